"""Streams with a position, samplers of unusual lengths, short last batches, and numbers of items of the user's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from datasets import IterableDataset as HubStream
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler

from ..kit import Inputs, LossAndOutputs, Network, Script, bert, case, own_loss, pad, plain_loss, samples, with_loss

Row = dict[str, Tensor]


def rows_of(number: int, seed: int = 9) -> list[Row]:
    rows = samples(number, seed=seed)
    return [rows[index] for index in range(number)]


# ---------------------------------------------------------------------------------------------------------
# Streams that are not read from their beginning by each iter()
# ---------------------------------------------------------------------------------------------------------


class MadeOnce(IterableDataset[Row]):
    """Has one iterator."""

    def __init__(self, rows: list[Row]) -> None:
        self.rows = iter(rows)

    def __iter__(self) -> Iterator[Row]:
        return self.rows


class WithPosition(IterableDataset[Row]):
    """Goes on where it was left."""

    def __init__(self, rows: list[Row]) -> None:
        self.rows, self.position = rows, 0

    def __iter__(self) -> Iterator[Row]:
        while self.position < len(self.rows):
            self.position += 1
            yield self.rows[self.position - 1]
        self.position = 0


class OfFunction(IterableDataset[Row]):
    """Asks a function for its iterator."""

    def __init__(self, make: Callable[[], Iterator[Row]]) -> None:
        self.make = make

    def __iter__(self) -> Iterator[Row]:
        return self.make()


def of_generator(rows: list[Row]) -> OfFunction:
    generator = (row for row in rows)
    return OfFunction(lambda: generator)


def predicting(stream: Callable[[list[Row]], Any]) -> Script:
    def drive(trainer: Any) -> Any:
        trainer.train()
        predictions = trainer.predict(stream(rows_of(32))).predictions
        return [len(predictions), predictions.sum(0).tolist(), trainer.evaluate(stream(rows_of(32, 3)))["eval_loss"]]

    return Script(model=bert(), data=samples(16), options={"num_train_epochs": 1}, drive=drive)


@case("K2")
def predicts_stream_made_once() -> Script:
    """Streams that can be read once are predicted and evaluated after training."""
    return predicting(MadeOnce)


@case("K2")
def predicts_stream_with_position() -> Script:
    """Streams that keep their position are predicted and evaluated after training."""
    return predicting(WithPosition)


@case("K2", expect="exact", because="OfFunction")
def predicts_generator_of_function() -> Script:
    """A stream returns the same generator from each iter(), and nothing can put back what is read from it."""
    return predicting(of_generator)


class OwnLoader:
    """Reads a stream that can be read once; each process has its part of each batch."""

    def get_train_dataloader(self: Any) -> Any:
        size, world, rank = self.args.per_device_train_batch_size, self.args.world_size, self.args.process_index
        rows = [row for k, row in enumerate(rows_of(64)) if k // size % world == rank]
        return DataLoader(MadeOnce(rows), batch_size=size, collate_fn=pad)


@case("R2")
def own_loader_of_stream_made_once() -> Script:
    """A loader of the user's over a stream that can be read once."""
    return Script(model=bert(), options={"max_steps": 6}, trainer=OwnLoader)


@case("K1")
def own_loader_of_stream_accumulated() -> Script:
    """Likewise with accumulation and a loss of the user's."""
    options = {"max_steps": 3, "gradient_accumulation_steps": 2}
    return with_loss(options=options, trainer=own_loss(plain_loss, OwnLoader))


def per_process(rows: list[Row]) -> Row:
    return pad([{name: torch.as_tensor(value) for name, value in row.items()} for row in rows])


@case("R2")
def hub_stream_without_dispatch() -> Script:
    """A stream of datasets, in as many shards as processes, with dispatch_batches=False."""

    def read(parts: list[list[Any]]) -> Iterator[Any]:
        for part in parts:
            yield from part

    rows = [{name: value.tolist() for name, value in row.items()} for row in rows_of(32)]
    stream = HubStream.from_generator(read, gen_kwargs={"parts": [rows[:16], rows[16:]]})
    options = {"max_steps": 4, "accelerator_config": {"dispatch_batches": False}}
    return Script(model=bert(), data=stream, collator=per_process, options=options)


# ---------------------------------------------------------------------------------------------------------
# Samplers
# ---------------------------------------------------------------------------------------------------------


class Permutations(Sampler[int]):
    """Draws the samples from a generator of its own."""

    def __init__(self, is_endless: bool) -> None:
        self.is_endless, self.generator = is_endless, torch.Generator().manual_seed(5)

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from torch.randperm(32, generator=self.generator).tolist()
            if not self.is_endless:
                return


class Sized(Permutations):
    def __len__(self) -> int:
        return 32


