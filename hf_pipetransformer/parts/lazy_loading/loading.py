"""Loads a model lazily: its weights are mapped from the checkpoint's files.

The stock `from_pretrained` loads the model, so renamed and tied weights, buffers, new heads and random numbers are as
usual. Weights that `from_pretrained` would convert are refused, because every process would hold them in memory.
"""

from __future__ import annotations

import logging
import tempfile
import zlib
from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig, PreTrainedModel

from ...file_formats import OBJECT, read_json
from ...model.mapped_weights import FileMappings, Place, TensorLike, into_memory, is_written, tensors_in_file
from ...model.placeholders import ParameterTable, set_values
from ...pipeline.mesh import ProcessMesh
from ...randomness import global_state_kept
from ...run.lazy_model import MARK
from .checkpoint_files import tensors_in, weight_files

logger = logging.getLogger(__name__)

SAMPLE_BYTES = 4096
"""Number of bytes compared between processes at each end of a mapped weight."""
SMALLEST_IN_FILE = 2**16
"""Size in bytes of the smallest new weights that are kept in a file."""
LONGEST_LOAD = timedelta(hours=2)
"""Timeout for other processes to load the model."""


def load_lazily(model_class: Any, checkpoint: str | Path | PreTrainedConfig, **options: Any) -> Any:
    """Load a model lazily: weights stay in the checkpoint's files until `PipeTransformerTrainer` distributes them.

    Each process then reads the weights of its own stage only. Until then a weight takes memory while it is used, and
    this memory is page cache that all processes of a host share. Use it in place of `from_pretrained`:

    ```python
    model = load_lazily(AutoModelForCausalLM, "path/to/checkpoint")
    trainer = PipeTransformerTrainer(model, args, train_dataset=dataset)  # args: pipeline_parallel_size=4
    ```

    If `torch.distributed` is initialised (as it is once `TrainingArguments` have been created), this is collective
    over all processes: an error on one of them is raised on all.

    Args:
        model_class: an auto class (`AutoModelForCausalLM`) or model class.
        checkpoint: a folder with a safetensors checkpoint in one or several files, or the name of a model on the hub.
            Or a configuration, for a model with new weights: each process draws the same weights as `from_config`,
            and keeps them in temporary files as large as the model.
        **options: arguments for `from_pretrained`, or for `from_config`. Set the same seed on all processes first if
            weights are drawn (a new head). With a configuration, `offload_folder` is the folder of the temporary
            files, on a disk; the default is the system's folder for temporary files.

    Returns:
        The model, in the same mode as from `from_pretrained` or `from_config`.

    Raises:
        ValueError: a file is missing, truncated or not in safetensors format; or the weights would have to be
            converted while they are loaded (another dtype, quantization, layers that transformers stores differently).
    """
    with ProcessMesh(LONGEST_LOAD).failing_together():
        if isinstance(model_class, nn.Module):
            raise ValueError(
                f"load_lazily got a {type(model_class).__name__} in the place of a class. Pass the class, for example"
                " AutoModelForCausalLM; changes to the model (new embeddings, adapters) are made after it is loaded."
            )
        if isinstance(checkpoint, PreTrainedConfig):
            model = _create(model_class, checkpoint, options)
        else:
            model = _load(model_class, checkpoint, options)
        setattr(model, MARK, True)
    return model


def _load(model_class: Any, checkpoint: str | Path, options: dict[str, Any]) -> PreTrainedModel:
    for name in ("device_map", "quantization_config", "tp_plan", "distributed_config"):
        if options.get(name) is not None:
            raise ValueError(f"load_lazily does not support {name}: the trainer distributes the weights. Remove it.")
    folder = Path(checkpoint) / options.get("subfolder", "")
    if folder.is_dir() and "variant" not in options:
        _refuse_other_dtype(folder, weight_files(folder), options)
    model: PreTrainedModel
    model, info = model_class.from_pretrained(checkpoint, **options, output_loading_info=True)
    _refuse_converted(model, folder, {*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])})
    return model


def _create(model_class: Any, config: PreTrainedConfig, options: dict[str, Any]) -> PreTrainedModel:
    folder = Path(options.pop("offload_folder", None) or tempfile.gettempdir())
    make = getattr(model_class, "from_config", None) or model_class._from_config  # an auto class, or a model's
    with _NewTensorsInFile(folder):
        model: PreTrainedModel = make(config, **options)
    return model


class _NewTensorsInFile(TorchFunctionMode):
    """Inside, new tensors of at least `SMALLEST_IN_FILE` bytes are mapped from files in a folder.

    The model's own code initialises them in its own order, so their values are the same as in memory.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is torch.empty and result.device.type == "cpu" and result.nbytes >= SMALLEST_IN_FILE:
            (in_file,) = tensors_in_file(self._folder, [TensorLike(result.shape, result.dtype)])
            return in_file.requires_grad_(result.requires_grad)
        return result


def _refuse_other_dtype(folder: Path, files: list[Path], options: Mapping[str, Any]) -> None:
    """Refuse a dtype that is not the checkpoint's, before anything is loaded."""
    wanted = options.get("dtype", options.get("torch_dtype", "auto"))
    if wanted in ("auto", None):
        config = options.get("config")
        wanted = getattr(config, "dtype", None) if config is not None else _configured_dtype(folder)
    if wanted is None:
        return
    wanted = str(wanted).removeprefix("torch.")
    sizes: Counter[str] = Counter()
    for file in files:
        for like in tensors_in(file).values():
            if like.dtype.is_floating_point:
                sizes[str(like.dtype).removeprefix("torch.")] += like.num_bytes
    if sizes and (stored := sizes.most_common(1)[0][0]) != wanted:
        raise ValueError(
            f"The checkpoint {folder} is stored in {stored}, but the model is to be loaded in {wanted}, so every"
            f" process would convert all weights in its memory. Pass dtype=torch.{stored} (bf16=True or fp16=True"
            " still choose the precision of the computation), or convert the checkpoint once:"
            f" from_pretrained(..., dtype=torch.{wanted}) and save_pretrained()."
        )


