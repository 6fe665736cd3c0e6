"""One given value -> the value that is kept, or a refusal that a person can read.

The functions here know a value and nothing of where it came from; :mod:`torchrig.settings` adds the setting's name and
the origin to what they refuse.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

from pydantic import BaseModel

from torchrig.catalogue import normalise
from torchrig.spelling import nearest

TRUE = frozenset({"y", "yes", "t", "true", "on", "1"})
FALSE = frozenset({"n", "no", "f", "false", "off", "0"})
PROBLEM_ACTIONS = ("warn", "raise", "ignore")
REGION_WORDS = ("auto", "whole", "repeated")
_LONGEST_SHOWN = 80  # characters of a bad value that a message repeats


@dataclass(frozen=True)
class Spelled:
    """How a field is written in an environment variable.

    Args:
        form: ``"text"`` as it stands; ``"list"`` as a JSON list or words between commas; ``"mapping"`` as a JSON
            object, or one variable a key, after ``__``.
        nullable: Whether ``none`` and ``null`` mean ``None``.
    """

    form: Literal["text", "list", "mapping"] = "text"
    nullable: bool = False


class Refused(ValueError):
    """A value that cannot be kept.

    Args:
        message: What is wrong with it, to be read after the setting's name: ``"must be text, and is 3"``.
        choices: The valid values, if they can be listed.
        nearest: The valid value most like it.
        at: The index of the item at fault, in a list.
    """

    def __init__(
        self, message: str, *, choices: Iterable[str] = (), nearest: str | None = None, at: int | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.at = None if at is None else str(at)
        self.choices = tuple(choices)
        self.nearest = nearest


def shown(value: object) -> str:
    """A value as a message repeats it: short, on one line, whatever its ``__repr__`` does."""
    try:
        text = repr(value)
    except Exception:
        text = f"a {type(value).__name__}"
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST_SHOWN else text[: _LONGEST_SHOWN - 3] + "..."


def one_of(*choices: str) -> Callable[[Any], str]:
    """A check that takes one of ``choices``, in any case."""

    def check(value: Any) -> str:
        given = _plain(value)
        if isinstance(given, str) and given.strip().casefold() in choices:
            return given.strip().casefold()
        raise Refused(f"cannot be {shown(value)}.", choices=choices, nearest=nearest(given, choices))

    return check


def flag(value: Any) -> bool:
    """True or false; the words and digits that environment variables use are taken too."""
    if isinstance(value, bool):
        return value
    word = str(value).strip().casefold() if isinstance(value, (str, int)) else None
    if word in TRUE or word in FALSE:
        return word in TRUE
    raise Refused(f"cannot be {shown(value)}.", choices=("true", "false"), nearest=nearest(word, ("true", "false")))


def optional_flag(value: Any) -> bool | None:
    """As :func:`flag`, or ``None``."""
    return None if value is None else flag(value)


def positive(value: Any) -> int:
    """A whole number from 1; one written out, as in an environment variable, is taken too."""
    number = int(value) if isinstance(value, str) and value.strip().isdecimal() else value
    if isinstance(number, int) and not isinstance(number, bool) and number > 0:
        return number
    raise Refused(f"must be a whole number from 1, and is {shown(value)}.")


def name(value: Any) -> str:
    """The name of a plugin, normalised."""
    given = _plain(value)
    if isinstance(given, str) and normalise(given):
        return normalise(given)
    raise Refused(f"must be a name, and is {shown(value)}.")


def backend(value: Any) -> str | Callable[..., Any]:
    """The name of a backend, normalised, or a callable as it is."""
    if isinstance(value, type) and issubclass(value, Enum):  # callable, and no compiler
        members = [str(member.value) for member in value]
        raise Refused(f"must be one member of {value.__name__}, and is the class itself.", choices=members)
    if isinstance(value, (str, Enum)) or not callable(value):
        try:
            return name(value)
        except Refused:
            raise Refused(f"must be a backend's name or a callable, and is {shown(value)}.") from None
    return value  # type: ignore[no-any-return]


def optional_function(value: Any) -> str | Callable[..., Any] | None:
    """A callable as it is, or the text ``"module:function"`` that names one; or ``None``."""
    if value is None or (callable(value) and not isinstance(value, (type, Enum))):
        return value
    given = value.strip() if isinstance(value, str) else ""
    module, _, name = given.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), *name.split("."))):
        raise Refused(f"must be a function, or 'module:function' such as 'train:parallelize', and is {shown(value)}.")
    return given


def optional_text(value: Any) -> str | None:
    """A word, or ``None``."""
    if value is None:
        return None
    given = _plain(value)
    if isinstance(given, str) and given.strip():
        return given.strip()
    raise Refused(f"must be a word, and is {shown(value)}.")


def device(value: Any) -> str | None:
    """A device as text; a ``torch.device`` is known by its ``type``, so that torch need not be imported."""
    if value is None or isinstance(value, str):
        return optional_text(value)
    if isinstance(getattr(value, "type", None), str):
        return optional_text(str(value))
    raise Refused(f"must be a device such as 'cpu' or 'cuda:0', and is {shown(value)}.")


def optional_mapping(value: Any) -> dict[str, Any] | None:
    """A mapping from names to anything, or ``None``."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise Refused(f"must be a mapping from names to values, and is {shown(value)}.")
    return {_key(key): inner for key, inner in value.items()}


