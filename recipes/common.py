"""What all recipes share: the model's arguments, reading them from a file, training, evaluating and the summary.

model_args, data_args, training_args = parse_arguments(sys.argv[1:], DataTrainingArguments)
start(training_args)
model = load_model(AutoModelFor..., model_args, load_config(model_args, SMALL_MODEL, ...))
trainer = PipeTransformerTrainer(...)
results = {**train(trainer), **evaluate(trainer, {"validation": dataset})}
print_summary(trainer, results)
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import datasets
import transformers
import yaml
from datasets import Dataset, DatasetDict
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import (
    AutoConfig,
    AutoTokenizer,
    HfArgumentParser,
    PretrainedConfig,
    PreTrainedTokenizerBase,
    TrainingArguments,
    set_seed,
)

from hf_pipetransformer import PipeTransformerTrainer, PipeTransformerTrainingArguments, load_lazily
from hf_pipetransformer.parts.records.history import LayoutPeriod, read_trainings

LABEL = "label"
Names = tuple[str, ...]
SMALL_MODEL = {
    "num_hidden_layers": 8,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "intermediate_size": 512,
}
"""Sizes of a model made from scratch; `--config_overrides` changes them."""
NEW_HEADS = {
    "classifier",
    "pre_classifier",
    "classification_head",
    "pooler",  # DeBERTa's; BERT's pooler is a part of the pretrained model, and no child of the whole one
    "score",
    "sequence_summary",  # XLNet's
    "logits_proj",
    "qa_outputs",
}
"""Names of parts that a pretrained model lacks, in the classes that the recipes use."""
USAGE = "%(prog)s [config.yaml] [--name value ...]"
TECHNICAL = ("eval_runtime", "eval_samples", "eval_steps_per_second", "eval_model_preparation_time")
"""Prefixes of an evaluation's figures that do not measure quality; the rest of such a name is the split's."""


# ---------------------------------------------------------------------------------------------------- arguments
@dataclass
class PartArguments:
    """How much of the data is used."""

    max_train_samples: int | None = field(default=None, metadata={"help": "Train on this many random samples."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Evaluate on this many random samples."})


@dataclass
class TextArguments(PartArguments):
    """How much of the data is used, and how it is tokenized."""

    preprocessing_num_workers: int | None = field(default=None, metadata={"help": "Processes that tokenize."})
    overwrite_cache: bool = field(default=False, metadata={"help": "Tokenize again, ignoring earlier results."})


@dataclass
class ModelArguments:
    """Which model is fine-tuned."""

    model_name_or_path: str | None = field(
        default=None,
        metadata={"help": "A model on the hub or in a folder. Without it a small model is made from scratch."},
    )
    model_type: str | None = field(
        default=None, metadata={"help": "The architecture of a model made from scratch, e.g. bert, vit, gpt2."}
    )
    config_overrides: str | None = field(
        default=None,
        metadata={"help": "Changes a model made from scratch, e.g. num_hidden_layers=4,hidden_size=256."},
    )
    config_name: str | None = field(default=None, metadata={"help": "A config other than the model's own."})
    tokenizer_name: str | None = field(default=None, metadata={"help": "A tokenizer other than the model's own."})
    cache_dir: str | None = field(default=None, metadata={"help": "Folder of downloads."})
    model_revision: str = field(default="main", metadata={"help": "A branch, a tag or a commit on the hub."})
    trust_remote_code: bool = field(
        default=False, metadata={"help": "Whether to run code from the model's repository on the hub."}
    )
    ignore_mismatched_sizes: bool = field(
        default=False, metadata={"help": "Whether to replace a head that has another number of labels."}
    )
    lazy_loading: bool = field(
        default=False,
        metadata={
            "help": "Leave the weights in the checkpoint until each process knows its stage, and read only those. For"
            " models that are too large for every process to hold."
        },
    )
    lora_rank: int | None = field(
        default=None, metadata={"help": "Train LoRA adapters of this rank (and the head) instead of all weights."}
    )
    lora_target_modules: list[str] | None = field(
        default=None,
        metadata={"help": "Names of the layers that get an adapter; None: PEFT's for the model, or all linear ones."},
    )

    lora_first_layer: int = field(
        default=0,
        metadata={"help": "Lowest layer with an adapter; the layers below it may be frozen and cached."},
    )

    def __post_init__(self) -> None:
        if self.config_overrides is not None and (self.model_name_or_path or self.config_name):
            raise ValueError(
                "config_overrides describes a model made from scratch; remove it, or remove model_name_or_path and "
                "config_name."
            )
        if self.lora_rank is not None and self.lora_rank < 1:
            raise ValueError(f"lora_rank={self.lora_rank} must be at least 1; leave it out to train all weights.")
        if self.lora_target_modules is not None and self.lora_rank is None:
            raise ValueError("lora_target_modules needs lora_rank.")
        if self.lora_first_layer and self.lora_rank is None:
            raise ValueError("lora_first_layer needs lora_rank.")

    @property
    def hub(self) -> dict[str, Any]:
        """The arguments of every `from_pretrained`."""
        return {
            "cache_dir": self.cache_dir,
            "revision": self.model_revision,
            "trust_remote_code": self.trust_remote_code,
        }


def parse_arguments(
    arguments: list[str], data_class: type, training_class: type = PipeTransformerTrainingArguments
) -> tuple[ModelArguments, Any, Any]:
    """Parses `[config.yaml | config.json] [--name value ...]`; what comes later wins."""
    if arguments and arguments[0].endswith((".yaml", ".yml", ".json")):
        arguments = config_to_arguments(Path(arguments[0])) + arguments[1:]
    parser = HfArgumentParser((ModelArguments, data_class, training_class), usage=USAGE)
    return parse_with(parser, data_class, arguments)


def parse_with(parser: HfArgumentParser, data_class: type, arguments: list[str]) -> tuple[Any, ...]:
    """Parses command-line arguments into the parser's dataclasses; one of them is about the data.

    Raises:
        ValueError: naming the first argument that is unknown, and the closest known one.
    """
    group_help(parser, data_class, shows_all="--help_all" in arguments)
    *parsed, rest = parser.parse_args_into_dataclasses(args=arguments, return_remaining_strings=True)
    unknown = next((word for word in rest if word.startswith("--")), next(iter(rest), None))
    if unknown is not None:
        close = get_close_matches(unknown, parser._option_string_actions, 1)
        raise ValueError(f"There is no argument {unknown}.{f' Did you mean {close[0]}?' if close else ''}")
    return tuple(parsed)


def group_help(parser: HfArgumentParser, data_class: type, shows_all: bool) -> None:
    """Have `--help` show the recipe's own fields, and `--help_all` also `TrainingArguments`' ones; each name once.

    Parsing is as before: a name may be written with dashes as well.
    """
    parser.add_argument("--help_all", action="help", help="Show all other training arguments, too.")
    known = set(TrainingArguments.__dataclass_fields__)
    groups = {
        "model": set(ModelArguments.__dataclass_fields__),
        "data": set(data_class.__dataclass_fields__),
        "pipeline, freezing and the cache": set(PipeTransformerTrainingArguments.__dataclass_fields__) - known,
        "help": {"help", "help_all"},
    }
    actions = next(group for group in parser._action_groups if group.title == "options")._group_actions
    rest = {action.dest for action in actions}.difference(*groups.values())
    groups["all other training arguments"] = rest
    for action in actions:
        action.option_strings = [name for name in action.option_strings if "-" not in name[2:]]  # only shown
    own = [parser.add_argument_group(title) for title in groups]
    for group, names in zip(own, groups.values(), strict=True):
        group._group_actions = [action for action in actions if action.dest in names]
    parser._action_groups = own if shows_all else own[:-1]


def config_to_arguments(path: Path) -> list[str]:
    """Turns a YAML or JSON file of `name: value` into command-line arguments: one parser reads both."""
    values = yaml.safe_load(path.read_text(encoding="utf-8"))  # JSON is YAML, too
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold `name: value` pairs, but holds {type(values).__name__}.")
    arguments: list[str] = []
    for name, value in values.items():
        if value is None:
            continue
        items = value if isinstance(value, list) else [value]
        arguments.append(f"--{name}")
        arguments += [json.dumps(item) if isinstance(item, dict) else str(item) for item in items]
    return arguments


def check_one_source(**sources: bool) -> None:
    """Refuses none, and more than one, of the places that data can come from.

    Raises:
        ValueError: naming the given places.
    """
    given = [name for name, is_given in sources.items() if is_given]
    if len(given) != 1:
        *others, last = sources
        raise ValueError(f"Give exactly one of {', '.join(others)} and {last}; got {', '.join(given) or 'none'}.")


def refuse_prediction(training_args: PipeTransformerTrainingArguments) -> None:
    """
    Raises:
        ValueError: `do_predict` is set, in a recipe that writes no predictions.
    """
    if training_args.do_predict:
        raise ValueError("do_predict: this recipe writes no predictions. Leave it out; do_eval gives the metrics.")


def start(training_args: PipeTransformerTrainingArguments) -> None:
    """Sets the log levels, and the seed: a new head must have the same weights on every rank."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S")
    level = training_args.get_process_log_level()
    datasets.utils.logging.set_verbosity(level)
    transformers.utils.logging.set_verbosity(level)
    if not training_args.should_log:
        datasets.disable_progress_bars()
    set_seed(training_args.seed)


