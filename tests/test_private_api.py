"""Guards for private names of other libraries. A failure here names the change in a new version."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate.data_loader import BatchSamplerShard
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedConfig, Seq2SeqTrainer, Trainer
from transformers.cache_utils import CacheLayerMixin
from transformers.modeling_layers import GradientCheckpointingLayer

import hf_pipetransformer
from hf_pipetransformer.pipeline import schedule


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


TRAINER_METHODS: dict[str, str] = {
    "_wrap_model": "self model training dataloader",
    "_save_optimizer_and_scheduler": "self output_dir",
    "_load_from_checkpoint": "self resume_from_checkpoint model",
    "_load_optimizer_and_scheduler": "self checkpoint",
    "_track_num_input_tokens": "self inputs",
    "_save_checkpoint": "self model trial",
    "_maybe_log_save_evaluate": (
        "self tr_loss grad_norm model trial epoch ignore_keys_for_eval start_time learning_rate"
    ),
    "_save": "self output_dir state_dict",
    "_evaluate": "self trial ignore_keys_for_eval skip_scheduler",
    "_get_output_dir": "self trial",
    "_push_from_checkpoint": "self checkpoint_folder",
    "_load_best_model": "self",
    "_prepare_inputs": "self inputs",
    "_get_num_items_in_batch": "self batch_samples device",
    # public; the overrides rest on them as well
    "create_accelerator_and_postprocess": "self",
    "create_optimizer": "self model",
    "get_train_dataloader": "self",
    "get_batch_samples": "self epoch_iterator num_batches device",
    "training_step": "self model inputs num_items_in_batch",
    "prediction_step": "self model inputs prediction_loss_only ignore_keys",
    "save_model": "self output_dir _internal_call",
    "floating_point_ops": "self inputs",
    "create_model_card": (
        "self language license tags model_name finetuned_from tasks dataset_tags dataset dataset_args"
    ),
}
"""The methods of the Trainer that are overridden or called, and their parameters."""


@pytest.mark.parametrize(("method", "expected"), TRAINER_METHODS.items())
def test_trainer_methods(method: str, expected: str) -> None:
    function = getattr(Trainer, method, None)
    assert function is not None, f"transformers {transformers.__version__} has no Trainer.{method} any more"
    changed = f"transformers {transformers.__version__} changed Trainer.{method}"
    assert parameters(function) == expected.split(), changed


CALLED = (
    *("get_batch_samples", "training_step", "_wrap_model", "create_optimizer", "accelerator.clip_grad_norm_"),
    *("_save_optimizer_and_scheduler", "_load_from_checkpoint", "_load_optimizer_and_scheduler", "_save_checkpoint"),
    *("_maybe_log_save_evaluate", "_evaluate", "_get_output_dir", "_push_from_checkpoint", "_load_best_model"),
    *("_track_num_input_tokens", "floating_point_ops"),
)
"""The stock loop must still pass through these, else an override would silently not run."""
SOURCES: list[tuple[Any, str]] = [
    *((Trainer, re.escape(f"self.{name}(")) for name in CALLED),
    # `training_loader` decides which loaders are prepared.
    (Trainer, r"self\.accelerator\.prepare\(DataLoader\("),
    # Our method does the same, without the detour over the device.
    (Trainer._load_optimizer_and_scheduler, r"OPTIMIZER_NAME\), map_location=map_location, weights_only=True"),
    (Trainer._load_optimizer_and_scheduler, r"self\.lr_scheduler\.load_state_dict\("),
    # `BatchesInEpoch` is the last but one of the numbers that the loop is given.
    (Trainer._run_epoch, r"or \(step \+ 1\) == steps_in_epoch"),
    (Trainer.set_initial_training_values, r"steps_in_epoch,\s+max_steps,\s+\)$"),
    # `TrainingJob.generates` decides in the same way, and the pair gathers in another way.
    (Seq2SeqTrainer.prediction_step, "if not self.args.predict_with_generate or prediction_loss_only:"),
    (Trainer.evaluation_loop, "prediction_loss_only is not None else args.prediction_loss_only"),
    (Trainer.evaluate, "prediction_loss_only=True if self.compute_metrics is None else None"),
    *(
        (m, r"self\.gather_function = self\.accelerator\.gather\n")
        for m in (Seq2SeqTrainer.evaluate, Seq2SeqTrainer.predict)
    ),
    # `Loss.is_scaled_for_accumulation` decides in the same way; older versions have no `loss_is_scaled_for_ga`.
    (
        Trainer.training_step,
        r"model_accepts_loss_kwargs and num_items_in_batch is not None\s*\)? or self.compute_loss_func is not None"
        "|compute_loss_func is None",
    ),
    (Trainer.training_step, "loss = loss / self.current_gradient_accumulation_steps"),
    (DistributedDataParallel, r"self\.reducer = dist\.Reducer\("),
    (DistributedDataParallel, r"self\.logger = dist\.Logger\(self\.reducer\)"),
]


@pytest.mark.parametrize(("code", "pattern"), SOURCES)
def test_what_the_code_of_others_must_contain(code: Any, pattern: str) -> None:
    versions = f"transformers {transformers.__version__} or torch {torch.__version__}"
    assert re.search(pattern, inspect.getsource(code)), f"{versions} does without {pattern!r} in {code.__name__}"


def test_a_step_begins_behind_the_random_states_of_the_checkpoint() -> None:
    """There the evaluation is made up for that SIGTERM left no time for."""
    source = inspect.getsource(Trainer._run_epoch)
    loads = source.rindex("self._load_rng_state(")
    assert loads < source.index("callback_handler.on_step_begin(") < source.index("self.training_step(")


STAGE_METHODS = ["backward_one_chunk", "backward_weight_one_chunk", "clear_runtime_states"]
if schedule._Stage is not PipelineStage:  # torch's own stage is used from torch 2.13 on
    STAGE_METHODS += ["_prepare_forward_infra", "_create_grad_send_info", "_get_init_p2p_neighbors_ops"]
    STAGE_METHODS += ["get_bwd_send_ops", "get_bwd_recv_ops", "set_local_fwd_input", "set_local_bwd_input"]


@pytest.mark.parametrize("method", STAGE_METHODS)
def test_pipeline_stage_methods(method: str) -> None:
    assert hasattr(PipelineStage, method), f"torch {torch.__version__} has no PipelineStage.{method} any more"


def test_the_frame_that_calls_a_module() -> None:
    """`MethodOverride` reads from torch's variable `self` which module is called, also with hooks on it."""
    seen = []

    class Called(nn.Module):
        def forward(self) -> None:
            frame: Any = inspect.currentframe()
            seen.append((frame.f_back.f_globals, frame.f_back.f_locals.get("self")))

    module = Called()
    module()
    module.register_forward_hook(lambda *_: None)
    module()
    of_torch = vars(sys.modules[nn.Module.__module__])
    assert len(seen) == 2
    for space, of in seen:
        assert space is of_torch and of is module, f"torch {torch.__version__} calls `forward` from another frame"


