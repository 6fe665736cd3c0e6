"""Backends that are no plugins: names registered with PyTorch, and plain callables, dressed as plugins.

They take what ``torch.compile`` would pass them: a ``mode`` other than ``"default"``, and ``options``,
if their signature has a place for either.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchrig.catalogue import normalise
from torchrig.errors import BackendUnavailable, SettingsError
from torchrig.hookspecs import BackendInfo, CompileRequest, hookimpl


@dataclass(frozen=True)
class ForeignInfo(BackendInfo):
    """Of a backend that cannot list its modes and options: it says no to a request itself."""


class ForeignBackend:
    """A compiler function, or a name PyTorch knows, with the hooks of a backend.

    Args:
        name: What it is called in a plan and a report.
        backend: What ``torch.compile`` gets as ``backend``.
        function: The function that compiles, to see which arguments it takes.
        summary: One line about it.
    """

    def __init__(self, name: str, backend: Any, function: Callable[..., Any], summary: str) -> None:
        self.name = name
        self.backend = backend
        self.summary = summary
        self._takes = functools.partial(_takes, function)

    @hookimpl
    def describe(self) -> ForeignInfo:
        """Say what the backend is."""
        return ForeignInfo(name=self.name, summary=self.summary)

    @hookimpl
    def torch_compile_kwargs(self, request: CompileRequest) -> dict[str, Any]:
        """The backend with the mode and the options, unless it has no place for them."""
        mode = None if request.mode == "default" else request.mode
        asked = {"mode": mode, "options": dict(request.options or {}) or None}  # a copy: torch.compile pops from it
        given = {setting: value for setting, value in asked.items() if value is not None}
        for setting in given:
            if not self._takes(setting):
                raise SettingsError(
                    f"Backend {self.name!r} takes no {setting}: its function has no argument of that name.",
                    setting=setting,
                )
        return {"backend": self.backend, **given}


def from_callable(function: Callable[..., Any]) -> ForeignBackend:
    """Dress a compiler function ``(graph_module, example_inputs) -> callable`` as a backend."""
    return ForeignBackend(_name_of(function), function, function, "a callable given as the backend")


def registered_names(debug: bool = True) -> dict[str, str]:
    """The names PyTorch's own registry knows, as torchrig spells them -> as PyTorch does.

    ``debug=False`` leaves out those PyTorch itself tags as for debugging or as experimental.
    Imports ``torch._dynamo``, which takes about two seconds: ask it last.
    """
    from torch._dynamo import list_backends

    return {normalise(name): name for name in (list_backends(None) if debug else list_backends())}


def from_registered(name: str) -> ForeignBackend:
    """Dress a backend of PyTorch's registry, named as PyTorch spells it.

    Raises:
        BackendUnavailable: PyTorch knows the name and cannot load it.
    """
    from torch._dynamo import lookup_backend

    try:
        function = lookup_backend(name)
    except (Exception, SystemExit) as error:
        raise BackendUnavailable(
            f"Backend {name!r} is registered with PyTorch, which cannot load it: {type(error).__name__}: {error}"
        ) from error
    return ForeignBackend(normalise(name), name, function, "registered with PyTorch")


def _name_of(function: Callable[..., Any]) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", None) or type(function).__name__


def _takes(function: Callable[..., Any], argument: str) -> bool:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return True  # written in C: nothing is known of it, and torch.compile would try
    keywords = inspect.Parameter.VAR_KEYWORD
    return argument in parameters or any(each.kind is keywords for each in parameters.values())