# ---------------------------------------------------------------------------------------------------- model
def load_config(model_args: ModelArguments, small: Mapping[str, Any], **options: Any) -> PretrainedConfig:
    """Loads the model's config, or makes one from scratch.

    Args:
        model_args: which model.
        small: sizes of a model made from scratch; `"model_type"` is its architecture if `model_args` names none.
            Names that the architecture does not know are left out.
        options: labels and the like, for either.
    """
    name = model_args.config_name or model_args.model_name_or_path
    if name is not None:
        return AutoConfig.from_pretrained(name, **model_args.hub, **options)
    model_type = model_args.model_type or small["model_type"]
    known = AutoConfig.for_model(model_type)
    sizes = {key: value for key, value in small.items() if key != "model_type" and hasattr(known, key)}
    config = AutoConfig.for_model(model_type, **sizes, **options)
    if model_args.config_overrides:
        config.update_from_string(model_args.config_overrides)
    return config


def load_model(auto_class: Any, model_args: ModelArguments, config: PretrainedConfig) -> nn.Module:
    """Loads the model, or makes it from its config with random weights; puts adapters on it where they are wanted."""
    if model_args.model_name_or_path is None:
        # transformers 5.23 iterates over it where a model type has several classes for a task (DeiT)
        config.architectures = config.architectures or []
        model = load_lazily(auto_class, config) if model_args.lazy_loading else auto_class.from_config(config)
    else:
        load = partial(load_lazily, auto_class) if model_args.lazy_loading else auto_class.from_pretrained
        model = load(
            model_args.model_name_or_path,
            config=config,
            ignore_mismatched_sizes=model_args.ignore_mismatched_sizes,
            **model_args.hub,
        )
    return model if model_args.lora_rank is None else with_adapters(model, model_args)


