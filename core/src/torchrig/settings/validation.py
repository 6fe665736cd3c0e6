"""pydantic's account of what is wrong -> one SettingsError that a person can read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, get_args

from pydantic import BaseModel, ValidationError

from torchrig.errors import SettingsError
from torchrig.spelling import nearest

from .values import Refused, shown

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

# What each of pydantic's error types wants; the types not listed have a text of their own that reads well enough.
_WANTED = {
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing_size": "a smaller number",
    "float_type": "a number",
    "float_parsing": "a number",
    "string_type": "text",
    "list_type": "a list",
    "tuple_type": "a list",
    "set_type": "a list",
    "dict_type": "a mapping",
    "mapping_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "dataclass_type": "a mapping",
    "callable_type": "a callable",
}


def first_error(
    error: ValidationError, model: type[BaseModel], given: Mapping[str, Any], prefix: str, origins: Mapping[str, str]
) -> SettingsError:
    """The first thing that pydantic found.

    Args:
        error: What pydantic raised.
        model: The model that refused.
        given: What it was given.
        prefix: The plugin whose block it is; empty for torchrig's own settings.
        origins: Where each value came from, by dotted name.
    """
    details = error.errors(include_url=False)
    detail, path = details[0], _given_path(details[0], given)
    cause = detail.get("ctx", {}).get("error")
    setting = ".".join([prefix] * bool(prefix) + path)
    origin = _origin(f"{setting}.{cause.at}" if isinstance(cause, Refused) and cause.at else setting, origins)
    if detail["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return _unknown(model, path, prefix, origin)
    if isinstance(cause, (Refused, SettingsError)):
        message = f"{setting} {cause.message}" if isinstance(cause, Refused) else cause.message
        return SettingsError(message, setting=setting, origin=origin, choices=cause.choices, nearest=cause.nearest)
    alike = [each for each in details if _given_path(each, given) == path]  # one for each member of a union
    choices = [choice for each in alike for choice in _choices(each)]
    return SettingsError(
        f"{setting} {_sentence(detail) if len(alike) == 1 else _sentence_of_union(alike)}",
        setting=setting,
        origin=origin,
        choices=choices,
        nearest=nearest(detail["input"], choices),
    )


def _sentence(detail: ErrorDetails) -> str:
    kind, value = detail["type"], shown(detail["input"])
    if kind == "missing":
        return "is needed, and is not given."
    if kind in ("literal_error", "enum"):
        return f"cannot be {value}."
    if kind in _WANTED:
        return f"must be {_WANTED[kind]}, and is {value}."
    text = detail["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    if text.startswith("Input should "):
        return f"must {text.removeprefix('Input should ')}, and is {value}."
    return f"cannot be {value}: {text.rstrip('.')}."


def _sentence_of_union(details: Iterable[ErrorDetails]) -> str:
    wanted: dict[str, None] = {}
    for detail in details:
        one_of = f"one of {', '.join(_choices(detail))}" if _choices(detail) else None
        wanted[one_of or _WANTED.get(detail["type"]) or detail["msg"].removeprefix("Input should be ")] = None
        value = shown(detail["input"])
    return f"must be {', or '.join(wanted)}, and is {value}."


def _choices(detail: ErrorDetails) -> list[str]:
    if detail["type"] not in ("literal_error", "enum"):
        return []
    expected = str(detail.get("ctx", {}).get("expected", ""))
    return re.findall(r"'([^']*)'", expected) or re.split(r", | or ", expected)


def _unknown(model: type[BaseModel], path: list[str], prefix: str, origin: str) -> SettingsError:
    key = path[-1]
    known = _fields(model, path[:-1])
    owner = ".".join([prefix] * bool(prefix) + path[:-1])
    where = f"{owner} has no setting" if owner else "There is no setting"
    return SettingsError(
        f"{where} {shown(key)}.",
        setting=f"{owner}.{key}" if owner else key,
        origin=origin,
        choices=known,
        nearest=nearest(key, known),
    )


def _fields(model: type[BaseModel], path: Iterable[str]) -> list[str]:
    """The names that the model takes at a path; empty where that cannot be told."""
    for name in path:
        info = model.model_fields.get(name)
        inner = next((each for each in _alternatives(info.annotation if info else None) if _is_model(each)), None)
        if inner is None:
            return []
        model = inner
    return [info.alias or name for name, info in model.model_fields.items()]


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    return (annotation, *get_args(annotation))


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _given_path(detail: ErrorDetails, given: Any) -> list[str]:
    """Pydantic's location without the steps that are in no document: the members of unions it tried."""
    path: list[str] = []
    for step in detail["loc"]:
        if _holds(given, step):
            given = given[step]
        elif detail["type"] != "missing" or step != detail["loc"][-1]:
            continue
        path.append(str(step))
    return path


def _holds(given: Any, step: str | int) -> bool:
    if isinstance(given, list):
        return isinstance(step, int) and step < len(given)
    return isinstance(given, Mapping) and step in given


def _origin(setting: str, origins: Mapping[str, str]) -> str:
    """The origin of a setting, or of the nearest thing around it that has one."""
    while setting not in origins and "." in setting:
        setting = setting.rpartition(".")[0]
    return origins.get(setting, "default")
