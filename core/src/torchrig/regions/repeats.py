"""Which modules of a tree repeat: the outermost modules that one compiled graph can serve several of.

A module is considered where it stands in a *row*, beside its like: in a ModuleList, a Sequential or a ModuleDict, or
among the attributes of any module. A row repeats when two of its members are built alike, that is, of one class (or of
a class and its subclass) with the same children and the same parameter shapes. Then all its members are taken, so a
stack of dense and MoE layers is taken whole. Four rules keep the level right:

- Hints go first. A class that the model names in ``_repeated_blocks`` or ``_no_split_modules`` is taken where it
  stands in a row, if a named class occurs at least twice. ``_repeated_blocks`` says that a class is worth compiling,
  so nothing else below the model that has it is taken; ``_no_split_modules`` is about devices, so structure adds to it.
- Members that differ, and each of which holds a row of the same class directly, are *stages* (Swin, ConvNeXt,
  ResNet): their blocks are taken instead. So is what a Sequential of repeated modules holds.
- Attributes of different names have different roles (``encoder`` and ``decoder``): what repeats inside them goes first.
  Attributes are taken only where they hold at least half of what their parent holds.
- The only module of a ModuleList, and members that merely differ in shape, are blocks, not places to look into:
  the experts of an MoE block must not become regions because the block occurs once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Set
from dataclasses import dataclass

from torch import nn

from .structure import AUTHORS_WORD, DEVICES_WORD, Node, Tree

_NO_NAMES: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Row:
    """Modules that stand side by side.

    Args:
        members: The modules.
        attributes: Whether they are attributes of a module, rather than held by a container.
        mixed: Whether modules of different classes have the same role here.
        numbered: Whether they are told apart by a number, rather than by a name.
    """

    members: list[Node]
    attributes: bool
    mixed: bool
    numbered: bool

    @property
    def stands_in_line(self) -> bool:
        """Whether it is a row in the plain sense: in a container, or numbered."""
        return self.numbered or not self.attributes


class Repeats:
    """What repeats in a tree.

    Args:
        tree: The tree; it is read, never changed.

    ``found`` lists the nodes, in the tree's order; ``hinted`` says for a class who named it.
    """

    def __init__(self, tree: Tree) -> None:
        self.hinted: dict[type[nn.Module], str] = {}
        self._inside: dict[Node, list[Node]] = {}
        self._barren: set[int] = set()  # shapes in which nothing repeats: looked into once, not once for each instance
        self._authored = _authored(tree)
        self.hinted.update({cls: why for _, classes in self._authored.items() for cls, why in classes.items()})
        self.hinted.update({cls: why for cls, why in _device_hints(tree).items() if cls not in self.hinted})
        for node in tree.children_first:
            self._inside[node] = self._look(node)
        self.found = self._everywhere(tree)

    def _look(self, node: Node) -> list[Node]:
        """The outermost repeated modules inside a node."""
        if node in self._authored:
            return _outermost(node, self._authored[node])
        if not node.children or node.shape in self._barren:
            return []
        taken: list[Node] = []
        for row in rows(node):
            taken.extend(self._look_along(row))
        if not taken:
            self._barren.add(node.shape)
        return taken

    def _look_along(self, row: Row) -> list[Node]:
        blocks: list[Node] = []
        taken: list[Node] = []
        for member in row.members:
            if is_block(member):
                blocks.append(member)
            else:
                taken.extend(self._inside[member])
        for group in _groups(blocks, row):
            taken.extend(self._take(group, row))
        return taken

    def _take(self, group: list[Node], row: Row) -> list[Node]:
        """The members of a group, or what repeats inside them, or nothing."""
        inside = [unit for member in group for unit in self._inside[member]]
        named = [member for member in group if member.cls in self.hinted and row.stands_in_line]
        alike = _alike(group, row)
        if not named and any(unit.cls in self.hinted and _deep(unit) for unit in inside):
            return inside
        if self._are_stages(group, alike) and (len(group) > 1 or named or self._may_enter(group[0], row)):
            return inside
        if named:
            return group if row.mixed else named
        if alike:
            return inside if self._better_inside(group, row) else group
        return inside if len(group) == 1 and self._may_enter(group[0], row) else []

    def _are_stages(self, group: list[Node], alike: int) -> bool:
        """Whether the members differ, and each directly holds, in a row, modules of one class that is taken.

        Where some of the members are alike, layers in a row are not enough to make stages of them: a ResNet's blocks
        hold rows of convolutions, and the first of them differs.
        """
        if alike == len(group) and not all(issubclass(member.cls, nn.Sequential) for member in group):
            return False
        if 0 < alike < len(group) and not any(_deep(unit) for member in group for unit in self._inside[member]):
            return False
        direct = [list(_directly_held(member)) for member in group]
        taken = {unit for member in group for unit in self._inside[member]}
        classes = {held.cls for members in direct for held in members if held in taken}
        return bool(classes) and all(any(held.cls in classes for held in members) for members in direct)

    def _better_inside(self, group: list[Node], row: Row) -> bool:
        if not row.attributes:
            return False
        if not row.numbered and all(self._inside[member] for member in group):
            return True
        parent = group[0].parent
        assert parent is not None
        rest = sum(child.size for child in parent.children if child.held or not child.facts.torch_layer)
        return sum(member.size for member in group) * 2 < rest

    def _may_enter(self, only: Node, row: Row) -> bool:
        """Whether a module without its like is a place to look into: not the one block of a list."""
        if not row.mixed or row.attributes or issubclass(only.cls, nn.Sequential):
            return True
        if len(row.members) > 1:
            return True
        return any(_deep(unit) for unit in self._inside[only])

    def _everywhere(self, tree: Tree) -> list[Node]:
        """What repeats, and the same classes wherever else they stand."""
        taken = set(self._inside[tree.root])
        if tree.root in self._authored or not taken:
            return [node for node in tree.parents_first() if node in taken]
        around = {(above, _kind(node)) for node in taken for above in _above(node)}
        classes = {_kind(node) for node in taken}
        closed = set(self._authored)
        found: list[Node] = []
        stack = [tree.root]
        while stack:
            node = stack.pop()
            kind = _kind(node)
            like = kind in classes and (node, kind) not in around and node is not tree.root
            if node in taken or (like and not any(above in closed for above in _above(node))):
                found.append(node)
            else:
                stack.extend(node.children[::-1])
        # What was taken may lie in one that was found by its class; then it gives no reason to take its like elsewhere.
        classes = {_kind(node) for node in found if node in taken}
        return [node for node in found if _kind(node) in classes]


def is_block(node: Node) -> bool:
    """Whether a module is worth a region of its own: it runs, and it is more than a layer of ``torch.nn``.

    A module without children is one only where its class is the user's own and it has parameters.
    """
    if not node.callable or node.facts.scripted:
        return False
    # What it holds, and not its nodes: a module whose children are all shared with another holds them too.
    return bool(node.held) or (not node.facts.torch_layer and node.size > 0)


def rows(node: Node) -> list[Row]:
    """The rows in which a node's children stand."""
    if issubclass(node.cls, nn.ModuleList):
        return [Row(node.children, attributes=False, mixed=True, numbered=True)]
    if issubclass(node.cls, nn.Sequential):
        return [Row(node.children, attributes=False, mixed=False, numbered=True)]
    attributes = not issubclass(node.cls, nn.ModuleDict)
    by_stem: dict[str, list[Node]] = {}
    for child in node.children:
        by_stem.setdefault(_stem(child.name), []).append(child)
    numbered = [members for members in by_stem.values() if len(members) > 1]
    lone = [members[0] for members in by_stem.values() if len(members) == 1]
    made = [Row(members, attributes and len(members) < len(node.children), True, True) for members in numbered]
    return made + ([Row(lone, attributes, mixed=False, numbered=False)] if lone else [])


