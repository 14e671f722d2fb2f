"""What is used of other libraries although they do not promise it. A failure here names what a new version changed."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import transformers
from accelerate.data_loader import BatchSamplerShard
from torch.distributed.pipelining import PipelineStage
from torch.utils import _pytree as pytree
from transformers import Trainer
from transformers.cache_utils import CacheLayerMixin
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_pipetransformer.pipeline import schedule


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("_wrap_model", ["self", "model", "training", "dataloader"]),
        ("_save_optimizer_and_scheduler", ["self", "output_dir"]),
        ("_load_from_checkpoint", ["self", "resume_from_checkpoint", "model"]),
        ("_load_optimizer_and_scheduler", ["self", "checkpoint"]),
        ("_track_num_input_tokens", ["self", "inputs"]),
        ("_save_checkpoint", ["self", "model", "trial"]),
        (
            "_maybe_log_save_evaluate",
            [
                "self",
                "tr_loss",
                "grad_norm",
                "model",
                "trial",
                "epoch",
                "ignore_keys_for_eval",
                "start_time",
                "learning_rate",
            ],
        ),
        ("_get_output_dir", ["self", "trial"]),
        ("_push_from_checkpoint", ["self", "checkpoint_folder"]),
        ("_load_best_model", ["self"]),
        ("_prepare_inputs", ["self", "inputs"]),
        # public, and still what the overrides rest on
        ("create_accelerator_and_postprocess", ["self"]),
        ("create_optimizer", ["self", "model"]),
        ("get_train_dataloader", ["self"]),
        ("get_batch_samples", ["self", "epoch_iterator", "num_batches", "device"]),
        ("training_step", ["self", "model", "inputs", "num_items_in_batch"]),
        ("prediction_step", ["self", "model", "inputs", "prediction_loss_only", "ignore_keys"]),
        ("save_model", ["self", "output_dir", "_internal_call"]),
        ("floating_point_ops", ["self", "inputs"]),
    ],
)
def test_trainer_methods(method: str, expected: list[str]) -> None:
    function = getattr(Trainer, method, None)
    assert function is not None, f"transformers {transformers.__version__} has no Trainer.{method} any more"
    assert parameters(function) == expected, f"transformers {transformers.__version__} changed Trainer.{method}"


def test_the_loop_calls_what_we_override() -> None:
    """The stock loop must still pass through these, else an override would silently not run."""
    source = inspect.getsource(Trainer)
    for call in (
        "self.get_batch_samples(",
        "self.training_step(",
        "self._wrap_model(",
        "self.create_optimizer(",
        "self.accelerator.clip_grad_norm_(",
        "self._save_optimizer_and_scheduler(",
        "self._load_from_checkpoint(",
        "self._load_optimizer_and_scheduler(",
        "self._save_checkpoint(",
        "self._maybe_log_save_evaluate(",
        "run_dir = self._get_output_dir(",
        "self._push_from_checkpoint(",
        "self._load_best_model(",
        "self._track_num_input_tokens(",
        "self.floating_point_ops(",
    ):
        assert call in source, f"transformers {transformers.__version__} does not call {call}...) any more"


def test_what_the_stock_trainer_does_with_the_optimizers_file() -> None:
    """Our method does the same, without the detour over the device."""
    source = inspect.getsource(Trainer._load_optimizer_and_scheduler)
    for part in (
        "OPTIMIZER_NAME), map_location=map_location, weights_only=True",
        "self.lr_scheduler.load_state_dict(",
    ):
        assert part in source, f"transformers {transformers.__version__} loads another way: {part} is gone"


def test_a_step_begins_behind_the_random_states_of_the_checkpoint() -> None:
    """There the evaluation is made up for that SIGTERM left no time for."""
    source = inspect.getsource(Trainer._run_epoch)
    loads = source.rindex("self._load_rng_state(")
    assert loads < source.index("callback_handler.on_step_begin(") < source.index("self.training_step(")


@pytest.mark.parametrize("method", ["backward_one_chunk", "clear_runtime_states"])
def test_pipeline_stage_methods(method: str) -> None:
    assert hasattr(PipelineStage, method), f"torch {torch.__version__} has no PipelineStage.{method} any more"


@pytest.mark.skipif(schedule._Stage is PipelineStage, reason="torch's own stage is used from torch 2.13 on")
@pytest.mark.parametrize(
    "method", ["_prepare_forward_infra", "_create_grad_send_info", "get_bwd_send_ops", "get_bwd_recv_ops"]
)
def test_methods_of_an_older_pipeline_stage(method: str) -> None:
    assert hasattr(PipelineStage, method), f"torch {torch.__version__} has no PipelineStage.{method}"


def test_backward_of_a_stage() -> None:
    expected = ["self", "bwd_chunk_id", "loss", "full_backward", "last_backward"]
    assert parameters(PipelineStage.backward_one_chunk) == expected, f"torch {torch.__version__} changed it"


def test_process_groups_are_ended() -> None:
    """What `resilience/exit.py` needs of them at the interpreter's end."""
    c10d = torch.distributed.distributed_c10d
    assert isinstance(c10d._world.pg_map, dict), f"torch {torch.__version__} lists its process groups elsewhere"
    abort = getattr(c10d, "_abort_process_group", None)
    assert abort is not None, f"torch {torch.__version__} has no _abort_process_group any more"
    assert not any(p.default is p.empty for p in inspect.signature(abort).parameters.values())


def test_pytree() -> None:
    for name in ("tree_flatten", "tree_unflatten", "tree_leaves", "tree_map"):
        assert hasattr(pytree, name), f"torch {torch.__version__} has no torch.utils._pytree.{name} any more"


def test_batch_sampler_of_accelerate() -> None:
    inner = torch.utils.data.BatchSampler(torch.utils.data.SequentialSampler(range(8)), 2, False)
    shard = BatchSamplerShard(inner, num_processes=2, process_index=0)
    assert shard.batch_sampler is inner, "accelerate's BatchSamplerShard hides the batch sampler that it divides"


def test_names_of_buffers_that_are_not_saved() -> None:
    module = torch.nn.Module()
    module.register_buffer("kept", torch.zeros(1))
    module.register_buffer("dropped", torch.zeros(1), persistent=False)
    assert module._non_persistent_buffers_set == {"dropped"}


def test_gradient_checkpointing_can_be_told_to_leave_the_cache_alone() -> None:
    """Without it, checkpointed layers would be given no keys and values of earlier slices."""
    flag = getattr(GradientCheckpointingLayer, "_can_checkpoint_with_cache", None)
    assert flag is False, f"transformers {transformers.__version__} has no _can_checkpoint_with_cache any more"


def test_what_a_layer_of_a_cache_must_have() -> None:
    assert CacheLayerMixin.__abstractmethods__ <= {
        "lazy_initialization",
        "update",
        "get_mask_sizes",
        "get_seq_length",
        "get_max_length",
        "get_max_cache_shape",
    }, f"transformers {transformers.__version__} asks more of a cache's layers"


def test_hooks_behind_accumulated_gradients_are_listed_on_the_parameter() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    assert not parameter._post_accumulate_grad_hooks
    parameter.register_post_accumulate_grad_hook(lambda _: None)
    assert parameter._post_accumulate_grad_hooks, f"torch {torch.__version__} keeps these hooks elsewhere"
