#!/usr/bin/env python
"""Which models of transformers can be cut into a pipeline? Every class of the Auto mappings in `TASKS` is tried.

    python benchmarks/supported_models.py --results results.jsonl            # all; goes on where it was stopped
    python benchmarks/supported_models.py --results results.jsonl --retry    # what is not supported, once more
    python benchmarks/supported_models.py BertForMaskedLM --results one.jsonl   # some, by class or model type
    python benchmarks/supported_models.py --results results.jsonl --table docs/supported_models.md --table_only
    python benchmarks/supported_models.py bert --results bert.jsonl --table docs/supported_models.md --update
    python benchmarks/supported_models.py --table docs/supported_models.md --readme README.md   # numbers of the page

Each class is built small with random weights (`tiny_models.py`), on the CPU, in a process of its own:

    1. The whole model runs forwards and backwards on `dummy_batch`, twice, with equal results.
    2. `LayerStack.discover` finds its layers, and checks them by running one at a time, all else NaN.
    3. Batch normalisation is noted: the trainer then does not divide a batch, as it is run here.
    4. The model is cut in two, in the middle and before the last layer. In each part the parameters of the other are
       NaN. What a loss is made of, and all gradients, must equal those of the whole model. Where they do not, both are
       computed once more in float64, which shows whether that was rounding.

What happens at 1 is no finding about the library, but for `dummy_batch`: the class is then *not tried*.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import re
import resource
import signal
import sys
import textwrap
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from tiny_inputs import tiny_batch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.auto_factory import _LazyAutoMapping
from transformers.utils import logging as hf_logging

from hf_pipetransformer.errors import UnsupportedModelError
from hf_pipetransformer.model.batch_statistics import normalised_by_batch
from hf_pipetransformer.model.layer_range import Carry
from hf_pipetransformer.model.layer_stack import LayerStack, loss_outputs, output_tensors
from hf_pipetransformer.model.placeholders import placeholder

from tiny_models import VARIANTS, Variant, build, tiny_config

TASKS = {
    "causal language modelling": "MODEL_FOR_CAUSAL_LM",
    "masked language modelling": "MODEL_FOR_MASKED_LM",
    "text to text": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM",
    "sequence classification": "MODEL_FOR_SEQUENCE_CLASSIFICATION",
    "token classification": "MODEL_FOR_TOKEN_CLASSIFICATION",
    "question answering": "MODEL_FOR_QUESTION_ANSWERING",
    "multiple choice": "MODEL_FOR_MULTIPLE_CHOICE",
    "next sentence prediction": "MODEL_FOR_NEXT_SENTENCE_PREDICTION",
    "pretraining": "MODEL_FOR_PRETRAINING",
    "image classification": "MODEL_FOR_IMAGE_CLASSIFICATION",
    "masked image modelling": "MODEL_FOR_MASKED_IMAGE_MODELING",
    "video classification": "MODEL_FOR_VIDEO_CLASSIFICATION",
    "semantic segmentation": "MODEL_FOR_SEMANTIC_SEGMENTATION",
    "universal segmentation": "MODEL_FOR_UNIVERSAL_SEGMENTATION",
    "instance segmentation": "MODEL_FOR_INSTANCE_SEGMENTATION",
    "object detection": "MODEL_FOR_OBJECT_DETECTION",
    "depth estimation": "MODEL_FOR_DEPTH_ESTIMATION",
    "zero-shot image classification": "MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION",
    "zero-shot object detection": "MODEL_FOR_ZERO_SHOT_OBJECT_DETECTION",
    "image and text to text": "MODEL_FOR_IMAGE_TEXT_TO_TEXT",
    "multimodal language modelling": "MODEL_FOR_MULTIMODAL_LM",
    "visual question answering": "MODEL_FOR_VISUAL_QUESTION_ANSWERING",
    "document question answering": "MODEL_FOR_DOCUMENT_QUESTION_ANSWERING",
    "table question answering": "MODEL_FOR_TABLE_QUESTION_ANSWERING",
    "audio classification": "MODEL_FOR_AUDIO_CLASSIFICATION",
    "audio frame classification": "MODEL_FOR_AUDIO_FRAME_CLASSIFICATION",
    "speaker verification": "MODEL_FOR_AUDIO_XVECTOR",
    "speech recognition (CTC)": "MODEL_FOR_CTC",
    "speech to text": "MODEL_FOR_SPEECH_SEQ_2_SEQ",
    "text to spectrogram": "MODEL_FOR_TEXT_TO_SPECTROGRAM",
    "text to waveform": "MODEL_FOR_TEXT_TO_WAVEFORM",
    "time series": "MODEL_FOR_TIME_SERIES_PREDICTION",
    "time series classification": "MODEL_FOR_TIME_SERIES_CLASSIFICATION",
    "time series regression": "MODEL_FOR_TIME_SERIES_REGRESSION",
    "speech recognition (RNN-T)": "MODEL_FOR_RNNT",
    "speech recognition (TDT)": "MODEL_FOR_TDT",
    "causal image modelling": "MODEL_FOR_CAUSAL_IMAGE_MODELING",
    "image to image": "MODEL_FOR_IMAGE_TO_IMAGE",
    "image matting": "MODEL_FOR_IMAGE_MATTING",
    "image segmentation": "MODEL_FOR_IMAGE_SEGMENTATION",
    "mask generation": "MODEL_FOR_MASK_GENERATION",
    "normal estimation": "MODEL_FOR_NORMAL_ESTIMATION",
    "pointmap estimation": "MODEL_FOR_POINTMAP_ESTIMATION",
    "pose estimation": "MODEL_FOR_POSE_ESTIMATION",
    "keypoint detection": "MODEL_FOR_KEYPOINT_DETECTION",
    "keypoint matching": "MODEL_FOR_KEYPOINT_MATCHING",
    "retrieval": "MODEL_FOR_RETRIEVAL",
    "decisions": "MODEL_FOR_DECISION",
    "table recognition": "MODEL_FOR_TABLE_RECOGNITION",
    "text recognition": "MODEL_FOR_TEXT_RECOGNITION",
}
"""Group in the table -> transformers' mapping. A class that stands in several counts with the first."""

