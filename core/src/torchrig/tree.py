"""A module tree, changed so that it can be changed back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

Undo = Callable[[], None]


class Undos(list[Undo]):
    """How to take back each thing that was done, in the order of doing."""

    def all(self) -> None:
        """Take back everything, last first."""
        while self:
            self.pop()()


@contextmanager
def undoing() -> Iterator[Undos]:
    """What was done inside is taken back where something raises.

    What cannot be taken back is noted on the error, and stops nothing.
    """
    undos = Undos()
    try:
        yield undos
    except BaseException as error:
        undo_all(undos, error)
        raise


class Places:
    """Where each module stands in a tree; found in one pass, when first asked.

    Args:
        root: The root of the tree.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._places: dict[int, list[tuple[nn.Module, str]]] | None = None

    def replace(self, module: nn.Module, other: nn.Module) -> Undo:
        """Put ``other`` in every place of ``module``, which is not the root; returns how to undo it."""
        places = self._of(module)
        for parent, name in places:
            parent._modules[name] = other

        def undo() -> None:
            for parent, name in places:
                parent._modules[name] = module

        return undo

    def _of(self, module: nn.Module) -> list[tuple[nn.Module, str]]:
        if self._places is None:
            self._places = {}
            for parent in self._root.modules():
                for name, child in parent._modules.items():
                    self._places.setdefault(id(child), []).append((parent, name))
        return self._places[id(module)]


def snapshot(root: nn.Module, *, data: bool = True) -> Undo:
    """Remember class, attributes, parameters and children of every module; returns how to bring them back.

    Of a tensor it is remembered where it stood and which data it had, so that one that was moved or converted comes
    back; a change written into its data stays.

    Args:
        root: The root of the tree.
        data: Whether the data of tensors is remembered; ``False`` where it will not be changed.
    """
    kept = [(module, type(module), dict(vars(module)), _parts(module)) for module in root.modules()]
    restore_data = tensors(root) if data else lambda: None

    def undo() -> None:
        restore_data()
        for module, cls, attributes, parts in kept:
            module.__class__ = cls
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for name, part in parts.items():
                attributes[name].clear()
                attributes[name].update(part)

    return undo


def tensors(root: nn.Module) -> Undo:
    """Remember every parameter and buffer with its data; returns how to bring them back."""
    kept = [(module, dict(module._parameters), dict(module._buffers)) for module in root.modules()]
    own = [part for _, parameters, buffers in kept for part in (*parameters.values(), *buffers.values())]
    data = [(tensor, tensor.data) for tensor in {id(each): each for each in own if each is not None}.values()]

    def undo() -> None:
        for tensor, before in data:
            tensor.data = before
        for module, parameters, buffers in kept:
            module._parameters.clear()
            module._parameters.update(parameters)
            module._buffers.clear()
            module._buffers.update(buffers)

    return undo


def undo_all(undos: list[Undo], error: BaseException) -> None:
    """Take back everything, last first; what cannot be taken back is noted on ``error`` and stops nothing."""
    while undos:
        try:
            undos.pop()()
        except Exception as failed:
            if hasattr(error, "add_note"):  # Python 3.11
                error.add_note(f"While taking back what was done, {type(failed).__name__}: {failed}")


def _parts(module: nn.Module) -> dict[str, dict[object, object]]:
    """Copies of the dictionaries of a module: its parameters, buffers, children and hooks."""
    return {name: dict(value) for name, value in vars(module).items() if isinstance(value, dict)}
