"""The calls of a model in steps, or in evaluations: their records, and the front of the frozen modules."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sized
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import xxhash
from torch import nn

from ...logs import log_on_main
from ...model.called_inputs import NOT_OF_STATES, named_inputs
from ...model.frozen_prefix import frozen_modules
from ...model.left_as_found import left_as_found
from ...model.micro_batch import Batch
from ...model.nested import in_new_containers, in_new_tensors
from ...model.plain_runs import runs_plainly
from ...model.zero_weights import zeros_filled
from ...randomness import seeded, set_torch_states, torch_states
from ...run.loss import Loss
from ...training_args import CACHE_DTYPES
from ..prefix_cache.cache.cache_counts import CacheCounts
from ..prefix_cache.cache.file_store import FileStore
from ..prefix_cache.cache.known_code import replaced_function_of_torch
from ..prefix_cache.cache.watched_weights import WatchedWeights
from ..prefix_cache.cache_setup import describe_model
from .alone import OTHERS
from .called_by_loss import CalledByLoss
from .dropout_hint import DropoutHint
from .entries import FrontEntries
from .finding import (
    DRAWS,
    FoundFront,
    find_front,
    users_hooks_at_rest,
    users_see_all_calls,
    waits_for_others,
)
from .front import MORE, FrozenFront, OtherCallsError
from .limits import (
    CALLS_TO_MISS,
    LEAST_SHARE,
    MOST_OF_IT,
    MOST_OPENED,
    MOST_SEARCHES,
    MOST_UNREAD,
    READS_TO_JUDGE,
)
from .reasons import NOTHING_FOUND, OTHER_ARGUMENTS, OTHER_INPUTS, PATCHED
from .repeating import is_of_libraries, is_restorable
from .rows import may_have_padding
from .trial import NOT_TRIED, OF_OTHER_SAMPLES

logger = logging.getLogger(__name__)

ENTRIES_VERSION = 12
"""Version of the contents of an entry in the store."""


class FrontCalls:
    """Records the model's calls in steps, or in evaluations, and holds their front.

    Args:
        loss: the trainer's loss.
        store: the store of this node.
        dataset: the training data; None in evaluations.
        called: the module that is called, if it is not the trained model.
    """

    def __init__(self, loss: Loss, store: FileStore, dataset: Any = None, called: CalledByLoss | None = None) -> None:
        self.epoch = -1
        """Epoch of the training; in evaluations, number of evaluations of the data set so far."""
        self.writes = False
        """Whether to store outputs, because later calls will read them."""
        self._loss, self._job, self._store = loss, loss.job, store
        self._model: nn.Module = loss.job.model if called is None else called.holder
        self._device = loss.job.device if called is None else called.device
        self._called, self._is_training = called, dataset is not None
        size = len(dataset) if isinstance(dataset, Sized) else None
        self._size = size if called is None else called.num_entries
        self._reads = self._is_trying = False
        self._begun = 0.0  # fraction of the epoch that was over at its first recorded call
        self._parameters: list[nn.Parameter] = []  # of the model, as the epoch began
        self._flags: list[bool] | None = None  # flags at the last search for the front
        self._front: FrozenFront | None = None
        self._weights: WatchedWeights | None = None
        self._digest = ""  # of the weights
        self._may_be_rewritten = False  # whether weights that were written to may have the same values
        self._entries: FrontEntries | None = None
        self._existed = False  # the generation existed before this training stored outputs
        self._is_decided, self._share = False, 0.0  # its share of the forward pass
        self._may_widen = False  # samples may be computed with more padding than their batch has
        # counts of the epoch, number of forward passes that were not run, and counts of the present front
        self._counts, self._skipped, self._of_front = CacheCounts(), 0.0, CacheCounts()
        self._has_looked = self._has_said_full = False  # for a front, in this step or evaluation; that all is full
        self._num_searches = self._num_opened = self._expected_in = 0
        self._first_opened = frozenset() if called is None else called.opened
        self._opened: frozenset[str] = self._first_opened  # modules that cannot be stored as a whole
        # at the last search: names of the inputs, and the frozen modules that were not called
        self._names = self._uncalled = frozenset[str]()
        self._declared = loss.job.args.cached_modules or ()
        self._why_not: dict[str, str] = {}  # why they cannot
        self.why_not_read: dict[str, str] = {}
        """Frozen modules that are computed in every epoch, and the reasons, if known."""
        self._hint: DropoutHint | None = None

    def begin_epoch(self, epoch: int, begun: float) -> None:
        """An epoch, or an evaluation, begins."""
        if self._hint is not None:
            self._hint.interrupt()
        if self._called is not None and self._reads and self.epoch >= self._expected_in:
            self._turn_off_if_never_found(OTHER_INPUTS)
        self.epoch, self._begun = epoch, begun
        self._parameters, self._has_looked = list(self._model.parameters()), False
        self._reads = self._front is not None
        self._may_be_rewritten |= not self._is_training  # for example by the best checkpoint, at the end
        if self._front is not None:
            self._front.is_verified, self._front.num_missed, self._front.num_found = False, 0, 0

    def begin_step(self) -> None:
        """A step begins. Other parameters may be trained than in the last step."""
        self._has_looked = False
        if self._weights is not None:
            self._weights.look_for_holders()  # not in a call, as the loss may have made a graph before
        if self._hint is not None:
            self._hint.begin_step()

    def take_counts(self) -> tuple[CacheCounts, float]:
        """The counts since the last call, and the number of forward passes that were not run."""
        self._count()
        taken, self._counts, self._skipped = (self._counts, self._skipped), CacheCounts(), 0.0
        return taken

    def _count(self) -> None:
        """Take the counts of the present front, if it was worth storing."""
        if self._front is not None and self._is_decided:
            counts, self._front.counts = self._front.counts, CacheCounts()
            self._counts, self._of_front = self._counts + counts, self._of_front + counts
            self._skipped += self._share * counts.layers_skipped
        if self._front is not None and (why := self._front.inputs.take_why_not()):
            names = self._front.found.described
            self._say(f"{names} is frozen, but computed in some or all calls: {why}.")
            if not self._is_decided:
                self.why_not_read.setdefault(names, why)

    def pause(self) -> None:
        """Restore the own forward of the front's modules until `resume`."""
        if self._hint is not None:
            self._hint.interrupt()
        if self._front is not None:
            self._front.close()

    @property
    def is_over(self) -> bool:
        """Whether no output is stored or read any more, unless other parameters are trained."""
        return self._front is None and self._flags is not None

    def end(self, why: str) -> None:
        """Stop storing and reading, and delete the entries, which may be wrong."""
        if self._front is not None:
            self._turn_off(why, is_wrong=True)

    def allow_rewritten(self) -> None:
        """Allow writes into weights before the next call if values stay the same (evaluation of averaged weights)."""
        self._may_be_rewritten = True

    def resume(self) -> None:
        """Intercept the calls of the front's modules again."""
        if self._front is not None:
            self._front.open()

    def try_loss(self, batch: Batch) -> None:
        """Test on a batch whether a stock loss reads padding in the model's outputs, if a trial is still due."""
        trial = None if self._front is None else self._front.trial
        if trial is None or not (trial.awaits_loss or trial.leaves_padding_out) or not may_have_padding(batch):
            return
        trial.follow(self._loss.has_changed)
        if not trial.awaits_loss or self._flags != self._flags_now():
            return

        def loss_of() -> torch.Tensor:
            with (
                torch.no_grad(),
                left_as_found(self._job.trainer, self._model),
                zeros_filled(self._model),
                users_hooks_at_rest(self._model),
                seeded(self._job.args.seed),
            ):
                return self._loss.of_batch(in_new_tensors(batch))

        self._is_trying = True
        try:
            trial.try_loss(loss_of)
        finally:
            self._is_trying = False

    def _flags_now(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self._parameters]

    # ------------------------------------------------------------------------------------ calls of the model
    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call of the model. The front is searched for, computed, or read from the store."""
        if users_see_all_calls() or not runs_plainly():
            return forward(*args, **kwargs)
        flags = self._flags_now()
        names = frozenset(name for name, value in kwargs.items() if value is not None) - NOT_OF_STATES
        shows_more = bool(self._uncalled) and names > self._names
        if flags == self._flags and self._front is None and not shows_more:
            return forward(*args, **kwargs)
        inputs: Batch = in_new_containers(dict(named_inputs(self._model, args, kwargs)))
        if shows_more or (self._front is not None and not self._is_trying and self._front.needs(inputs)):
            self.end_hint(is_given=False)
            self.drop()
            self._flags = None  # search again: the outputs stored so far stay valid
        run: Callable[[], Any] = partial(forward, *args, **kwargs)
        run_on: Callable[[Batch], Any] = lambda batch: forward(**batch)  # noqa: E731
        if self._is_trying:  # a trial restores the model, so it must not open or close a front
            assert self._front is not None
            if flags != self._flags:
                return run()
            return self._front.run(inputs, run, self._reads and self._is_decided, self.writes)
        if flags != self._flags:
            self.drop(deletes=not self._job.shares_store)
            if self._flags is not None:
                self.end_hint(is_given=False)  # its modules may be trained now
                self._opened, self._num_opened = self._first_opened, 0
                if self._has_looked and self._num_searches < MOST_SEARCHES:
                    self._num_searches = MOST_SEARCHES
                    logger.warning(
                        "Nothing is cached: between two calls of the model parameters begin or cease to be trained"
                        " (the loss turns adapters off, for example)."
                    )
            self._flags, self._has_looked = flags, True
            is_useful = self.writes and not all(flags) and self._num_searches < MOST_SEARCHES
            return self._look_for_front(inputs, run, run_on) if is_useful else run()
        assert self._front is not None and self._weights is not None
        if not self._is_training:  # there is no graph, and there are no steps
            self._weights.look_for_holders()
        changed = self._weights.what_changed(settings=False)  # the front asks for those where it is called
        if changed is not None and self._may_be_rewritten and self._weights.take_rewritten(self._digest):
            changed = None
        self._may_be_rewritten = False  # in the first call of an evaluation, or after one, alone
        if (changed := changed or self._front.trouble) is not None:  # found after the last call, by a late read
            self._turn_off(changed, is_wrong=changed != MORE)
            return run()
        if (why := self._weights.why_too_slow()) is not None:
            self._turn_off(why)
            return run()
        try:
            may_widen = self._may_widen and self._is_decided
            widens = (self._alone(self._front.found) or run_on) if may_widen else None
            output = self._front.run(inputs, run, self._reads and self._is_decided, self.writes, widens)
        except OtherCallsError as error:
            self._turn_off(str(error), is_wrong=True)
            return run()
        assert self._entries is not None
        failure = self._entries.failure
        self._say_if_full(self._entries.full or (str(failure) if failure is not None and self._existed else None))
        if self._front.trouble is not None or (failure is not None and not self._existed):
            is_wrong = self._front.trouble not in (None, MORE)
            self._turn_off(self._front.trouble or f"it cannot be stored ({failure})", is_wrong)
        elif self._front.inputs.num_refused >= CALLS_TO_MISS:
            self._turn_off(self._front.inputs.take_why_not(again=True))
        elif not self._is_decided and self._front.share:
            self._decide()
        elif self._front.num_unmatched >= CALLS_TO_MISS:  # first, as the number of calls read stays the same
            self._turn_off(OTHER_ARGUMENTS)
        elif self._front.num_read == READS_TO_JUDGE:
            self._judge()
        elif self._front.num_missed >= CALLS_TO_MISS and not self._front.num_read and self.epoch >= self._expected_in:
            self._turn_off(OTHER_INPUTS)
        return output

    def _look_for_front(self, inputs: Batch, run: Callable[[], Any], run_on: Callable[[Batch], Any]) -> Any:
        job, device, reading = self._job, self._device, None if self._called is None else self._called.reading
        self._num_searches += not self._num_opened
        self._names = frozenset(name for name, value in inputs.items() if value is not None) - NOT_OF_STATES
        before, frozen = torch_states(), frozen_modules(self._model, self._first_opened)
        if (patched := replaced_function_of_torch()) is not None:
            self.why_not_read = dict.fromkeys(frozen, PATCHED.format(patched))
            self._say(f"Nothing is cached: {PATCHED.format(patched)}.")
            return run()
        everything = self._watched(frozen.values())
        try:
            output, found = find_front(self._model, inputs, run, device, self._opened, self._declared, reading)
        except Exception:  # the model does not run while it is watched
            logger.debug("Frozen modules could not be looked for.", exc_info=True)
            set_torch_states(before)
            return run()
        self._uncalled = found.uncalled
        split = None if self._called is None else self._called.split
        if split is not None and (split.undivided in found.closed or split.has_inside(found.needed)):
            found = replace(found, needed={}, closed=frozenset())
        if found.closed and self._num_opened < MOST_OPENED:
            self._num_opened += 1
            self._opened |= found.closed
            self._why_not |= {name: why for name, why in found.why_not.items() if name in found.closed}
            self._flags = None  # search inside these modules in the next call
            return output
        if self._is_training:
            self._say_why_not(found)
        if not any(found.needed.values()) or everything.what_changed(settings=False) is not None:
            if self._is_training and job.args.activation_cache == "on" and not self.why_not_read:
                self.why_not_read = dict.fromkeys(frozen, NOTHING_FOUND)
            return output
        if frozen.keys() != found.needed.keys() or everything.what_changed() is not None:
            everything.release()
            everything = self._watched(map(self._model.get_submodule, found.needed))
        self._weights = everything
        self._weights.guard()
        self._entries = self._entries_of(found)
        self._existed = self._reads = self._entries.exists
        self._expected_in = self.epoch + (1 if self._begun < 0.5 else 2)  # half an epoch is too short
        is_timed = job.args.activation_cache == "auto" and not job.args.full_determinism
        changed, entries, dtype = everything.what_changed, self._entries, CACHE_DTYPES[job.args.activation_cache_dtype]
        self._front = front = FrozenFront(self._model, found, entries, device, dtype, is_timed, changed)
        self._of_front = CacheCounts()
        # evaluations repeat their batches, and samples grouped by length meet batches of similar width again
        self._may_widen = self._is_training and str(job.args.train_sampling_strategy) == "random"
        self._may_widen &= job.mesh.world_size == 1 or not waits_for_others(self._model)
        # a forward of users' does not run more often than in a plain training
        self._may_widen &= (found.alone is not None and found.alone.is_closed) or is_of_libraries(self._model)
        if (why := self._why_not_of_samples(front, inputs, found, run_on)) is None:
            front.learn(inputs, found.calls, found.seconds, found.seconds / found.share, self.writes)
            front.share = 0.0  # the search takes time itself
        else:
            self._turn_off(why)
        found.calls.clear()
        if found.alone is not None:
            found.alone.others.clear()
        return output

    def _alone(self, found: FoundFront) -> Callable[[Batch], Any] | None:
        """Runs the front on a batch, without the forward around it; None if this computes some of its arguments."""
        return partial(found.alone.run, self._model) if found.alone is not None and found.alone.is_closed else None

    def _watched(self, roots: Iterable[nn.Module]) -> WatchedWeights:
        """Watch modules; of one that the loss calls without its adapters, the weights that are not trained."""
        trained = frozenset[int]() if self._called is None else self._called.reading.trained
        if self._called is not None and self._called.split is not None:
            trained |= self._called.split.elsewhere
        modules = [module for root in roots for module in root.modules()]
        weights = [weight for module in modules for weight in module.parameters(recurse=False)]
        return WatchedWeights(modules, [weight for weight in weights if id(weight) not in trained])

    def _why_not_of_samples(
        self, front: FrozenFront, inputs: Batch, found: FoundFront, run_on: Callable[[Batch], Any]
    ) -> str | None:
        """Why a sample's output may depend on the other samples; None if it does not. Restores all state."""
        may_cut = self._is_training and self._loss.is_stock and self._job.trainer.label_smoother is None
        # each process decides for itself, and the trial must not wait for other processes
        may_cut &= self._job.mesh.world_size == 1 or not waits_for_others(self._model)
        may_cut &= not front.trial.hooks.are_any
        before, alone, runs_on = torch_states(), found.alone, self._alone(found)
        may_repeat = is_restorable(self._model)
        # with a column less, the forward around would compute other arguments
        needs_forward = may_repeat and (is_of_libraries(self._model) or front.trial.cuttable(inputs) is not None)
        if runs_on is None and alone is not None and not needs_forward:
            inputs, runs_on = {**inputs, OTHERS: list(alone.others)}, partial(alone.run, self._model)
        if runs_on is None and not may_repeat:
            return NOT_TRIED
        try:
            is_one = front.trial.is_of_samples(inputs, found.calls, runs_on or run_on, may_cut and may_repeat)
            return None if is_one else OF_OTHER_SAMPLES
        except Exception:  # out of memory, perhaps
            logger.debug("The front could not be tried.", exc_info=True)
            set_torch_states(before)
            return OF_OTHER_SAMPLES

    def _say_why_not(self, found: FoundFront) -> None:
        """Log why the largest frozen modules are not stored; without modules that are stored for the most part."""
        stored = list(found.needed) if found.share >= MOST_OF_IT else []
        said: list[str] = []
        random: list[str] = []
        for name, why in sorted({**self._why_not, **found.why_not}.items()):
            inside = f"{name}."
            if not name.startswith(tuple(said)) and not any(other.startswith(inside) for other in stored):
                said.append(inside)
                self.why_not_read[name] = why
                if why == DRAWS and self._called is None:
                    random.append(name)
                else:
                    self._say(f"{name} is frozen, but computed in every epoch: {why}.")
        self._why_not = {}
        if random:  # of modules that `eval_frozen_modules` sets to evaluation mode
            self._hint = DropoutHint(self._job, random)

    def _entries_of(self, found: FoundFront) -> FrontEntries:
        assert self._weights is not None
        job = self._job
        self._store.limit(job.args.activation_cache_max_gib)
        described = describe_model(self._model, job.mixed_precision)
        self._digest = self._weights.digest()
        elsewhere = "" if self._called is None or self._called.split is None else self._called.split.digest()
        about = f"{described} {self._is_training} {job.args.activation_cache_dtype} {self._digest}{elsewhere}"
        content = f"{ENTRIES_VERSION} {about} {sorted(found.reads)} {found.needed} {self._weights.described()}"
        return FrontEntries(self._store, len(found.needed), xxhash.xxh3_128_hexdigest(content.encode()))

    def _say_if_full(self, why: str | None) -> None:
        """Log once that some samples are not stored, in training and in evaluations."""
        if why is not None and not self._has_said_full:
            self._has_said_full = True
            logger.warning("Not all samples are stored, and the others are computed in each epoch: %s", why)

    # ------------------------------------------------------------------------------------ decisions
    def _decide(self) -> None:
        """Decide whether the front is worth storing, and log the decision."""
        front = self._front
        assert front is not None
        names = front.found.described
        if front.share < LEAST_SHARE and self._job.args.activation_cache == "auto":
            self.why_not_read[names] = f"computing it takes only {front.share:.1%} of the forward pass"
            self.drop(deletes=not self._job.shares_store)
            return
        self._is_decided, self._share = True, front.share
        needed = None if self._size is None else front.found.sample_bytes * self._size
        now = "epoch" if self._is_training else "evaluation"
        since = f"is stored in this {now} and read in later ones"
        if self._existed:  # in its own folder: for another form of the call, or before this training was resumed
            since = "was stored by another training" if self._job.shares_store else "was stored before"
        size = self._store.epoch_in_words(needed)
        share = f"Frozen: {names}, {front.share:.0%} of the forward pass."
        share = share if self._called is None else f"Frozen, and called by the loss: {names}."
        self._say(f"{share} The output {since}{size}.")

    def _judge(self) -> None:
        front = self._front
        assert front is not None
        reading = front.counts.load_seconds / max(front.counts.hits, 1)
        if self._job.args.activation_cache == "auto" and reading > front.seconds_per_row:
            self._turn_off(
                f"reading a sample takes {1e3 * reading:.3g} ms, but computing it only"
                f" {1e3 * front.seconds_per_row:.3g} ms (measured; activation_cache='on' reads nevertheless)"
            )

    def _turn_off(self, why: str, is_wrong: bool = False) -> None:
        """Stop storing and reading this front. Entries that may be wrong, or that no process can use, are deleted."""
        assert self._front is not None
        names = self._front.found.described
        logger.warning("The output of %s is not cached: %s.", names, why)
        self.why_not_read[names] = why
        self.drop(deletes=is_wrong or not self._job.shares_store)

    def _turn_off_if_never_found(self, why: str) -> None:
        """Stop storing if samples have been looked up in the epoch, and none was found."""
        front = self._front
        if front is not None and self._is_decided and front.num_missed and not front.num_found:
            self._turn_off(why)

    def end_if_useless(self) -> None:
        """Stop storing if a tenth of the space is full of more samples than an epoch has, and none was found."""
        front, most = self._front, self._store.max_bytes
        if front is None or front.num_found or not self._is_decided or most is None:
            return
        stored = self._counts.stored + front.counts.stored
        if (self._size is None or stored > self._size) and stored * front.found.sample_bytes > MOST_UNREAD * most:
            self._turn_off(OTHER_INPUTS)

    def end_hint(self, is_given: bool) -> None:
        """Stop timing modules that run with dropout, and give the hint about them if it has not been given."""
        if self._hint is not None:
            self._hint.close(is_given)
            self._hint = None

    def drop(self, deletes: bool = False) -> None:
        """Restore the own forward of the front's modules, and discard the front."""
        self.say_what_was_read()
        if self._front is not None:
            self._front.close()
        if self._entries is not None:
            self._entries.close(deletes)
        if self._weights is not None:
            self._weights.release()
        self._front, self._weights, self._entries, self._is_decided = None, None, None, False

    def say_what_was_read(self, if_any: bool = False) -> None:
        """Log for how many samples the present front was read since the last such line.

        Args:
            if_any: whether to log only if there were samples.
        """
        self._count()
        front, counts = self._front, self._of_front
        if front is not None and self._is_decided and counts.rows and not (if_any and not counts.layers_skipped):
            self._of_front = CacheCounts()
            names, where = front.found.described, "" if self._is_training else " in evaluations"
            of = "images" if front.found.is_of_images else "samples"
            self._say(f"The output of {names} was read{where} for {counts.layers_skipped} of {counts.rows} {of}.")

    @property
    def generation(self) -> tuple[int, str] | None:
        """Name of the present front's generation in the store; None if it has no entries."""
        return self._entries.name if self._entries is not None and self._is_decided and self._entries.exists else None

    def _say(self, text: str) -> None:
        log_on_main(logger, self._job.args, text)
