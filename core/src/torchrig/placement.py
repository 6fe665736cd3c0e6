"""Put a compiled forward on a module, and take it off again.

Three placements (DESIGN gives the measurements behind them):

``forward``
    The class's ``forward`` compiled once and bound to each instance. Hooks run outside the compiled code; type,
    ``state_dict`` keys and pickling stay; a deep copy binds to the copy.
``inplace``
    What ``module.compile()`` does. Needed where the instance carries a ``forward`` of its own.
``wrap``
    ``torch.compile(module)`` in the module's place, as accelerate's users know it.

A *layer* is a function that stands in an instance's ``forward`` and calls what was there before. The compiled forward
is one, a strategy's autocast is another. Layers lie on each other, and are found again by the mark they carry, on a
copy too.
"""

from __future__ import annotations

import copy
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from .errors import RegionError
from .tree import Undo

if TYPE_CHECKING:
    from .hookspecs import Region
    from .observe import Observation

Forward = Callable[..., Any]
_LAYER = "__torchrig_layer__"
CHECKPOINT = "checkpoint"  # the layer that computes a block again in the backward; it is compiled along
_MISSING = object()
IN_PLACE = "_compiled_call_impl"  # where nn.Module.compile leaves the compiled call


@dataclass(frozen=True)
class Under:
    """The ``forward`` an instance carried before a layer was put on it.

    Args:
        function: What was there; without its ``self`` where it was bound to the instance, so that a copy binds its own.
        bound: Whether it was bound to the instance.
    """

    function: Forward
    bound: bool

    def on(self, module: nn.Module) -> Forward:
        """What was there, for ``module``."""
        return types.MethodType(self.function, module) if self.bound else self.function


@dataclass(frozen=True)
class Layer:
    """What the function of a layer carries.

    Args:
        name: ``"compile"``, ``"checkpoint"``, or what a strategy calls its own.
        under: The instance's own ``forward`` before; ``None`` where the class's was in force.
        record: What observes the compiled code of a ``"compile"`` layer; what a ``"checkpoint"`` layer was made with.
        taken: Called with the module when the layer is taken off.
    """

    name: str
    under: Under | None = None
    record: Any = None
    taken: Callable[[nn.Module], None] | None = None


def put_layer(module: nn.Module, function: Forward, layer: Layer) -> Undo:
    """Bind ``function`` as the instance's ``forward``; goes past ``__setattr__``, which a user's class may define."""
    before = module.__dict__.get("forward", _MISSING)
    function.__dict__[_LAYER] = layer
    function.__name__ = "forward"  # a bound method is pickled as its object and this name
    module.__dict__["forward"] = types.MethodType(function, module)
    return lambda: _restore(module, "forward", before)


def _restore(module: nn.Module, name: str, value: Any) -> None:
    if value is _MISSING:
        module.__dict__.pop(name, None)
    else:
        module.__dict__[name] = value


def under(module: nn.Module) -> Under | None:
    """The ``forward`` that this instance carries of its own, layers included; ``None`` where the class's is in force.

    A bound method of the class's own ``forward``, as unpickling a prepared module leaves it, is none of its own.
    """
    forward = module.__dict__.get("forward")
    if forward is None:
        return None
    if getattr(forward, "__self__", None) is not module:
        return Under(forward, bound=False)
    return None if forward.__func__ is type(module).forward else Under(forward.__func__, bound=True)


def layers(module: nn.Module) -> Iterator[Layer]:
    """The layers on an instance's ``forward``, outermost first."""
    lying = under(module)
    while lying is not None:
        layer = getattr(lying.function, _LAYER, None) if lying.bound else None
        if layer is None:
            return
        yield layer
        lying = layer.under


def _own(module: nn.Module) -> Under | None:
    """The ``forward`` that an instance carries of its own, and that is no checkpoint's."""
    lying = under(module)
    while lying is not None and lying.bound:
        layer = getattr(lying.function, _LAYER, None)
        if layer is None or layer.name != CHECKPOINT:
            return lying
        lying = layer.under
    return lying


