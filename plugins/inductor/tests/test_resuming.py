"""A run goes on compiled by Inductor where it was eager, and the other way round."""

from __future__ import annotations

import pytest
import torch
from ranks import adamw, batch, build, loss_of

import torchrig


def steps(model, optimizer, first, count):
    losses = []
    for step in range(first, first + count):
        loss = loss_of(model, batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.slow_compile
@pytest.mark.parametrize(("source", "to"), [("inductor", "no"), ("no", "inductor")])
def test_a_run_goes_on_under_another_backend(tmp_path, source, to):
    first, second = build(torch.float32), build(torch.float32)
    one, two = adamw(first), adamw(second)
    first, one = torchrig.prepare(first, one, backend=source)
    steps(first, one, 0, 3)
    torchrig.save_checkpoint(tmp_path / "run", first, one, step=3)
    second, two = torchrig.prepare(second, two, backend=to)
    loaded = torchrig.load_checkpoint(tmp_path / "run", second, two)
    assert steps(second, two, loaded["step"], 4) == pytest.approx(steps(first, one, 3, 4), abs=1e-5)
