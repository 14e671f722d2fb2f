"""State that modules read in ways that are easy to overlook, and data, trainers and models of other kinds."""

from __future__ import annotations

import enum
import functools
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..kit import (
    LABELS,
    WIDTH,
    At,
    Backbone,
    Each,
    FrozenBackbone,
    Inputs,
    LossAndOutputs,
    Rows,
    Script,
    bert,
    case,
    classified,
    own_loss,
    pad,
    pool,
    samples,
)
from .attack_caches import freeze_lowest
from .attack_front import OnBert, frozen_bert, ragged
from .attack_recipes_front import of
from .front_weights import MIDDLE
from .late_teachers import distil, frozen, kd, read_of, teacher_of_four

SMALLER = 0.3

# ---------------------------------------------------------------------------------------------------------
# Values that the code of a declared frozen backbone reads
# ---------------------------------------------------------------------------------------------------------


class Helper:
    """Scales."""

    factor = 1.0

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.factor

    def __call__(self, x: Tensor) -> Tensor:
        return x * SCALES["call"]


class SmallHelper(Helper):
    def scaled(self, x: Tensor) -> Tensor:
        return x * SMALLER


class Setting:
    scale = 1.0


class OfClass(Setting):
    """Has its number from the class below."""


SCALES = {"call": 1.0}
SCALE = 1.0
GLOBAL_HELPER = Helper()
LOCAL = threading.local()
settings: Any = types.ModuleType("settings_of_a_script")
settings.scale = 1.0
sys.modules["settings_of_a_script"] = settings

Scale = Callable[[Any, Tensor], Tensor]
Change = Callable[[Any], object]


class ScaledBy(Backbone):
    """Scales its output by a function of the user's, which reads what may change."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.scaled(super().forward(input_ids))

    def scaled(self, x: Tensor) -> Tensor:
        return x


def scaling(cls: type, change: Change, before: Change = lambda backbone: None, steps: Any = MIDDLE) -> Script:
    """A frozen backbone of a class; `change(backbone)` in the middle of the second epoch."""
    backbone = cls()
    before(backbone)
    return Script(model=FrozenBackbone(backbone), callbacks=[At(lambda model, step: change(model.backbone), steps)])


class ByHelper(ScaledBy):
    def __init__(self) -> None:
        super().__init__()
        self.helper: Any = Helper()
        self.helpers = [Helper()]

    def scaled(self, x: Tensor) -> Tensor:
        return self.helpers[0].scaled(self.helper.scaled(x))


@case("K1", "R2")
def class_of_an_object_is_replaced() -> Script:
    """An object of a frozen module gets another class."""
    return scaling(ByHelper, lambda backbone: setattr(backbone.helper, "__class__", SmallHelper))


@case("K1")
def class_of_an_object_in_a_list_is_replaced() -> Script:
    """An object in a list of a frozen module gets another class."""
    return scaling(ByHelper, lambda backbone: setattr(backbone.helpers[0], "__class__", SmallHelper))


class ByGlobalHelper(ScaledBy):
    def scaled(self, x: Tensor) -> Tensor:
        return GLOBAL_HELPER.scaled(x)


@case("K1")
def class_of_a_global_object_is_replaced() -> Script:
    """A global object that a frozen module reads gets another class."""
    return scaling(ByGlobalHelper, lambda _: setattr(GLOBAL_HELPER, "__class__", SmallHelper))


class Inherits(ScaledBy):
    """Has all methods but one from its base class."""

    def own(self) -> None: ...


@case("K1")
def method_is_added_that_overrides() -> Script:
    """The class of a frozen module gets a method that it has inherited before."""
    return scaling(Inherits, lambda _: setattr(Inherits, "scaled", lambda self, x: x * SMALLER))


class DerivedHelper(Helper):
    """Has its method from its base class."""


@case("K1")
def method_of_an_object_is_added_that_overrides() -> Script:
    """The class of an object of a frozen module gets a method that it has inherited before."""
    return scaling(
        ByHelper,
        lambda _: setattr(DerivedHelper, "scaled", lambda self, x: x * SMALLER),
        lambda backbone: setattr(backbone, "helper", DerivedHelper()),
    )


class ByDerivedClass(ScaledBy):
    def scaled(self, x: Tensor) -> Tensor:
        return x * OfClass.scale


@case("K1")
def value_is_added_to_a_class_that_overrides() -> Script:
    """A class that a frozen module reads gets a number that it has inherited before."""
    return scaling(ByDerivedClass, lambda _: setattr(OfClass, "scale", SMALLER))


class ByClass(ScaledBy):
    """Has a class as attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.setting = Setting

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.setting.scale


