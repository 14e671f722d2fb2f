"""Code of the user's, and of PEFT, that writes or loads weights while they are distributed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PromptEncoderConfig, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback
from user_code.kit import Rows

from ..kit import VOCABULARY, At, Each, Script, bert, case, pad, samples

ADAM: dict[str, Any] = {"num_train_epochs": 1, "optim": "adamw_torch", "learning_rate": 0.05, "adam_epsilon": 1e-4}
SAVES: dict[str, Any] = {**ADAM, "save_strategy": "steps", "save_steps": 3}
BEST: dict[str, Any] = {**SAVES, "eval_strategy": "steps", "eval_steps": 3, "load_best_model_at_end": True}


def llama(config: Any) -> nn.Module:
    """A tiny Llama with an adapter."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
    return get_peft_model(LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes)), config)


def words() -> Rows:
    rows = samples(48)
    return Rows([{"input_ids": rows[i]["input_ids"], "labels": rows[i]["input_ids"]} for i in range(len(rows))])


def tuned(config: Any, options: dict[str, Any], **fields: Any) -> Script:
    data = words()
    if "eval_strategy" in options:
        fields["keywords"] = {"eval_dataset": data}
    return Script(model=llama(config), data=data, collator=pad, options=options, **fields)


@case("K2")
def prompt_tuning_resumes() -> Script:
    """PEFT writes the outputs of the prompt's module, which is not on the process that writes."""
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    return tuned(config, SAVES, drive=resume)


@case("K2")
def prompt_encoder_resumes() -> Script:
    """The same for p-tuning, whose prompt comes from an encoder."""
    config = PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=8)
    return tuned(config, SAVES, drive=resume)


@case("K2")
def best_prompt_is_loaded() -> Script:
    """PEFT loads the best prompt into the module alone."""
    return tuned(PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3), BEST)


def resume(trainer: Any) -> None:
    trainer.train()
    trainer.train(resume_from_checkpoint=f"{trainer.args.output_dir}/checkpoint-3")


class Writes:
    """A `_save` that writes a file of the trained parameters."""

    def _save(self, output_dir: str, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)  # type: ignore[misc]
        own: Any = self
        if own.args.should_save:
            trained = {name: p.detach().clone() for name, p in own.model.named_parameters() if p.requires_grad}
            torch.save(trained, Path(output_dir) / "trained.pt")


def written(name: str) -> Any:
    """Observes the file of the checkpoint of step 3."""

    def read(trainer: Any) -> dict[str, Tensor]:
        found: dict[str, Tensor] = torch.load(Path(trainer.args.output_dir) / "checkpoint-3" / name)
        return {f"written {key}": value for key, value in found.items()}

    return read


@case("K2", "K2R2", slack=2)
def own_save_writes_trained_adapters() -> Script:
    """`_save` writes the parameters with `requires_grad` of an adapter; some are on other processes."""
    config = LoraConfig(task_type="CAUSAL_LM", r=2, init_lora_weights=False)
    return tuned(config, SAVES, trainer=Writes, observe=written("trained.pt"))


@case("K2")
def own_save_writes_parameters() -> Script:
    """`_save` writes the parameters of a model without adapters."""
    return Script(model=bert(), data=samples(48), options=SAVES, trainer=Writes, observe=written("trained.pt"))


class Replaces:
    """A `save_model` that writes the weights by itself."""

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        own: Any = self
        if own.args.should_save:
            folder = Path(output_dir or own.args.output_dir)
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(own.model.state_dict(), folder / "weights.pt")


@case("K2", expect="exact", because="override _save")
def save_model_of_the_users() -> Script:
    """`save_model` does not call the stock method."""
    return Script(model=bert(), data=samples(48), options=SAVES, trainer=Replaces, observe=written("weights.pt"))


@case("K2", expect="exact", because="override _save")
def save_model_of_adapters_that_reads_all_weights() -> Script:
    """The stock method saves the adapters; the user's reads the whole model's state first."""
    config = LoraConfig(task_type="CAUSAL_LM", r=2, init_lora_weights=False)
    return tuned(config, SAVES, trainer=Replaces, observe=written("weights.pt"))


class Swaps:
    """A `save_model` that saves other weights, which each process has for the parameters that it holds."""

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        own: Any = self
        here = [p for p in own.model.parameters() if not getattr(p, "is_elsewhere", False)]
        before = [p.detach().clone() for p in here]
        with torch.no_grad():
            for p in here:
                p.zero_()
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]
            for p, value in zip(here, before, strict=True):
                p.copy_(value)


@case("K2", "K2R2")
def save_model_swaps_weights() -> Script:
    """A checkpoint of averaged weights, which replace the trained ones while it is written."""

    def read(trainer: Any) -> dict[str, Tensor]:
        return dict(load_file(Path(trainer.args.output_dir) / "checkpoint-3" / "model.safetensors"))

    return Script(model=bert(), data=samples(48), options=SAVES, trainer=Swaps, observe=read)


def interrupted(trainer: Any) -> None:
    """A callback ends the training by an error; the user saves and goes on."""
    try:
        trainer.train()
    except ZeroDivisionError:
        trainer._save_checkpoint(trainer.model, None)
        trainer.remove_callback(Fails)
    trainer.train(resume_from_checkpoint=True)


class Fails(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 2:
            raise ZeroDivisionError("the user's")


@case("K2")
def saved_after_an_error() -> Script:
    """A checkpoint that is written after an error has ended the training has the whole optimizer's state."""
    return Script(model=bert(), data=samples(48), options=ADAM, callbacks=[Fails()], drive=interrupted)


class Counts:
    """A `floating_point_ops` of the user's."""

    def floating_point_ops(self, inputs: Any) -> int:
        return int(inputs["input_ids"].numel()) * 11


@case("K2", "K2R2", "R2")
def operations_counted_by_the_user() -> Script:
    """Each batch counts once."""
    observe = lambda trainer: {"flops": torch.tensor(float(trainer.state.total_flos))}  # noqa: E731
    return Script(model=bert(), data=samples(48), options=ADAM, trainer=Counts, observe=observe)


@case("K2")
def layer_is_rolled_back() -> Script:
    """A callback loads the first weights of a layer that one process alone holds."""
    model = bert()
    before = {key: value.clone() for key, value in model.bert.encoder.layer[0].state_dict().items()}

    def roll_back(model: Any, step: int) -> None:
        model.bert.encoder.layer[0].load_state_dict(before)

    return Script(model=model, data=samples(48), options=ADAM, callbacks=[At(roll_back, [3])])


@case("K1", "K2", expect="exact", because="state_dict()")
def optimizer_saved_by_a_callback() -> Script:
    """A callback on the main process keeps the optimizer's state."""
    kept: dict[str, Any] = {}

    def keep(each: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        if state.is_world_process_zero and state.global_step == 3:
            kept.update(
                {str(key): values["exp_avg"].clone() for key, values in optimizer.state_dict()["state"].items()}
            )

    return Script(
        model=bert(), data=samples(48), options=ADAM, callbacks=[Each(keep)], observe=lambda trainer: dict(kept)
    )
