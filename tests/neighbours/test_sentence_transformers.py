"""sentence-transformers' trainers with our two classes put in, and `LayerFreezeCallback` in the stock ones.

Losses equal the stock trainer's under the same launcher; with freezing, a stock run with layers that are frozen by
hand.
"""

from __future__ import annotations

import inspect
import random
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks
from model_zoo import without_dropout
from torch import nn
from training_runs import StopAfter
from transformers import BertConfig, BertForSequenceClassification, BertModel, PreTrainedTokenizerFast, TrainerCallback

from hf_pipetransformer import LayerFreezeCallback, PipeTransformerTrainer, PipeTransformerTrainingArguments
from hf_pipetransformer.parts.prefix_cache.cache import writing

pytestmark = [
    pytest.mark.slow,  # importing the library takes seconds in every process
    pytest.mark.skipif(find_spec("sentence_transformers") is None, reason="sentence-transformers is not installed"),
]

WORDS = [f"w{i}" for i in range(40)]
SAMPLES, ROWS, EPOCHS, FROZEN = 32, 8, 4, 2
FREEZING = {"freeze_policy": "schedule", "freeze_schedule": {1: FROZEN}, "activation_cache": "on"}


# ------------------------------------------------------------------------------------------ model and data
@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a tiny BERT without dropout, "body", and the same with a head, "cross-encoder"."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    names = {"pad_token": special[0], "unk_token": special[1], "cls_token": special[2], "sep_token": special[3]}
    vocabulary = {word: i for i, word in enumerate([*special, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=special[1]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder = tmp_path_factory.mktemp("models")
    sizes = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32}
    config = BertConfig(vocab_size=len(vocabulary), max_position_embeddings=24, num_labels=1, **sizes)
    for name, model_class in {"body": BertModel, "cross-encoder": BertForSequenceClassification}.items():
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=24, **names)
        fast.save_pretrained(folder / name)
        torch.manual_seed(0)
        without_dropout(model_class(config)).save_pretrained(folder / name)
    return str(folder)


def sentence_transformer(models: str) -> Any:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    body = Transformer(f"{models}/body")
    return SentenceTransformer(modules=[body, Pooling(body.get_embedding_dimension())], device="cpu")


def data_for(kind: str) -> Any:
    from datasets import Dataset

    draw = random.Random(0)
    names = ["anchor", "positive", "negative"] if kind == "triplet" else ["anchor", "positive"]
    columns: dict[str, list[Any]] = {
        # "cached": padding is stored as well, as the loss may read it
        name: [
            " ".join(draw.choices(WORDS, k=5 if kind == "cached" else draw.randrange(3, 8))) for _ in range(SAMPLES)
        ]
        for name in names
    }
    if kind == "duplicates":
        columns["anchor"][1::2] = columns["anchor"][::2]
    if kind in ("softmax", "cross-encoder"):
        columns["label"] = [i % 3 if kind == "softmax" else float(i % 2) for i in range(SAMPLES)]
    return Dataset.from_dict(columns)


def loss_for(kind: str, model: Any) -> nn.Module:
    from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss
    from sentence_transformers.sentence_transformer import losses

    if kind == "cached":
        return losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=4)
    if kind == "softmax":
        return losses.SoftmaxLoss(model, model.get_embedding_dimension(), num_labels=3)
    if kind == "cross-encoder":
        return BinaryCrossEntropyLoss(model)
    return (losses.TripletLoss if kind == "triplet" else losses.MultipleNegativesRankingLoss)(model)


class FreezesByHand(TrainerCallback):
    """Freezes the embeddings and the first layers at the start of the second epoch."""

    def on_epoch_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step == 0:
            return
        freeze_below(model)


def freeze_below(model: nn.Module) -> None:
    bert = next(module for module in model.modules() if isinstance(module, BertModel))
    for module in (bert.embeddings, *bert.encoder.layer[:FROZEN]):
        for parameter in module.parameters():
            parameter.requires_grad_(False)
            parameter.grad = None


