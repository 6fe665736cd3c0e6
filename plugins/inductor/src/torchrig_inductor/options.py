"""The options TorchInductor takes, and whether a value is of an option's type: the one touch of its configuration.

``torch.compile`` makes the same checks when it is called, and says no with a ``RuntimeError``;
here they are made before the model is touched.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, get_origin

from torchrig import SettingsError

# torch.compile takes this one out of the options itself; it is not Inductor's.
GUARD_FILTER = "guard_filter_fn"


@functools.cache
def names() -> tuple[str, ...]:
    """Every option's name, as ``torch._inductor.list_options()`` gives them."""
    import torch._inductor

    return (*torch._inductor.list_options(), GUARD_FILTER)


def check(options: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the options, each name spelled as Inductor does. (A copy, because ``torch.compile`` pops from it.)

    Raises:
        SettingsError: A value is not of its option's type.
    """
    spelled = {name.replace("-", "_"): value for name, value in options.items()}
    for name, value in spelled.items():
        _check_value(name, value)
    return spelled


def _check_value(name: str, value: Any) -> None:
    if name == GUARD_FILTER:
        fits, expected = callable(value), "a callable"
    else:
        wanted = _type_of(name)
        # As PyTorch: a subscripted type, such as list[int] or a union, is not checked.
        fits = get_origin(wanted) is not None or isinstance(value, wanted)
        expected = getattr(wanted, "__name__", str(wanted))
    if not fits:
        raise SettingsError(
            f"Option {name!r} of backend 'inductor' is of type {expected}, and {value!r} is {type(value).__name__}.",
            setting="options",
        )


def _type_of(name: str) -> Any:
    # get_type is added to the module by torch.utils._config_module (PyTorch 2.6 to 2.13), where
    # torch.compile finds it too; there is no public way to ask for an option's type.
    from torch._inductor import config

    return config.get_type(name)  # type: ignore[attr-defined]
