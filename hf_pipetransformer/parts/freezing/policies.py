"""Freeze policies (the Freeze Algorithm): how many layers to freeze, and when.

At every *decision* T = 0, 1, 2, ... (0 before the first step) a policy returns f(T), the number of frozen units,
counted from the bottom, until the next decision. `next_num_frozen` enforces two rules for every policy: f never
decreases, and some parameters stay trainable.

    policy       f(T), with L units, f(0) = 0                                             source
    none         0
    alpha        ceil(L (1 - (1 - a)^T))                                                  PipeTransformer, its code
    adaptive     min(ceil(f(T-1) + a (L - f(T-1))), argmin over active units of |g|)      PipeTransformer, equation 1
    autofreeze   up to the first active unit with a fast-changing gradient norm           AutoFreeze
    schedule     a map from epoch or step to f

PipeTransformer: He et al., ICML 2021, section 3.1. AutoFreeze: Liu et al. 2021 (arXiv 2102.01386).

To add a policy, write a class and enter it in `POLICIES`. The module is independent of models and process groups.
"""

from __future__ import annotations

import inspect
import itertools
import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from ...file_formats import PREVIOUS_NORMS, checked

ScheduleUnit = Literal["epoch", "step"]
FreezeStrategy = Literal["epoch", "steps"]

ALL = "all"
"""In a schedule: as many layers as can be frozen."""
ROUNDING = 1e-9
"""Tolerance of `ceil` for floating-point error: with it, 10 (1 - 0.9) rounds up to 1, not 2."""


@dataclass(frozen=True)
class FreezeDecision:
    """The information that a policy receives at a decision.

    Attributes:
        index: T. It is 0 before the first step of a training and counts the decisions since, including those before
            a resume.
        num_layers: L, the number of units of the model's layer stack.
        num_frozen: f(T - 1), the number of units that are frozen now.
        epoch: number of epochs done, as in `TrainerState.epoch`; a whole number at the start of an epoch.
        global_step: number of optimizer steps done.
        gradient_norms: for each of the L units the root mean square of its gradient's 2-norm over the steps since the
            last decision; 0.0 for a unit without gradient (a frozen one). None if no gradients were observed.
        max_frozen: the largest number of units that can be frozen while some parameters stay trainable.

    Examples:
        >>> decision = FreezeDecision(1, 12, 0, epoch=1.0, global_step=500, gradient_norms=None, max_frozen=11)
        >>> AlphaPolicy(1 / 3).num_frozen(decision)
        4
    """

    index: int
    num_layers: int
    num_frozen: int
    epoch: float
    global_step: int
    gradient_norms: tuple[float, ...] | None
    max_frozen: int


@runtime_checkable
class FreezePolicy(Protocol):
    """Base class of freeze policies. Any object with the same members is a policy, too.

    Pass a policy of your own as `PipeTransformerTrainer(..., freeze_policy=policy)`. It must return the same answer on
    every process: it may use only the decision and its own state.

    ```python
    class FreezeHalfAfterWarmUp(FreezePolicy):
        needs_gradient_norms = False

        def num_frozen(self, decision: FreezeDecision) -> int:
            return decision.num_layers // 2 if decision.global_step >= 100 else 0
    ```

    Attributes:
        needs_gradient_norms: whether the policy reads gradient norms; False skips their computation.
    """

    needs_gradient_norms: bool = True

    def num_frozen(self, decision: FreezeDecision) -> int:
        """Return f(T). The caller raises it to at least f(T - 1) and lowers it to at most the maximum."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The policy's state, in plain values for JSON."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned; an empty dict resets the policy."""
        return None


@dataclass
class NeverFreeze(FreezePolicy):
    """Freezes no layer."""

    needs_gradient_norms = False

    def num_frozen(self, decision: FreezeDecision) -> int:
        return 0