@case("K1")
def value_of_a_class_in_an_attribute() -> Script:
    """A frozen module has a class as attribute, and reads a number of it."""
    return scaling(ByClass, lambda _: setattr(Setting, "scale", SMALLER))


class ByFunction(ScaledBy):
    """Has a function as attribute."""

    act: Any

    def scaled(self, x: Tensor) -> Tensor:
        return self.act(x)  # type: ignore[no-any-return]


def by_global(x: Tensor) -> Tensor:
    return x * SCALE


def by_closure(holder: list[float]) -> Any:
    def act(x: Tensor) -> Tensor:
        return x * holder[0]

    return act


@case("K1", "R2")
def function_in_an_attribute_reads_a_global() -> Script:
    """A frozen module has a function as attribute, which reads a global number."""
    return scaling(
        ByFunction, lambda _: globals().update(SCALE=SMALLER), lambda backbone: setattr(backbone, "act", by_global)
    )


@case("K1")
def function_in_an_attribute_reads_a_closure() -> Script:
    """A frozen module has a function as attribute, which reads a list of its closure."""
    holder = [1.0]
    act = by_closure(holder)
    return scaling(
        ByFunction, lambda _: holder.__setitem__(0, SMALLER), lambda backbone: setattr(backbone, "act", act)
    )


@case("K1")
def function_in_a_list_reads_a_global() -> Script:
    """A frozen module has a partial function in a list, which reads a global number."""
    act = functools.partial(by_global)

    class ByList(ScaledBy):
        def __init__(self) -> None:
            super().__init__()
            self.acts = [act]

        def scaled(self, x: Tensor) -> Tensor:
            return self.acts[0](x)

    return scaling(ByList, lambda _: globals().update(SCALE=SMALLER))


class ByCall(ScaledBy):
    def scaled(self, x: Tensor) -> Tensor:
        return GLOBAL_HELPER(x)


@case("K1")
def global_object_is_called() -> Script:
    """A frozen module calls a global object; its `__call__` reads another global variable."""
    return scaling(ByCall, lambda _: SCALES.update(call=SMALLER))


@case("K1")
def call_of_a_global_object_is_replaced() -> Script:
    """A frozen module calls a global object, whose class gets another `__call__`."""
    return scaling(ByCall, lambda _: setattr(Helper, "__call__", lambda self, x: x * SMALLER))


class ByText(ScaledBy):
    def scaled(self, x: Tensor) -> Tensor:
        return x * getattr(settings, "scale") * globals()["SCALE"]  # noqa: B009


@case("K1")
def value_of_a_module_by_its_text() -> Script:
    """A frozen module reads a number of a module by `getattr`."""
    return scaling(ByText, lambda _: setattr(settings, "scale", SMALLER))


@case("K1")
def global_value_by_its_text() -> Script:
    """A frozen module reads a number by `globals()[...]`."""
    return scaling(ByText, lambda _: globals().update(SCALE=SMALLER))


class ByImport(ScaledBy):
    def scaled(self, x: Tensor) -> Tensor:
        import settings_of_a_script as own

        return x * own.scale


@case("K1", "R2")
def value_of_a_module_that_the_forward_imports() -> Script:
    """A frozen module imports a module in its forward, and reads a number of it."""
    return scaling(ByImport, lambda _: setattr(settings, "scale", SMALLER))


class ByReference(ScaledBy):
    """Has a weak reference to its settings."""

    def __init__(self) -> None:
        super().__init__()
        SETTINGS_OF_ALL.scale = 1.0
        self.of_all = weakref.ref(SETTINGS_OF_ALL)

    def scaled(self, x: Tensor) -> Tensor:
        of_all = self.of_all()
        return x if of_all is None else x * of_all.scale


class Holder:
    scale: float


SETTINGS_OF_ALL = Holder()


@case("K1")
def value_behind_a_weak_reference() -> Script:
    """A frozen module reads a number of an object to which it has a weak reference."""
    return scaling(ByReference, lambda _: setattr(SETTINGS_OF_ALL, "scale", SMALLER))


class Config(dict[str, float]):
    """A dictionary with attributes."""

    scale = 1.0


class ByConfig(ScaledBy):
    def __init__(self) -> None:
        super().__init__()
        self.config = Config(width=WIDTH)
        self.config.scale = 1.0

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.config.scale