def test_backward_of_a_stage() -> None:
    expected = ["self", "bwd_chunk_id", "loss", "full_backward", "last_backward"]
    assert parameters(PipelineStage.backward_one_chunk) == expected, f"torch {torch.__version__} changed it"
    expected = ["self", "bwd_chunk_id", "last_backward"]
    assert parameters(PipelineStage.backward_weight_one_chunk) == expected, f"torch {torch.__version__} changed it"


def test_batch_sampler_of_accelerate() -> None:
    inner = torch.utils.data.BatchSampler(torch.utils.data.SequentialSampler(range(8)), 2, False)
    shard = BatchSamplerShard(inner, num_processes=2, process_index=0)
    assert shard.batch_sampler is inner, "accelerate's BatchSamplerShard hides the batch sampler that it divides"


def test_what_a_layer_of_a_cache_must_have() -> None:
    known = {
        "lazy_initialization",
        "update",
        "get_mask_sizes",
        "get_seq_length",
        "get_max_length",
        "get_max_cache_shape",
    }
    version = f"transformers {transformers.__version__}"
    assert CacheLayerMixin.__abstractmethods__ <= known, f"{version} asks more of a cache's layers"


# ------------------------------------------------------------------------------------ attributes
def module_with_all() -> nn.Module:
    module = nn.Module()
    module.register_parameter("weight", nn.Parameter(torch.zeros(1)))
    module.register_buffer("kept", torch.zeros(1))
    module.register_buffer("dropped", torch.zeros(1), persistent=False)
    module.register_module("inside", nn.Module())
    module.register_forward_hook(lambda *_: None)
    module.register_forward_pre_hook(lambda *_: None)
    return module


