"""Which models of transformers can be cut into a pipeline? Every class with a head behind its Auto classes is tried.

    python -m tests.supported_models --table docs/supported_models.md          # all, which takes hours
    python -m tests.supported_models bert --table docs/supported_models.md     # some; the others are kept
    python -m tests.supported_models --new --table docs/supported_models.md    # classes that the page lacks

Each class is built small with random weights (`tiny_models.py`), on the CPU, in a process of its own:

    1. The whole model runs forwards and backwards on `dummy_batch`, twice, with equal results.
    2. `LayerStack.discover` finds its layers, and checks them by running one at a time, all else NaN.
    3. Batch normalisation is noted: the trainer then does not divide a batch, as it is run here.
    4. The model is cut in two, in the middle and before the last layer. In each part the parameters of the other are
       NaN. The tensors in the loss, and all gradients, must equal the whole model's. Where they differ, both are
       computed once more in float64, which shows whether that was rounding.

A failure at 1 is no finding about the library, but about `dummy_batch`: the class is then *not tried*. The page is
written after each family.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers.models.auto import modeling_auto

from .page import read_page, write_page
from .trial import Candidate, Finding, examine

LEFT_OUT = ("AUDIO_TOKENIZATION", "BACKBONE", "IMAGE", "TEXT_ENCODING")
"""Mappings of classes without a head and a loss."""
PREFIX, SUFFIX = "MODEL_FOR_", "_MAPPING"


def tasks() -> list[str]:
    """The tasks of transformers' mappings of classes with a head. Pretraining comes last."""
    names = [name[len(PREFIX) : -len(SUFFIX)] for name in vars(modeling_auto) if name.startswith(PREFIX)
             and name.endswith(SUFFIX)]  # fmt: skip
    return sorted((name for name in names if name not in LEFT_OUT), key=lambda name: name == "PRETRAINING")


def candidates() -> list[Candidate]:
    """Every class of these mappings once, with the first task that it stands in."""
    found: dict[str, Candidate] = {}
    for task in tasks():
        names: dict[str, Any] = getattr(modeling_auto, f"{PREFIX}{task}{SUFFIX}_NAMES", {})
        pairs = [(name, t) for t, cs in names.items() for name in (cs if isinstance(cs, (tuple, list)) else (cs,))]
        # a class may serve several types (Llama's code_llama, too): the type in its name comes first
        for name, model_type in sorted(pairs, key=lambda pair: (pair[0], not _is_named_after(*pair), pair[1])):
            found.setdefault(name, Candidate(name, model_type, task.replace("_", " ").lower()))
    return list(found.values())


def _is_named_after(name: str, model_type: str) -> bool:
    return name.lower().startswith(model_type.replace("-", "").replace("_", ""))


def examine_in_process(family: Sequence[Candidate], timeout_s: float, memory_gib: float) -> Iterator[Finding]:
    """`examine` classes of one family in a forked process: a crash or an endless loop ends only this process.

    The class that caused it is known; the classes after it get a process of their own.
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


def main(given: Sequence[str] | None = None) -> None:
    """Try the classes that are asked for, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="*", help="names of classes or model types; default: all")
    parser.add_argument("--new", action="store_true", help="only classes that the page does not have")
    parser.add_argument("--table", type=Path, required=True, help="the page; what it has and is not tried is kept")
    parser.add_argument("--timeout_s", type=float, default=60, help="seconds for one class")
    parser.add_argument("--memory_gib", type=float, default=12, help="address space for one class")
    options = parser.parse_args(given)
    torch.set_num_threads(1)
    known = candidates()
    kept = read_page(options.table.read_text(), known) if options.table.exists() else {}
    chosen = [c for c in known if not options.only or {c.name, c.model_type} & set(options.only)]
    families: dict[str, list[Candidate]] = {}
    for candidate in chosen:
        if not (options.new and candidate.name in kept):
            families.setdefault(candidate.model_type, []).append(candidate)
    if not families:
        raise SystemExit(f"there is nothing to try: {options.only} is in none of transformers' mappings, or not new")
    tried: dict[str, Finding] = {}
    left_out = [f"{PREFIX}{name}{SUFFIX}" for name in LEFT_OUT] + ["MODEL_MAPPING"]
    for number, family in enumerate(families.values(), 1):
        for finding in examine_in_process(family, options.timeout_s, options.memory_gib):
            tried[finding.name] = finding
            line = f"{number}/{len(families)} {finding.name}: {finding.result} {finding.reason}"
            print(line[:200], file=sys.stderr)
        found = {**kept, **tried}
        in_order = [found[candidate.name] for candidate in known if candidate.name in found]
        write_page(in_order, options.table, len(kept.keys() - tried.keys()), left_out)


if __name__ == "__main__":
    main()