def _configured_dtype(folder: Path) -> str | None:
    try:
        config = read_json(folder / "config.json", OBJECT)
    except (OSError, ValueError):
        return None
    dtype = config.get("dtype", config.get("torch_dtype"))
    return dtype if isinstance(dtype, str) else None


def _refuse_converted(model: PreTrainedModel, folder: Path, new: set[str]) -> None:
    """Refuse a model if some of its stored weights are in memory because they were converted.

    Vectors may be in memory: they are small, and transformers copies a head's bias when it ties it.

    Args:
        model: the model.
        folder: the checkpoint.
        new: names of the weights that are not in the checkpoint.
    """
    table, mappings = ParameterTable(model), FileMappings()
    mapped = mappings.places_in({name: table[name] for name in table.names})
    in_memory = [n for n in table.names if n not in mapped and table[n].numel() and table[n].dim() > 1]
    converted = [name for name in in_memory if new.isdisjoint(table.aliases[name])]
    if converted:
        raise ValueError(
            f"{type(model).__name__} cannot be loaded lazily from {folder}: {converted[0]!r} and"
            f" {len(converted) - 1} more of its weights are stored in another form (merged, split, transposed or in"
            " another dtype) and were converted in memory. Load the model with from_pretrained."
        )


def weights_in_checkpoint(table: ParameterTable, mesh: ProcessMesh) -> frozenset[str]:
    """The names of the weights that are still mapped, after a check that they are the same on all processes.

    Weights that this process has changed since loading are moved into memory. For the other weights, only the place in
    the file and a few bytes are compared, to avoid reading the whole checkpoint on every process. Collective over all
    processes.

    Raises:
        ValueError: a file is no longer complete, or processes have different files. Every process raises it.
    """
    with mesh.failing_together():
        into_memory([table[name] for name in _places(table) if is_written(table[name])])
        places = _places(table)
        for file in sorted({place.file for place in places.values()}):
            if not file.is_file():
                raise ValueError(f"{file}, which the model was loaded from, is gone. Keep it until train() has begun.")
            tensors_in(file)
        mine = {n: (place.file.name, place.offset, place.size, _ends_of(table[n])) for n, place in places.items()}
    everyone = [mine] if mesh.are_equal(mine) else mesh.gather_objects(mine)
    for rank, theirs in enumerate(everyone):
        other = next((name for name in table.names if theirs.get(name) != everyone[0].get(name)), None)
        if other is not None:
            raise ValueError(
                "The processes have loaded different checkpoints, or have changed different weights after loading:"
                f" {other!r} differs between process 0 and process {rank}. Give all processes the same files."
            )
    return frozenset(mine)


def _places(table: ParameterTable) -> dict[str, Place]:
    """The places of the weights in a checkpoint's files; without new weights, which are in this process's own file."""
    places = FileMappings().places_in({name: table[name] for name in table.names})
    return {name: place for name, place in places.items() if place.is_private}


def _ends_of(parameter: torch.Tensor) -> int:
    values = parameter.detach().view(-1).view(torch.uint8)
    ends = torch.cat([values[:SAMPLE_BYTES], values[-SAMPLE_BYTES:]])
    return zlib.crc32(ends.numpy().data)


def map_from(model: PreTrainedModel, checkpoint: str, mesh: ProcessMesh) -> None:
    """Map the weights of a lazily loaded model from a checkpoint of its training. Collective over all processes.

    Weights that are in memory in another dtype are copied. Weights that are not in the checkpoint keep their values,
    with a warning, as when the stock Trainer resumes.

    Raises:
        ValueError: as for `load_lazily`, or a weight has another shape in the checkpoint. Every process raises it.
    """
    with mesh.failing_together(), global_state_kept(), torch.no_grad():
        table, stored, missing = ParameterTable(model), _stored_for(model, Path(checkpoint)), []
        for name in table.names:
            weight = table[name]
            found = next((stored[alias] for alias in table.aliases[name] if alias in stored), None)
            if found is None:
                missing += [name] if weight.numel() else []
            elif found.shape != weight.shape:
                raise ValueError(
                    f"{name!r} has the shape {tuple(found.shape)} in {checkpoint}, but {tuple(weight.shape)} in the"
                    " model. Resume with a model that has the same changes (labels, vocabulary) as the saved one."
                )
            elif found.dtype == weight.dtype:
                set_values(weight, [found])
            else:
                weight.copy_(found)
        if missing and mesh.rank == 0:
            logger.warning("These weights are not in %s and keep their values: %s.", checkpoint, ", ".join(missing))
        for name, buffer in model.named_buffers():
            if name in stored:
                buffer.copy_(stored[name])


def _stored_for(model: PreTrainedModel, checkpoint: Path) -> dict[str, torch.Tensor]:
    """The mapped tensors of a checkpoint, by their names in the model."""
    files = weight_files(checkpoint)
    _refuse_other_dtype(checkpoint, files, {"config": model.config, "dtype": model.dtype})
    stored: dict[str, torch.Tensor] = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            stored.update((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118
    if not model.state_dict().keys() >= stored.keys():  # `save_pretrained` writes the published names
        loaded = type(model).from_pretrained(checkpoint, config=model.config, dtype=model.dtype).state_dict()
        stored.update((name, loaded[name]) for name in FileMappings().places_in(loaded))  # unmapped weights are new
    return stored
