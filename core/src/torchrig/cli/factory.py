"""``MODULE:NAME`` -> the model or batch it makes; what goes wrong in the user's code is one line that says where."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
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
    with working_directory_first():
        return _model(_find(factory), factory)


def build_batch(factory: str) -> Any:
    """The batch that ``"module:attribute"`` names: a tensor, tuple, list or mapping, or what a function of it returns.

    Raises:
        ArgumentError: As for :func:`build`; or what is found is no batch.
    """
    from torch import Tensor

    with working_directory_first():
        made = _find(factory)
        if callable(made) and not isinstance(made, (Tensor, Mapping)):
            made = _made(made, factory)
    if isinstance(made, (Tensor, tuple, list, Mapping)):
        return made
    from torchrig.arguments import kind_of

    raise ArgumentError(
        f"{factory!r} must be a tensor, a tuple, a dict, or a function that returns one, and gives {kind_of(made)}."
    )


def told(error: BaseException) -> str:
    """An error on one line: its type, its message and its place."""
    said = error.msg if isinstance(error, SyntaxError) else str(error)
    message = " ".join(said.split()).rstrip(".")
    return f"{type(error).__name__}{f': {message}' if message else ''}{_where(error)}."


def _find(name: str) -> Any:
    module, _, attribute = name.partition(":")
    if not module or not attribute or module.startswith("."):
        raise ArgumentError(f"{name!r} must have the form module:factory, such as train:build_model.")
    found = _import(module)
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            raise ArgumentError(f"{name!r} cannot be found: {error}.") from error
    return found


@contextmanager
def working_directory_first() -> Iterator[None]:
    """Have the user's own modules found, also those that their code imports late."""
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
        raise ArgumentError(f"The module {module!r} was found, and its import fails: {told(error)}") from error


def _model(found: Any, factory: str) -> nn.Module:
    from torch import nn

    from torchrig.arguments import kind_of

    if isinstance(found, nn.Module):
        return found
    if not callable(found):
        raise ArgumentError(f"{factory!r} is {kind_of(found)}, neither a module nor something that makes one.")
    made = _made(found, factory)
    if not isinstance(made, nn.Module):
        raise ArgumentError(f"{factory}() must return an nn.Module, and returned {kind_of(made)}.")
    return made


def _made(found: Callable[[], Any], factory: str) -> Any:
    try:
        return found()
    except (Exception, SystemExit) as error:
        raise ArgumentError(f"{factory}() raised {told(error)}") from error


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