def with_adapters(model: nn.Module, model_args: ModelArguments) -> nn.Module:
    """LoRA adapters on a model. Its pretrained weights are frozen, a new head is trained."""
    from peft import LoraConfig, get_peft_model
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING

    targets: list[str] | str | None = model_args.lora_target_modules
    if targets is None and model.config.model_type not in TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING:
        targets = "all-linear"
    first, layers = model_args.lora_first_layer, model.config.num_hidden_layers
    if not 0 <= first < layers:
        raise ValueError(f"lora_first_layer={first} must be from 0 to {layers - 1}: the model has {layers} layers.")
    config = LoraConfig(
        r=model_args.lora_rank,
        layers_to_transform=list(range(first, layers)) if first else None,
        lora_alpha=2 * (model_args.lora_rank or 0),
        target_modules=targets,
        modules_to_save=[name for name, _ in model.named_children() if name in NEW_HEADS] or None,  # gets no adapters
    )
    return get_peft_model(model, config)


def load_tokenizer(model_args: ModelArguments) -> PreTrainedTokenizerBase | None:
    """Loads the model's tokenizer; None where neither a model nor a tokenizer is named."""
    name = model_args.tokenizer_name or model_args.model_name_or_path
    return AutoTokenizer.from_pretrained(name, **model_args.hub) if name is not None else None


# ---------------------------------------------------------------------------------------------------- classes
def labels_of(model_args: ModelArguments) -> Names | None:
    """A checkpoint's labels in the order of its head, none for a regression; None without a checkpoint."""
    checkpoint = model_args.config_name or model_args.model_name_or_path
    if checkpoint is None:
        return None
    config = AutoConfig.from_pretrained(checkpoint, **model_args.hub)
    if config.num_labels == 1:
        return ()
    return tuple(str(config.id2label[number]) for number in range(config.num_labels))