@case("K1")
def attribute_of_a_dictionary() -> Script:
    """A frozen module reads a number that is an attribute of a dictionary."""
    return scaling(ByConfig, lambda backbone: setattr(backbone.config, "scale", SMALLER))


class OneSlot:
    __slots__ = "scale"

    def __init__(self) -> None:
        self.scale = 1.0


class PrivateSlot:
    __slots__ = ("__scale",)

    def __init__(self) -> None:
        self.__scale = 1.0

    def get(self) -> float:
        return self.__scale

    def set(self, scale: float) -> None:
        self.__scale = scale


class BySlots(ScaledBy):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.private = OneSlot(), PrivateSlot()

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.one.scale * self.private.get()


@case("K1")
def only_slot_changes() -> Script:
    """A frozen module reads the only slot of an object, whose class has one text as `__slots__`."""
    return scaling(BySlots, lambda backbone: setattr(backbone.one, "scale", SMALLER))


@case("K1")
def private_slot_changes() -> Script:
    """A frozen module reads a private slot of an object."""
    return scaling(BySlots, lambda backbone: backbone.private.set(SMALLER))


class ByProperty(ScaledBy):
    @property
    def number(self) -> float:
        return 1.0

    @staticmethod
    def fixed() -> float:
        return 1.0

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.number * self.fixed()


def reload(function: Any, other: Any) -> None:
    function.__code__ = other.__code__


@case("K1")
def property_reloaded() -> Script:
    """The function of a property gets other code, as by the autoreload of a notebook."""
    return scaling(ByProperty, lambda _: reload(vars(ByProperty)["number"].fget, lambda self: 0.3))


@case("K1")
def static_method_reloaded() -> Script:
    """A static method gets other code, as by the autoreload of a notebook."""
    return scaling(ByProperty, lambda _: reload(ByProperty.fixed, lambda: 0.3))


@functools.lru_cache
def remembered() -> float:
    return SCALE


class ByMemory(ScaledBy):
    def scaled(self, x: Tensor) -> Tensor:
        return x * remembered()


@case("K1")
def remembered_value_is_cleared() -> Script:
    """A frozen module calls a function with `lru_cache`, which is emptied when a global number has changed."""

    def change(_: Any) -> None:
        globals().update(SCALE=SMALLER)
        remembered.cache_clear()

    return scaling(ByMemory, change)


class Mode(enum.Enum):
    PLAIN = 1

    def of(self, x: Tensor) -> Tensor:
        return x * SCALE


class ByMode(ScaledBy):
    def __init__(self) -> None:
        super().__init__()
        self.mode = Mode.PLAIN

    def scaled(self, x: Tensor) -> Tensor:
        return self.mode.of(x)


@case("K1")
def method_of_an_enumeration_reads_a_global() -> Script:
    """A frozen module has a member of an enumeration, whose method reads a global number."""
    return scaling(ByMode, lambda _: globals().update(SCALE=SMALLER))


class ByEnvironment(ScaledBy):
    def scaled(self, x: Tensor) -> Tensor:
        return x * float(os.getenv("SCALE_OF_A_SCRIPT", "1")) * float(os.environ.get("SCALE_OF_IT", "1"))


@case("K1", "R2")
def environment_variable_changes() -> Script:
    """A frozen module reads an environment variable by `os.getenv`."""
    return scaling(ByEnvironment, lambda _: os.environ.update(SCALE_OF_A_SCRIPT="0.3"))


@case("K1")
def mapping_of_the_environment_changes() -> Script:
    """A frozen module reads an environment variable of `os.environ`."""
    return scaling(ByEnvironment, lambda _: os.environ.update(SCALE_OF_IT="0.3"))


class ByThread(ScaledBy):
    def scaled(self, x: Tensor) -> Tensor:
        return x * getattr(LOCAL, "scale", 1.0)


@case("K1")
def value_of_a_thread_changes() -> Script:
    """A frozen module reads a number of a `threading.local`."""
    return scaling(ByThread, lambda _: setattr(LOCAL, "scale", SMALLER))


class ByDefault(ScaledBy):
    def scaled(self, x: Tensor) -> Tensor:
        return x * (torch.ones(WIDTH) / 3).to(x.dtype)


@case("K1", "R2")
def default_dtype_changes() -> Script:
    """A frozen module makes a tensor in the default dtype, which is another one from the middle of an epoch on."""
    return scaling(ByDefault, lambda _: torch.set_default_dtype(torch.bfloat16))


# ---------------------------------------------------------------------------------------------------------
# Modules that a frozen module holds, but not as its parts
# ---------------------------------------------------------------------------------------------------------


