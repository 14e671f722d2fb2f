"""A model without weights, from the name of its configuration.

    load_config -> model_class -> build_placeholder_model

No weights are loaded or created: each parameter is a *placeholder*, one element of memory in the shape of the real
parameter, so a laptop can inspect a model with billions of parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel

from ..model.elsewhere import placeholder
from ..model.placeholders import ParameterTable
from ..planning.tables import MIB

PLACEHOLDER_VALUE = 0.01
"""Value of all placeholders. It is not zero, because CLIP divides by the norm of its embeddings."""
LARGE_BYTES = 64 * MIB
"""Tensors of at least this size are parameters, not buffers."""
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.addmm.default)
"""Matrix products: the last argument multiplies the argument before it."""
CAST = torch.ops.aten._to_copy.default
"""Converts a tensor to another data type, as autocast does with weights."""

# Many families are in several mappings (BART in five), so the order decides, from the narrow mapping to the wide
# one: encoder-decoders first, because BART is also listed as a masked and a causal language model; then encoders,
# recognized by masked-language modeling and fine-tuned as classifiers, because BERT is also listed as a causal
# model; then decoders, because Llama is also listed as a classifier. The rest do not overlap with text. Entries after
# "base", which takes every family, are only used on request.
TASKS: Mapping[str, str] = {
    "speech-seq2seq": "AutoModelForSpeechSeq2Seq",
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
    "sequence-classification": "AutoModelForSequenceClassification",
    "causal-lm": "AutoModelForCausalLM",
    "image-classification": "AutoModelForImageClassification",
    "video-classification": "AutoModelForVideoClassification",
    "audio-classification": "AutoModelForAudioClassification",
    "image-text-to-text": "AutoModelForImageTextToText",
    "masked-lm": "AutoModelForMaskedLM",
    "ctc": "AutoModelForCTC",
    "base": "AutoModel",
    "token-classification": "AutoModelForTokenClassification",
    "question-answering": "AutoModelForQuestionAnswering",
    "multiple-choice": "AutoModelForMultipleChoice",
}
"""Name of a task -> Auto class for its model."""


class UnknownModelError(ValueError):
    """Raised if there is no configuration of this name, or no model class for the task."""


def load_config(name: str) -> PreTrainedConfig:
    """Load the configuration of a name.

    The name is looked up as a path first, then as a model type (with its default configuration), then on the Hub. If
    the Hub does not answer, its local cache is used. Code that comes with a model is never run.

    Raises:
        UnknownModelError: There is no such configuration.
    """
    path = Path(name)
    is_path = path.is_file() or (path / "config.json").is_file()
    if not is_path and name in CONFIG_MAPPING:
        try:
            return AutoConfig.for_model(name)
        except Exception as error:  # its class rejects its own default values, with any error
            raise UnknownModelError(
                f"model type {name!r} has no default configuration ({_first_line(error)}). Pass a folder or a"
                " config.json with the values of a real model."
            ) from error
    is_offline = not path.exists() and not _hub_answers(name)
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(name, local_files_only=is_offline)
    except Exception as error:  # OSError, ValueError, or any error of the HTTP client
        if is_path:
            reason = f"its configuration cannot be read ({_first_line(error)})."
        elif path.exists():
            reason = "the folder has no config.json."
        else:
            reason = f"it is not a folder, a config.json or a model type, {_why_not_on_hub(is_offline, error)}."
            similar = get_close_matches(name, list(CONFIG_MAPPING.keys()), n=3)
            such_as = f". Model types of a similar name: {', '.join(similar)}" if similar else " such as 'llama'"
            reason += f" Pass a folder, a config.json or a model type{such_as}."
        raise UnknownModelError(f"unknown model {name!r}: {reason}") from error
    return config


def _hub_answers(name: str) -> bool:
    """Return whether the Hub answers a single request for a model's configuration, even with "not found".

    Without this request, `from_pretrained` would try six times to reach an unreachable Hub. The request runs in a
    thread, because looking up the Hub's name and trying each of its addresses may exceed the timeout.
    """
    answers: list[bool] = []

    def ask() -> None:
        try:
            get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=constants.HF_HUB_ETAG_TIMEOUT)
        except (HfHubHTTPError, HFValidationError):
            pass  # the Hub has answered, or the name is invalid: `from_pretrained` explains the error
        except Exception:  # the HTTP client's error for a failed connection, a proxy, or offline mode
            return
        answers.append(True)

    thread = Thread(target=ask, daemon=True)
    thread.start()
    thread.join(constants.HF_HUB_ETAG_TIMEOUT)
    return bool(answers)


def _why_not_on_hub(is_offline: bool, error: Exception) -> str:
    """Return why a model could not be loaded from the Hub, as the end of a sentence."""
    if not is_offline:
        return f"and it could not be loaded from the Hugging Face Hub ({_first_line(error)})"
    why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the Hugging Face Hub cannot be reached"
    return f"it is not in the Hub's local cache, and {why}"


def model_class(config: PreTrainedConfig, task: str = "auto") -> type:
    """Return the class that builds a configuration's model: an architecture of transformers or an Auto class.

    Without a task, the configuration's own `architectures` decides. A configuration without `architectures` gets the
    usual fine-tuning task of its family (encoders: sequence classification; decoders: causal language modeling).

    Raises:
        UnknownModelError: No class accepts the configuration.
    """

    chooses, kind = task == "auto", type(config)
    for name in (config.architectures or ()) if chooses else ():
        named = getattr(transformers, name, None)
        if isinstance(named, type):
            return named
    for candidate in TASKS if chooses else (task,):
        auto: Any = getattr(transformers, TASKS[candidate])
        is_encoder = kind in transformers.AutoModelForMaskedLM._model_mapping
        if kind not in auto._model_mapping or (chooses and candidate == "sequence-classification" and not is_encoder):
            continue
        found = auto._model_mapping[kind]
        # LeViT has several classes. Take the first: the Auto class would read `architectures`, which the default
        # configuration of a model type lacks
        cls: type = found[0] if isinstance(found, (tuple, list)) and not config.architectures else auto
        return cls
    if chooses:
        raise UnknownModelError(f"transformers has no model for {kind.__name__}.")
    raise UnknownModelError(f"transformers has no {task} model for {kind.__name__}. Pass another --task.")


def build_placeholder_model(config: PreTrainedConfig, cls: type) -> PreTrainedModel:
    """Build a model of placeholders: each parameter occupies the memory of a single element.

    Buffers are real, because models compute with them. Tied parameters stay tied, and every parameter is trainable.
    """
    build = getattr(cls, "from_config", None) or cls._from_config  # type: ignore[attr-defined]
    config._experts_implementation = "eager"  # the grouped kernel does not accept stride-0 weights
    with _LargeTensorsOnMeta(), init_empty_weights(include_buffers=False):
        model: PreTrainedModel = build(config)
    model.tie_weights()  # moving to the meta device has untied the parameters
    table = ParameterTable(model)
    for name in table.names:
        empty = placeholder(table[name], PLACEHOLDER_VALUE, torch.device("cpu"))
        table[name] = nn.Parameter(empty, requires_grad=empty.is_floating_point())
    return model


class _LargeTensorsOnMeta(TorchFunctionMode):
    """Mode that makes `torch.empty` create large tensors on the meta device.

    `init_empty_weights` first allocates each parameter, and a mixture of experts has single parameters of 30 GB.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty:
            on_meta = func(*args, **{**kwargs, "device": "meta"})
            if on_meta.nbytes >= LARGE_BYTES:
                return on_meta
        return func(*args, **kwargs)


class GhostProducts(TorchDispatchMode):
    """Mode that computes matrix products with placeholders from row sums, without expanding the placeholder.

    The kernels would first copy a stride-0 matrix to its full size: 26 GB for one forward of a 7B model. Results equal
    the product up to rounding, and have the same shape. Enter it before a `FlopCounterMode`, which then still counts
    the product. A placeholder that autocast converts to another data type stays one.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in PRODUCTS and not kwargs and args[-1].numel() > 1 and not any(args[-1].stride()):
            *bias, left, empty = args  # [..., N, K] @ [..., K, M]
            row_sums = left.sum(-1, keepdim=True) * empty.as_strided((), ())
            product = row_sums.expand(*left.shape[:-1], empty.shape[-1])
            product = product.clone(memory_format=torch.contiguous_format)
            return product.add_(bias[0]) if bias else product
        if func is CAST and args[0].numel() > 1 and not any(args[0].stride()):
            return func(args[0].as_strided((), ()), **(kwargs or {})).expand(args[0].shape)
        return func(*args, **(kwargs or {}))


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