@dataclass
class AlphaPolicy(FreezePolicy):
    """Freezes the fraction `alpha` of the active layers at each decision. Gradients do not matter.

    f(T) = ceil(L (1 - (1 - alpha)^T)):

    Examples:
        >>> [AlphaPolicy(1 / 3).num_frozen(FreezeDecision(t, 12, 0, t, t, None, 12)) for t in range(1, 8)]
        [4, 7, 9, 10, 11, 11, 12]

    Raises:
        ValueError: `alpha` is not between 0 and 1.
    """

    alpha: float = 1 / 3

    needs_gradient_norms = False

    def __post_init__(self) -> None:
        _check_alpha(self.alpha)

    def num_frozen(self, decision: FreezeDecision) -> int:
        return _ceil(decision.num_layers * (1 - (1 - self.alpha) ** decision.index))


@dataclass
class AdaptivePolicy(FreezePolicy):
    """Freezes up to the active layer with the smallest gradient, but at most the fraction `alpha` of active layers.

    Equation 1 of PipeTransformer: f(T) = min(f(T-1) + alpha (L - f(T-1)), argmin over l of |g_l|). The paper counts
    layers from 1, so the layer with the smallest norm is itself frozen; l runs over the active layers, because frozen
    layers have no gradient. The first term is rounded up. Ties: the lowest layer. Without gradients none is frozen.

    Examples:
        >>> decision = FreezeDecision(1, 6, 0, 1.0, 100, gradient_norms=(0.5, 0.2, 0.4, 0.6, 0.9, 1.0), max_frozen=6)
        >>> AdaptivePolicy(alpha=0.5).num_frozen(decision)  # the second layer has the smallest norm
        2

    Raises:
        ValueError: `alpha` is not between 0 and 1.
    """

    alpha: float = 1 / 3

    def __post_init__(self) -> None:
        _check_alpha(self.alpha)

    def num_frozen(self, decision: FreezeDecision) -> int:
        f, active = decision.num_frozen, decision.num_layers - decision.num_frozen
        if decision.gradient_norms is None or active == 0:
            return f
        norms = decision.gradient_norms[f:]
        smallest = f + 1 + norms.index(min(norms))
        return min(_ceil(f + self.alpha * active), smallest)