class Borrows(ScaledBy):
    """Reads the weights of a module that is part of the model elsewhere."""

    borrowed: Any

    def scaled(self, x: Tensor) -> Tensor:
        return x + self.of_borrowed(x)

    def of_borrowed(self, x: Tensor) -> Tensor:
        borrowed: Tensor = self.borrowed[0](x)
        return borrowed


class Lends(FrozenBackbone):
    """A frozen backbone that reads a frozen layer of the model around it."""

    def __init__(self, backbone: Any, lend: Callable[[Any, nn.Module], object]) -> None:
        super().__init__(backbone)
        self.shared = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)).requires_grad_(False)
        lend(backbone, self.shared)


def write(model: Any, step: int) -> None:
    model.shared[1].weight.mul_(3.0)


def lending(backbone: Any, lend: Callable[[Any, nn.Module], object], change: Any = write) -> Script:
    return Script(model=Lends(backbone, lend), callbacks=[At(change, MIDDLE)])


def in_list(backbone: Any, shared: nn.Module) -> None:
    backbone.borrowed = [shared]


@case("K1", "R2")
def module_in_a_list_is_written() -> Script:
    """A frozen module has a frozen layer of the model in a list; the layer's weights change."""
    return lending(Borrows(), in_list)


@case("K1")
def module_in_a_list_gets_an_attribute() -> Script:
    """A frozen module has a frozen layer of the model in a list; the layer's normalisation changes."""

    def change(model: Any, step: int) -> None:
        model.shared[1].eps = 1.0

    return lending(Borrows(), in_list, change)


@case("K1")
def module_in_a_list_is_replaced_inside() -> Script:
    """A frozen module has a frozen layer of the model in a list; a part of the layer is replaced."""

    def change(model: Any, step: int) -> None:
        model.shared[0] = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    return lending(Borrows(), in_list, change)


class BorrowsByMethod(Borrows):
    def of_borrowed(self, x: Tensor) -> Tensor:
        borrowed: Tensor = self.borrowed(x)
        return borrowed


@case("K1")
def module_by_its_method_is_written() -> Script:
    """A frozen module has the method of a frozen layer as attribute; the layer's weights change."""
    return lending(BorrowsByMethod(), lambda backbone, shared: setattr(backbone, "borrowed", shared.forward))


@case("K1")
def module_in_a_closure_is_written() -> Script:
    """A frozen module has a function as attribute, whose closure has a frozen layer; its weights change."""

    def lend(backbone: Any, shared: nn.Module) -> None:
        backbone.borrowed = lambda x: shared(x)

    return lending(BorrowsByMethod(), lend)


@case("K1")
def module_in_a_global_variable_is_written() -> Script:
    """A frozen module reads a frozen layer of the model in a global variable; the layer's weights change."""

    def lend(backbone: Any, shared: nn.Module) -> None:
        backbone.borrowed = of_all
        globals().update(SHARED=shared)

    return lending(BorrowsByMethod(), lend)


SHARED: Any = None


def of_all(x: Tensor) -> Tensor:
    made: Tensor = SHARED(x)
    return made


@case("K1")
def module_without_registration_is_written() -> Script:
    """A frozen module has a frozen layer in its `__dict__`; the layer's weights change."""

    def lend(backbone: Any, shared: nn.Module) -> None:
        vars(backbone)["borrowed"] = shared

    return lending(BorrowsByMethod(), lend)


@case("K1")
def module_in_a_list_is_trained() -> Script:
    """A frozen module has a layer of the model in a list; the layer is trained from the middle of an epoch on."""

    def change(model: Any, step: int) -> None:
        model.shared[0].weight.requires_grad_(True)

    script = lending(Borrows(), in_list, change)
    script.trainer = own_optimizer()
    return script


def own_optimizer() -> type:
    class AllParameters:
        def create_optimizer(self: Any, *_: Any) -> Any:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=self.args.learning_rate)
            return self.optimizer

    return AllParameters


# ---------------------------------------------------------------------------------------------------------
# Libraries' code that is replaced, and functions of the user's that libraries call
# ---------------------------------------------------------------------------------------------------------


def at_step(change: Callable[[], object], model: Any, step: int = 6, **fields: Any) -> Script:
    return of(model, callbacks=[At(lambda *_: change(), [step])], **fields)