def take_layers(module: nn.Module) -> None:
    """Take every layer off, and leave the ``forward`` that was there before the first."""
    for layer in tuple(layers(module)):
        _restore(module, "forward", _MISSING if layer.under is None else layer.under.on(module))
        if layer.taken is not None:
            layer.taken(module)
    drop_pending(module)


def after_first_call(module: nn.Module, action: Callable[[nn.Module], None]) -> None:
    """Have ``action(module)`` called once, after the module's next call.

    A forward hook that takes itself off, but for a module compiled in place: its hooks are compiled with it.
    """
    call = module.__dict__.get(IN_PLACE)
    if call is None:
        module.register_forward_hook(_Once(action))
        return

    @functools.wraps(call)
    def first(*args: Any, **kwargs: Any) -> Any:
        module.__dict__[IN_PLACE] = call
        output = call(*args, **kwargs)
        action(module)
        return output

    module.__dict__[IN_PLACE] = first


def drop_pending(module: nn.Module) -> None:
    """Take off what :func:`after_first_call` left on a module that was not called since."""
    for key, hook in tuple(module._forward_hooks.items()):
        if isinstance(hook, _Once):
            del module._forward_hooks[key]


class _Once:
    """A forward hook that takes itself off, on a copy of the module too."""

    def __init__(self, action: Callable[[nn.Module], None]) -> None:
        self._action = action

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        drop_pending(module)
        self._action(module)


class RegionCompiler:
    """Compiles the instances of one region kind, with one context and one compiled ``forward``.

    Args:
        region: The kind.
        kwargs: The arguments for ``torch.compile``, as in the plan.
        observation: Has the backend object, with mode and options in it, and the record of the kind.
        varies: Whether a first dimension of that size varies; ``None`` where nothing is known to.
    """

    def __init__(
        self,
        region: Region,
        kwargs: Mapping[str, Any],
        observation: Observation,
        varies: Callable[[int], bool] | None = None,
    ) -> None:
        self._region = region
        self._varies = varies
        self._kwargs = kwargs
        self._observation = observation
        self._record = observation.record(region)
        self._compiled: dict[Forward, Forward] = {}

    def compile(self, module: nn.Module, placement: str) -> tuple[nn.Module, Undo]:
        """Compile one instance; returns what takes its place (itself, but for ``wrap``) and how to undo it."""
        if placement == "auto":
            placement = "forward" if _own(module) is None and is_plain(type(module)) else "inplace"
        if placement == "forward" and not is_plain(type(module)):
            raise RegionError(
                f"The forward of {type(module).__name__} is no plain method, so it cannot be bound to an instance. "
                "Leave placement to 'auto', or use 'inplace' or 'wrap'."
            )
        if placement == "wrap":
            return self._wrap(module)
        put = self._put_forward if placement == "forward" else self._put_inplace
        return module, put(module)

    def function(self, function: Forward) -> Forward:
        """A function compiled; the first call tells whether anything of it was."""
        compiled = self._context(function)

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            result = compiled(*args, **kwargs)
            if not self._record.checked:
                self._record.check_compiled()
            return result

        return run

    def left(self, reason: str) -> None:
        """Report that it runs eager after all."""
        self._record.left(reason)

    def _put_forward(self, module: nn.Module) -> Undo:
        lying = under(module)
        if lying is None:
            compiled = self._shared(self._region.cls.forward)
        elif lying.bound:  # the same function on several instances, as a checkpoint's is, is compiled once
            compiled = self._shared(lying.function)
        else:
            # The instance's own forward is compiled for itself: what it closes over is its own, and cannot be shared.
            compiled = self._context(with_self(lying.function))
        return put_layer(module, compiled, Layer("compile", lying, self._record))

    def _put_inplace(self, module: nn.Module) -> Undo:
        before = module.__dict__.get(IN_PLACE, _MISSING)
        _CopiesCompiled(module, self._context, Layer("compile", record=self._record)).put()

        def undo() -> None:
            take_inplace(module)
            _restore(module, IN_PLACE, before)

        return undo

    def _wrap(self, module: nn.Module) -> tuple[nn.Module, Undo]:
        from . import dynamo

        self._context.__dict__[_LAYER] = Layer("compile", record=self._record)
        return dynamo.wrap(self._context, module), lambda: None

    def _shared(self, function: Forward) -> Forward:
        if function not in self._compiled:
            self._compiled[function] = self._context(function)
        return self._compiled[function]

    @functools.cached_property
    def _context(self) -> Any:
        from . import dynamo

        return dynamo.watched_context(
            self._record,
            backend=self._observation.backend,
            fullgraph=self._kwargs["fullgraph"] and not self._record.falls_back,
            dynamic=self._kwargs["dynamic"],
            guard_filter_fn=(self._kwargs.get("options") or {}).get("guard_filter_fn"),
            varies=self._varies,
        )