@dataclass
class AutoFreezePolicy(FreezePolicy):
    """Freezes all layers below the first active layer with a fast-changing gradient norm.

    A layer's change is |n(T-1) - n(T)| / n(T-1), with n its gradient norm. A change is fast if it reaches the given
    percentile of the active layers' changes. AutoFreeze takes the norm of the gradients' sum over the interval; this
    implementation takes the root mean square of their norms, which needs no second copy of the gradients. The first
    decision with gradients has no earlier norms and freezes no layer.

    Examples:
        >>> policy = AutoFreezePolicy(percentile=50)
        >>> policy.num_frozen(FreezeDecision(1, 4, 0, 1.0, 100, gradient_norms=(1.0, 1.0, 1.0, 1.0), max_frozen=4))
        0
        >>> policy.num_frozen(FreezeDecision(2, 4, 0, 2.0, 200, gradient_norms=(0.9, 0.9, 0.5, 0.4), max_frozen=4))
        2

    Args:
        percentile: between 0 and 100; a higher value freezes faster.

    Raises:
        ValueError: `percentile` is out of range.
    """

    percentile: float = 50.0
    _previous: tuple[float, ...] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.percentile <= 100:
            raise ValueError(f"percentile={self.percentile!r} is invalid. Set it to between 0 and 100, such as 50.")

    def num_frozen(self, decision: FreezeDecision) -> int:
        f, norms, before = decision.num_frozen, decision.gradient_norms, self._previous
        if norms is None:
            return f
        self._previous = norms
        if before is None or f == decision.num_layers:
            return f
        changes = [_relative_change(old, new) for old, new in zip(before[f:], norms[f:], strict=True)]
        fast = _percentile(changes, self.percentile)
        return f + next(position for position, change in enumerate(changes) if change >= fast)

    def state_dict(self) -> dict[str, Any]:
        return {"previous": None if self._previous is None else list(self._previous)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        previous = checked(state, PREVIOUS_NORMS, 'trainer_state.json: state of the policy "autofreeze"').get(
            "previous"
        )
        self._previous = None if previous is None else tuple(previous)


@dataclass
class SchedulePolicy(FreezePolicy):
    """Freezes layers by a schedule: a map from an epoch or a step to a number of frozen layers.

    `SchedulePolicy({1: 4, 2: 7})` freezes 4 layers after one epoch and 7 after two; `{0: 4}` freezes 4 from the start,
    `{0: 0.5}` half of the layers, and `{0: "all"}` as many as can be frozen, which leaves the head to train. Layers
    are frozen at decisions only, so a step in the map is rounded up to the next decision.

    Args:
        schedule: number of epochs or steps done -> frozen layers: a number, a fraction of all layers between 0 and 1,
            rounded down (0.5 of 7 layers are 3), or "all" for as many as can be frozen while some parameters stay
            trainable. Keys may be strings, as in JSON.
        by: whether the keys are epochs or steps.

    Raises:
        ValueError: the map is empty, has keys or values that are not numbers, decreases, or asks for more layers than
            the model has.
    """

    schedule: Mapping[Any, Any]
    by: ScheduleUnit = "epoch"

    needs_gradient_norms = False

    def __post_init__(self) -> None:
        if self.by not in ("epoch", "step"):
            raise ValueError(f"by={self.by!r} is invalid. Set it to 'epoch' or 'step', the freeze schedule's unit.")
        if not isinstance(self.schedule, Mapping) or not self.schedule:
            raise ValueError(
                f"freeze_schedule={self.schedule!r} is invalid. Pass a dict that maps each {self.by} to a number of"
                ' frozen layers, such as {"1": 4, "2": 7}.'
            )
        layers_from = {self._start(key): self._layers(key) for key in self.schedule}
        if len(layers_from) < len(self.schedule):
            raise ValueError(
                f"freeze_schedule={dict(self.schedule)!r} has several entries for the same {self.by}."
                " Remove all but one."
            )
        self.schedule = {start: layers_from[start] for start in sorted(layers_from)}
        for (start, layers), (later, fewer) in itertools.pairwise(self.schedule.items()):
            is_alike = type(layers) is type(fewer) and layers != ALL  # a share and a number: compared once L is known
            if layers == ALL != fewer or (is_alike and fewer < layers):
                raise self._decreases(layers, start, fewer, later)

    def num_frozen(self, decision: FreezeDecision) -> int:
        resolved = {start: self._resolved(layers, decision) for start, layers in self.schedule.items()}
        most = max((resolved[start] for start, layers in self.schedule.items() if layers != ALL), default=0)
        if most > decision.num_layers:
            raise ValueError(
                f"freeze_schedule requests {most} frozen layers, but the model has {decision.num_layers}. Reduce its"
                " numbers."
            )
        if most > decision.max_frozen:
            raise ValueError(
                f"freeze_schedule requests {most} frozen layers of {decision.num_layers}, which would leave nothing to"
                f" train: at most {decision.max_frozen} can be frozen in this model. Reduce its numbers."
            )
        for (start, frozen), (later, fewer) in itertools.pairwise(resolved.items()):
            if fewer < frozen:
                raise self._decreases(frozen, start, fewer, later)
        now = decision.epoch if self.by == "epoch" else decision.global_step
        return max((frozen for start, frozen in resolved.items() if start <= now + ROUNDING), default=0)

    def _decreases(self, layers: float | str, start: float, fewer: float | str, later: float) -> ValueError:
        return ValueError(
            f"freeze_schedule decreases from {layers} layers at {self.by} {start:g} to {fewer} at {self.by}"
            f" {later:g}, but frozen layers stay frozen. Use numbers that do not decrease."
        )

    def _resolved(self, layers: float | str, decision: FreezeDecision) -> int:
        if isinstance(layers, str):
            return decision.max_frozen
        return layers if isinstance(layers, int) else math.floor(layers * decision.num_layers + ROUNDING)

    def _start(self, key: Any) -> float:
        try:
            start = float(key)
        except (TypeError, ValueError, OverflowError):
            start = math.nan
        if not (math.isfinite(start) and start >= 0):
            raise ValueError(
                f"freeze_schedule has the invalid key {key!r}. Use a number of at least 0, which counts by {self.by}."
            )
        return start

    def _layers(self, key: Any) -> float | str:
        layers = self.schedule[key]
        if layers == ALL:
            return ALL
        is_share = isinstance(layers, float) and 0 < layers < 1
        if not is_share and (isinstance(layers, bool) or not isinstance(layers, int) or layers < 0):
            raise ValueError(
                f"freeze_schedule has {layers!r} at {self.by} {key}, but a number of frozen layers must be an integer"
                " of at least 0, a share of all layers between 0 and 1, or 'all'."
            )
        return float(layers) if is_share else int(layers)


POLICIES: Mapping[str, Callable[..., FreezePolicy]] = {
    "none": NeverFreeze,
    "alpha": AlphaPolicy,
    "adaptive": AdaptivePolicy,
    "autofreeze": AutoFreezePolicy,
    "schedule": SchedulePolicy,
}
"""Value of `freeze_policy` -> class. Each class keeps its arguments as attributes of the same names."""


def make_policy(
    name: str,
    *,
    alpha: float = 1 / 3,
    percentile: float = 50.0,
    schedule: Mapping[Any, Any] | None = None,
    by: ScheduleUnit = "epoch",
) -> FreezePolicy:
    """Create a policy from its name. Arguments that the policy does not have are ignored.

    Raises:
        ValueError: the name is unknown, or an argument is out of range.
    """
    if name not in tuple(POLICIES):  # a file may hold any value, even an unhashable list
        raise ValueError(f"freeze_policy={name!r} is unknown. Set it to one of {', '.join(map(repr, POLICIES))}.")
    given = {"alpha": alpha, "percentile": percentile, "schedule": {} if schedule is None else schedule, "by": by}
    make = POLICIES[name]
    return make(**{argument: given[argument] for argument in _arguments_of(make)})


def policy_description(policy: FreezePolicy) -> dict[str, Any] | None:
    """Return the arguments of `make_policy` that recreate this policy, for JSON; None for a user's own class."""
    for name, make in POLICIES.items():
        if type(policy) is make:
            return {"name": name, **{argument: getattr(policy, argument) for argument in _arguments_of(make)}}
    return None


def _arguments_of(make: Callable[..., FreezePolicy]) -> list[str]:
    parameters = inspect.signature(make).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]