@case("K1")
def call_of_all_modules_is_replaced() -> Script:
    """`nn.Module.__call__` is replaced in the middle of an epoch."""
    before = nn.Module.__call__

    def halved(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = before(self, *args, **kwargs)
        return output * 0.5 if isinstance(self, nn.LayerNorm) else output

    return at_step(lambda: setattr(nn.Module, "__call__", halved), frozen_bert())


@case("K1")
def mask_function_is_replaced() -> Script:
    """The function that makes the attention's mask is replaced in the table of transformers."""

    def change() -> None:
        before = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]

        def first_alone(*args: Any, **kwargs: Any) -> Any:
            mask = before(*args, **{**kwargs, "allow_is_bidirectional_skip": False})
            return torch.zeros_like(mask).index_fill_(-1, torch.tensor([0]), True)

        ALL_MASK_ATTENTION_FUNCTIONS.register("sdpa", first_alone)

    return at_step(change, frozen_bert())


def own_attention(*args: Any, **kwargs: Any) -> Any:
    output, weights = ALL_ATTENTION_FUNCTIONS["sdpa"](*args, **kwargs)
    return output * SCALE, weights


@case("K1", "R2")
def own_attention_reads_a_global() -> Script:
    """A declared BERT has an attention function of the user's, which reads a global number."""
    ALL_ATTENTION_FUNCTIONS.register("own", own_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register("own", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model = OnBert()
    model.bert.set_attn_implementation("own")
    product = {"cached_modules": ["bert"]}
    return at_step(lambda: globals().update(SCALE=-1.0), model, product=product)


def own_mask(*args: Any, **kwargs: Any) -> Any:
    mask = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](*args, **{**kwargs, "allow_is_bidirectional_skip": False})
    return mask if SCALE > 0 else torch.zeros_like(mask).index_fill_(-1, torch.tensor([0]), True)


@case("K1")
def own_mask_reads_a_global() -> Script:
    """A BERT has a mask function of the user's from the start, which reads a global number."""
    ALL_MASK_ATTENTION_FUNCTIONS.register("own", own_mask)
    ALL_ATTENTION_FUNCTIONS.register("own", ALL_ATTENTION_FUNCTIONS["sdpa"])
    model = OnBert()
    model.bert.set_attn_implementation("own")
    return at_step(lambda: globals().update(SCALE=-1.0), model)


class Options:
    """An argument of a module."""

    def __init__(self, scale: float) -> None:
        self.scale = scale


class WithOptions(Backbone):
    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, options: Options | None = None
    ) -> Tensor:
        return super().forward(input_ids) * (1.0 if options is None else options.scale)


class GivesOptions(FrozenBackbone):
    def __init__(self) -> None:
        super().__init__(WithOptions())
        self.options: Options | None = None

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        hidden = self.backbone(input_ids, attention_mask, self.options)
        return classified(self.head(pool(hidden, attention_mask)), labels)


@case("K1")
def object_as_argument_from_the_second_epoch() -> Script:
    """A frozen module is given an object from the second epoch on; a number of it changes in the third."""

    def change(model: Any, step: int) -> None:
        if step == 4:
            model.options = Options(1.0)
        else:
            model.options.scale = SMALLER

    return Script(
        model=GivesOptions(), callbacks=[At(change, [4, 14])], data=samples(64), options={"num_train_epochs": 4}
    )


class FollowsLater(OnBert):
    """The forward changes the frozen module before it calls it, as for a momentum encoder, from a step on."""

    how: Callable[[Any], object] | None = None

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        if self.how is not None and self.training:
            with torch.no_grad():
                self.how(self.bert.encoder.layer[1].output.LayerNorm.weight)
        return super().forward(input_ids, attention_mask, labels)


def following(how: Callable[[Any], object]) -> Script:
    return of(
        FollowsLater(), callbacks=[At(lambda model, _: setattr(model, "how", how), [10])], data=samples(32, 8, 8)
    )


@case("K1", "R2")
def weights_written_in_the_forward_around_later() -> Script:
    """The model's forward changes a frozen weight before it calls the module, from the third epoch on."""
    return following(lambda weight: weight.mul_(1.5))


@case("K1")
def weights_written_through_data_in_the_forward_around_later() -> Script:
    """Likewise, through `.data`."""
    return following(lambda weight: weight.data.mul_(1.5))


