"""The places that settings come from, as pydantic-settings wants them: one source, one layer.

From the strongest to the weakest: arguments, ``TORCHRIG_*`` variables (:mod:`torchrig.environment`), one YAML file,
accelerate's variables. Mappings are merged key by key between the layers; everything else is replaced.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

from . import yamlfile
from .layers import BLOCKS, Copier, Layer, refusal, tidy
from .values import Refused, flag

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo


class Source(PydanticBaseSettingsSource):
    """One layer.

    Args:
        settings_cls: The settings model.
        origins: Shared by all sources of one set of settings. They run from the strongest on, so the first one to name
            an origin is right.

    Attributes:
        values: The layer's values, once the source has run.
    """

    def __init__(self, settings_cls: type[BaseSettings], origins: dict[str, str]) -> None:
        super().__init__(settings_cls)
        self._origins = origins
        self.values: dict[str, Any] = {}

    @abstractmethod
    def layer(self) -> Layer:
        """Read the values."""

    def __call__(self) -> dict[str, Any]:
        """The layer's values; notes their origins."""
        layer = self.layer()
        for name, origin in layer.origins.items():
            self._origins.setdefault(name, origin)
        self.values = layer.values
        return layer.values

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        """One field's value; pydantic-settings asks for the method, though it calls the source as a whole."""
        return self.values.get(field_name), field_name, False

    @property
    def fields(self) -> Mapping[str, FieldInfo]:
        """The settings that have a name of their own."""
        return {name: info for name, info in self.settings_cls.model_fields.items() if name != BLOCKS}


class Earlier(Source):
    """The values of settings made before, which others are to replace."""

    def __init__(self, settings_cls: type[BaseSettings], origins: dict[str, str], layer: Layer) -> None:
        super().__init__(settings_cls, origins)
        self._layer = layer

    def layer(self) -> Layer:
        """The layer that was given."""
        return self._layer


class Arguments(Source):
    """Keyword arguments."""

    def __init__(self, settings_cls: type[BaseSettings], origins: dict[str, str], given: Mapping[str, Any]) -> None:
        super().__init__(settings_cls, origins)
        self._given = given

    def layer(self) -> Layer:
        """Copies of the mappings and lists given, so that later changes to them change no settings."""
        origins: dict[str, str] = {}
        return tidy(Layer(Copier("argument", origins).copy(self._given, ()), origins), self.fields)


class YamlFile(Source):
    """One file, named by the user."""

    def __init__(self, settings_cls: type[BaseSettings], origins: dict[str, str], path: str, named_by: str) -> None:
        super().__init__(settings_cls, origins)
        self._path, self._named_by = path, named_by

    def layer(self) -> Layer:
        """Read the file."""
        return tidy(Layer(*yamlfile.read(self._path, self._named_by)), self.fields)


class Accelerate(Source):
    """The variables in which ``accelerate launch`` hands on its dynamo settings.

    The launcher always sets all five, to its own defaults where the user said nothing (accelerate 1.15,
    ``accelerate/utils/launch.py`` and ``commands/launch.py``: backend NO, mode default, and flags that are False unless
    given). A default therefore says nothing here: USE_DYNAMIC=False must not force static shapes, nor
    USE_REGIONAL_COMPILATION=False the whole model.
    """

    def layer(self) -> Layer:
        """Read the five variables."""
        layer = Layer()
        for name, setting, read in _ACCELERATE:
            value = _accelerated(f"ACCELERATE_DYNAMO_{name}", setting, read)
            if value is not None:
                layer.values[setting] = value
                layer.origins[setting] = f"variable ACCELERATE_DYNAMO_{name}"
        return layer


def _accelerated(name: str, setting: str, read: Callable[[str], Any]) -> Any:
    text = os.environ.get(name, "").strip()
    try:
        return read(text) if text.lower() not in ("", "none") else None
    except Refused as error:
        raise refusal(error, setting, f"variable {name}") from None


def _unless(default: str) -> Callable[[str], str | None]:
    return lambda text: None if text.lower() == default else text


def _if_asked(value: Any) -> Callable[[str], Any]:
    return lambda text: value if flag(text) else None


_ACCELERATE: tuple[tuple[str, str, Callable[[str], Any]], ...] = (
    ("BACKEND", "backend", _unless("no")),
    ("MODE", "mode", _unless("default")),
    ("USE_FULLGRAPH", "fullgraph", _if_asked(True)),
    ("USE_DYNAMIC", "dynamic", _if_asked(True)),
    ("USE_REGIONAL_COMPILATION", "regions", _if_asked("auto")),
)