def _key(key: Any) -> str:
    if isinstance(key, str):
        return key
    raise Refused(f"has a key that is no text: {shown(key)}.")


def problems(value: Any) -> Any:
    """A mapping, or a model made of one; one action for all kinds was spread over them when it was read."""
    if isinstance(value, (Mapping, BaseModel)):
        return value
    raise Refused(
        f"cannot be {shown(value)}. Give one action, or a mapping from kinds of problem to actions.",
        choices=PROBLEM_ACTIONS,
        nearest=nearest(value, PROBLEM_ACTIONS),
    )


def regions(value: Any) -> str | list[str | type]:
    """One of the words of :data:`REGION_WORDS`, or a list that is not empty."""
    if isinstance(value, (str, Enum)):
        word = _plain(value)
        if isinstance(word, str) and word.strip().casefold() in REGION_WORDS:
            return word.strip().casefold()
        raise Refused(
            f"cannot be {shown(value)}. Class names and patterns of module names go into a list.",
            choices=REGION_WORDS,
            nearest=nearest(word, REGION_WORDS),
        )
    chosen = classes(value)
    if not chosen:
        raise Refused("is an empty list, which selects nothing. To compile nothing, say disable=True.")
    return chosen


def classes(value: Any) -> list[str | type]:
    """A list of class names, classes and patterns of module names."""
    return _list(value, _class, "class names, classes and patterns of module names")


def _class(item: Any) -> str | type:
    if isinstance(item, type):
        return item
    if isinstance(item, str) and item.strip():
        return item.strip()
    raise Refused("must be a class or its name.")


def names(value: Any) -> list[str]:
    """A list of plugins' names, normalised."""
    return _list(value, name, "names")


def optional_words(value: Any) -> list[str] | None:
    """A list of words, or ``None``."""
    return None if value is None else _list(value, _word, "words")


def _word(item: Any) -> str:
    if isinstance(item, str) and item.strip():
        return item.strip()
    raise Refused("must be a word.")


def _list(value: Any, check: Callable[[Any], Any], what: str) -> list[Any]:
    if isinstance(value, AbstractSet):
        value = sorted(value, key=str)  # a set has no order, and the same settings must compare equal
    if not isinstance(value, (list, tuple)):
        raise Refused(f"must be a list of {what}, and is {shown(value)}.")
    return [_item(item, check, what, index) for index, item in enumerate(value)]


def _item(item: Any, check: Callable[[Any], Any], what: str, index: int) -> Any:
    try:
        return check(item)
    except Refused:
        raise Refused(f"must be a list of {what}, and holds {shown(item)}.", at=index) from None


def _plain(value: Any) -> Any:
    """The value of an enum's member; anything else as it is."""
    return value.value if isinstance(value, Enum) else value


def plain(value: Any) -> Any:
    """A value as JSON can hold it: classes and functions by qualified name, what JSON has no word for by ``repr``."""
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    if isinstance(value, Enum):
        return plain(value.value)
    if value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return shown(value)