class HandsOn(nn.Module):
    """Returns its input beside its output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.linear(x)), x


class WritesHandedOn(nn.Module):
    """Writes into what a frozen module hands on, from a step on, and reads what it has given to it."""

    writes = False

    def __init__(self) -> None:
        super().__init__()
        self.backbone = HandsOn().requires_grad_(False)
        self.head = nn.Linear(WIDTH, LABELS)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        x = x * 2
        made, same = self.backbone(x)
        if self.writes:
            same[:, ::2] = 0
        return classified(self.head(made + x + same), labels)


@case("K1")
def input_handed_on_and_written_later() -> Script:
    """A frozen module returns its input, into which the model writes from the middle of the third epoch on."""

    def change(model: Any, step: int) -> None:
        model.writes = True

    generator = torch.Generator().manual_seed(4)
    rows = [{"x": torch.randn(WIDTH, generator=generator), "labels": torch.tensor(k % LABELS)} for k in range(32)]
    stacked = lambda of_batch: {n: torch.stack([row[n] for row in of_batch]) for n in of_batch[0]}  # noqa: E731
    product = {"cached_modules": ["backbone"]}
    return of(WritesHandedOn(), data=rows, collator=stacked, callbacks=[At(change, [10])], product=product)


# ---------------------------------------------------------------------------------------------------------
# Autocast and inference mode
# ---------------------------------------------------------------------------------------------------------


def in_half() -> Any:
    return torch.autocast("cpu", torch.bfloat16)


def nothing(trainer: Any) -> dict[str, Any]:
    """Norms of gradients in half precision depend on the size of micro-batches."""
    return {}


def half_from(step: int) -> Each:
    """A callback that turns autocast on for the rest of the training."""

    def act(callback: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == step:
            callback.trainer.compute_loss_context_manager = in_half

    return Each(act, "on_step_begin")


@case("K1", "R2", slack=30)
def autocast_by_a_callback() -> Script:
    """A callback turns autocast on in the middle of the third epoch; the encoder of a BERT is frozen."""
    return of(frozen_bert(initializer_range=0.5), observe=nothing, callbacks=[half_from(10)], data=samples(32, 8, 8))


@case("K1", slack=30)
def autocast_over_lowest_layers_by_a_callback() -> Script:
    """A callback turns autocast on in the middle of the third epoch; the lowest layers of a BERT are frozen."""
    return of(
        freeze_lowest(bert(initializer_range=0.5)), observe=nothing, callbacks=[half_from(10)], data=samples(32, 8, 8)
    )


@case("K1", slack=30)
def autocast_over_lowest_layers_by_the_loss() -> Script:
    """The loss turns autocast on from the third epoch on; the lowest layers of a BERT are frozen."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        with torch.autocast("cpu", torch.bfloat16, enabled=trainer.state.global_step >= 10):
            outputs = model(**inputs)
        return outputs["loss"], outputs

    model = freeze_lowest(bert(initializer_range=0.5))
    return of(model, observe=nothing, trainer=own_loss(loss), data=samples(32, 8, 8))


@case("K1", slack=30)
def autocast_with_a_policy() -> Script:
    """A callback turns autocast on in the middle of the third epoch; a policy has frozen the lowest layers."""

    product = {"freeze_policy": "schedule", "freeze_schedule": {"0": 2}}
    model = bert(initializer_range=0.5)
    model.bert.embeddings.requires_grad_(False)
    model.bert.encoder.layer[:2].requires_grad_(False)
    return of(model, callbacks=[half_from(10)], data=samples(32, 8, 8), product=product)


@case("K1", slack=30)
def evaluated_in_half_precision() -> Script:
    """`bf16_full_eval` casts the model when it is evaluated after the training; then it trains again."""

    def drive(trainer: Any) -> Any:
        trainer.train()
        losses = [trainer.evaluate()["eval_loss"] for _ in range(2)]
        trainer.model.float()
        trainer.train()
        return losses

    options = {"bf16_full_eval": True, "eval_strategy": "epoch", "num_train_epochs": 3}
    return of(frozen_bert(), drive=drive, keywords={"eval_dataset": ragged(12, seed=9)}, options=options)


@case("K1", "R2")
def teacher_in_inference_mode() -> Script:
    """The loss calls the teacher in inference mode, and copies its logits."""

    def further(trainer: Any, model: Any, outputs: Any, inputs: Inputs) -> Tensor:
        with torch.inference_mode():
            wanted = trainer.teacher(**read_of(inputs)).logits
        return kd(outputs.logits, wanted.clone())

    return distil(further)


# ---------------------------------------------------------------------------------------------------------
# Teachers
# ---------------------------------------------------------------------------------------------------------


