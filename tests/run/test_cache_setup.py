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