def counts_writes() -> bool:
    tensor = torch.zeros(1)
    before = tensor._version
    tensor.add_(1)
    return tensor._version > before


def lists_gradient_hooks() -> bool:
    """Hooks on a parameter's gradient, and hooks behind its accumulation."""
    parameter, bare = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    parameter.register_hook(lambda gradient: gradient)
    parameter.register_post_accumulate_grad_hook(lambda _: None)
    has_none = not bare._backward_hooks and not bare._post_accumulate_grad_hooks
    return has_none and len(parameter._backward_hooks or ()) == len(parameter._post_accumulate_grad_hooks or ()) == 1


def aborts_without_arguments() -> bool:
    abort = torch.distributed.distributed_c10d._abort_process_group
    return not any(p.default is p.empty for p in inspect.signature(abort).parameters.values())


def exchanges_the_default_group() -> bool:
    source = inspect.getsource(torch.distributed.distributed_c10d._update_default_pg)
    return "(pg: " in source and "_world.default_pg = pg" in source


def orders_step_hooks() -> bool:
    """A hook can be moved behind those that were registered later, and before those registered earlier."""
    optimizer, seen = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1), ""

    def note(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            nonlocal seen
            seen += name

        return hook

    last, _ = (optimizer.register_step_pre_hook(note(name)) for name in "ba")
    _, first = (optimizer.register_step_post_hook(note(name)) for name in "dc")
    optimizer._optimizer_step_pre_hooks.move_to_end(last.id)  # type: ignore[attr-defined]
    optimizer._optimizer_step_post_hooks.move_to_end(first.id, last=False)  # type: ignore[attr-defined]
    optimizer.step()
    return seen == "abcd"


def seen_in_a_backward(look: Callable[[Any], Any], backward: Callable[[Tensor, Tensor], Any]) -> Any:
    """What `look` finds in a node's backward; the node has the parameter behind it, as of a micro-batch."""
    seen = []

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, parameter: Tensor, value: Tensor) -> Tensor:
            return value.view_as(value)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            seen.append(look(ctx))
            return None, gradient

    inputs = torch.zeros(1, requires_grad=True)
    backward(Node.apply(torch.zeros(1, requires_grad=True), inputs).sum(), inputs)
    return seen[0]


def tells_backward_from_grad() -> bool:
    look = lambda ctx: torch._C._will_engine_execute_node(ctx.next_functions[0][0])  # noqa: E731
    with_all = seen_in_a_backward(look, lambda loss, inputs: loss.backward())
    return with_all is True and seen_in_a_backward(look, torch.autograd.grad) is False


def tells_whether_the_graph_is_kept() -> bool:
    look = lambda ctx: torch._C._autograd._get_current_graph_task_keep_graph()  # noqa: E731
    kept = seen_in_a_backward(look, lambda loss, inputs: loss.backward(retain_graph=True))
    return kept is True and seen_in_a_backward(look, lambda loss, inputs: loss.backward()) is False


def adapters_have_a_state() -> bool:
    layer = pytest.importorskip("peft").tuners.tuners_utils.BaseTunerLayer
    return layer._disable_adapters is False and layer._active_adapter == "default"


def knows_what_it_is_a_view_of() -> bool:
    tensor = torch.zeros(2, 2)
    with torch.no_grad():
        return tensor[0]._base is tensor and tensor.view(4)[1:]._base is tensor and tensor._base is None


def lists_modes() -> bool:
    class OfFunctions(torch.overrides.TorchFunctionMode):
        pass

    class OfDispatch(torch.utils._python_dispatch.TorchDispatchMode):
        pass

    with OfFunctions() as one, OfDispatch() as other:
        functions = torch.overrides._get_current_function_mode_stack()
        return functions == [one] and torch.utils._python_dispatch._get_current_dispatch_mode_stack() == [other]


def lists_hooks_of_saved_tensors() -> bool:
    def pack(tensor: Tensor) -> Tensor:
        return tensor

    top = torch._C._autograd._top_saved_tensors_default_hooks
    with torch.autograd.graph.saved_tensors_hooks(pack, pack):
        is_seen = top(True) == (pack, pack)
    return is_seen and top(True) is None


def hooks_all_modules(table: str, register: str) -> bool:
    """The table of hooks for all modules has a hook as long as it is registered."""
    module = torch.nn.modules.module
    handle = getattr(module, register)(lambda *_: None)
    has_one = len(getattr(module, table)) == 1
    handle.remove()
    return has_one and not getattr(module, table)


