#!/usr/bin/env python
"""Train transformers' own example scripts with the two class names changed, and compare the losses.

    git clone --depth 1 https://github.com/huggingface/transformers
    python benchmarks/transformers_examples.py transformers/examples/pytorch --output results.json

Each script is copied, and the names in it are changed line by line, as `sed` would. It trains a small random model on
generated data, offline:

    stock     the script as it is, one process
    K=1       the changed script, one process
    K=2       the changed script, two processes, `--pipeline_parallel_size 2` on the command line
    frozen    as K=1; layers freeze on a schedule, and are computed again in each epoch
    cached    as K=2, with the same schedule; in the last epoch the frozen layers' outputs are read from the cache

The global batch is the same everywhere. `evaluate.load` needs the hub, so a stand-in without metrics takes its place;
losses are compared. A script whose other requirements are not installed is skipped with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parents[1]
WORDS = [f"word{n}" for n in range(200)]
SAMPLES, EVAL_SAMPLES, BATCH, EPOCHS, LENGTH = 40, 12, 8, 3, 48
FREEZE_SCHEDULE = {1: 2}
TIMEOUT_S = 600
NAMES = re.compile(r"(?<![\w.])((?:Seq2Seq)?Trainer|(?:Seq2Seq)?TrainingArguments)(?=[(),])")
STAND_IN = '''"""Stands in for `evaluate`, whose `load` needs the hub."""


class NoMetrics(dict):
    def __missing__(self, name):
        return 0.0


class Metric:
    def compute(self, **_):
        return NoMetrics()


def load(*_, **__):
    return Metric()
'''

FREEZES = ["--freeze_policy", "schedule", "--freeze_schedule", json.dumps(FREEZE_SCHEDULE)]
# name -> (arguments of the script, number of processes)
LAYOUTS: dict[str, tuple[list[str], int]] = {
    "stock": ([], 1),
    "K=1": ([], 1),
    "K=2": (["--pipeline_parallel_size", "2"], 2),
    "frozen": ([*FREEZES, "--activation_cache", "off"], 1),
    "cached": (["--pipeline_parallel_size", "2", *FREEZES, "--activation_cache", "on"], 2),
}
COMPARED = {"K=1": "stock", "K=2": "K=1", "cached": "frozen"}
"""Which layout each one's losses must equal."""


def with_our_names(script: str) -> str:
    """Return a script with the Trainer's and the arguments' names changed, and imported from this package."""
    lines, ours = [], set()
    for line in script.splitlines():
        if re.fullmatch(r"\s+(Seq2Seq)?(Trainer|TrainingArguments),", line):
            continue  # one name on a line of the import
        if line.startswith("from transformers import ") and NAMES.search(line):
            line = NAMES.sub("", line).replace("import , ", "import ")
        if not line.lstrip().startswith(("#", '"')):
            line = NAMES.sub(lambda name: f"PipeTransformer{name[1]}", line)
            ours.update(re.findall(r"PipeTransformer\w+", line))
        lines.append(line)
    imported = f"from hf_pipetransformer import {', '.join(sorted(ours))}"
    if ours:
        lines.insert(next(k for k, line in enumerate(lines) if line.startswith("from transformers import")), imported)
    return "\n".join(lines) + "\n"


def lines_changed(before: str, after: str) -> int:
    """Number of lines of a changed script that are not in the one before."""
    return len([line for line in after.splitlines() if line not in set(before.splitlines())])


# ---------------------------------------------------------------------------------------------------------
# Data and models
# ---------------------------------------------------------------------------------------------------------


def _sentence(draw: random.Random, shortest: int = 5, longest: int = 20) -> str:
    return " ".join(draw.choices(WORDS, k=draw.randint(shortest, longest)))


def _pair(draw: random.Random) -> dict[str, Any]:
    first = _sentence(draw)
    return {"sentence1": first, "sentence2": _sentence(draw), "label": int(first[4:6].strip(), 10) % 2}


def _text(draw: random.Random) -> dict[str, Any]:
    return {"text": _sentence(draw, 30, 60)}


def _tags(draw: random.Random) -> dict[str, Any]:
    words = _sentence(draw).split()
    return {"tokens": words, "ner_tags": ["B-X" if int(word[4:]) % 3 == 0 else "O" for word in words]}


def _choices(draw: random.Random) -> dict[str, Any]:
    endings = {f"ending{k}": _sentence(draw, 3, 6) for k in range(4)}
    return {"sent1": _sentence(draw), "sent2": _sentence(draw, 2, 4), **endings, "label": draw.randrange(4)}


def _question(draw: random.Random) -> dict[str, Any]:
    words = _sentence(draw, 12, 20).split()
    answer = draw.randrange(len(words))
    start = len(" ".join(words[:answer])) + (answer > 0)
    return {
        "id": str(draw.getrandbits(48)),
        "title": "generated",
        "question": _sentence(draw, 3, 6),
        "context": " ".join(words),
        "answers": {"text": [words[answer]], "answer_start": [start]},
    }


