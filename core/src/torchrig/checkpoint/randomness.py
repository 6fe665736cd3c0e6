"""The states of the random generators, as tensors."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

from torchrig.tree import Undo


def capture() -> dict[str, torch.Tensor]:
    """The states of torch, of its accelerator where one is in use, of Python, and of numpy where it is loaded."""
    states = {"torch": torch.get_rng_state()}
    device = _device_module()
    if device is not None:
        states["device"] = device.get_rng_state()
    _, words, gauss = random.getstate()
    states["python"] = torch.tensor(words, dtype=torch.int64)
    states["python_gauss"] = torch.tensor([] if gauss is None else [gauss], dtype=torch.float64)
    kind, words, position, has_gauss, cached = _numpy().get_state() if _numpy() is not None else ("", (), 0, 0, 0.0)
    if kind == "MT19937":
        states["numpy"] = torch.tensor([*map(int, words), position, has_gauss], dtype=torch.int64)
        states["numpy_gauss"] = torch.tensor([cached], dtype=torch.float64)
    return states


def restore(states: Mapping[str, torch.Tensor]) -> Undo:
    """Set the generators to ``states``; those that are not in it, or not in use, stay as they are."""
    before = capture()
    _set(states)
    return lambda: _set(before)


def _set(states: Mapping[str, torch.Tensor]) -> None:
    torch.set_rng_state(states["torch"])
    device = _device_module()
    if device is not None and "device" in states:
        device.set_rng_state(states["device"])
    gauss = states["python_gauss"].tolist()
    random.setstate((random.getstate()[0], tuple(states["python"].tolist()), gauss[0] if gauss else None))
    if _numpy() is not None and "numpy" in states:
        *words, position, has_gauss = states["numpy"].tolist()
        _numpy().set_state(("MT19937", words, position, has_gauss, states["numpy_gauss"].item()))


def _numpy() -> Any:
    return getattr(sys.modules.get("numpy"), "random", None)


def _device_module() -> Any:
    """What has the accelerator's random state; ``None`` without one, or before its first use."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return None
    module = torch.get_device_module(accelerator)
    used = getattr(module, "is_initialized", lambda: True)()
    return module if used and hasattr(module, "get_rng_state") else None