def counts_holders() -> bool:
    """A storage is one object for all tensors, and views and arrays count among its holders."""
    tensor = torch.ones(3)
    storage = tensor.untyped_storage()
    before = torch._C._storage_Use_Count(storage._cdata)
    view, array = tensor.data, tensor.numpy()
    after = torch._C._storage_Use_Count(storage._cdata)
    is_one = view.untyped_storage()._cdata == storage._cdata and view.untyped_storage() is storage
    del view, array
    return is_one and before == 2 and after > before == torch._C._storage_Use_Count(storage._cdata)


def dispatches_to_a_class() -> bool:
    """Functions that ignore a tensor's class still call `__torch_dispatch__` of the class that it was made with."""
    seen = list[Any]()

    class Own(Tensor):
        @classmethod
        def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(function)
            return torch.ones(2)

    own = Tensor._make_subclass(Own, torch.zeros(2))
    return torch.equal(torch.func.vmap(lambda x: x + 1)(own), torch.ones(2)) and bool(seen)


def tells_of_forward_mode() -> bool:
    """The level of forward-mode AD is -1 outside, and from 0 on inside."""
    with forward_ad.dual_level():
        inside = forward_ad._current_level
    return bool(inside >= 0 > forward_ad._current_level)


def tells_of_function_transforms() -> bool:
    """Inside of a function that torch.func transforms there is an interpreter, and none outside."""
    tell, seen = torch._C._functorch.peek_interpreter_stack, list[bool]()
    one = torch.ones(1)

    def note(x: Tensor) -> Tensor:
        seen.append(tell() is not None)
        return x

    torch.func.jvp(note, (one,), (one,))
    torch.func.vjp(note, one)
    torch.func.vmap(note)(one)
    return seen == [True] * 3 and tell() is None


def is_set_by_compile() -> bool:
    module = nn.Linear(1, 1)
    before = module._compiled_call_impl
    module.compile(backend="eager")
    return before is None and module._compiled_call_impl is not None