def _summary(draw: random.Random) -> dict[str, Any]:
    text = _sentence(draw, 12, 20)
    return {"text": text, "summary": " ".join(text.split()[:4])}


def write_tokenizer(folder: Path) -> Any:
    """Write a tokenizer of `WORDS`, with BERT's special tokens, and return it."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {word: n for n, word in enumerate([*special, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")],
    )
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=LENGTH, eos_token="[SEP]", **names)
    made.save_pretrained(folder)
    return made


def write_model(kind: str, folder: Path) -> None:
    """Write a small random model of a kind, "bert", "gpt2" or "bart", without dropout."""
    import transformers as hf

    hf.set_seed(0)
    size = len(write_tokenizer(folder))
    if kind == "bert":
        config = hf.BertConfig(
            vocab_size=size,
            hidden_size=32,
            num_hidden_layers=4,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=LENGTH,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        hf.BertForPreTraining(config).save_pretrained(folder)
    elif kind == "gpt2":
        config = hf.GPT2Config(
            vocab_size=size,
            n_positions=LENGTH,
            n_embd=32,
            n_layer=4,
            n_head=2,
            resid_pdrop=0,
            embd_pdrop=0,
            attn_pdrop=0,
        )
        hf.GPT2LMHeadModel(config).save_pretrained(folder)
    else:
        config = hf.BartConfig(
            vocab_size=size,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            max_position_embeddings=LENGTH,
            dropout=0.0,
            pad_token_id=0,
            bos_token_id=2,
            eos_token_id=3,
            decoder_start_token_id=3,
            forced_eos_token_id=3,
        )
        hf.BartForConditionalGeneration(config).save_pretrained(folder)


@dataclass(frozen=True)
class Example:
    """An example script, and what it is trained on.

    Attributes:
        model: kind of the model.
        sample: draws a sample of the data.
        options: further arguments of the script.
        beside: scripts that it imports from its folder.
        needs: modules that it imports besides the common ones.
        in_field: the field of the JSON files that holds the samples, or "" if they are lines.
    """

    model: str
    sample: Callable[[random.Random], dict[str, Any]]
    options: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    in_field: str = ""


LENGTHS = ("--max_seq_length", str(LENGTH))
EXAMPLES = {
    "run_glue": Example("bert", _pair, LENGTHS),
    "run_classification": Example(
        "bert", _pair, (*LENGTHS, "--text_column_names", "sentence1", "--label_column_name", "label")
    ),
    "run_ner": Example("bert", _tags),
    "run_swag": Example("bert", _choices, LENGTHS),
    "run_mlm": Example("bert", _text, (*LENGTHS, "--line_by_line")),
    "run_clm": Example("gpt2", _text, ("--block_size", "32")),
    "run_qa": Example(
        "bert",
        _question,
        (*LENGTHS, "--doc_stride", "8", "--pad_to_max_length"),
        ("trainer_qa", "utils_qa"),
        (),
        "data",
    ),
    "run_summarization": Example("bart", _summary, ("--max_target_length", "8"), (), ("nltk", "rouge_score")),
}


# ---------------------------------------------------------------------------------------------------------
# Runs
# ---------------------------------------------------------------------------------------------------------


@dataclass
class Result:
    """What a script has done.

    Attributes:
        script: its name.
        lines: lines in it that were changed.
        skipped: why it was not run.
        losses: layout -> the loss of each step.
        eval_loss: layout -> the loss of the evaluation at the end.
        differences: layout -> largest difference of a loss from the layout that it is compared with.
        cached: share of the samples in the last epoch whose frozen layers' outputs came from the cache.
        errors: layout -> the end of the output of a run that has failed.
    """

    script: str
    lines: int = 0
    skipped: str = ""
    losses: dict[str, list[float]] = field(default_factory=dict)
    eval_loss: dict[str, float] = field(default_factory=dict)
    differences: dict[str, float] = field(default_factory=dict)
    cached: float | None = None
    errors: dict[str, str] = field(default_factory=dict)


def write_data(example: Example, folder: Path) -> tuple[Path, Path]:
    """Write the files of the samples for training and evaluation."""
    draw, files = random.Random(0), (folder / "train.json", folder / "validation.json")
    for file, count in zip(files, (SAMPLES, EVAL_SAMPLES), strict=True):
        samples = [example.sample(draw) for _ in range(count)]
        if example.in_field:
            file.write_text(json.dumps({example.in_field: samples}))
        else:
            file.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    return files


def find_script(examples: Path, name: str) -> Path | None:
    """Find a script in a folder or its subfolders."""
    return next(iter(sorted(examples.rglob(f"{name}.py"))), None)


def run_layout(script: Path, example: Example, data: tuple[Path, Path], layout: str, home: Path) -> tuple[str, Path]:
    """Run a script in a layout. Returns an error, or "", and the folder of its output."""
    options, processes = LAYOUTS[layout]
    output = script.parent / f"output {layout}"
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    command += [str(script), "--model_name_or_path", str(home / example.model), *example.options, *options]
    command += ["--train_file", str(data[0]), "--validation_file", str(data[1]), "--output_dir", str(output)]
    command += ["--do_train", "--do_eval", "--use_cpu", "--save_strategy", "no", "--report_to", "none"]
    command += ["--per_device_train_batch_size", str(BATCH // processes), "--num_train_epochs", str(EPOCHS)]
    command += ["--logging_steps", "1", "--learning_rate", "3e-3", "--adam_epsilon", "1e-4", "--seed", "1"]
    path = os.pathsep.join([str(home / "modules"), str(PACKAGE), os.environ.get("PYTHONPATH", "")])
    environment = {"PYTHONPATH": path, "HF_HOME": str(home / "hf"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no end within {TIMEOUT_S} s", output
    return (done.stdout + done.stderr)[-2000:] if done.returncode else "", output


def run_example(name: str, examples: Path, home: Path) -> Result:
    """Run a script in all layouts."""
    example, result, script = EXAMPLES[name], Result(name), find_script(examples, name)
    from importlib.util import find_spec

    import hf_pipetransformer

    missing = [module for module in example.needs if find_spec(module) is None]
    if script is None or missing:
        result.skipped = f"{', '.join(missing)} not installed" if missing else "not in the folder"
        return result
    folder = home / name
    sources = {part: (script.parent / f"{part}.py").read_text() for part in (name, *example.beside)}
    for changes, change in (("stock", str), ("changed", with_our_names)):
        (folder / changes).mkdir(parents=True)
        for part, source in sources.items():
            (folder / changes / f"{part}.py").write_text(change(source))
    result.lines = sum(lines_changed(source, with_our_names(source)) for source in sources.values())
    ours = set(re.findall(r"PipeTransformer\w+", " ".join(map(with_our_names, sources.values()))))
    lacking = sorted(name for name in ours if not hasattr(hf_pipetransformer, name))
    if lacking:
        result.skipped = f"this package has no {lacking[0]}"
        return result
    data = write_data(example, folder)
    for layout in LAYOUTS:
        place = folder / ("stock" if layout == "stock" else "changed") / f"{name}.py"
        error, output = run_layout(place, example, data, layout, home)
        if error:
            result.errors[layout] = error
            continue
        history = json.loads((output / "trainer_state.json").read_text())["log_history"]
        result.losses[layout] = [entry["loss"] for entry in history if "loss" in entry]
        metrics = json.loads((output / "all_results.json").read_text())
        recorded = (output / "pipeline_metrics.jsonl").read_text() if layout == "cached" else ""
        rates = re.findall(r'"cache_hit_rate": ([\d.]+)', recorded)
        result.cached = float(rates[-1]) if rates else result.cached
        if "eval_loss" in metrics:
            result.eval_loss[layout] = metrics["eval_loss"]
    for layout, other in COMPARED.items():
        if layout in result.losses and other in result.losses:
            pairs = zip(result.losses[layout], result.losses[other], strict=True)
            result.differences[layout] = max(abs(one - two) for one, two in pairs)
    return result


def table(results: list[Result]) -> str:
    """The results as a table in Markdown."""
    columns = ["script", "lines changed", "last loss, stock", *(f"{one} − {other}" for one, other in COMPARED.items())]
    columns[-1:] = ["last loss, frozen", columns[-1], "read from the cache"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for result in results:
        if result.skipped:
            lines.append(f"| `{result.script}` | {result.lines or ''} | not run: {result.skipped} | | | | | |")
            continue
        last = {layout: f"{losses[-1]:.4f}" for layout, losses in result.losses.items()}
        shown = {
            layout: f"{result.differences[layout]:.0e}" if layout in result.differences else "failed"
            for layout in COMPARED
        }
        lines.append(
            f"| `{result.script}` | {result.lines} | {last.get('stock', 'failed')} | {shown['K=1']} | {shown['K=2']} |"
            f" {last.get('frozen', 'failed')} | {shown['cached']} | {result.cached or 0:.0%} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("examples", type=Path, help="examples/pytorch of a checkout of transformers")
    parser.add_argument("--only", nargs="+", choices=list(EXAMPLES), default=list(EXAMPLES))
    parser.add_argument("--output", type=Path, help="write all losses here, as JSON")
    options = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        (home / "modules").mkdir()
        (home / "modules" / "evaluate.py").write_text(STAND_IN)
        for kind in sorted({EXAMPLES[name].model for name in options.only}):
            write_model(kind, home / kind)
        for name in options.only:
            results.append(run_example(name, options.examples.resolve(), home))
            for layout, error in results[-1].errors.items():
                print(f"{name}, {layout}: {error}\n", file=sys.stderr)
    versions = {package: version(package) for package in ("torch", "transformers", "accelerate", "datasets")}
    print(f"With {', '.join(f'{package} {number}' for package, number in versions.items())}:\n\n{table(results)}")
    if options.output is not None:
        options.output.write_text(json.dumps({"versions": versions, "results": list(map(asdict, results))}, indent=1))


if __name__ == "__main__":
    main()
