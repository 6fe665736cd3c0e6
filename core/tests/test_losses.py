"""Going backward from whatever a model returned."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from torchrig.losses import backward


class Named(dict):
    """As the outputs of the transformers library, which are mappings with attributes."""


@pytest.mark.parametrize(
    ("output", "gradient"),
    [
        (lambda a: (3 * a).sum(), 3.0),
        (lambda a: {"loss": (3 * a).sum(), "logits": a}, 3.0),
        (lambda a: Named(loss=(3 * a).sum(), logits=a), 3.0),
        (lambda a: SimpleNamespace(loss=(3 * a).sum()), 3.0),
        (lambda a: (a, [2 * a, torch.ones(2)], torch.ones(2, dtype=torch.long)), 3.0),
        (lambda a: {"loss": None, "logits": 2 * a}, 2.0),
        (lambda a: {"loss": torch.ones(()), "logits": 2 * a}, 2.0),
    ],
    ids=["scalar", "mapping", "named mapping", "attribute", "nested", "loss is none", "loss learns nothing"],
)
def test_a_loss_is_found_in_any_output(output, gradient):
    a = torch.ones(2, requires_grad=True)
    assert backward(output(a))
    assert a.grad.tolist() == [gradient, gradient]


@pytest.mark.parametrize("output", [torch.ones(2), None, {"loss": 3}], ids=str)
def test_what_learns_nothing_is_told(output):
    assert not backward(output)
