"""A module tree as it is: who holds whom, under which name, and which modules are built alike.

Children are read from ``vars(module)["_modules"]`` and compared by identity, so a class that overrides
``named_modules``, ``__getattr__``, ``__eq__``, ``__hash__`` or ``__len__`` is read like any other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from torchrig.errors import RegionError

# Swapped in at run time for the class a module was built from, whose name they carry behind one of these prefixes:
# by torch.nn.utils.parametrize, by fully_shard and by replicate.
_SWAPPED_IN = ("Parametrized", "FSDP", "Replicate")
_WRAPPED = "_orig_mod"
# Where a model names its blocks: diffusers the classes that repeat, transformers those that stay on one device.
AUTHORS_WORD = "_repeated_blocks"
DEVICES_WORD = "_no_split_modules"
_NONE: dict[str, Any] = {}


class ClassFacts:
    """What is asked of a class again and again, worked out once for all its instances.

    Args:
        cls: The class, as it is now.
    """

    __slots__ = ("built_from", "has_forward", "hints", "of_torch", "scripted", "torch_layer", "wrapper")

    def __init__(self, cls: type[nn.Module]) -> None:
        self.built_from = built_from(cls)
        # Read, not called for: a ScriptModule's forward is a descriptor that refuses to be asked on the class.
        self.has_forward = next(base for base in cls.__mro__ if "forward" in vars(base)) is not nn.Module
        # Told by name, because to import Dynamo takes seconds.
        self.wrapper = cls.__module__ == "torch._dynamo.eval_frame" and cls.__name__ == "OptimizedModule"
        self.scripted = any(base.__module__ == "torch.jit._script" for base in cls.__mro__)
        self.hints = {word: getattr(cls, word) for word in (AUTHORS_WORD, DEVICES_WORD) if hasattr(cls, word)}
        self.of_torch = _of_torch(self.built_from)
        self.torch_layer = any(_of_torch(base) for base in cls.__mro__ if base is not nn.Module)


class Node:
    """One module of a tree, at the first place where it is found.

    Args:
        module: The module.
        name: Its name in ``parent``.
        fqn: Its fully qualified name; ``""`` is the root.
        parent: The node that holds it; ``None`` for the root.
        facts: Of its class.
    """

    __slots__ = (
        "aliases",
        "children",
        "cls",
        "facts",
        "fqn",
        "held",
        "module",
        "name",
        "parent",
        "places",
        "shape",
        "size",
    )

    def __init__(self, module: nn.Module, name: str, fqn: str, parent: Node | None, facts: ClassFacts) -> None:
        self.module = module
        self.facts = facts
        self.name = name
        self.fqn = fqn
        self.parent = parent
        self.cls = facts.built_from
        # A ScriptModule cannot be compiled in parts: its children are not looked at.
        self.held: dict[str, nn.Module] = {} if facts.scripted else children_of(module)
        self.children: list[Node] = []
        self.places = 1  # how often its parent holds it
        self.aliases: list[str] = []  # its other names
        self.shape = -1  # equal for modules that are built alike
        self.size = 0  # elements of its parameters, its children's included

    @property
    def callable(self) -> bool:
        """Whether the module has a forward; a ModuleList, a ModuleDict and a ParameterList have none."""
        return self.facts.has_forward or "forward" in vars(self.module)

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
    """The modules that a module holds, by name."""
    return {name: child for name, child in vars(module).get("_modules", {}).items() if child is not None}


def _of_torch(cls: type) -> bool:
    return cls.__module__.startswith(("torch.nn.", "torch.ao."))


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
        self._facts: dict[type[nn.Module], ClassFacts] = {}
        self.root = self._add(model, "", None)
        self._read()

    def parents_first(self) -> Iterator[Node]:
        """Every node, in the order of ``named_modules``."""
        yield self.root
        yield from self.root.inside()

    def _facts_of(self, cls: type[nn.Module]) -> ClassFacts:
        facts = self._facts.get(cls)
        if facts is None:
            facts = self._facts[cls] = ClassFacts(cls)
        return facts

    def _add(self, module: nn.Module, name: str, parent: Node | None) -> Node:
        fqn = f"{parent.fqn}.{name}" if parent is not None and parent.fqn else name
        node = Node(module, name, fqn, parent, self._facts_of(type(module)))
        self.nodes[id(module)] = node
        if parent is not None:
            parent.children.append(node)
        return node

    def _read(self) -> None:
        # A stack rather than recursion: chains of modules may be deeper than Python's recursion limit.
        stack = [(self.root, iter(self.root.held.items()))]
        while stack:
            node, left = stack[-1]
            for name, child in left:
                entered = self._enter(node, name, child)
                if entered is not None and entered.held:
                    stack.append((entered, iter(entered.held.items())))
                    break
                if entered is not None:
                    self._finish(entered)
            else:
                self._finish(node)
                stack.pop()

    def _enter(self, parent: Node, name: str, child: nn.Module) -> Node | None:
        """The node of a module met for the first time; of one met before, note the other name."""
        while self._facts_of(type(child)).wrapper:
            name, child = f"{name}.{_WRAPPED}", _wrapped(child)
        known = self.nodes.get(id(child))
        if known is None:
            return self._add(child, name, parent)
        known.aliases.append(f"{parent.fqn}.{name}" if parent.fqn else name)
        known.places += known.parent is parent
        return None

    def _finish(self, node: Node) -> None:
        self.children_first.append(node)
        tensors, node.size = ((), 0) if node.facts.scripted else _tensors(vars(node.module))
        for child in node.children:
            node.size += child.size
        below = tuple([(name, self._shape_of(child)) for name, child in node.held.items()]) if node.held else ()
        node.shape = self._shapes.setdefault((node.cls, tensors, below), len(self._shapes))

    def _shape_of(self, module: nn.Module) -> int:
        while self._facts_of(type(module)).wrapper:
            module = _wrapped(module)
        return self.nodes[id(module)].shape  # -1 for a module that holds itself


def _wrapped(module: nn.Module) -> nn.Module:
    inner: nn.Module = vars(module)["_modules"][_WRAPPED]
    return inner


def _tensors(own: dict[str, Any]) -> tuple[tuple[Any, ...], int]:
    """Name and shape of a module's own parameters and buffers, and how many elements the parameters have."""
    found: list[tuple[str, torch.Size | None]] = []
    size = 0
    for name, tensor in own.get("_parameters", _NONE).items():
        if tensor is not None:
            lazy = is_lazy(tensor)
            found.append((name, None if lazy else tensor.shape))
            size += 0 if lazy else tensor.numel()
    for name, tensor in own.get("_buffers", _NONE).items():
        if tensor is not None:
            found.append((name, None if is_lazy(tensor) else tensor.shape))
    return tuple(found), size
