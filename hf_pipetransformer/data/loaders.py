"""The loaders: batches by number for training, and batches without cache keys for evaluation."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, Sampler

from ..model.called_inputs import BatchTags
from .numbered_batches import NumberedBatches

ARGUMENTS = {
    "batch_size": "set per_device_train_batch_size",
    "sampler": "override _get_train_sampler",
    "drop_last": "set dataloader_drop_last",
}
"""Attributes of a batch sampler, and what to do before the training in place of setting them."""


class _Numbers(Sampler[list[int]]):
    """Yields [0], [1], ...; Accelerate's `skip_first_batches` finds this sampler and skips numbers.

    Callbacks may read its attributes, which have the values of one process. They cannot be set.
    """

    next_collator: Any = None
    """The collator that a callback has set; used from the next epoch on."""

    def __init__(self, batches: NumberedBatches) -> None:
        self._batches = batches
        given = {"batch_size": batches.global_batch_size, "sampler": batches.order.sampler}
        vars(self).update(given, drop_last=batches.drop_last)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ARGUMENTS:
            raise ValueError(
                f"The training loader's batch_sampler.{name} was set. The batches are divided among processes, and do"
                f" not depend on it: {ARGUMENTS[name]} before train(). With one stage,"
                " get_train_dataloader may return a loader of yours."
            )
        super().__setattr__(name, value)

    def __len__(self) -> int:
        if self._batches.num_batches is None:
            raise TypeError("the number of batches of an IterableDataset is not known")
        return self._batches.num_batches

    def __iter__(self) -> Iterator[list[int]]:
        known = None if self._batches.is_iterable else self._batches.num_batches  # an iterable signals its own end
        return ([number] for number in (itertools.count() if known is None else range(known)))

    def set_epoch(self, epoch: int) -> None:
        self.take_collator()
        self._batches.set_epoch(epoch)

    def take_collator(self) -> None:
        """Use the collator that a callback has set."""
        collate_fn, self.next_collator = self.next_collator, None
        if collate_fn is not None and collate_fn is not self._batches.collate_fn:
            self._batches.use_collator(collate_fn)


class NumberedLoader(DataLoader[Any]):
    """The loader that the Trainer iterates over: batch after batch of `NumberedBatches`.

    Callbacks read attributes of Accelerate's loader. They have the values of a single process with the global batch.
    Only `dataset` differs: it returns batches by their numbers, and the user's samples are in `dataset.dataset`.

    The Trainer's loop sets the epoch before each of its passes. Any other pass is of the user's code, such as a
    callback: it has a position of its own, and is not collective.
    """

    dataset: NumberedBatches
    is_of_loop = False
    """Whether the Trainer's loop iterates over this loader, and not over a user's wrapper around it."""

    def __init__(self, batches: NumberedBatches) -> None:
        self._numbers = _Numbers(batches)
        super().__init__(batches, batch_sampler=self._numbers, collate_fn=_Collator(batches, batches.collate_fn))
        self._numbers.next_collator = None
        if batches.is_iterable:  # PyTorch's sampler for iterable datasets
            vars(self)["sampler"] = DataLoader(batches.dataset).sampler
        self._epoch_read: int | None = None  # epoch that was read to its end, and not set since
        self._has_begun = False  # whether the epoch has begun since it was set
        self._is_due = False  # whether the epoch has been set for the next pass
        self._epoch_of_user = batches.epoch  # of the next pass of the user's code

    def __iter__(self) -> Any:
        if self.is_of_loop and not self._is_due:
            return self._pass_of_user(NumberedLoader(self.dataset.aside(self._epoch_of_user)))
        self._numbers.take_collator()
        if self._epoch_read == self.dataset.epoch:
            # the loop reads a user's wrapper and has not set the epoch: it would get the same order again
            self.set_epoch(self.dataset.epoch + 1)
        elif self._has_begun:  # the loop knows the length and stopped after the last batch
            self.dataset.begin_again()
        self._has_begun, self._is_due = True, False
        return self._one_epoch(super().__iter__())

    def _pass_of_user(self, aside: NumberedLoader) -> Iterator[Any]:
        """Like Accelerate's loader, a pass that is read to its end begins another epoch."""
        if self._numbers.next_collator is not None:
            aside.collate_fn = self._numbers.next_collator
        yield from aside
        self._epoch_of_user += 1

    def _one_epoch(self, batches: Iterator[Any]) -> Iterator[Any]:
        yield from batches
        self._epoch_read = self.dataset.epoch

    @property
    def collate_fn(self) -> Any:
        """Hands on the batches. Accelerate's `skip_first_batches` copies it, so it is not what a callback has set."""
        return self._collate

    @collate_fn.setter
    def collate_fn(self, collate_fn: Any) -> None:
        if not isinstance(collate_fn, _Collator):
            collate_fn = _Collator(self.dataset, collate_fn)
        self._collate, self._numbers.next_collator = collate_fn, collate_fn.of_user

    @property
    def total_batch_size(self) -> int:
        """Number of samples in a batch, over all processes."""
        return self.dataset.global_batch_size

    @property
    def total_dataset_length(self) -> int:
        return len(self.dataset)

    def set_epoch(self, epoch: int) -> None:
        self._epoch_read, self._has_begun, self._is_due, self._epoch_of_user = None, False, True, epoch
        self.dataset.set_epoch(epoch)


class LoaderWithoutTags:
    """An evaluation loader that removes tags from its batches and keeps them here.

    Any code that gets the batch, such as a user's `prediction_step`, can then pass it to a model.

    Args:
        loader: a loader with tags in its batches. It also provides all other attributes.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self.tags: BatchTags | None = None
        """Tags of the latest batch."""

    def __iter__(self) -> Iterator[Any]:
        for tagged in self._loader:
            batch, self.tags = BatchTags.taken_out_of(tagged)
            yield batch

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class _Collator:
    """Hands a batch on that was read by its number. Samples, which a user's wrapper passes on, are collated.

    Args:
        batches: the batches.
        of_user: the user's collator.
    """

    def __init__(self, batches: NumberedBatches, of_user: Callable[[list[Any]], Any]) -> None:
        self._batches: Any = weakref.ref(batches)  # workers would outlive the loader in a cycle of references
        self.of_user = of_user

    def __getstate__(self) -> dict[str, Any]:
        return {"_batches": _none, "of_user": self.of_user}  # workers get samples

    def __call__(self, rows: list[Any]) -> Any:
        batches = self._batches()
        if batches is None or len(rows) != 1 or rows[0] is not batches.latest:
            return self.of_user(rows)
        batches.latest = None
        return rows[0]


def _none() -> None:
    return None