# ------------------------------------------------------------------------------------------ runs
def make_trainer(
    kind: str, way: str, models: str, folder: str, world_size: int = 1, freezes: bool = False, **options: Any
) -> Any:
    """A trainer: "stock", "by hand", "callback" (all three of the library), "ours" or "frozen".

    With `freezes`, the lower layers are frozen before it is made.
    """
    if kind == "cross-encoder":
        from sentence_transformers import CrossEncoder
        from sentence_transformers.cross_encoder import CrossEncoderTrainer as StockTrainer
        from sentence_transformers.cross_encoder import CrossEncoderTrainingArguments as StockArguments

        model: Any = CrossEncoder(f"{models}/cross-encoder", num_labels=1, device="cpu")
    else:
        from sentence_transformers import SentenceTransformerTrainer as StockTrainer
        from sentence_transformers import SentenceTransformerTrainingArguments as StockArguments

        model = sentence_transformer(models)
    if freezes:
        freeze_below(model)

    @dataclass
    class Arguments(StockArguments, PipeTransformerTrainingArguments):
        pass

    Arguments.__qualname__ = "Arguments"  # a checkpoint contains them
    globals()["Arguments"] = Arguments

    class Trainer(PipeTransformerTrainer, StockTrainer):
        pass

    is_ours, evaluator = way in ("ours", "frozen"), options.pop("evaluator", None)
    common = {
        # "cached" has two mini-batches on each process
        "per_device_train_batch_size": ROWS // (1 if kind == "cached" else world_size),
        "num_train_epochs": EPOCHS,
        "learning_rate": 1e-3,
        "adam_epsilon": 1e-3,  # a gradient that is zero but for rounding must not become a step
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        **options,
    }
    if kind == "duplicates":
        common["batch_sampler"] = "no_duplicates"
    arguments = (Arguments if is_ours else StockArguments)(
        f"{folder}/{way}", **common, **(FREEZING if way == "frozen" else {})
    )
    freezing = LayerFreezeCallback({"name": "schedule", "schedule": {1: FROZEN}})
    callbacks = {"by hand": [FreezesByHand()], "callback": [freezing]}.get(way, [])
    torch.manual_seed(1)  # the loss may have parameters of its own
    return (Trainer if is_ours else StockTrainer)(
        model=model,
        args=arguments,
        train_dataset=data_for(kind),
        loss=loss_for(kind, model),
        callbacks=callbacks,
        evaluator=evaluator,
    )