def next_num_frozen(policy: FreezePolicy, decision: FreezeDecision, max_frozen_layers: int | None = None) -> int:
    """Return f(T): the policy's answer, clipped to the valid range.

    f(T) is at least f(T - 1), and at most `num_layers`, `max_frozen` and the user's `max_frozen_layers`.

    Raises:
        ValueError: the answer is not a whole number of at least 0.
    """
    answer: Any = policy.num_frozen(decision)
    try:
        proposed = operator.index(answer)
    except TypeError:
        proposed = -1
    if isinstance(answer, bool) or proposed < 0:
        raise ValueError(
            f"{type(policy).__name__}.num_frozen returned {answer!r} at decision {decision.index}, but it must return"
            " a number of layers as an integer of at least 0."
        )
    most = min(decision.num_layers, decision.max_frozen)
    if max_frozen_layers is not None:
        most = min(most, max_frozen_layers)
    return max(decision.num_frozen, min(proposed, most))


def check_when(strategy: str, steps: float | None, max_frozen_layers: int | None = None) -> None:
    """Check when decisions are made, and the bound on the number of frozen layers.

    Args:
        strategy: "epoch": at the start of each epoch but the first; "steps": every `steps` optimizer steps.
        steps: a whole number, or below 1 a fraction of all training steps; ignored for "epoch".
        max_frozen_layers: the user's bound, or None.

    Raises:
        ValueError: a value is invalid; the message names the field, its value and the valid values.
    """
    if strategy not in ("epoch", "steps"):
        raise ValueError(f"freeze_strategy={strategy!r} is unknown. Set it to 'epoch' or 'steps'.")
    if strategy == "steps":
        number = steps if isinstance(steps, (int, float)) and not isinstance(steps, bool) else 0
        if not 0 < number < math.inf or (number > 1 and number != int(number)):
            raise ValueError(
                f"freeze_strategy='steps' requires freeze_steps, but it is {steps!r}. Set it to an integer number of"
                " optimizer steps between decisions, or to a fraction of all steps between 0 and 1."
            )
    if max_frozen_layers is None:
        return
    is_whole = isinstance(max_frozen_layers, int) and not isinstance(max_frozen_layers, bool)
    if not is_whole or max_frozen_layers < 1:
        raise ValueError(
            f"max_frozen_layers={max_frozen_layers!r} is invalid. Set it to an integer of at least 1, or set"
            " freeze_policy='none' to freeze nothing."
        )


