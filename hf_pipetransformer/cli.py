"""`hf-pipetransformer`: inspect a model, predict its training, and report on it.

    hf-pipetransformer inspect bert
    hf-pipetransformer inspect ./my-model --task sequence-classification --stages 2,4 --json
    hf-pipetransformer plan bert --devices 8 --batch 128 --seq 384 --epochs 10 --samples 88500

`inspect` needs a configuration but no weights: each parameter occupies the memory of a single element, so a laptop can
inspect a model with billions of parameters.

Each command imports its modules when it runs: torch and transformers take seconds to import, and `--help` must be
fast.

Exit codes: 0 done, 1 the model cannot run as a pipeline, 2 wrong arguments or unknown model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from . import __version__

CONFIGURATION_HELP = "Name on the Hub, folder, config.json, or model type such as 'bert' or 'llama'."
TASK_HELP = "Task, such as sequence-classification or causal-lm; auto: by the configuration."
SEQ_HELP = "Number of tokens in a sample; ignored for images and audio (sized by the configuration)."
DEFAULT_DEVICE = "a100-80g"

app = typer.Typer(
    name="hf-pipetransformer",
    help="Pipeline-parallel fine-tuning of Transformers with the Hugging Face Trainer.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


@app.command()
def inspect(
    model_or_config: Annotated[
        str,
        typer.Argument(
            metavar="MODEL_OR_CONFIG",
            help=CONFIGURATION_HELP,
        ),
    ],
    task: Annotated[str, typer.Option(help=TASK_HELP)] = "auto",
    seq: Annotated[int | None, typer.Option(min=1, help=SEQ_HELP, show_default="8")] = None,
    stages: Annotated[
        str,
        typer.Option(
            help="Comma-separated numbers of stages to propose; those above the number of units are omitted."
        ),
    ] = "1,2,4,8",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print a model's units, its shared parameters, and its split into stages."""
    from .errors import UnsupportedModelError
    from .forecast import inspection, placeholder_model

    try:
        numbers = [int(number) for number in stages.split(",")]
    except ValueError:
        numbers = [0]
    if min(numbers) < 1:
        _fail(2, f"--stages is {stages!r}, but must be comma-separated positive integers, such as 1,2,4.")

    _check_task(task)
    try:
        config = placeholder_model.load_config(model_or_config)
        cls = placeholder_model.model_class(config, task)
    except placeholder_model.UnknownModelError as error:
        _fail(2, str(error))
    try:
        model = placeholder_model.build_placeholder_model(config, cls)
        report, text = inspection.inspect(model, seq or inspection.DEFAULT_TOKENS, numbers)
    except UnsupportedModelError as error:
        _fail(1, str(error))
    except (ImportError, ValueError) as error:  # a package is missing, or the model rejects its configuration or batch
        _fail(1, f"{model_or_config} cannot be inspected: {error}")
    except Exception as error:  # the model's own code may raise any error
        _fail(1, f"{model_or_config} cannot be inspected: {_failure_of_class(cls.__name__, error)}")
    typer.echo(json.dumps(report, indent=2) if as_json else text)