def _stem(name: str) -> str:
    """A name without its number: ``layer`` for ``layer3``; names without a number keep themselves apart."""
    own = name.removesuffix("._orig_mod")
    without = "".join(letter for letter in own if not letter.isdigit())
    return without if without != own else f"{own}."


def _groups(blocks: list[Node], row: Row) -> list[list[Node]]:
    """The members of a row that have one role: those of one class or of a class and its subclass.

    In a mixed row that is everyone, as soon as two of them are alike.
    """
    families: list[list[Node]] = []
    by_class: dict[type[nn.Module], list[Node]] = {}
    for block in blocks:
        family = by_class.get(block.cls)
        if family is None:
            family = next((by_class[cls] for cls in by_class if _related(cls, block.cls)), None)
            if family is None:
                family = []
                families.append(family)
            by_class[block.cls] = family
        family.append(block)
    if row.mixed and any(_alike(family, row) for family in families):
        return [blocks]
    return families


def _related(one: type[nn.Module], other: type[nn.Module]) -> bool:
    bases = {nn.Module, nn.Sequential, nn.ModuleList, nn.ModuleDict}
    return (issubclass(one, other) and other not in bases) or (issubclass(other, one) and one not in bases)


def _alike(group: list[Node], row: Row) -> int:
    """How many members have their like in the group; a class beside its subclass is alike in a mixed row."""
    shapes = Counter(member.shape for member in group)
    classes = {member.cls for member in group}
    mixes = {
        cls for cls in classes if row.mixed and any(cls is not other and _related(cls, other) for other in classes)
    }
    return sum(1 for member in group if shapes[member.shape] > 1 or member.places > 1 or member.cls in mixes)