def test_what_is_frozen_before_training_is_cached(
    models: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kind = "cached"
    caplog.set_level("INFO", "hf_pipetransformer")
    stock = make_trainer(kind, "stock", models, str(tmp_path), freezes=True)
    stock.train()
    ours = make_trainer(kind, "ours", models, str(tmp_path), freezes=True, activation_cache="on", log_level="info")
    ours.train()
    assert values_of(ours, "loss") == pytest.approx(values_of(stock, "loss"), abs=1e-5)
    read = [int(found) for found in re.findall(r"was read for (\d+) of \d+ samples", caplog.text)]
    assert sum(read) >= SAMPLES


def test_the_guide_in_a_loss_of_the_library_is_read(
    models: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The loss holds the student as well, and the guide writes into the dict that it is given."""
    from sentence_transformers.sentence_transformer.losses import GISTEmbedLoss

    caplog.set_level("INFO", "hf_pipetransformer")
    found = []
    for way in ("stock", "ours"):
        more = {} if way == "stock" else {"activation_cache": "on", "log_level": "info"}
        trainer = make_trainer("triplet", way, models, str(tmp_path), **more)
        trainer.loss = GISTEmbedLoss(trainer.model, sentence_transformer(models).requires_grad_(False).eval())
        trainer.train()
        found.append(values_of(trainer, "loss"))
    assert found[1] == pytest.approx(found[0], abs=1e-5)
    assert re.search(r"called by the loss: trainer\.loss\.guide, [1-9]\d* of \d+ samples read", caplog.text)


def values_of(trainer: Any, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def equal_in_each_way(rank: int, world_size: int, models: str, folder: str, kind: str) -> None:
    """The losses of each way to train, and the cache hits of the last one."""
    writing.PENDING_BATCHES = 1000  # a busy machine drops no batches either
    found = {}
    for way in ("stock", "ours", "by hand", "callback", "frozen"):
        trainer = make_trainer(kind, way, models, f"{folder}/{kind}/{rank}", world_size)
        trainer.train()
        found[way] = values_of(trainer, "loss")
    assert found["ours"] == pytest.approx(found["stock"], abs=1e-4)
    assert found["callback"] == pytest.approx(found["by hand"], abs=1e-4)
    assert found["frozen"] == pytest.approx(found["by hand"], abs=1e-4)
    assert found["by hand"][-1] != pytest.approx(found["stock"][-1], abs=1e-4)
    hits = values_of(trainer, "cache_hit_rate")
    assert (hits[0], hits[-1]) == (0.0, 1.0)


def test_losses_are_those_of_the_stock_trainer(models: str, tmp_path: Path) -> None:
    """Freezing and a warm cache are tried, too. "cached" calls the model in its backward.

    The cross-encoder has no launcher: under one, the stock trainer of version 6.2 fails in DDP.
    """
    run_ranks(equal_in_each_way, 2, models, str(tmp_path), "cached", timeout=250)
    equal_in_each_way(0, 1, models, str(tmp_path), "cross-encoder")


STAGED = ("triplet", "cached", "softmax", "cross-encoder")
REFUSED = [
    ("duplicates", {}, "NoDuplicatesBatchSampler.*pipeline_parallel_size=1"),
    ("softmax", {"loss_reduction": "mean"}, "loss_reduction='mean'.*Leave loss_reduction out"),
]


def staged(rank: int, world_size: int, models: str, folder: str) -> dict[str, tuple[Any, ...]]:
    """Losses, norms and weights of each kind of loss over two stages, or by the stock trainer in this process."""
    found = {}
    way, stages = ("ours", {"pipeline_parallel_size": 2}) if world_size > 1 else ("stock", {})
    for kind in STAGED:
        options = {"num_train_epochs": 1, "per_device_train_batch_size": ROWS // world_size, **stages}
        trainer = make_trainer(kind, way, models, f"{folder}/{kind}/{rank}", world_size, **options)
        trainer.train()
        weights = {**dict(trainer.model.named_parameters()), **dict(trainer.loss.named_parameters(prefix="loss"))}
        weights = {name: weight.detach().clone() for name, weight in weights.items()}
        found[kind] = values_of(trainer, "loss"), values_of(trainer, "grad_norm"), weights
    for kind, options, message in REFUSED if world_size > 1 else ():
        trainer = make_trainer(kind, way, models, f"{folder}/{rank}", world_size, **stages, **options)
        with pytest.raises(ValueError, match=message):
            trainer.train()
    return found


def test_two_stages_equal_one_process(models: str, tmp_path: Path) -> None:
    """Each column of the data set is a call of the model. The classifier of "softmax" belongs to the loss."""
    expected = staged(0, 1, models, str(tmp_path / "stock"))
    for found in run_ranks(staged, 2, models, str(tmp_path), timeout=290):
        for kind in STAGED:
            for mine, wanted, most in zip(found[kind], expected[kind], (1e-5, 1e-4, 1e-5), strict=True):
                torch.testing.assert_close(mine, wanted, rtol=0, atol=most)


def saved_in_stages(rank: int, world_size: int, models: str, folder: str) -> None:
    from sentence_transformers import SentenceTransformer

    options: dict[str, Any] = {"save_strategy": "epoch", "num_train_epochs": 2, "pipeline_parallel_size": 2}
    trainer = make_trainer("pairs", "ours", models, folder, world_size, **options)
    trainer.train()
    assert (Path(folder) / "ours" / f"checkpoint-{trainer.state.global_step}" / "README.md").is_file()
    if rank == 0:
        saved = SentenceTransformer(f"{folder}/ours/checkpoint-{trainer.state.global_step}").state_dict()
        for name, weight in trainer.model.state_dict().items():
            torch.testing.assert_close(saved[name], weight, rtol=0, atol=0)
    first = trainer.state.global_step // 2
    resumed = make_trainer("pairs", "ours", models, folder, world_size, **options)
    resumed.train(resume_from_checkpoint=f"{folder}/ours/checkpoint-{first}")
    for mine, wanted in zip(resumed.model.parameters(), trainer.model.parameters(), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=0, atol=1e-5)


def evaluated(rank: int, world_size: int, models: str, folder: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """What an evaluator finds after each epoch, and the best model's weights."""
    from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator

    both = {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True, "num_train_epochs": 3}
    best = {"metric_for_best_model": "dev_spearman_cosine", "greater_is_better": True}
    way, stages = ("ours", {"pipeline_parallel_size": 2}) if world_size > 1 else ("stock", {})
    options: dict[str, Any] = {**both, **best, **stages, "per_device_train_batch_size": ROWS // world_size}
    first, second = ([f"w{start + n} w{n % 3}" for n in range(9)] for start in (1, 2))
    scores = [n / 9 for n in range(9)]
    options["evaluator"] = EmbeddingSimilarityEvaluator(first, second, scores, name="dev", batch_size=2)
    trainer = make_trainer("pairs", way, models, folder, world_size, **options)
    trainer.train()
    weights = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
    return values_of(trainer, "eval_dev_spearman_cosine"), weights


def test_two_stages_evaluate_and_load_the_best(models: str, tmp_path: Path) -> None:
    """An odd number of sentences, in several batches."""
    expected, weights = evaluated(0, 1, models, str(tmp_path / "stock"))
    assert len(expected) == 3
    for found, theirs in run_ranks(evaluated, 2, models, str(tmp_path / "two"), timeout=200):
        assert found == pytest.approx(expected, abs=1e-4)
        for name, weight in weights.items():
            torch.testing.assert_close(theirs[name], weight, rtol=0, atol=1e-5)


def test_two_stages_save_and_resume(models: str, tmp_path: Path) -> None:
    """The library writes a model card, for which it calls the model on the main process."""
    run_ranks(saved_in_stages, 2, models, str(tmp_path), timeout=200)


def test_an_interrupted_training_resumes(models: str, tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    def trained(folder: str, *callbacks: TrainerCallback, resumes: bool = False) -> list[float]:
        trainer = make_trainer("pairs", "frozen", models, str(tmp_path / folder), save_strategy="epoch")
        for callback in callbacks:
            trainer.add_callback(callback)
        trainer.train(resume_from_checkpoint=resumes)
        return values_of(trainer, "loss")

    whole, _ = trained("whole"), trained("parts", StopAfter(10))
    assert trained("parts", resumes=True)[-6:] == pytest.approx(whole[-6:], abs=1e-4)
    saved = SentenceTransformer(str(tmp_path / "parts" / "frozen" / f"checkpoint-{SAMPLES * EPOCHS // ROWS}"))
    assert saved.encode(["w1 w2"]).shape == (1, 16)


# ------------------------------------------------------------------------------------------ names of that library
def test_what_of_the_library_is_relied_on() -> None:
    import sentence_transformers as library
    from sentence_transformers.sentence_transformer.training_args import BatchSamplers
    from torch.utils.data import BatchSampler

    trainer = library.SentenceTransformerTrainer
    version = f"sentence-transformers {library.__version__}"
    names = list(inspect.signature(trainer._load_from_checkpoint).parameters)
    assert len(names) == 2, f"{version}: _load_from_checkpoint takes {names}"  # trainer.py calls it with the folder
    names = list(inspect.signature(library.SentenceTransformer.forward).parameters)
    assert names[1] == "input", f"{version}: forward takes {names}"  # `HowCalled.nested_in`
    assert BatchSamplers.NO_DUPLICATES.value == "no_duplicates", version
    from sentence_transformers.base.sampler import DefaultBatchSampler, NoDuplicatesBatchSampler

    # `training_data.training_loader` tells by this that batches are grouped in a way of their own
    assert DefaultBatchSampler.__iter__ is BatchSampler.__iter__, version
    assert NoDuplicatesBatchSampler.__iter__ is not BatchSampler.__iter__, version


def run_recipe(rank: int, world_size: int, folder: str) -> dict[str, float]:
    import run_sentence_embeddings

    options = {"generated_data": 64, "output_dir": folder, "num_train_epochs": 4, "per_device_train_batch_size": 8}
    options |= {"freeze_policy": "alpha", "activation_cache": "on", "report_to": "none", "save_strategy": "no"}
    options |= {"logging_steps": 4, "learning_rate": 1e-3, "use_cpu": True, "disable_tqdm": True}
    return run_sentence_embeddings.main(
        [part for name, value in options.items() for part in (f"--{name}", str(value))]
    )


def test_the_recipe_trains_on_two_processes(tmp_path: Path) -> None:
    for results in run_ranks(run_recipe, 2, str(tmp_path)):
        assert results["train_loss"] < 2.0 and 0.5 < results["eval_validation_cosine_accuracy"] <= 1.0
    assert (tmp_path / "modules.json").exists()