GUARDS: dict[str, Callable[[], Any]] = {
    "_loss_function": lambda: (
        "self._loss_function = " in inspect.getsource(transformers.PreTrainedModel.loss_function.fset)
    ),
    # torch
    "_C": lambda: torch._C.DisableTorchFunctionSubclass().__enter__,
    "_make_subclass": dispatches_to_a_class,
    "_current_level": tells_of_forward_mode,
    "_functorch": tells_of_function_transforms,
    "_autograd": tells_whether_the_graph_is_kept,
    "_get_current_graph_task_keep_graph": tells_whether_the_graph_is_kept,
    "_will_engine_execute_node": tells_backward_from_grad,
    "_DropoutNd": lambda: issubclass(nn.Dropout2d, nn.modules.dropout._DropoutNd),
    "_modules": lambda: module_with_all()._modules.keys() == {"inside"},
    "_parameters": lambda: module_with_all()._parameters.keys() == {"weight"},
    "_buffers": lambda: module_with_all()._buffers.keys() == {"kept", "dropped"},
    "_non_persistent_buffers_set": lambda: module_with_all()._non_persistent_buffers_set == {"dropped"},
    "_global_forward_hooks": lambda: hooks_all_modules("_global_forward_hooks", "register_module_forward_hook"),
    "_global_forward_pre_hooks": lambda: hooks_all_modules(
        "_global_forward_pre_hooks", "register_module_forward_pre_hook"
    ),
    "_global_backward_hooks": lambda: torch.nn.modules.module._global_backward_hooks == {},
    "_global_backward_pre_hooks": lambda: hooks_all_modules(
        "_global_backward_pre_hooks", "register_module_full_backward_pre_hook"
    ),
    "_top_saved_tensors_default_hooks": lists_hooks_of_saved_tensors,
    "_compiled_call_impl": is_set_by_compile,
    "_forward_hooks": lambda: len(module_with_all()._forward_hooks) == 1,
    "_get_current_function_mode_stack": lambda: lists_modes(),
    "_get_current_dispatch_mode_stack": lambda: lists_modes(),
    "_forward_pre_hooks": lambda: len(module_with_all()._forward_pre_hooks) == 1,
    "_backward_pre_hooks": lambda: nn.Linear(1, 1)._backward_pre_hooks == {},
    "_version": counts_writes,
    "_storage_Use_Count": counts_holders,
    "_cdata": counts_holders,
    "_base": knows_what_it_is_a_view_of,
    "_backward_hooks": lists_gradient_hooks,
    "_post_accumulate_grad_hooks": lists_gradient_hooks,
    "_foreach_norm": lambda: torch._foreach_norm([torch.ones(4)])[0] == 2,
    "_BatchNorm": lambda: issubclass(nn.BatchNorm2d, nn.modules.batchnorm._BatchNorm),
    "_NormBase": lambda: issubclass(nn.InstanceNorm2d, nn.modules.batchnorm._NormBase),
    "_to_copy": lambda: torch.ops.aten._to_copy.default,
    "_grouped_mm": lambda: torch.ops.aten._grouped_mm.default,
    "_scaled_dot_product_flash_attention_for_cpu": (
        lambda: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    ),
    "_world": lambda: isinstance(torch.distributed.distributed_c10d._world.pg_map, dict),
    "_update_default_pg": exchanges_the_default_group,
    "_optimizer_step_pre_hooks": orders_step_hooks,
    "_optimizer_step_post_hooks": orders_step_hooks,
    "_abort_process_group": aborts_without_arguments,
    "_comm_hooks": (
        lambda: "self._comm_hooks.append((hook, state))" in inspect.getsource(nn.parallel.DistributedDataParallel)
    ),
    # PEFT
    "_disable_adapters": adapters_have_a_state,
    "_active_adapter": adapters_have_a_state,
    # transformers
    "_model_mapping": lambda: LlamaConfig in AutoModelForCausalLM._model_mapping,
    "_from_config": lambda: LlamaForCausalLM._from_config,
    "_experts_implementation": lambda: isinstance(PreTrainedConfig._experts_implementation, property),
    "_attn_implementation": lambda: isinstance(PreTrainedConfig._attn_implementation, property),
    "_name_or_path": lambda: LlamaConfig(name_or_path="name")._name_or_path == "name",
    "_can_checkpoint_with_cache": lambda: GradientCheckpointingLayer._can_checkpoint_with_cache is False,
    "_gradient_checkpointing_func": (
        lambda: "self._gradient_checkpointing_func(" in inspect.getsource(GradientCheckpointingLayer)
    ),
    "_loss_shifts_labels": lambda: "self._loss_shifts_labels = " in inspect.getsource(Trainer),
    "_train_batch_size": lambda: "self._train_batch_size = " in inspect.getsource(Trainer),
    "_gen_kwargs": lambda: "self._gen_kwargs = gen_kwargs" in inspect.getsource(Seq2SeqTrainer),
    "_tr_loss": lambda: "self._tr_loss = " in inspect.getsource(Trainer),
}
"""What must hold for each private name of another library that the package reads."""

OF_PYTHON = {"_current_frames", "_exit", "_getframe"}
"""Documented, in spite of their names."""


@pytest.mark.parametrize("name", GUARDS)
def test_private_attributes(name: str) -> None:
    assert GUARDS[name](), f"torch {torch.__version__} or transformers {transformers.__version__} changed {name}"


def private_names(tree: ast.Module) -> Iterator[str]:
    """Private names of other objects that a module reads: `x._name`, `getattr(x, "_name")`, `vars(x)["_name"]`."""
    is_own = lambda value: isinstance(value, ast.Name) and value.id in ("self", "cls")  # noqa: E731
    functions = [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    assigned = [
        node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and is_own(node.value)
    ]  # of the module's own classes
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not is_own(node.value) and "super()" not in ast.unparse(node.value):
            found = node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr") and len(node.args) > 1:
            found = getattr(node.args[1], "value", "")
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value).startswith("vars("):
            found = getattr(node.slice, "value", "")
        else:
            continue
        is_private = isinstance(found, str) and found.startswith("_") and not found.endswith("__")
        if is_private and found not in (*functions, *assigned):
            yield found


def test_every_private_name_of_another_object_has_a_guard() -> None:
    """A file reads no private name of another file of this package, nor of another library without a guard."""
    known = {*GUARDS, *OF_PYTHON, *(name for name in vars(Trainer) if name in TRAINER_METHODS)}
    files = Path(hf_pipetransformer.__file__).parent.rglob("*.py")
    unknown = {
        (path.name, name)
        for path in files
        for name in private_names(ast.parse(path.read_text(encoding="utf-8")))
        if name not in known
    }
    assert not unknown