def _directly_held(node: Node) -> Iterable[Node]:
    """The modules that stand in a row right inside a node, or in containers that it holds."""
    for row in rows(node):
        for member in row.members:
            container = not member.callable or issubclass(member.cls, nn.Sequential)
            if row.stands_in_line:
                yield member
            if container:
                yield from _directly_held(member)


def _above(node: Node) -> Iterable[Node]:
    while node.parent is not None:
        node = node.parent
        yield node


def _deep(node: Node) -> bool:
    """Whether a module is made of modules that are made of modules, as a block is and an MLP is not."""
    return any(part.children for part in node.children)


def _kind(node: Node) -> object:
    """A class of the user's own; of a class of torch.nn, which may hold anything, only what is built alike."""
    return (node.cls, node.shape) if node.facts.of_torch else node.cls


def _outermost(node: Node, classes: Iterable[type[nn.Module]]) -> list[Node]:
    wanted = set(classes)
    found: list[Node] = []
    stack = node.children[::-1]
    while stack:
        below = stack.pop()
        if below.cls in wanted:
            found.append(below)
        else:
            stack.extend(below.children[::-1])
    return found


def _names(node: Node, attribute: str) -> Set[str]:
    """The class names of a hint, on the module or on its class; empty where there is none, or it is something else."""
    value = vars(node.module).get(attribute) or node.facts.hints.get(attribute)
    if value is None:
        return _NO_NAMES
    if isinstance(value, str):
        return {value}
    return (
        {name for name in value if isinstance(name, str)} if isinstance(value, (list, tuple, set, frozenset)) else set()
    )


def _named(cls: type[nn.Module], names: Set[str]) -> bool:
    return any(base.__name__ in names for base in cls.__mro__ if base is not nn.Module)


def _authored(tree: Tree) -> dict[Node, dict[type[nn.Module], str]]:
    """The models with ``_repeated_blocks``, and the classes they name, where at least one of these repeats."""
    found: dict[Node, dict[type[nn.Module], str]] = {}
    for node in tree.children_first:
        names = _names(node, AUTHORS_WORD)
        if names:
            counts = Counter(below.cls for below in node.inside() if _named(below.cls, names))
            if any(count > 1 for count in counts.values()):
                found[node] = dict.fromkeys(counts, f"named in {node.cls.__name__}.{AUTHORS_WORD}")
    return found


def _device_hints(tree: Tree) -> dict[type[nn.Module], str]:
    """The classes named in ``_no_split_modules`` that stand in a row, where at least one of these repeats."""
    by_name: dict[str, str] = {}
    for node in tree.parents_first():
        for name in _names(node, DEVICES_WORD):
            by_name.setdefault(name, f"named in {node.cls.__name__}.{DEVICES_WORD}")
    if not by_name:
        return {}
    counts: Counter[type[nn.Module]] = Counter()
    for node in tree.children_first:
        for row in rows(node) if node.children else ():
            if row.stands_in_line:
                counts.update(_named_in(row, set(by_name)))
    if not any(count > 1 for count in counts.values()):
        return {}
    return {cls: next(by_name[base.__name__] for base in cls.__mro__ if base.__name__ in by_name) for cls in counts}


def _named_in(row: Row, names: Set[str]) -> Counter[type[nn.Module]]:
    counts: Counter[type[nn.Module]] = Counter()
    for member in row.members:
        if _named(member.cls, names):
            counts[member.cls] += member.places
    return counts
