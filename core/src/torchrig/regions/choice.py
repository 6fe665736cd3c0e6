"""A module tree -> its regions: the modules that are worth one compiled graph for each kind.

What repeats is found in :mod:`torchrig.repeats`; here it is chosen as asked, grouped into kinds and explained.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from torch import nn

from torchrig.errors import RegionError
from torchrig.hookspecs import Region

from .repeats import Repeats
from .structure import Node, Tree

Item = str | type[nn.Module]
_PLACES_TOLD = 3


def find_regions(
    model: nn.Module,
    spec: str | type[nn.Module] | Sequence[Item] = "auto",
    exclude: str | type[nn.Module] | Sequence[Item] = (),
) -> tuple[Region, ...]:
    """Find what to compile in a model. Reads the module tree alone: nothing is changed, and nothing runs.

    Args:
        model: The model.
        spec: ``"auto"``: the repeated blocks where there are any, else the whole model. ``"repeated"``: the repeated
            blocks. ``"whole"``: the whole model. Or a list of class names (``"Block"``, ``"package.module.Block"``),
            classes, and patterns of module names (``"encoder.layers.*"``; ``*`` matches dots too). A class stands for
            its subclasses as well.
        exclude: Class names, classes and patterns; what they match is no region, nor is anything inside it.

    Returns:
        One region for each class, in the order of their first instances. A module that stands in several places has
        one name, the first. No region lies inside another.

    Raises:
        RegionError: Nothing repeats and ``"repeated"`` was asked for; an item matches nothing, or nothing that can be
            compiled; ``exclude`` leaves nothing, or names a part of a region.
    """
    tree = Tree(model)
    found, reasons = _chosen(tree, spec)
    kept = _without(tree, found, _items(exclude))
    return _regions(kept, reasons)


def find_blocks(model: nn.Module, spec: str | type[nn.Module] | Sequence[Item]) -> tuple[Region, ...]:
    """The repeated blocks, or what was asked for by name, whether or not anything is compiled.

    Args:
        model: The model.
        spec: As for :func:`find_regions`; each of the words stands for the repeated blocks.

    Raises:
        RegionError: Nothing repeats; an item matches nothing.
    """
    return find_regions(model, "repeated" if isinstance(spec, str) else spec)


def _items(given: str | type[nn.Module] | Sequence[Item]) -> list[Item]:
    return [given] if isinstance(given, (str, type)) else list(given)


def _chosen(tree: Tree, spec: str | type[nn.Module] | Sequence[Item]) -> tuple[list[Node], dict[type[nn.Module], str]]:
    """The nodes asked for, and by class the words that go before where they stand."""
    if spec == "whole":
        return [_whole(tree)], {tree.root.cls: "the whole model, as asked for"}
    if spec in ("auto", "repeated"):
        repeats = Repeats(tree)
        if repeats.found:
            return repeats.found, repeats.hinted
        if spec == "repeated":
            raise RegionError(_nothing_repeats(tree))
        return [_whole(tree)], {tree.root.cls: "nothing repeats: the whole model"}
    return _selected(tree, _items(spec))


def _whole(tree: Tree) -> Node:
    if not _compilable(tree.root):
        why = "is TorchScript already" if tree.root.facts.scripted else "has no forward of its own"
        raise RegionError(
            f"{tree.root.cls.__name__} {why}, so the whole model cannot be compiled, and nothing in it repeats. "
            "Prepare the module whose forward you call, or name the regions."
        )
    return tree.root


def _compilable(node: Node) -> bool:
    return node.callable and not node.facts.scripted


def _nothing_repeats(tree: Tree) -> str:
    classes = Counter(node.cls.__name__ for node in tree.root.inside() if node.children and node.callable)
    seen = ", ".join(f"{count} {name}" for name, count in classes.most_common(5)) or "no module that holds others"
    return (
        f'regions="repeated", and no blocks repeat in {tree.root.cls.__name__}. Looked at: {len(tree.nodes)} modules '
        f"({seen}), the hints _repeated_blocks and _no_split_modules, and modules of one class that are built alike "
        'and stand side by side. Name the classes (regions=["Block"]), or use regions="whole".'
    )


def _selected(tree: Tree, items: list[Item]) -> tuple[list[Node], dict[type[nn.Module], str]]:
    if not items:
        raise RegionError('regions is an empty list, which selects nothing. Name classes, or use regions="whole".')
    wanted: dict[Node, Item] = {}
    for item in items:
        for node in _compilable_matches(tree, item):
            wanted.setdefault(node, item)
    found = _outermost(tree, wanted)
    nested = Counter(_holder(node, found).cls for node in wanted if node not in found)
    reasons: dict[type[nn.Module], str] = {}
    for node in found:
        reasons.setdefault(node.cls, f"asked for as {_shown(wanted[node])}" + _nested(nested[node.cls]))
    return list(found), reasons


def _nested(count: int) -> str:
    return f" ({count} more asked for inside {'it is part' if count == 1 else 'are parts'} of it)" if count else ""


def _compilable_matches(tree: Tree, item: Item) -> list[Node]:
    matches = _matches(tree, item)
    usable = [node for node in matches if _compilable(node)]
    if not usable:
        classes = ", ".join(sorted({node.cls.__name__ for node in matches}))
        raise RegionError(
            f"regions: {_shown(item)} matches {classes} alone, which is never called, so it cannot be compiled. "
            "Name what it holds: a class, or a pattern such as "
            f"{(matches[0].fqn + '.*').lstrip('.')!r}."
        )
    return usable


def _matches(tree: Tree, item: Item, setting: str = "regions") -> list[Node]:
    matches = [node for node in tree.parents_first() if _is_match(node, item)]
    if not matches:
        raise RegionError(_no_match(tree, item, setting))
    return matches


def _is_match(node: Node, item: Item) -> bool:
    if isinstance(item, type):
        return issubclass(type(node.module), item)
    if any(item in (cls.__name__, _qualified(cls)) for cls in type(node.module).__mro__ if cls is not nn.Module):
        return True
    return any(fnmatchcase(name, item) for name in (node.fqn, *node.aliases))


def _no_match(tree: Tree, item: Item, setting: str) -> str:
    model = tree.root.cls.__name__
    if isinstance(item, type) and not issubclass(item, nn.Module):
        return f"{setting}: {item.__name__} is no nn.Module, so no part of {model} is one."
    name = item.__name__ if isinstance(item, type) else item
    classes = sorted({node.cls.__name__ for node in tree.parents_first()})
    names = classes + [node.fqn for node in tree.parents_first() if node.fqn]
    near = difflib.get_close_matches(name, names[:5000], 3, cutoff=0.5)
    hint = f"Nearest: {', '.join(near)}." if near else f"Its classes: {', '.join(classes[:20])}."
    what = "an instance of" if isinstance(item, type) else "of the class, or of a name that matches,"
    return f"{setting}: {model} has no module {what} {_shown(item)}. {hint}"


def _shown(item: Item) -> str:
    return item.__name__ if isinstance(item, type) else repr(item)


def _qualified(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _outermost(tree: Tree, wanted: Iterable[Node]) -> dict[Node, None]:
    asked = set(wanted)
    found: dict[Node, None] = {}
    stack = [tree.root]
    while stack:
        node = stack.pop()
        if node in asked:
            found[node] = None
        else:
            stack.extend(node.children[::-1])
    return found


def _holder(node: Node, found: Iterable[Node]) -> Node:
    """The chosen node that a node lies in."""
    chosen = set(found)
    while node not in chosen:
        assert node.parent is not None
        node = node.parent
    return node


def _without(tree: Tree, found: list[Node], exclude: list[Item]) -> list[Node]:
    """What is left of the found nodes."""
    kept = found
    for item in exclude:
        matches = set(_matches(tree, item, "exclude"))
        kept = [node for node in kept if not _lies_in(node, matches)]
        _refuse_parts(item, matches, found)
    if not kept:
        kinds = ", ".join(sorted({node.cls.__name__ for node in found}))
        raise RegionError(
            f"exclude takes out every region that was found ({kinds}), so there is nothing to compile. "
            'Exclude less, name other regions, or turn compiling off with backend="no".'
        )
    return kept


def _lies_in(node: Node | None, matches: set[Node]) -> bool:
    while node is not None:
        if node in matches:
            return True
        node = node.parent
    return False


def _refuse_parts(item: Item, matches: set[Node], found: list[Node]) -> None:
    """A part of a region cannot stay eager by itself; say so rather than compile what was excluded."""
    kept = {node for node in found if not _lies_in(node, matches)}
    for match in matches:
        above = match.parent
        while above is not None and above not in kept:
            above = above.parent
        if above is not None:
            where = above.fqn or "the whole model"
            raise RegionError(
                f"exclude: {_shown(item)} matches {match.fqn!r}, a part of the region {above.cls.__name__} ({where}), "
                "and a part of a region cannot be left out. Exclude that region, or name smaller regions."
            )


def _regions(found: list[Node], reasons: dict[type[nn.Module], str]) -> tuple[Region, ...]:
    by_class: dict[type[nn.Module], list[Node]] = {}
    for node in found:
        by_class.setdefault(node.cls, []).append(node)
    kinds = _kinds(list(by_class))
    return tuple(
        Region(kinds[cls], cls, tuple(node.fqn for node in nodes), _reason(nodes, reasons.get(cls)))
        for cls, nodes in by_class.items()
    )


def _kinds(classes: list[type[nn.Module]]) -> dict[type[nn.Module], str]:
    """A unique name for each class: its own, its qualified one, or that with a number."""
    own = Counter(cls.__name__ for cls in classes)
    full = Counter(_qualified(cls) for cls in classes)
    seen: Counter[str] = Counter()
    kinds: dict[type[nn.Module], str] = {}
    for cls in classes:
        name = cls.__name__ if own[cls.__name__] == 1 else _qualified(cls)
        seen[name] += 1
        kinds[cls] = f"{name}#{seen[name]}" if own[cls.__name__] > 1 and full[name] > 1 else name
    return kinds


def _reason(nodes: list[Node], before: str | None) -> str:
    if nodes[0].parent is None:
        return before or "the whole model"
    return "; ".join(part for part in (before, _where(nodes)) if part)


def _where(nodes: list[Node]) -> str:
    """``12 alike in layers (ModuleList)``."""
    parents = Counter(node.parent for node in nodes)
    told = [f"{count} in {_place(parent)}" for parent, count in parents.items() if parent is not None]
    more = [f"and in {len(told) - _PLACES_TOLD} more places"] if len(told) > _PLACES_TOLD else []
    structures = len({node.shape for node in nodes})
    if len(nodes) == 1:
        return _one(nodes[0])
    alike = "alike" if structures == 1 else f"of {structures} structures"
    if len(parents) == 1:
        return f"{len(nodes)} {alike} in {_place(nodes[0].parent)}"
    return f"{len(nodes)} {alike}: {', '.join(told[:_PLACES_TOLD] + more)}"


def _one(node: Node) -> str:
    if node.places > 1:
        return f"one module in {node.places} places of {_place(node.parent)}"
    return f"1 in {_place(node.parent)}"


def _place(parent: Node | None) -> str:
    if parent is None or not parent.fqn:
        return "the model" if parent is None else f"the model ({parent.cls.__name__})"
    return f"{parent.fqn} ({parent.cls.__name__})"
