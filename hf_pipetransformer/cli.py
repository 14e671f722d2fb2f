"""`hf-pipetransformer`: look at a model and its stages before training.

    hf-pipetransformer inspect bert
    hf-pipetransformer inspect ./my-model --task sequence-classification --stages 2,4 --json

`inspect` needs a configuration, no weights: each parameter takes the memory of one element, so a
laptop can look at a model of billions of parameters.

Exit codes: 0 done, 1 the model cannot run as a pipeline, 2 wrong arguments or unknown model.
"""

from __future__ import annotations

import json
from typing import Annotated, NoReturn

import typer

from . import __version__, inspection
from .errors import UnsupportedModelError

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
            help="Name on the Hub, folder, config.json, or model type such as 'bert' or 'llama'.",
        ),
    ],
    task: Annotated[
        str, typer.Option(help="Such as sequence-classification, causal-lm; auto: by the configuration.")
    ] = "auto",
    stages: Annotated[
        str,
        typer.Option(help="Numbers of stages to propose, with commas; those above the number of units are left out."),
    ] = "1,2,4,8",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print a model's units, its shared parameters, and how it would be cut into stages."""
    try:
        numbers = [int(number) for number in stages.split(",")]
    except ValueError:
        numbers = [0]
    if min(numbers) < 1:
        _fail(2, f"--stages is {stages!r}, but must be positive numbers with commas, such as 1,2,4.")

    if task != "auto" and task not in inspection.TASKS:
        _fail(2, f"--task is {task!r}, but the tasks are auto, {', '.join(inspection.TASKS)}.")
    try:
        config = inspection.load_config(model_or_config)
        cls = inspection.model_class(config, task)
    except inspection.UnknownModelError as error:
        _fail(2, str(error))
    try:
        model = inspection.build_ghost_model(config, cls)
        batch, units = inspection.measure(model)
    except UnsupportedModelError as error:
        _fail(1, str(error))
    except (ImportError, ValueError) as error:  # a package is missing, or the model refuses its configuration or batch
        _fail(1, f"{model_or_config} cannot be inspected: {error}")
    report = inspection.make_report(model, batch, units, [number for number in numbers if number <= len(units)])
    typer.echo(json.dumps(report, indent=2) if as_json else inspection.as_text(report, units))


def _fail(code: int, message: str) -> NoReturn:
    """Print one line to the error stream and leave with the exit code."""
    typer.echo("error: " + " ".join(message.split()), err=True)
    raise typer.Exit(code)


if __name__ == "__main__":
    app()
