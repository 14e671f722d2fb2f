"""The order in which Python looks for methods of a class that derives from ours and from another library's.

    class MyTrainer(PipeTransformerTrainer, GKDTrainer): ...

    method resolution     MyTrainer, PipeTransformerTrainer, GKDTrainer, SFTTrainer, LastOverrides, Trainer

`GKDTrainer.training_step` replaces words of the batch by generated ones, and then calls `super().training_step`: this
must be the pipeline's step. If `PipeTransformerTrainer` had the step itself, GKD's would never run.
"""

from __future__ import annotations

from abc import ABCMeta

from transformers import Trainer


class LastInLine(ABCMeta):
    """Resolves methods of the class with `is_last_in_line = True` directly before those of `transformers.Trainer`.

    (It is an `ABCMeta` so that a user's trainer may also have an abstract base class.)
    """

    def mro(cls) -> list[type]:
        order = super().mro()
        last = next((one for one in order if one.__dict__.get("is_last_in_line")), None)
        if last is not None:
            order.remove(last)
            order.insert(order.index(Trainer), last)
        return order


def refuse_wrong_order(cls: type, ours: type, stock: type, first: bool) -> None:
    """Refuse a class with bases of ours and of another library in an order that loses one's behaviour.

    Args:
        cls: the combined class.
        ours: our class, a subclass of `stock`.
        stock: transformers' class, a base of the other library's class.
        first: whether our class must come before the other library's, or after it.

    Raises:
        ValueError: the bases are in the wrong order.
    """
    order = cls.__mro__
    place = order.index(ours)
    before, after = order[1:place], order[place + 1 : order.index(stock)]
    misplaced = [other for other in (before if first else after) if issubclass(other, stock)]
    misplaced = [other for other in misplaced if not issubclass(other, ours)]
    if not misplaced:
        return
    other = misplaced[0].__name__
    wanted = [ours.__name__, other] if first else [other, ours.__name__]
    lost = f"methods of {other} would never call ours" if first else f"the defaults of {other} would be lost"
    raise ValueError(
        f"class {cls.__name__} derives from {ours.__name__} and {other} in an order in which {lost}."
        f" Write class {cls.__name__}({', '.join(wanted)})."
    )