@app.command()
def plan(
    model_or_config: Annotated[str, typer.Argument(metavar="MODEL_OR_CONFIG", help=CONFIGURATION_HELP)],
    devices: Annotated[int, typer.Option(help="Number of devices, with one process each.")],
    batch: Annotated[int, typer.Option(help="Samples in the global batch, over all devices.")],
    epochs: Annotated[int, typer.Option(help="Number of epochs; layers freeze at the start of each.")],
    seq: Annotated[int | None, typer.Option(help=SEQ_HELP)] = None,
    samples: Annotated[int, typer.Option(help="Number of samples in an epoch.")] = 100_000,
    device: Annotated[str, typer.Option(help="Kind of device; an unknown name lists all kinds.")] = DEFAULT_DEVICE,
    efficiency: Annotated[float | None, typer.Option(help="Fraction of peak FLOP/s that layers reach.")] = None,
    memory_gib: Annotated[float | None, typer.Option(help="Override the device's memory, in GiB.")] = None,
    disk_gib: Annotated[float | None, typer.Option(help="Free disk of a node for the cache, in GiB.")] = None,
    activation_cache_max_gib: Annotated[
        float | None, typer.Option(help="Limit of a node's cache, in GiB; by default a fifth of --disk-gib.")
    ] = None,
    alpha: Annotated[
        float, typer.Option(help="Fraction of the active layers to freeze at the start of each epoch.")
    ] = 1 / 3,
    freeze_schedule: Annotated[
        str | None,
        typer.Option(
            help='Instead of --alpha: epoch -> number of frozen layers from then on, as JSON: {"1": 4, "2": 7}.'
        ),
    ] = None,
    max_frozen_layers: Annotated[int | None, typer.Option(help="Upper bound on the number of frozen layers.")] = None,
    freeze: Annotated[bool, typer.Option("--freeze/--no-freeze", help="Freeze layers.")] = True,
    cache: Annotated[bool, typer.Option("--cache/--no-cache", help="Cache the outputs of frozen layers.")] = True,
    elastic: Annotated[
        bool, typer.Option("--elastic/--no-elastic", help="Use fewer stages once layers are frozen.")
    ] = True,
    pipeline_parallel_size: Annotated[str, typer.Option(help="Number of pipeline stages K, or auto.")] = "auto",
    pipeline_schedule: Annotated[str, typer.Option(help="1f1b, gpipe, interleaved1f1b, or zbv.")] = "1f1b",
    virtual_pipeline_parallel_size: Annotated[
        int | None, typer.Option(help="Virtual stages per stage of interleaved1f1b (zbv has 2).", show_default="2")
    ] = None,
    num_microbatches: Annotated[str, typer.Option(help="Number of micro-batches M, or auto.")] = "auto",
    replica_sharding: Annotated[
        str, typer.Option(help="State that the replicas of a stage shard: none, optimizer, or auto.")
    ] = "none",
    gradient_accumulation_steps: Annotated[
        int, typer.Option(help="Number of batches that the global batch is split into.")
    ] = 1,
    lora_r: Annotated[
        int | None, typer.Option(help="Train LoRA adapters of this rank (PEFT) instead of all weights.")
    ] = None,
    gradient_checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing", help="Keep only the layers' inputs for the backward.")
    ] = False,
    bf16: Annotated[bool, typer.Option("--bf16", help="Compute in bf16 by autocast.")] = False,
    frozen_module: Annotated[
        list[str] | None, typer.Option(help="Name of a module that you have frozen; may be repeated.")
    ] = None,
    teacher: Annotated[
        str | None, typer.Option(help="Frozen teacher that the loss calls: a name as for MODEL_OR_CONFIG.")
    ] = None,
    task: Annotated[str, typer.Option(help=TASK_HELP)] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="List all assumptions of the prediction.")] = False,
) -> None:
    """Predict a whole training without launching it: stages, memory, time and speed-up in each epoch."""
    from .argument_values import int_or_auto
    from .errors import UnsupportedModelError
    from .forecast.command import answer, policy_of
    from .forecast.device_table import device_named
    from .forecast.forecast import Job
    from .forecast.forecast_text import as_text
    from .forecast.tuning import Tuning
    from .planning.planner import Request
    from .planning.schedules import virtual_stages_of

    _check_task(task)
    try:
        job = Job(
            num_devices=devices,
            batch=batch,
            num_epochs=epochs,
            num_samples=samples,
            freeze_policy=policy_of(freeze, alpha, freeze_schedule),
            asked=Request(
                int_or_auto("pipeline_parallel_size", pipeline_parallel_size),
                is_elastic=elastic,
                schedule=pipeline_schedule,
                num_microbatches=int_or_auto("num_microbatches", num_microbatches),
                replica_sharding=replica_sharding,
                virtual_pipeline_parallel_size=virtual_stages_of(pipeline_schedule, virtual_pipeline_parallel_size),
            ),
            max_frozen_layers=max_frozen_layers,
            caches=cache,
            gradient_accumulation_steps=gradient_accumulation_steps,
        )
        kind = device_named(device, efficiency, memory_gib, disk_gib, activation_cache_max_gib)
        tuning = Tuning(lora_r, gradient_checkpointing, bf16)
        title, values = answer(model_or_config, task, seq, job, kind, frozen_module or (), tuning, teacher)
    except UnsupportedModelError as error:
        _fail(1, str(error))
    except ImportError as error:
        _fail(1, f"{model_or_config} cannot be planned: {error}")
    except ValueError as error:
        _fail(2, str(error))
    except Exception as error:  # the model's own code may raise any error
        _fail(1, f"{model_or_config} cannot be planned: {_failure_of_class('its class', error)}")
    typer.echo(json.dumps(values, indent=2) if as_json else as_text(values, title, verbose))


@app.command()
def report(
    output_dir: Annotated[Path, typer.Argument(metavar="OUTPUT_DIR", help="The folder of a training.")],
    output: Annotated[
        Path | None, typer.Option(help="The file to write.", show_default="report.html in OUTPUT_DIR")
    ] = None,
) -> None:
    """Write one HTML file about a training: layouts, speed, memory, cache, losses, and time by activity.

    Prints the path to stdout, and a summary of a few sentences to stderr.
    """
    from .report.comparison import trainings_in
    from .report.report import write_report
    from .report.words import verdict

    try:
        path = write_report(output_dir, output)
        sentences = verdict(trainings_in(output_dir)[-1])
    except ValueError as error:
        _fail(2, str(error))
    for sentence in sentences:
        typer.echo(sentence, err=True)
    typer.echo(path.resolve())


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(metavar="A", help="The folder of a training.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="The folder of another, such as one without freezing.")],
    output: Annotated[
        Path | None, typer.Option(help="Write a report of A, compared with B, to this HTML file.")
    ] = None,
) -> None:
    """Compare two trainings: seconds, samples/s, loss and accuracy; losses over time with --output."""
    from .report.comparison import as_text, differences, headline, notes, pair, rows_of
    from .report.report import write_report

    try:
        runs = pair(first, second)
        typer.echo("\n".join([as_text(rows_of(runs)), "", headline(runs), *notes(runs)]))
        different = differences(runs)
        if different:
            typer.echo(f"\nThe trainings also differ in:\n\n{as_text(different)}")
        if output is not None:
            typer.echo(write_report(first, output, second).resolve())
    except ValueError as error:
        _fail(2, str(error))


def _check_task(task: str) -> None:
    """Exit with an error if there is no such task."""
    from .forecast.placeholder_model import TASKS

    if task != "auto" and task not in TASKS:
        _fail(2, f"--task is {task!r}, but must be one of auto, {', '.join(TASKS)}.")


def _failure_of_class(name: str, error: Exception) -> str:
    """Return the message for a model class that fails to build, or to run on a small batch."""
    reason = " ".join(str(error).split())[:200].rstrip(".")
    return (
        f"{name} fails on a small batch ({type(error).__name__}: {reason}). Pass another --task, or a folder whose"
        " config.json has the values of a real model and names its class in 'architectures'."
    )


def _fail(code: int, message: str) -> NoReturn:
    """Print one line to stderr and exit with the code."""
    typer.echo("error: " + " ".join(message.split()), err=True)
    raise typer.Exit(code)


if __name__ == "__main__":
    app()
