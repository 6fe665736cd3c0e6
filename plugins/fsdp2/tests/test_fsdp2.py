"""Strategy fsdp2 on several processes: what one process computes on the whole batch is what they compute together."""

from __future__ import annotations

import pytest
from ranks import adamw, batch, build, check_same, loss_of, own, train, whole

import torchrig

FSDP = {"strategy": "fsdp2"}
BACKENDS = ("no", "eager", "aot_eager")
EXACT = {"rtol": 1e-12, "atol": 1e-12}  # the gradients' sum is in another order


@pytest.mark.processes(2)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_losses_gradients_and_parameters_are_those_of_one_process(backend, tied):
    """Cases 21, 22: tied parameters, and an optimizer that has state already."""
    bare, model = build(tied=tied), build(tied=tied)
    expected, optimizer = adamw(bare), adamw(model)
    train(bare, expected, range(2), whole)
    train(model, optimizer, range(2), whole)
    prepared, same = torchrig.prepare(model, optimizer, backend=backend, fullgraph=True, **FSDP)
    assert prepared is model and same is optimizer
    assert train(prepared, optimizer, range(2, 5)) == pytest.approx(train(bare, expected, range(2, 5), whole))
    loss_of(prepared, own(batch(9))).backward()
    loss_of(bare, batch(9)).backward()
    check_same(prepared, bare, **EXACT)
    assert (prepared.head.weight is prepared.embed.weight) is tied
    report = torchrig.report(prepared)
    assert (report.graphs, report.breaks) == (backend != "no", 0)


@pytest.mark.processes(4)
@pytest.mark.parametrize(
    "own_settings",
    [{}, {"replicate": 2}, {"replicate": 4}, {"units": "root"}, {"units": "large"}, {"reshard_after_forward": False},
     {"reshard_after_forward": 2}, {"cpu_offload": True}],
    ids=str,
)  # fmt: skip
def test_every_way_of_sharding_computes_the_same(own_settings):
    bare, model = build(), build()
    expected, optimizer = adamw(bare), adamw(model)
    torchrig.prepare(model, optimizer, backend="aot_eager", fullgraph=True, fsdp2=own_settings, **FSDP)
    assert train(model, optimizer) == pytest.approx(train(bare, expected, part=whole))
    check_same(model, bare, **EXACT)
    assert torchrig.report(model).graphs == 1