RESULTS = ("supported", "refused", "failing", "not tried")
TOLERANCE = 1e-4
"""Relative to the largest value of a tensor: the same kernels on the same values, added in another order."""
SMALLEST_SCALE = 1e-3
"""Relative to the largest value of a step. A gradient that is zero but for rounding, as that of an attention's key
bias, has no scale of its own."""
SEED = 1


@dataclass(frozen=True)
class Candidate:
    """One class of transformers, with the model type whose configuration builds it."""

    name: str
    model_type: str
    task: str


@dataclass
class Finding:
    """What became of one class."""

    name: str
    model_type: str
    task: str
    result: str
    reason: str = ""
    units: int = 0
    stacks: int = 0
    size: str = ""  # the variant that ran
    inputs: list[str] = field(default_factory=list)
    conditions: list[str] = field(default_factory=list)


Running = tuple[PreTrainedModel, dict[str, Any], dict[str, Tensor]]
"""A model, a batch that it takes, and what a step of the whole model leaves behind."""


def candidates() -> list[Candidate]:
    """Every class of the mappings in `TASKS` once, in the order of tasks and names.

    An older version of transformers does not have all of the mappings: see `unknown_mappings`.
    """
    found: dict[str, Candidate] = {}
    for task, mapping in TASKS.items():
        names: dict[str, Any] = getattr(modeling_auto, mapping + "_MAPPING_NAMES", {})
        pairs = [(name, t) for t, cs in names.items() for name in (cs if isinstance(cs, (tuple, list)) else (cs,))]
        # a class may serve several types (Llama's code_llama, too): the one that it is named after comes first
        for name, model_type in sorted(pairs, key=lambda pair: (pair[0], not _is_named_after(*pair), pair[1])):
            found.setdefault(name, Candidate(name, model_type, task))
    return list(found.values())


def unknown_mappings() -> list[str]:
    """Mappings in `TASKS` that this version of transformers does not have."""
    return [mapping for mapping in TASKS.values() if not hasattr(modeling_auto, mapping + "_MAPPING_NAMES")]


def left_out() -> list[str]:
    """transformers' mappings that are not in `TASKS`."""
    mappings = {name for name, value in vars(modeling_auto).items() if isinstance(value, _LazyAutoMapping)}
    return sorted(mappings - {f"{mapping}_MAPPING" for mapping in TASKS.values()})


def _is_named_after(name: str, model_type: str) -> bool:
    return name.lower().startswith(model_type.replace("-", "").replace("_", ""))