def in_order_of(known: Names | None, names: Sequence[str]) -> Names | None:
    """A checkpoint's classes in its own order, spelled as in the data; None where it does not know all the data's.

    Its head has learnt its own order, which need not be the data's (roberta-large-mnli's is not), and perhaps more
    classes than a small set has. Capital letters count only if they are the only difference of two classes.

    Args:
        known: the checkpoint's classes, if there is one.
        names: the data's.
    """
    same: Callable[[str], str]
    for same in (str, str.lower):
        counts = Counter(same(label) for label in known or ())
        spelled = {same(name): name for name in names}
        if len(spelled) == len(names) and all(counts[label] == 1 for label in spelled):
            # ImageNet's models know two classes of one name ("crane"): each gets a name of its own
            return tuple(
                spelled.get(same(label), label if counts[same(label)] == 1 else f"{label} ({number})")
                for number, label in enumerate(known or ())
            )
    return None


# ---------------------------------------------------------------------------------------------------- data
def file_format(files: Mapping[str, str], formats: Mapping[str, str]) -> str:
    """Returns the `datasets` builder that reads all of the files, by their endings.

    Raises:
        ValueError: the files need several builders, or one has an unknown ending.
    """
    found = {formats.get(Path(path).suffix) for path in files.values()}
    if len(found) != 1 or None in found:
        endings: dict[str, list[str]] = {}
        for ending, builder in formats.items():
            endings.setdefault(builder, []).append(ending)
        choices = ", or all in ".join("/".join(group) for group in endings.values())
        raise ValueError(f"Files must all end in {choices}; got {', '.join(files.values())}.")
    return found.pop() or ""


def take_part(dataset: Dataset, max_samples: int | None, seed: int) -> Dataset:
    """Returns a random part of at most `max_samples` (files are often sorted by label), the same on every rank."""
    if max_samples is None or max_samples >= len(dataset):
        return dataset
    return dataset.shuffle(seed=seed).select(range(max_samples))


def without_missing(splits: DatasetDict, column: str) -> DatasetDict:
    """Takes a column out of the splits that lack it: read with files that have it, one without gets it, too: None."""

    def is_missing(split: Dataset) -> bool:
        return column in split.column_names and len(split) > 0 and all(value is None for value in split[column])

    return DatasetDict(
        {name: split.remove_columns(column) if is_missing(split) else split for name, split in splits.items()}
    )


def padding_multiple(training_args: PipeTransformerTrainingArguments) -> int | None:
    """Pad batches to a multiple of this length: 8 in mixed precision, as tensor cores need it."""
    return None if training_args.mixed_precision == "no" else 8


def without_column(splits: DatasetDict, column: str, prefix: str) -> DatasetDict:
    """Takes a column out of the splits that begin with `prefix`: test data has placeholders there, or true values."""
    return DatasetDict(
        {
            name: split.remove_columns(column) if name.startswith(prefix) and column in split.column_names else split
            for name, split in splits.items()
        }
    )


def split_names(prefix: str, splits: DatasetDict) -> list[str]:
    """Returns the splits that begin with `prefix`: MNLI has `validation_matched` and `validation_mismatched`.

    Raises:
        ValueError: there is none.
    """
    names = [name for name in splits if name == prefix or name.startswith(f"{prefix}_")]
    if not names:
        raise ValueError(f"There is no {prefix} data: give {prefix}_file, or leave that step out.")
    return names


# ---------------------------------------------------------------------------------------------------- the run
def find_checkpoint(training_args: PipeTransformerTrainingArguments) -> str | None:
    """The checkpoint to resume from; "last": the newest in `output_dir`, if any."""
    wanted = training_args.resume_from_checkpoint
    if wanted is None or str(wanted).lower() in {"false", "no"}:
        return None
    return "last" if str(wanted).lower() in {"last", "true", "yes"} else wanted


def train(trainer: PipeTransformerTrainer) -> dict[str, float]:
    """Trains if `do_train` says so, saves model and metrics. Every rank must call this."""
    if not trainer.args.do_train:
        return {}
    metrics = trainer.train(resume_from_checkpoint=find_checkpoint(trainer.args)).metrics
    metrics["train_samples"] = len(trainer.train_dataset)
    trainer.save_model()  # saves the tokenizer, too
    trainer.log_metrics("train", metrics)
    trainer.save_metrics("train", metrics)
    trainer.save_state()
    return metrics


