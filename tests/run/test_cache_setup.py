"""What the name of a cache says about a model."""

from __future__ import annotations

from torch import nn

from hf_pipetransformer.run import cache_setup


def test_what_a_model_depends_on_is_described_whatever_its_configuration_is() -> None:
    model = nn.Linear(2, 2)
    plain = cache_setup.describe_model(model, "no")
    model.config = {"width": 2}  # type: ignore[assignment]
    assert cache_setup.describe_model(model, "no") != plain
    assert cache_setup.describe_model(model, "no") != cache_setup.describe_model(model, "bf16")


def test_the_head_and_dropout_of_a_model_are_no_part_of_it() -> None:
    """So that trials of a search find each other's entries: frozen layers run without dropout, and below the head."""
    model = nn.Linear(2, 2)
    model.config = {"width": 2}  # type: ignore[assignment]
    names = {"nothing": {"width": 2}}
    for field, value in (("hidden_dropout_prob", 0.3), ("id2label", {0: "a"}), ("problem_type", "regression")):
        names[field] = {"width": 2, field: value}

    class Config:
        def __init__(self, values: dict) -> None:
            self.values = values

        def to_dict(self) -> dict:
            return self.values

    described = set()
    for values in names.values():
        model.config = Config(values)  # type: ignore[assignment]
        described.add(cache_setup.describe_model(model, "no"))
    assert len(described) == 1
    model.config = Config({"width": 3})  # type: ignore[assignment]
    assert cache_setup.describe_model(model, "no") not in described