def is_plain(cls: type[nn.Module]) -> bool:
    """Whether the class's ``forward`` is a function that takes the instance first."""
    forward = inspect.getattr_static(cls, "forward")
    return callable(forward) and not isinstance(forward, (staticmethod, classmethod))


class _CopiesCompiled:
    """Stands in ``__deepcopy__`` of a module compiled in place, and compiles the copy too.

    ``nn.Module.__getstate__`` leaves the compiled call behind, so a plain copy of such a module would run eager. So
    does a copy of a module with a ``__deepcopy__`` of its own, which stays.
    Pickled, this becomes ``None``, which ``copy.deepcopy`` takes for no method at all.
    """

    def __init__(self, module: nn.Module, context: Any, layer: Layer) -> None:
        self._module = module
        self._context = context
        self._layer = layer

    def put(self) -> None:
        """Compile the module in place and stand in its ``__deepcopy__``."""
        call = self._context(self._module._call_impl)
        call.__dict__[_LAYER] = self._layer
        self._module.__dict__[IN_PLACE] = call
        if getattr(self._module, "__deepcopy__", None) is None:
            self._module.__dict__["__deepcopy__"] = self

    def __call__(self, memo: dict[int, Any]) -> nn.Module:
        del self._module.__dict__["__deepcopy__"]
        try:
            copied = copy.deepcopy(self._module, memo)
        finally:
            self._module.__dict__["__deepcopy__"] = self
        _CopiesCompiled(copied, self._context, self._layer).put()
        return copied

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return (type(None), ())


def take_inplace(module: nn.Module) -> None:
    """Take an in-place compile off again; one of the user's own too."""
    module.__dict__.pop(IN_PLACE, None)
    if isinstance(module.__dict__.get("__deepcopy__"), _CopiesCompiled):
        del module.__dict__["__deepcopy__"]


def compile_layer(module: nn.Module) -> Layer | None:
    """The layer of torchrig's that compiles this very module, however it was placed."""
    for layer in layers(module):
        if layer.name == "compile":
            return layer
    return getattr(module.__dict__.get(IN_PLACE), _LAYER, None) or _wrap_layer(module)


def _wrap_layer(module: nn.Module) -> Layer | None:
    return getattr(module.__dict__.get("dynamo_ctx"), _LAYER, None)


def take_users_inplace(module: nn.Module) -> Undo:
    """Take the user's own ``module.compile()`` off; returns how to put it back."""
    before = module.__dict__.pop(IN_PLACE)
    return lambda: _restore(module, IN_PLACE, before)


def inside_compile(module: nn.Module) -> nn.Module | None:
    """The module inside ``torch.compile(module)``'s wrapper; ``None`` if it is not one.

    Told by the wrapper's own entry in ``vars``, so that neither Dynamo need be imported nor a user's attribute named
    ``_orig_mod`` is taken for one.
    """
    return module._modules["_orig_mod"] if "dynamo_ctx" in module.__dict__ else None


def record_of(module: nn.Module) -> Any:
    """What observes this module's compiled code; ``None`` if torchrig did not compile it."""
    layer = compile_layer(module)
    return None if layer is None else layer.record


def is_compiled(module: nn.Module) -> bool:
    """Whether this very module runs compiled, by torchrig or by the user's own call of ``torch.compile``."""
    in_place = module.__dict__.get(IN_PLACE) is not None
    return in_place or "dynamo_ctx" in module.__dict__ or compile_layer(module) is not None


def with_self(forward: Forward) -> Forward:
    """A function that takes the module first, and calls ``forward`` without it."""

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    return call