def evaluate(trainer: PipeTransformerTrainer, eval_datasets: Mapping[str, Dataset]) -> dict[str, float]:
    """Evaluates on each split, by name, and saves the metrics. Every rank must call this.

    Returns:
        The metrics, with the end of the split's name behind theirs where there are several: `eval_loss_mismatched`.
    """
    results: dict[str, float] = {}
    for name, dataset in eval_datasets.items():
        metrics = trainer.evaluate(eval_dataset=dataset)
        metrics["eval_samples"] = len(dataset)
        suffix = name.removeprefix("validation")  # "", or MNLI's "_matched" and "_mismatched"
        trainer.log_metrics(f"eval{suffix}", metrics)
        named = {f"{key}{suffix}": value for key, value in metrics.items()}
        trainer.save_metrics(f"eval{suffix}", named)  # goes to all_results.json, too, beside the other splits'
        results.update(named)
    return results


# ---------------------------------------------------------------------------------------------------- the summary
def describe_layout(num_stages: int | str, world_size: int) -> str:
    """Returns "4 stages × 2 replicas" for 8 processes in pipelines of 4."""
    if not isinstance(num_stages, int) or num_stages < 1 or world_size % num_stages:
        return f"{num_stages} stages, {world_size} processes"
    replicas = world_size // num_stages
    stages = "1 stage" if num_stages == 1 else f"{num_stages} stages"
    return f"{stages} × {replicas} replica{'' if replicas == 1 else 's'}"


def layouts_of(training_args: PipeTransformerTrainingArguments) -> Sequence[LayoutPeriod]:
    """Those that this training went through, as recorded; earlier trainings in the same folder are left out."""
    if not training_args.do_train:
        return ()
    try:
        trainings = read_trainings(Path(training_args.output_dir or "."))
    except ValueError:  # a line of an earlier training is damaged; `hf-pipetransformer report` tells which
        return ()
    return trainings[-1].layouts if trainings else ()  # without a record something else distributes the model


def describe_layouts(training_args: PipeTransformerTrainingArguments, layouts: Sequence[LayoutPeriod]) -> str:
    """The layouts one after the other; without a record the requested layout."""
    sizes = [layout.num_stages for layout in layouts] or [training_args.pipeline_parallel_size]
    return " → ".join(describe_layout(size, training_args.world_size) for size, _ in groupby(sizes))


def print_summary(trainer: PipeTransformerTrainer, results: Mapping[str, float]) -> None:
    """Prints the layout, the time and the quality of the run as a table, on the main process."""
    if not trainer.is_world_process_zero():
        return
    training_args = trainer.args
    table = Table(title="Summary", show_header=False, title_justify="left")
    table.add_row("Model", describe_model(trainer.model))
    layouts = layouts_of(training_args)
    table.add_row("Layout", describe_layouts(training_args, layouts))
    if layouts and layouts[-1].num_frozen:
        table.add_row("Frozen layers", f"{layouts[-1].num_frozen} of {layouts[-1].num_layers}")
        # "older": what fewer layers gave, before the latest freeze
        log = [entry for entry in trainer.state.log_history if "cache_hit_rate" in entry]
        hits = [entry["cache_hit_rate"] + entry["cache_older_hit_rate"] for entry in log]
        if len(hits) > 1:  # the first epoch fills the cache
            table.add_row("Cache hits", f"up to {max(hits):.0%} of an epoch's samples")
    table.add_row("Device", training_args.device.type)
    if "train_runtime" in results:
        table.add_row("Training time", f"{results['train_runtime']:.1f} s")
        table.add_row("Throughput", f"{results['train_samples_per_second']:.1f} samples/s")
        table.add_row("Training loss", f"{results['train_loss']:.4f}")
    for name, value in results.items():
        if name.startswith("eval_") and not name.startswith(TECHNICAL):
            table.add_row(name.replace("_", " ").capitalize(), f"{value:.4f}")
    Console().print(table)


def describe_model(model: nn.Module) -> str:
    """The class of the model; of an adapted one that below the adapters."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    name = type(base).__name__
    return name if base is model else f"{name} with adapters"