def steps_between_decisions(steps: float, max_steps: int) -> int:
    """Return `freeze_steps` as an integer; a fraction below 1 of `max_steps` is rounded up, as for `eval_steps`."""
    return int(steps) if steps >= 1 else max(1, _ceil(steps * max_steps))


def check_something_to_freeze(max_frozen: int, num_layers: int, outside_alone: Collection[str] = ()) -> None:
    """Refuse a model without a layer that can be frozen.

    Args:
        max_frozen: the largest number of layers that can be frozen.
        num_layers: L.
        outside_alone: names of the parameters that freezing would stop, if none of them is inside a layer.

    Raises:
        ValueError: freezing a single layer would leave no trainable parameter, or would stop only a prompt or prefix.
    """
    if outside_alone:
        raise ValueError(
            f"Freezing layers would only stop the training of {min(outside_alone)!r}"
            + (f" and {len(outside_alone) - 1} more parameters" if len(outside_alone) > 1 else "")
            + f", which the layers read from outside (a prompt, a prefix, embeddings): of the model's {num_layers}"
            " layers themselves no parameter is trained. Set freeze_policy='none', or make parameters of the layers"
            " trainable."
        )
    if max_frozen < 1:
        raise ValueError(
            f"Freezing one of the model's {num_layers} layers would leave nothing to train. Set freeze_policy='none',"
            " or make parameters of the upper layers or the head trainable."
        )


def agreed_num_frozen(proposals: Sequence[int]) -> int:
    """Return the number that all ranks propose.

    Args:
        proposals: one proposal per rank, in rank order.

    Raises:
        ValueError: the proposals differ; the message names each number and the ranks that propose it.
    """
    ranks_of: dict[int, list[int]] = {}
    for rank, proposal in enumerate(proposals):
        ranks_of.setdefault(proposal, []).append(rank)
    if len(ranks_of) > 1:
        said = "; ".join(
            f"{layers} on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
            for layers, ranks in sorted(ranks_of.items())
        )
        raise ValueError(
            f"The freeze policy returns different numbers of frozen layers on different ranks ({said}). Make it depend"
            " only on the FreezeDecision, which is the same on all ranks, and not on random numbers, the rank or local"
            " files."
        )
    return next(iter(ranks_of))


def _check_alpha(alpha: float) -> None:
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not 0 < alpha < 1:
        raise ValueError(
            f"freeze_alpha={alpha!r} is invalid: it is the share of the remaining layers that each decision freezes."
            " Set it to between 0 and 1, such as 0.33, or set freeze_policy='none' to freeze nothing."
        )


def _ceil(value: float) -> int:
    return math.ceil(value - ROUNDING)


def _relative_change(old: float, new: float) -> float:
    if old > 0:
        return abs(old - new) / old
    return math.inf if new > 0 else 0.0


def _percentile(values: Sequence[float], percent: float) -> float:
    """Percentile with linear interpolation, as in numpy.

    `numpy.percentile` itself returns NaN if one of the values is infinite, such as the change of a gradient from 0.
    """
    ordered = sorted(values)
    position = percent / 100 * (len(ordered) - 1)
    low, high = ordered[math.floor(position)], ordered[math.ceil(position)]
    return low if low == high else min(high, low + (high - low) * (position - math.floor(position)))
