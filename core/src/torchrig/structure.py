"""A module tree as it is: who holds whom, under which name, and which modules are built alike.

Children are read from ``vars(module)["_modules"]`` and compared by identity, so a class that overrides
``named_modules``, ``__getattr__``, ``__eq__``, ``__hash__`` or ``__len__`` is read like any other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from .errors import RegionError

# Swapped in at run time for the class a module was built from, whose name they carry behind one of these prefixes:
# by torch.nn.utils.parametrize, by fully_shard and by replicate.
_SWAPPED_IN = ("Parametrized", "FSDP", "Replicate")


class Node:
    """One module of a tree, at the first place where it is found.

    Args:
        module: The module.
        name: Its name in ``parent``.
        fqn: Its fully qualified name; ``""`` is the root.
        parent: The node that holds it; ``None`` for the root.
    """

    __slots__ = ("aliases", "children", "cls", "fqn", "module", "name", "parent", "places", "shape", "size")

    def __init__(self, module: nn.Module, name: str, fqn: str, parent: Node | None) -> None:
        self.module = module
        self.name = name
        self.fqn = fqn
        self.parent = parent
        self.cls = built_from(type(module))
        self.children: list[Node] = []
        self.places = 1  # how often its parent holds it
        self.aliases: list[str] = []  # its other names
        self.shape = -1  # equal for modules that are built alike
        self.size = 0  # elements of its parameters, its children's included

    @property
    def callable(self) -> bool:
        """Whether the module has a forward; a ModuleList, a ModuleDict and a ParameterList have none."""
        return "forward" in vars(self.module) or type(self.module).forward is not nn.Module.forward

    def inside(self) -> Iterator[Node]:
        """Every node below this one, parents first."""
        stack = self.children[::-1]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children[::-1])


def built_from(cls: type[nn.Module]) -> type[nn.Module]:
    """The class that a module was built from, where another was swapped in for it."""
    for base in cls.__bases__:
        if any(cls.__name__ == prefix + base.__name__ for prefix in _SWAPPED_IN) and issubclass(base, nn.Module):
            return built_from(base)
    return cls


def children_of(module: nn.Module) -> dict[str, nn.Module]:
    """The modules that a module holds, by name; none for a ``ScriptModule``, which cannot be compiled in parts."""
    held: dict[str, nn.Module | None] = {} if is_scripted(module) else vars(module).get("_modules", {})
    return {name: child for name, child in held.items() if child is not None}


def is_scripted(module: nn.Module) -> bool:
    """Whether a module is TorchScript already."""
    return any(base.__module__ == "torch.jit._script" for base in type(module).__mro__)


def is_torch_compiled(module: nn.Module) -> bool:
    """Whether a module is the wrapper that ``torch.compile`` makes. Told by name: importing Dynamo takes seconds."""
    return type(module).__module__ == "torch._dynamo.eval_frame" and "_orig_mod" in vars(module).get("_modules", {})


def resolve(model: nn.Module, fqn: str) -> nn.Module:
    """The module of a fully qualified name.

    Args:
        model: The model.
        fqn: The name, as ``named_modules`` gives it; ``""`` is the model itself.

    Raises:
        RegionError: There is no module of that name.
    """
    module = model
    for name in fqn.split(".") if fqn else ():
        child = vars(module).get("_modules", {}).get(name)
        if child is None:
            raise RegionError(
                f"{type(model).__name__} has no module {fqn!r}: {type(module).__name__} holds no {name!r}. "
                "If the model was changed after its regions were found, find them again."
            )
        module = child
    return module


class Tree:
    """The nodes of a model, each module once, read in one pass.

    Args:
        model: The model; it is read, never changed.
    """

    def __init__(self, model: nn.Module) -> None:
        self.nodes: dict[int, Node] = {}
        self.children_first: list[Node] = []
        self._shapes: dict[Any, int] = {}
        self.root = self._add(model, "", None)
        self._read()

    def parents_first(self) -> Iterator[Node]:
        """Every node, in the order of ``named_modules``."""
        yield self.root
        yield from self.root.inside()

    def _add(self, module: nn.Module, name: str, parent: Node | None) -> Node:
        prefix = f"{parent.fqn}." if parent is not None and parent.fqn else ""
        node = Node(module, name, prefix + name, parent)
        self.nodes[id(module)] = node
        if parent is not None:
            parent.children.append(node)
        return node

    def _read(self) -> None:
        held = children_of(self.root.module)
        # A stack rather than recursion: chains of modules may be deeper than Python's recursion limit.
        stack = [(self.root, held, iter(held.items()))]
        while stack:
            node, held, left = stack[-1]
            for name, child in left:
                entered = self._enter(node, name, child)
                if entered is not None:
                    below = children_of(entered.module)
                    stack.append((entered, below, iter(below.items())))
                    break
            else:
                self._finish(node, held)
                stack.pop()

    def _enter(self, parent: Node, name: str, child: nn.Module) -> Node | None:
        """The node of a module met for the first time; of one met before, note the other name."""
        while is_torch_compiled(child):
            name, child = f"{name}._orig_mod", vars(child)["_modules"]["_orig_mod"]
        known = self.nodes.get(id(child))
        if known is None:
            return self._add(child, name, parent)
        known.aliases.append(f"{parent.fqn}.{name}" if parent.fqn else name)
        known.places += known.parent is parent
        return None

    def _finish(self, node: Node, held: dict[str, nn.Module]) -> None:
        self.children_first.append(node)
        tensors = _tensors(node.module)
        node.size = sum(size for _, _, size in tensors) + sum(child.size for child in node.children)
        below = tuple((name, self._shape_of(child)) for name, child in held.items())
        key = (node.cls, tuple((name, shape) for name, shape, _ in tensors), below)
        node.shape = self._shapes.setdefault(key, len(self._shapes))

    def _shape_of(self, module: nn.Module) -> int:
        while is_torch_compiled(module):
            module = vars(module)["_modules"]["_orig_mod"]
        return self.nodes[id(module)].shape  # -1 for a module that holds itself


def _tensors(module: nn.Module) -> list[tuple[str, tuple[int, ...] | None, int]]:
    """Name, shape and elements of a module's own parameters and buffers; buffers count no elements."""
    if is_scripted(module):
        return []
    own = vars(module)
    found: list[tuple[str, tuple[int, ...] | None, int]] = []
    for name, tensor in own.get("_parameters", {}).items():
        if tensor is not None:
            found.append((name, None, 0) if is_lazy(tensor) else (name, tuple(tensor.shape), tensor.numel()))
    for name, tensor in own.get("_buffers", {}).items():
        if tensor is not None:
            found.append((name, None if is_lazy(tensor) else tuple(tensor.shape), 0))
    return found