# ---------------------------------------------------------------------------------------------------------
# One class
# ---------------------------------------------------------------------------------------------------------


def examine(candidate: Candidate) -> Finding:
    """Build one class small, and try to cut it."""
    finding = Finding(candidate.name, candidate.model_type, candidate.task, "not tried")
    warnings.simplefilter("ignore")
    hf_logging.set_verbosity_error()
    try:
        model, batch, whole = _running_model(candidate, finding)
    except Exception as error:
        finding.reason = finding.reason or _in_one_line(error)
        return finding
    finding.inputs = sorted(batch)
    try:
        if normalised_by_batch(model) is not None:
            finding.conditions.append("num_microbatches=1")
        torch.manual_seed(SEED)
        stack = LayerStack.discover(model, batch)
        finding.units, finding.stacks = stack.num_units, len({unit.stack for unit in stack.units})
        if stack.num_units < 2:
            finding.result, finding.reason = "refused", "it has a single layer at this size"
            return finding
        for cut in sorted({stack.num_units // 2, stack.num_units - 1}):
            difference = _differs(whole, step_when_cut(stack, cut, batch))
            if difference and not _differs_in_double_precision(stack, cut, batch):
                finding.conditions.append("compared in float64")
            elif difference:
                finding.result, finding.reason = "failing", f"cut at {cut} of {stack.num_units}: {difference}"
                return finding
        finding.result = "supported"
    except UnsupportedModelError as error:
        finding.result, finding.reason = "refused", _in_one_line(error)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        finding.result = "failing"
        finding.reason = f"{_in_one_line(error)} ({Path(where.filename).name}:{where.lineno})"
    return finding


def _running_model(candidate: Candidate, finding: Finding) -> Running:
    """The first variant whose whole model runs forwards and backwards, and twice the same."""
    cls = getattr(transformers, candidate.name)
    errors: list[Exception] = []
    for variant in VARIANTS:
        for large_weights in (True, False):
            try:
                return _try_variant(cls, candidate, variant, large_weights, finding)
            except _NotFinite:
                continue
            except Exception as error:
                if not isinstance(error, MemoryError):
                    errors.append(error)
                break
    if errors:
        raise errors[:2][-1]  # the second variant's, in which gaps are filled
    raise MemoryError("no variant of it is small enough, or its values are not finite")


class _NotFinite(Exception):
    pass


def _try_variant(
    cls: type[PreTrainedModel], candidate: Candidate, variant: Variant, large_weights: bool, finding: Finding
) -> Running:
    tiny = tiny_config(candidate.model_type, variant, candidate.name)
    model = build(cls, tiny.config, large_weights=large_weights, check_size=variant.divide_widths_by < 16)
    batch = _with_noise(tiny_batch(model))
    first, second = whole_step(model, batch), whole_step(model, batch)
    if not all(bool(torch.isfinite(t).all()) for t in first.values() if t.is_floating_point()):
        raise _NotFinite(f"{variant}: the whole model's result is not finite")
    difference = _differs(first, second)
    if difference:
        raise ArithmeticError(f"the whole model gives another result each time ({difference})")
    finding.size, finding.conditions = str(variant), tiny.conditions
    return model, batch, first


def _with_noise(batch: dict[str, Any]) -> dict[str, Any]:
    """Random images and sounds in place of black and silent ones, which batch normalisation divides by almost nothing.

    Masks of ones stay as they are.
    """
    generator = torch.Generator().manual_seed(SEED)
    return {
        name: torch.randn(value.shape, generator=generator) if value.is_floating_point() and not value.any() else value
        for name, value in batch.items()
    }


def _loss(outputs: dict[str, Tensor]) -> Tensor:
    """A number that every value of the loss or logits has its own weight in."""
    parts = []
    generator = torch.Generator().manual_seed(SEED)
    for tensor in loss_outputs(outputs):
        if tensor.is_floating_point() and tensor.requires_grad and tensor.numel():
            weights = torch.randn(tensor.shape, generator=generator)
            finite = torch.isfinite(tensor)  # masked scores are -inf on purpose
            tensor = tensor if tensor.dtype == torch.float64 else tensor.float()
            parts.append((torch.where(finite, tensor, 0.0) * weights).sum() / tensor.numel() ** 0.5)
    if not parts:
        raise ArithmeticError("nothing in its output depends on its weights")
    return torch.stack(parts).sum()


def _left_behind(model: PreTrainedModel, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The answers and gradients of a step; the model's gradients are then gone."""
    kept = {f"output {i}": t.detach() for i, t in enumerate(loss_outputs(outputs))}
    kept = {name: torch.nan_to_num(t, posinf=0.0, neginf=0.0, nan=float("nan")) for name, t in kept.items()}
    kept |= {f"gradient of {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return kept


def whole_step(model: PreTrainedModel, batch: dict[str, Any]) -> dict[str, Tensor]:
    """Answers and gradients of the uncut model."""
    torch.manual_seed(SEED)
    outputs = output_tensors(model(**batch))
    _loss(outputs).backward()
    return _left_behind(model, outputs)


def cut_step(stack: LayerStack, cut: int, batch: dict[str, Any], absent: float) -> dict[str, Tensor]:
    """Answers and gradients of two stages, run one after the other; the other's parameters have the value `absent`."""
    torch.manual_seed(SEED)
    with _only_parameters_of(stack, 0, cut, absent):
        sent = stack.runner.run(0, cut, None, batch)
    received = _as_received(stack, cut, sent, absent)
    torch.manual_seed(SEED)
    with _only_parameters_of(stack, cut, stack.num_units, absent):
        with stack.runner.to_the_end(cut, received):
            outputs = output_tensors(stack.model(**batch))
        _loss(outputs).backward()
    arrived = [
        (ours, theirs.grad)
        for index in sent
        for ours, theirs in zip(sent[index], received[index], strict=True)
        if ours.requires_grad and theirs.grad is not None
    ]
    with _only_parameters_of(stack, 0, cut, absent):
        torch.autograd.backward([tensor for tensor, _ in arrived], [gradient for _, gradient in arrived])
    return _left_behind(stack.model, outputs)


def step_when_cut(stack: LayerStack, cut: int, batch: dict[str, Any]) -> dict[str, Tensor]:
    """`cut_step` with NaN for what is absent; with zeros, as in a pipeline, where the model itself looks for NaN."""
    stack.runner.install()
    try:
        return cut_step(stack, cut, batch, math.nan)
    except AssertionError:  # I-BERT
        return cut_step(stack, cut, batch, 0.0)
    finally:
        stack.runner.remove()


@contextmanager
def _only_parameters_of(stack: LayerStack, start: int, stop: int, absent: float) -> Iterator[None]:
    owned = stack.owned(start, stop)
    ghosts = {
        name: placeholder(stack.table[name], absent if stack.table[name].is_floating_point() else 0)
        for name in stack.table.names
        if name not in owned
    }
    with stack.table.replaced(ghosts):
        yield


def _as_received(stack: LayerStack, boundary: int, carry: Carry, absent: float) -> Carry:
    """The carry as another process has it: cut off from the graph, without what nobody reads."""
    received: dict[int, list[Tensor]] = {index: [] for index in carry}
    for slot in stack.boundaries[boundary]:
        sent = carry[slot.stack][slot.position]
        tensor = sent.detach() if slot.is_used else torch.full_like(sent, absent)
        received[slot.stack].append(tensor.requires_grad_(slot.needs_gradient and sent.requires_grad))
    return {index: tuple(tensors) for index, tensors in received.items()}


def _differs(a: dict[str, Tensor], b: dict[str, Tensor]) -> str:
    """The first tensor in which two steps differ, with the difference; empty where none does."""
    zero = torch.zeros(())
    largest = max((float(t.abs().max()) for t in a.values() if t.is_floating_point() and t.numel()), default=0.0)
    for name in [*a, *(name for name in b if name not in a)]:
        first, second = (step.get(name, zero) for step in (a, b))
        if first.shape != second.shape and name in a and name in b:
            return f"{name} has shape {tuple(second.shape)}, not {tuple(first.shape)}"
        if not first.numel():
            continue
        scale = max(float(first.abs().max()), float(second.abs().max()), SMALLEST_SCALE * max(largest, 1.0))
        distance = float((first.double() - second.double()).abs().max())
        if not distance <= TOLERANCE * scale:  # NaN, too
            return f"{name} differs by {distance:.2g}, its largest value is {scale:.2g}"
    return ""


def _differs_in_double_precision(stack: LayerStack, cut: int, batch: dict[str, Any]) -> str:
    """`_differs` of the two steps in float64, in which rounding that a model amplifies stays below the tolerance."""
    model = stack.model.double()
    in_double = {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}
    try:
        return _differs(whole_step(model, in_double), step_when_cut(stack, cut, in_double))
    finally:
        model.float()


def _in_one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    if not isinstance(error, (UnsupportedModelError, ArithmeticError, MemoryError)):
        text = f"{type(error).__name__}: {text}"
    return text[:300]


# ---------------------------------------------------------------------------------------------------------
# All classes, each in a process
# ---------------------------------------------------------------------------------------------------------


def examine_in_process(family: Sequence[Candidate], timeout_s: float, memory_gib: float) -> Iterator[Finding]:
    """`examine` classes of one family in a forked process, so that a crash or an endless loop ends only that.

    Which class it was is known; those after it get a process of their own.
    """
    context = multiprocessing.get_context("fork")  # transformers is imported once
    left = list(family)
    while left:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_child, args=(left, theirs, memory_gib))
        process.start()
        theirs.close()
        try:
            while left:
                if ours.poll(timeout_s):
                    finding = Finding(**ours.recv())
                else:
                    finding = _not_tried(left[0], f"no result after {timeout_s:.0f} s")
                    process.kill()
                left.pop(0)
                yield finding
        except EOFError:
            if process.exitcode is None:
                process.join(5)
            if process.exitcode != -signal.SIGKILL:
                yield _not_tried(left.pop(0), "its process ended without a result")
        finally:
            process.kill()
            process.join()


def _not_tried(candidate: Candidate, reason: str) -> Finding:
    return Finding(candidate.name, candidate.model_type, candidate.task, "not tried", reason)


def _child(family: Sequence[Candidate], pipe: Any, memory_gib: float) -> None:
    limit = int(memory_gib * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for candidate in family:
        pipe.send(asdict(examine(candidate)))


def read_results(path: Path) -> dict[str, Finding]:
    if not path.exists():
        return {}
    return {f.name: f for f in (Finding(**json.loads(line)) for line in path.read_text().splitlines())}


def run(chosen: Sequence[Candidate], results: Path, timeout_s: float, memory_gib: float, retry: bool) -> None:
    """Examine what the file of results does not have yet, and add it there; a later line replaces an earlier one."""
    done = {name for name, finding in read_results(results).items() if finding.result == "supported" or not retry}
    families: dict[str, list[Candidate]] = {}
    for candidate in chosen:
        if candidate.name not in done:
            families.setdefault(candidate.model_type, []).append(candidate)
    with results.open("a") as file:
        for number, family in enumerate(families.values(), 1):
            for finding in examine_in_process(family, timeout_s, memory_gib):
                file.write(json.dumps(asdict(finding)) + "\n")
                file.flush()
                line = f"{number}/{len(families)} {finding.name}: {finding.result} {finding.reason}"
                print(line[:200], file=sys.stderr)


# ---------------------------------------------------------------------------------------------------------
# The table
# ---------------------------------------------------------------------------------------------------------

INTRODUCTION = """# Supported models

Every class in {tried} of the {mappings} mappings behind the Auto classes of transformers {transformers}
([the others](#left-out)), tried by

    python benchmarks/supported_models.py --results results.jsonl --table docs/supported_models.md --timeout_s 60

on a small instance with random weights, on the CPU (torch {torch}). This page is written by that script, {date}.{kept}

- **supported**: the layers were found, and the model gives the same when it is cut in two as when it is not: outputs
  that a loss is made of, and all gradients, within {tolerance:g} of the largest value (in float64 where float32 is too
  coarse). A model with batch normalisation runs the batch of a pipeline in one piece.
- **refused**: `UnsupportedModelError` with more than one stage. With `pipeline_parallel_size=1` these train as in the
  stock Trainer.
- **failing**: another error, or another result. A fault of this library.
- **not tried**: no small instance could be made from the default configuration, or no input for it. That says nothing
  about the model: with your configuration and data the trainer finds out by itself, before the first step, by the same
  trial.

Inputs were those that `dummy_batch` and `benchmarks/tiny_inputs.py` make. Models of image and text were mostly given
text alone; then their vision tower counts with a layer of the text model and is not cut. Losses were not looked at:
one that couples rows is refused when training starts.
"""


LEFT_OUT = """## Left out

Classes that stand in one of these mappings alone were not looked at: bare models, backbones, encoders and codecs,
which have no head and no loss. Those with a head on top are in the tables above.

"""
README_BEGINS, README_ENDS = "<!-- supported models -->\n\n", "\n<!-- end of supported models -->\n"


def read_table(page: str) -> dict[str, Finding]:
    """What a page of `write_table` says of each class that this version of transformers has."""
    known = {candidate.name: candidate for candidate in candidates()}
    found: dict[str, Finding] = {}

    def add(entry: str, result: str, reason: str = "") -> None:
        name, _, conditions = entry.rstrip(")").partition(" (")
        if name in known:
            c = known[name]
            found[name] = Finding(name, c.model_type, c.task, result, reason)
            found[name].conditions = conditions.split(", ") if conditions else []

    sections = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))
    for result in RESULTS:
        for first, entries in re.findall(r"^\| (.*) \| (.*) \|$", sections[result.capitalize()], re.MULTILINE):
            if first not in ("reason", "model type"):
                for entry in re.split(r", (?![^(]*\))", entries):
                    add(entry, result, "" if result == "supported" else re.sub(r"\\(.)", r"\1", first))
    return found


def kept_line(page: str, kept: int) -> str:
    """Says how many rows are those of a page that was written before, and when that was."""
    written = re.search(r"written by that script, ([\d-]+)\.", page)
    assert written is not None, "no page of write_table"
    return f" The results of {kept} classes were kept from {written[1]}."


def write_table(findings: Sequence[Finding], path: Path, kept: str = "") -> None:
    """Counts, then what is refused, failing or not tried with reasons, then everything that is supported.

    Args:
        findings: One for each class.
        path: The page.
        kept: A sentence about findings of an earlier page.
    """
    lines = [
        INTRODUCTION.format(
            tried=len(TASKS),
            mappings=len(TASKS) + len(left_out()),
            transformers=version("transformers"),
            torch=version("torch").split("+")[0],
            date=datetime.now(timezone.utc).date(),
            kept=kept,
            tolerance=TOLERANCE,
        )
    ]
    lines += ["| task | " + " | ".join(RESULTS) + " |", "|---|" + "---|" * len(RESULTS)]
    for task in TASKS:
        counts = [sum(f.task == task and f.result == result for f in findings) for result in RESULTS]
        if any(counts):
            lines.append(f"| {task} | " + " | ".join(str(count or "") for count in counts) + " |")
    counts = [sum(f.result == result for f in findings) for result in RESULTS]
    lines.append(f"| **all {len(findings)}** | " + " | ".join(f"**{count}**" for count in counts) + " |")
    for result in RESULTS[1:]:
        lines += ["", f"## {result.capitalize()}", "", *_by_reason([f for f in findings if f.result == result])]
    lines += [
        "",
        "## Supported",
        "",
        "By model type. What is in brackets has to be set, or says how the class was tried.",
        "",
    ]
    families: dict[str, list[Finding]] = {}
    for finding in findings:
        if finding.result == "supported":
            families.setdefault(finding.model_type, []).append(finding)
    lines += ["| model type | classes |", "|---|---|"]
    for model_type, members in sorted(families.items()):
        lines.append(f"| {model_type} | {', '.join(map(_with_conditions, sorted(members, key=lambda f: f.name)))} |")
    lines += ["", LEFT_OUT + textwrap.fill(", ".join(f"`{mapping}`" for mapping in left_out()), 120) + "."]
    path.write_text("\n".join(lines) + "\n")


def readme_part(page: str) -> str:
    """What the README says about models, by the numbers of the page that `write_table` has written."""
    mappings = re.search(r"^Every class in (\d+) of the (\d+) mappings", page, re.MULTILINE)
    total = re.search(r"^\| \*\*all (\d+)\*\*" + r" \| \*\*(\d+)\*\*" * len(RESULTS) + r" \|$", page, re.MULTILINE)
    assert mappings is not None and total is not None, "no page of write_table"
    number, supported, refused, failing, untried = total.groups()
    words = (
        f"Of {number} classes in {mappings[1]} of the {mappings[2]} mappings behind transformers' Auto classes, in"
        f" tiny sizes, **{supported}** give the same outputs and gradients when cut in two; {refused} are refused with"
        f" a reason, {failing} fail, and {untried} could not be tried. Which they are, why, and which mappings are"
        " left out: [docs/supported_models.md](docs/supported_models.md). PEFT adapters in the layers (LoRA) train,"
        " freeze with their layers and are saved as adapters ([how](recipes/drop_in.md#with-adapters-peft)); prompts"
        " and prefixes train, but not with a freeze policy."
    )
    return textwrap.fill(words, 120, break_on_hyphens=False) + "\n"


def write_readme(page: Path, readme: Path) -> None:
    """Put `readme_part` between the two marks."""
    before, rest = readme.read_text().split(README_BEGINS)
    after = rest.split(README_ENDS)[1]
    readme.write_text(before + README_BEGINS + readme_part(page.read_text()) + README_ENDS + after)


def _by_reason(findings: Sequence[Finding]) -> list[str]:
    """A table of reasons, those of many classes first."""
    if not findings:
        return ["None."]
    reasons: dict[str, list[str]] = {}
    for finding in findings:
        reasons.setdefault(shortened(finding.reason), []).append(finding.name)
    rows = [
        f"| {reason} | {', '.join(sorted(names))} |"
        for reason, names in sorted(reasons.items(), key=lambda item: (-len(item[1]), item[0]))
    ]
    return ["| reason | classes |", "|---|---|", *rows]


def shortened(reason: str) -> str:
    """A reason without the model's name and the remedy, and harmless in a table."""
    reason = re.sub(r"^\w+ cannot be trained as a pipeline: ", "", reason)
    reason = re.sub(r" Set pipeline_parallel_size=1\.$", "", reason)
    reason = re.sub(r"'[\w.]+' is a (\w+), whose result", r"a layer is a \1, whose result", reason)
    reason = re.sub(r" You can install it with.*$", "", reason)
    return re.sub(r"[<>|*_`\[\]]", lambda match: "\\" + match[0], reason[:200])


def _with_conditions(finding: Finding) -> str:
    return finding.name + (f" ({', '.join(finding.conditions)})" if finding.conditions else "")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("only", nargs="*", help="names of classes or model types; default: all")
    parser.add_argument("--results", type=Path, help="file of results, one line each; is added to")
    parser.add_argument("--table", type=Path, help="Markdown file to write by the results")
    parser.add_argument("--update", action="store_true", help="keep the rows of --table that --results does not have")
    parser.add_argument("--readme", type=Path, help="README to bring up to date by the numbers of --table")
    parser.add_argument("--retry", action="store_true", help="try what is not supported once more")
    parser.add_argument("--table_only", action="store_true", help="run nothing")
    parser.add_argument("--timeout_s", type=float, default=120, help="seconds for one class")
    parser.add_argument("--memory_gib", type=float, default=12, help="address space for one class")
    arguments = parser.parse_args()
    if arguments.results is None and arguments.readme is None:
        parser.error("give --results, or --readme and --table")
    if arguments.readme is not None and arguments.table is None:
        parser.error("--readme needs --table")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    if arguments.results is not None:
        try_and_write(arguments)
    if arguments.readme is not None:
        write_readme(arguments.table, arguments.readme)


def try_and_write(arguments: argparse.Namespace) -> None:
    """Examine the classes that were asked for, and write the table of them."""
    chosen = [c for c in candidates() if not arguments.only or {c.name, c.model_type} & set(arguments.only)]
    if not chosen:
        raise SystemExit(f"none of {', '.join(arguments.only)} stands in transformers' mappings")
    if unknown := unknown_mappings():
        print(
            f"not tried, as transformers {version('transformers')} does not have them: {', '.join(unknown)}",
            file=sys.stderr,
        )
    torch.set_num_threads(1)
    if not arguments.table_only:
        run(chosen, arguments.results, arguments.timeout_s, arguments.memory_gib, arguments.retry)
    if arguments.table is not None:
        done, kept = read_results(arguments.results), ""
        if arguments.update:
            page = arguments.table.read_text()
            earlier = {name: finding for name, finding in read_table(page).items() if name not in done}
            done, chosen, kept = {**earlier, **done}, candidates(), kept_line(page, len(earlier))
        write_table([done[candidate.name] for candidate in chosen if candidate.name in done], arguments.table, kept)


if __name__ == "__main__":
    main()