class Wraps(nn.Module):
    """A teacher with a helper of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = teacher_of_four()
        self.helper = Helper()
        self.act: Any = by_global

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        logits: Tensor = self.inner(input_ids=input_ids, attention_mask=attention_mask).logits
        return self.act(self.helper.scaled(logits))  # type: ignore[no-any-return]


def wrapped(change: Callable[[Any], object]) -> Script:
    """A declared teacher; `change(teacher)` in the middle of the third epoch."""

    def further(trainer: Any, model: Any, outputs: Any, inputs: Inputs) -> Tensor:
        with torch.no_grad():
            return kd(outputs.logits, trainer.teacher(**read_of(inputs)))

    def act(callback: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 10:
            change(callback.trainer.teacher)

    product = {"cached_modules": ["trainer.teacher"], "activation_cache": "on"}
    return distil(further, lambda: frozen(Wraps()), callbacks=[Each(act)], product=product)


@case("K1", "K2", "R2")
def class_of_a_teacher_s_object_is_replaced() -> Script:
    """An object of a declared teacher gets another class."""
    return wrapped(lambda teacher: setattr(teacher.helper, "__class__", SmallHelper))


@case("K1", "K2")
def function_of_a_teacher_reads_a_global() -> Script:
    """A declared teacher has a function as attribute, which reads a global number."""
    return wrapped(lambda _: globals().update(SCALE=SMALLER))


# ---------------------------------------------------------------------------------------------------------
# Data
# ---------------------------------------------------------------------------------------------------------

LAYOUTS = ("K1", "K2", "R2")


def lowest(**fields: Any) -> Script:
    """The lowest layers of a BERT are frozen."""
    return of(freeze_lowest(bert(initializer_range=0.3)), **fields)


def with_empty() -> Rows:
    """Some texts are empty."""
    rows = list(ragged())
    for row in rows[3::7]:
        row["input_ids"], row["attention_mask"] = row["input_ids"][:1] * 0, row["attention_mask"][:1] * 0
    return Rows(rows)


@case(*LAYOUTS)
def empty_texts() -> Script:
    """Some texts have no token; the lowest layers are frozen."""
    return lowest(data=with_empty())


@case("K1", "R2")
def empty_texts_of_a_frozen_encoder() -> Script:
    """Some texts have no token; the encoder is frozen."""
    return of(frozen_bert(initializer_range=0.3), data=with_empty())


@case(*LAYOUTS)
def texts_of_a_token() -> Script:
    """Texts have one to three tokens; the lowest layers are frozen."""
    return lowest(data=samples(32, 1, 3))


@case("K1", "R2")
def texts_of_a_token_of_a_frozen_encoder() -> Script:
    """Texts have one to three tokens; the encoder is frozen."""
    return of(frozen_bert(initializer_range=0.3), data=samples(32, 1, 3))


def repeated() -> Rows:
    """Each text several times, with other labels."""
    rows = [{**row, "labels": (row["labels"] + k) % LABELS} for k in range(4) for row in ragged(8)]
    return Rows(rows)


@case(*LAYOUTS)
def texts_with_several_labels() -> Script:
    """The same texts have other labels; the lowest layers are frozen."""
    return lowest(data=repeated())


@case("K1")
def texts_with_several_labels_of_a_teacher() -> Script:
    """The same texts have other labels, which the teacher gets, too; its loss is read."""

    def further(trainer: Any, model: Any, outputs: Any, inputs: Inputs) -> Tensor:
        with torch.no_grad():
            wanted = trainer.teacher(**inputs)
        return kd(outputs.logits, wanted.logits) * wanted.logits.logsumexp(-1).mean()

    return distil(further, data=repeated())


class Cuts:
    """A collator that cuts texts, shorter ones when it is told to."""

    most = 14

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        cut = [{n: v[: self.most] if v.dim() else v for n, v in row.items()} for row in rows]
        return pad(cut)


def other_collator(frozen_model: Any) -> Script:
    def act(callback: Any, state: Any, control: Any, **others: Any) -> None:
        loader = getattr(others["train_dataloader"], "base_dataloader", others["train_dataloader"])
        before = loader.collate_fn

        def wrapped(rows: list[dict[str, Any]]) -> Any:
            batch = before(rows)
            batch["input_ids"] = batch["input_ids"].clone()
            batch["input_ids"][:, 0] = 7
            return batch

        if state.epoch == 2:
            loader.collate_fn = wrapped

    return of(frozen_model, data=samples(32, 8, 8), callbacks=[Each(act, "on_epoch_end")])


@case("K1", "R2")
def collator_wrapped_by_a_callback() -> Script:
    """A callback wraps the collator of the loader after the second epoch; the encoder is frozen."""
    return other_collator(frozen_bert(initializer_range=0.3))


@case("K1", "K2", expect="exact")
def collator_wrapped_over_lowest_layers() -> Script:
    """A callback wraps the collator of the loader after the second epoch; the lowest layers are frozen."""
    return other_collator(freeze_lowest(bert(initializer_range=0.3)))


@case(*LAYOUTS)
def collator_with_state() -> Script:
    """A callback tells the collator to cut texts, from the third epoch on; the lowest layers are frozen."""
    cuts = Cuts()

    def act(callback: Any, state: Any, control: Any, **_: Any) -> None:
        cuts.most = 14 if state.epoch < 2 else 5

    return lowest(collator=cuts, callbacks=[Each(act, "on_epoch_end")])


class ByEpoch(IterableDataset):
    """A stream that follows `set_epoch`: every second epoch has other words."""

    def __init__(self) -> None:
        self.rows, self.epoch = list(samples(32, 8, 8)), 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        for row in self.rows:
            words = row["input_ids"].clone()
            if self.epoch % 2:
                words[0] = 7
            yield {**row, "input_ids": words}


@case(*LAYOUTS)
def stream_that_follows_the_epoch() -> Script:
    """An iterable data set with `set_epoch` and `max_steps`; the lowest layers are frozen."""
    return lowest(data=ByEpoch(), options={"max_steps": 15})


@case("K1", "R2")
def stream_that_follows_the_epoch_of_a_frozen_encoder() -> Script:
    """An iterable data set with `set_epoch` and `max_steps`; the encoder is frozen."""
    return of(frozen_bert(initializer_range=0.3), data=ByEpoch(), options={"max_steps": 15})


def norm(prediction: Any) -> dict[str, float]:
    return {"norm": float(abs(prediction.predictions).sum())}


@case(*LAYOUTS)
def several_sets_with_metrics_and_max_steps() -> Script:
    """Two evaluation sets with metrics, of which one is the training set; the training ends within an epoch."""
    sets = {"one": ragged(12, seed=9), "two": ragged()}
    return lowest(
        keywords={"eval_dataset": sets, "compute_metrics": norm},
        options={"eval_strategy": "steps", "eval_steps": 3, "max_steps": 14},
        observe=lambda trainer: {
            "norms": [v for e in trainer.state.log_history for k, v in e.items() if k.endswith("norm")]
        },
    )


def train_on_others(trainer: Any) -> Any:
    trainer.train()
    before = trainer.evaluate(ragged(12, seed=9))["eval_loss"]
    trainer.train_dataset = Rows([*list(ragged())[:16], *ragged(16, seed=3)])
    trainer.train()
    return (
        before,
        trainer.evaluate(ragged(12, seed=9))["eval_loss"],
        trainer.predict(ragged(12, seed=9)).metrics["test_loss"],
    )


@case("K2")
def trained_again_on_other_data() -> Script:
    """A second train() has other data, of which a half is the same; the lowest layers are frozen."""
    return lowest(drive=train_on_others, options={"num_train_epochs": 3})


@case("K1", "K2", "R2", expect="exact")
def model_is_replaced_between_trainings() -> Script:
    """The trainer gets another model between two trainings."""

    def drive(trainer: Any) -> None:
        trainer.train()
        torch.manual_seed(5)
        trainer.model = trainer.model_wrapped = freeze_lowest(bert(initializer_range=0.5), 2)
        trainer.optimizer = trainer.lr_scheduler = None
        trainer.train()

    return lowest(drive=drive, options={"num_train_epochs": 3})


class Twice:
    """Calls the model on the batch, and on a mixture of the batch's embeddings."""

    def compute_loss(self: Any, model: Any, inputs: Inputs, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        embeds = model.get_input_embeddings()(inputs["input_ids"]) if self.args.world_size == 1 else None
        loss = outputs["loss"]
        if embeds is not None and model.training:
            mask, labels = inputs["attention_mask"], inputs["labels"]
            mixed = 0.7 * embeds + 0.3 * embeds.flip(0)
            loss = loss + model(inputs_embeds=mixed, attention_mask=mask, labels=labels)["loss"]
        return (loss, outputs) if return_outputs else loss


@case("K1")
def mixture_of_frozen_embeddings() -> Script:
    """The loss calls the model on the batch, and on a mixture of frozen embeddings; the lowest layers are frozen."""
    return lowest(trainer=Twice, data=samples(32, 8, 8))
