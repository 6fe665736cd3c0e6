"""``MODULE:FACTORY`` -> the model it makes; whatever goes wrong in the user's code is one line that says where."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrig.errors import ArgumentError

if TYPE_CHECKING:
    from torch import nn


def build(factory: str) -> nn.Module:
    """Build the model that ``"module:attribute"`` names; the module is looked for in the working directory too.

    Raises:
        ArgumentError: The name has no such form, nothing of that name is there, it makes no model, or the user's code
            raised.
    """
    module, _, attribute = factory.partition(":")
    if not module or not attribute or module.startswith("."):
        raise ArgumentError(f"{factory!r} must have the form module:factory, such as train:build_model.")
    with _working_directory_first():
        found = _import(module)
        for name in attribute.split("."):
            try:
                found = getattr(found, name)
            except AttributeError as error:
                raise ArgumentError(f"{factory!r} cannot be found: {error}.") from error
        return _model(found, factory)


@contextmanager
def _working_directory_first() -> Iterator[None]:
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        yield
    finally:
        if here in sys.path:  # the user's code may have changed the path
            sys.path.remove(here)


def _import(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        lacking = error.name or ""
        if module == lacking or module.startswith(f"{lacking}."):
            raise ArgumentError(f"The module {module!r} cannot be found: {error}.") from error
        raise ArgumentError(
            f"The module {module!r} was found, and it imports {lacking!r}, which is not there{_where(error)}."
        ) from error
    except (Exception, SystemExit) as error:
        raise ArgumentError(f"The module {module!r} was found, and its import fails: {_told(error)}") from error


def _model(found: Any, factory: str) -> nn.Module:
    from torch import nn

    from torchrig.arguments import kind_of

    if isinstance(found, nn.Module):
        return found
    if not callable(found):
        raise ArgumentError(f"{factory!r} is {kind_of(found)}, neither a module nor something that makes one.")
    try:
        made = found()
    except (Exception, SystemExit) as error:
        raise ArgumentError(f"{factory}() raised {_told(error)}") from error
    if not isinstance(made, nn.Module):
        raise ArgumentError(f"{factory}() must return an nn.Module, and returned {kind_of(made)}.")
    return made


def _told(error: BaseException) -> str:
    """An error on one line: its type, its message and its place."""
    said = error.msg if isinstance(error, SyntaxError) else str(error)
    message = " ".join(said.split()).rstrip(".")
    return f"{type(error).__name__}{f': {message}' if message else ''}{_where(error)}."


def _where(error: BaseException) -> str:
    """The line of the user's own code that led to the error, in brackets; nothing where none did."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({_short(error.filename)}:{error.lineno})"
    outside = (str(Path(importlib.__file__).parent), "<frozen importlib", __file__)
    frames = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith(outside)]
    own = [each for each in frames if _is_here(each.filename)] or frames
    return f" ({_short(own[-1].filename)}:{own[-1].lineno})" if own else ""


def _is_here(filename: str) -> bool:
    path = Path(filename)
    return path.is_relative_to(Path.cwd()) and "site-packages" not in path.parts


def _short(filename: str) -> str:
    return str(Path(filename).relative_to(Path.cwd())) if Path(filename).is_relative_to(Path.cwd()) else filename
