"""The settings of a prepare: one frozen model, every value with its origin.

An argument wins over a ``TORCHRIG_*`` variable, that over the YAML file the user names (:meth:`Settings.from_yaml` or
``TORCHRIG_CONFIG``), that over accelerate's ``ACCELERATE_DYNAMO_*`` variables, and those over the default.
No file is read that nobody named.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, PrivateAttr, ValidationError
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from torchrig.catalogue import canonical
from torchrig.errors import SettingsError

from . import environment, layers, sources, values
from .validation import first_error
from .values import Spelled

if TYPE_CHECKING:
    from os import PathLike

M = TypeVar("M", bound=BaseModel)

Action = Annotated[Literal["warn", "raise", "ignore"], PlainValidator(values.one_of(*values.PROBLEM_ACTIONS))]


class OnProblem(BaseModel):
    """What is done about each kind of problem: ``"warn"``, ``"raise"`` or ``"ignore"``.

    Args:
        region_not_compiled: A region ran, and no graph was built for it.
        graph_break: A region was cut into more than one graph.
        recompile_limit: A region was recompiled as often as PyTorch allows, and runs eager from then on.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    region_not_compiled: Action = "warn"
    graph_break: Action = "warn"
    recompile_limit: Action = "warn"


class Row(NamedTuple):
    """One line of ``torchrig config show``."""

    name: str
    value: Any
    origin: str