class Shrinking(Sampler[int]):
    """Has fewer samples in later epochs."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 32

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(32, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        return iter(order[: 32 - 12 * self.epoch])


def sampled(make: Callable[[], Any], **options: Any) -> Script:
    class Sampled:
        def _get_train_sampler(self, *_: Any) -> Any:
            return make()

    return Script(model=bert(), data=samples(32), trainer=Sampled, options=options)


@case("K1", "K2")
def sampler_with_fewer_samples_later() -> Script:
    """A sampler's set_epoch shortens later epochs."""
    return sampled(Shrinking, dataloader_drop_last=True)


@case("K1", "R2")
def sampler_of_unknown_length() -> Script:
    """A sampler without a length."""
    return sampled(lambda: Permutations(False), max_steps=7)


@case("R2")
def sampler_without_end() -> Script:
    """An endless sampler without a length."""
    return sampled(lambda: Permutations(True), max_steps=7)


@case("K1", "R2")
def sampler_without_end_but_with_length() -> Script:
    """An endless sampler with a length."""
    return sampled(lambda: Sized(True), num_train_epochs=2)


@case("R2")
def sampler_of_global_generators_resumed() -> Script:
    """With use_seedable_sampler=False, a resumed training goes on in the order that it had."""

    def drive(trainer: Any) -> bool:
        trainer.train()
        before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        trainer.train(resume_from_checkpoint=f"{trainer.args.output_dir}/checkpoint-3")
        after = trainer.model.state_dict()
        differs = any(not torch.allclose(value, after[name], atol=1e-5) for name, value in before.items())
        # several processes have another order than one
        trainer.model.load_state_dict({name: value * 0 for name, value in before.items()})
        trainer.state.log_history.clear()
        return differs and trainer.args.world_size > 1  # in one process it begins with other random numbers

    script = sampled(
        lambda: RandomSampler(samples(32)),
        num_train_epochs=2,
        save_strategy="steps",
        save_steps=3,
        accelerator_config={"use_seedable_sampler": False},
    )
    script.drive = drive
    return script


# ---------------------------------------------------------------------------------------------------------
# Numbers of items, and short last batches
# ---------------------------------------------------------------------------------------------------------


class CountsItems:
    """Counts some samples more than others."""

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
        return torch.tensor(float(sum((batch["labels"] != 0).sum() * 2 + 1 for batch in batch_samples)))


def summed(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """A sum that needs the number."""
    return F.cross_entropy(outputs["logits"], labels, reduction="sum") * (1 / float(num_items_in_batch))


def counting(**more: Any) -> Script:
    return Script(
        model=Network(),
        data=samples(32),
        batch=4,
        options={"gradient_accumulation_steps": 2, "num_train_epochs": 1},
        keywords={"compute_loss_func": summed},
        **more,
    )


@case("K1", "K2")
def items_counted_by_the_user() -> Script:
    """_get_num_items_in_batch is overridden."""
    return counting(trainer=CountsItems)


@case("R2", expect="exact", because="_get_num_items_in_batch")
def items_counted_by_the_user_for_replicas() -> Script:
    """Likewise with replicas, where it is not known what the number is of."""
    return counting(trainer=CountsItems)


class CountsAsStock:
    """Looks at the number."""

    def _get_num_items_in_batch(self: Any, batch_samples: list[Any], device: Any) -> Any:
        self.seen = super()._get_num_items_in_batch(batch_samples, device)  # type: ignore[misc]
        return self.seen


@case("R2")
def items_looked_at_by_the_user() -> Script:
    """_get_num_items_in_batch is overridden, and returns the stock method's number."""
    return counting(trainer=CountsAsStock)


@case("K2R2")
def items_of_a_replica_without_samples() -> Script:
    """The last batch has one sample, and the loss divides by the number of items."""
    return Script(
        model=Network(), data=samples(17), options={"num_train_epochs": 1}, keywords={"compute_loss_func": summed}
    )


@case("R2")
def tokens_of_a_replica_without_samples() -> Script:
    """The last batch has one sample; tokens and operations are counted."""
    return Script(
        model=bert(),
        data=samples(17),
        options={"num_train_epochs": 1, "include_num_input_tokens_seen": "all"},
        observe=lambda trainer: {"seen": trainer.state.num_input_tokens_seen, "flos": trainer.state.total_flos},
    )


@case("R2", "K2R2")
def deviation_over_a_short_batch() -> Script:
    """The loss takes a deviation over the batch, and there are two samples for two replicas."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs = model(**inputs)
        return outputs["loss"] + outputs["logits"].std(0).mean(), outputs

    return with_loss(loss, data=samples(2), options={"num_train_epochs": 3})
