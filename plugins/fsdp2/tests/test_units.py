"""Which modules are gathered at one time; read off the model, without processes."""

from __future__ import annotations

import pytest
from ranks import Language
from torch import nn

import torchrig
from torchrig_fsdp2 import settings, units


def found(model: nn.Module, **chosen: object) -> tuple[str, ...]:
    return units.find(model, torchrig.plan(model, strategy="fsdp2", **chosen))


BLOCKS = tuple(f"layers.{index}" for index in range(4))


@pytest.mark.parametrize("backend", ["no", "eager"])
def test_blocks_then_the_root_whatever_compiles(backend):
    assert found(Language(), backend=backend) == (*BLOCKS, "")


def test_large_modules_are_units_where_asked_for():
    model = Language(width=16)
    model.embed = nn.Embedding(1000, 16)
    assert found(model, fsdp2={"units": "large"}) == (*BLOCKS, "embed", "")
    assert found(model) == (*BLOCKS, "")


def test_a_parameter_with_several_places_belongs_to_the_unit_that_has_all_of_them():
    """Case 21."""
    model = Language(tied=True)
    model.layers[1].up.weight = model.layers[0].up.weight
    model.layers[2].down.weight = nn.Parameter(model.layers[2].up.weight.detach().t().contiguous())
    assert found(model, fsdp2={"units": "large"}) == (*BLOCKS[2:], "")


def test_one_unit_where_asked_for_or_where_nothing_repeats_or_all_is_one_graph():
    assert found(Language(), fsdp2={"units": "root"}) == ("",)
    assert found(Language(), backend="eager", regions="whole") == ("",)
    assert found(nn.Linear(2, 2)) == ("",)


def test_settings_from_variables(monkeypatch):
    for name, value in {"RESHARD_AFTER_FORWARD": "none", "REPLICATE": "1", "CPU_OFFLOAD": "true"}.items():
        monkeypatch.setenv(f"TORCHRIG_FSDP2__{name}", value)
    own = settings.of(torchrig.plan(Language(), strategy="fsdp2"))
    assert (own.reshard_after_forward, own.replicate, own.cpu_offload) == (None, 1, True)
    monkeypatch.setenv("TORCHRIG_FSDP2__RESHARD_AFTER_FORWARD", "False")
    assert settings.of(torchrig.plan(Language(), strategy="fsdp2")).reshard_after_forward is False
    monkeypatch.setenv("TORCHRIG_FSDP2__UNITS", "larg")
    with pytest.raises(torchrig.SettingsError, match=r"fsdp2\.units") as caught:
        torchrig.plan(Language(), strategy="fsdp2")
    assert (caught.value.origin, caught.value.nearest) == ("variable TORCHRIG_FSDP2__UNITS", "large")


def test_named_regions_are_units():
    assert found(Language(), regions=["layers.1", "layers.2"]) == ("layers.1", "layers.2", "")