class Settings(BaseSettings):
    """Everything that says how a model is prepared.

    Args:
        strategy: ``"auto"``, or the name of a strategy.
        backend: The name of a compile backend, or a callable that is one. Names are kept in lower case, with ``_`` for
            ``-``.
        mode: The backend's mode, such as ``"max-autotune"``. It excludes ``options``, as in ``torch.compile``.
        options: The backend's options, by name.
        fullgraph: Whether a graph break is an error.
        dynamic: Whether shapes are dynamic from the start; ``None`` decides at the first recompile.
        disable: Compile nothing.
        regions: ``"auto"`` (repeated blocks where there are any, else the whole model), ``"repeated"``, ``"whole"``,
            or a list of class names, classes, and patterns of module names such as ``"decoder.layers.*"``.
            ``use_regional_compilation`` is taken as an old name: true is ``"auto"``, false is ``"whole"``.
        exclude: What not to compile, written as such a list.
        placement: How the compiled code is put on a region: ``"auto"``, ``"forward"``, ``"inplace"`` or ``"wrap"``.
        reapply_compile: Whether a compile that the user applied before (``torch.compile(model)``,
            ``model.compile()``) is taken off, and applied again at its step. ``False`` leaves it in place.
        compile_loss: Compile the loss functions given to prepare, too.
        compile_optimizer: Compile ``optimizer.step()`` of the optimizers given to prepare, too.
        on_failure: When compiling raises: ``"raise"``, or ``"eager"`` to warn once and go on uncompiled.
        on_problem: ``"warn"``, ``"raise"`` or ``"ignore"``, for all problems or by kind; see :class:`OnProblem`.
        mixed_precision: ``"no"``, ``"bf16"`` or ``"fp16"``.
        activation_checkpointing: ``"full"`` keeps a block's inputs alone, and computes the rest again in the backward.
            ``"selective"`` also keeps the results of matrix products and attention. ``"none"`` keeps everything.
            Blocks are those that repeat, or those that ``regions`` names, compiled or not.
        activation_checkpointing_every: One block in so many is checkpointed.
        activation_checkpointing_save: The operators whose results ``"selective"`` keeps, such as ``["mm", "addmm"]``,
            as they are named in ``torch.ops.aten``; others with their namespace.
        transforms: The names of transforms, in the order in which they are applied.
        parallelize: A function ``(model, mesh)`` that parallelizes the model over a mesh of processes in a way of its
            own (tensor parallelism: ``torch.distributed.tensor.parallel.parallelize_module``), or its name as
            ``"module:function"``. Called before compiling and sharding, with the strategy's mesh. It may return the
            model; ``None`` is the model it was given.
        shard_loaders: Whether each of several processes gets a part of the samples of the loaders. ``False`` for
            loaders that read a part of their own already.
        device: The device to run on, as text or ``torch.device``; ``None`` takes an accelerator, else the CPU.
        **blocks: Plugins' own settings: a mapping under the plugin's name.

    Raises:
        SettingsError: A value, key or variable cannot be used. Names where it came from.
    """

    model_config = SettingsConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    strategy: Annotated[str, PlainValidator(values.name)] = "auto"
    backend: Annotated[str | Callable[..., Any], PlainValidator(values.backend)] = "no"
    mode: Annotated[str | None, PlainValidator(values.optional_text), Spelled(nullable=True)] = None
    options: Annotated[
        dict[str, Any] | None, PlainValidator(values.optional_mapping), Spelled("mapping", nullable=True)
    ] = None
    fullgraph: Annotated[bool, PlainValidator(values.flag)] = False
    dynamic: Annotated[bool | None, PlainValidator(values.optional_flag), Spelled(nullable=True)] = None
    disable: Annotated[bool, PlainValidator(values.flag)] = False
    regions: Annotated[str | list[str | type], PlainValidator(values.regions), Spelled("list")] = "auto"
    exclude: Annotated[list[str | type], PlainValidator(values.classes), Spelled("list")] = Field(default_factory=list)
    placement: Annotated[str, PlainValidator(values.one_of("auto", "forward", "inplace", "wrap"))] = "auto"
    reapply_compile: Annotated[bool, PlainValidator(values.flag)] = True
    compile_loss: Annotated[bool, PlainValidator(values.flag)] = False
    compile_optimizer: Annotated[bool, PlainValidator(values.flag)] = False
    on_failure: Annotated[str, PlainValidator(values.one_of("raise", "eager"))] = "raise"
    on_problem: Annotated[OnProblem, BeforeValidator(values.problems), Spelled("mapping")] = OnProblem()
    mixed_precision: Annotated[str, PlainValidator(values.one_of("no", "bf16", "fp16"))] = "no"
    activation_checkpointing: Annotated[str, PlainValidator(values.one_of("none", "full", "selective"))] = "none"
    activation_checkpointing_every: Annotated[int, PlainValidator(values.positive)] = 1
    activation_checkpointing_save: Annotated[
        list[str] | None, PlainValidator(values.optional_words), Spelled("list", nullable=True)
    ] = None
    transforms: Annotated[list[str], PlainValidator(values.names), Spelled("list")] = Field(default_factory=list)
    parallelize: Annotated[
        str | Callable[..., Any] | None, PlainValidator(values.optional_function), Spelled(nullable=True)
    ] = None
    shard_loaders: Annotated[bool, PlainValidator(values.flag)] = True
    device: Annotated[str | None, PlainValidator(values.device), Spelled(nullable=True)] = None
    blocks: dict[str, dict[str, Any]] = Field(default_factory=dict, repr=False)

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)

    def __init__(self, /, **arguments: Any) -> None:
        self._load(arguments, _configured_file)

    @classmethod
    def from_yaml(cls, path: str | PathLike[str], **arguments: Any) -> Settings:
        """Settings from a file, under the environment's variables and the arguments.

        Args:
            path: The file. ``TORCHRIG_CONFIG`` is not looked at.
            **arguments: As for :class:`Settings`.

        Raises:
            SettingsError: Also when the file cannot be read, is no YAML, or holds a key twice.
        """
        file = _path(path)
        made = cls.__new__(cls)
        made._load(arguments, lambda: (file, "argument"))
        return made

    def replace(self, **overrides: Any) -> Settings:
        """These settings with some changed. The environment is not read again.

        Args:
            **overrides: As arguments of :class:`Settings`: a mapping changes the keys it has, and leaves the others.

        Raises:
            SettingsError: As for :class:`Settings`.
        """
        origins: dict[str, str] = {}
        made = type(self).__new__(type(self))
        earlier = layers.Layer(self._given(), dict(self._origins))
        made._build(
            origins,
            sources.Arguments(type(self), origins, overrides),
            sources.Earlier(type(self), origins, earlier),
        )
        return made

    def origin(self, field: str) -> str:
        """Where a value came from.

        Args:
            field: A setting; ``"on_problem.graph_break"``, ``"fsdp2.reshard"`` for a key in one.

        Returns:
            ``"argument"``, ``"variable TORCHRIG_MODE"``, ``"train.yaml:3"``, or ``"default"`` where nobody set it.
        """
        return self._origins.get(field, "default")

    def rows(self) -> list[Row]:
        """Every setting, and every key of a mapping, with its value and origin."""
        return [Row(name, value, self.origin(name)) for name, value in _rows(self._nested())]

    def to_dict(self) -> dict[str, Any]:
        """The values as JSON can hold them; classes and callables by their qualified names."""
        return {name: values.plain(value) for name, value in self._nested().items()}

    def plugin_block(self, name: str) -> Mapping[str, Any] | None:
        """A plugin's own settings as they were given, not validated; ``None`` when there are none."""
        return self.blocks.get(canonical(name))

    def validate_block(self, name: str, model: type[M]) -> M:
        """A plugin's own settings, validated.

        Args:
            name: The plugin.
            model: Its settings model. Where nothing was given, its defaults are returned.

        Raises:
            SettingsError: Names ``plugin.field``, the origin, and the nearest valid choice.
        """
        block = self.plugin_block(name) or {}
        try:
            return model.model_validate(block)
        except ValidationError as error:
            raise first_error(error, model, block, canonical(name), self._origins) from None

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            super().__setattr__(name, value)
            return
        raise SettingsError(
            f"Settings do not change once made. Make others: settings.replace({name}=...).",
            setting=name,
            origin="argument",
        )

    def __eq__(self, other: object) -> bool:
        """Equal values, wherever they came from."""
        return isinstance(other, Settings) and self._nested() == other._nested()

    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The sources that this instance is made from, instead of pydantic-settings' own."""
        ordered: tuple[sources.Source, ...] = cast(InitSettingsSource, init_settings).init_kwargs["_sources"]
        return ordered

    def _load(self, arguments: Mapping[str, Any], find_file: Callable[[], tuple[str, str] | None]) -> None:
        cls, origins, file = type(self), dict[str, str](), find_file()
        self._build(
            origins,
            sources.Arguments(cls, origins, arguments),
            environment.Environment(cls, origins),
            *([sources.YamlFile(cls, origins, *file)] if file is not None else []),
            sources.Accelerate(cls, origins),
        )

    def _build(self, origins: dict[str, str], *ordered: sources.Source) -> None:
        try:
            super().__init__(_sources=ordered)  # settings_customise_sources takes them out again
        except ValidationError as error:
            merged = {name: value for each in reversed(ordered) for name, value in each.values.items()}
            raise first_error(error, type(self), merged, "", origins) from None
        living = {name for name, _ in _paths(self._nested())} | set(self._nested())
        self._origins = {name: origin for name, origin in origins.items() if name in living}
        self._check_mode_and_options()

    def _check_mode_and_options(self) -> None:
        if self.mode is None or self.options is None:
            return
        origins = dict.fromkeys((self.origin("mode"), self.origin("options")))
        raise SettingsError(
            f"mode {self.mode!r} and options are both given, and torch.compile takes only one of them. "
            "Set the other to None.",
            setting="mode",
            origin=" and ".join(origins),
        )

    def _given(self) -> dict[str, Any]:
        given = {name: getattr(self, name) for name in self.model_fields_set}
        if "on_problem" in given:
            given["on_problem"] = self.on_problem.model_dump(exclude_unset=True)
        return given

    def _nested(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in type(self).model_fields if name != layers.BLOCKS}
        return {**fields, "on_problem": self.on_problem.model_dump(), **self.blocks}


def _path(path: Any) -> str:
    try:
        return os.fsdecode(path)
    except (TypeError, ValueError):
        raise SettingsError(
            f"The path of a file is needed, and {values.shown(path)} is none.", origin="argument"
        ) from None


def _configured_file() -> tuple[str, str] | None:
    path = os.environ.get(environment.CONFIG_VARIABLE, "")
    return (path, f"variable {environment.CONFIG_VARIABLE}") if path.strip() else None


def _rows(nested: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in nested.items():
        if isinstance(value, dict) and value:
            yield from _rows(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _paths(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in inside:
        yield f"{prefix}{key}", inner
        yield from _paths(inner, f"{prefix}{key}.")
