"""Dynamic loss scaling for a loop that does not know of it.

Gradients are scaled inside a model only. One that enters the model, through an output, is multiplied by the scale;
one that leaves it, to a parameter or to an input, is divided by it. Outside, in ``.grad`` as in the loss, every
gradient has its true size: clipping, penalties on parameters, several optimizers and optimizers built later need not
know of the scale. A step whose gradients overflowed is skipped, by :mod:`torchrig.overflow`.
``docs/decisions/003-loss-scaling.md`` has the alternatives and the measurements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from torchrig.errors import SettingsError
from torchrig.nested import map_tensors

OUTPUT = "output"  # what a node of the autograd graph is to a scaling
EDGE = "edge"
Convert = Callable[[torch.Tensor], torch.Tensor]


class LossScaling:
    """The loss scale of one model; grows and backs off as :class:`torch.amp.GradScaler` does, and with its defaults.

    Args:
        init_scale: The first scale.
        growth_factor: What the scale is multiplied by after ``growth_interval`` good steps in a row.
        backoff_factor: What it is multiplied by after a step that was skipped.
        growth_interval: In optimizer steps.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        self.growth_factor = growth_factor
        self.backoff_factor = backoff_factor
        self.growth_interval = growth_interval
        self.skipped_steps = 0
        self._scale = init_scale
        self._good_steps = 0
        self._overflowed: bool | None = None  # since the last forward; None where nothing was stepped

    @property
    def scale(self) -> float:
        """The scale of the next backward."""
        return self._after_steps()[0]

    def state_dict(self) -> dict[str, Any]:
        """The state, in the form of ``GradScaler.state_dict``."""
        scale, good_steps = self._after_steps()
        return {
            "scale": scale,
            "growth_factor": self.growth_factor,
            "backoff_factor": self.backoff_factor,
            "growth_interval": self.growth_interval,
            "_growth_tracker": good_steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state of :meth:`state_dict`, or of a ``GradScaler``."""
        self._scale, self._good_steps = float(state["scale"]), int(state["_growth_tracker"])
        self.growth_factor, self.backoff_factor = state["growth_factor"], state["backoff_factor"]
        self.growth_interval = state["growth_interval"]
        self._overflowed = None

    def stepped(self, *, overflowed: bool) -> None:
        """Note an optimizer's step. The steps between two forwards count as one, as those between two ``update`` do."""
        self._overflowed = overflowed or bool(self._overflowed)
        self.skipped_steps += overflowed

    def run(self, module: nn.Module, call: Callable[..., Any], convert: Convert, args: Any, kwargs: Any) -> Any:
        """Call the model, with the gradients inside it scaled.

        Args:
            module: The model, whose attributes may hold losses after the call.
            call: Its forward.
            convert: What to do to each tensor it returns.
            args, kwargs: What to call it with.

        Raises:
            SettingsError: Part of the model is checkpointed the reentrant way, whose backward leaves it unseen.
        """
        if not torch.is_grad_enabled():
            return map_tensors(call(*args, **kwargs), convert)
        self._scale, self._good_steps = self._after_steps()
        self._overflowed = None
        args, kwargs = map_tensors((args, kwargs), self._enter)
        exits = _Exits(self, convert)
        outputs = map_tensors(call(*args, **kwargs), exits.returned)
        exits.attributes(module)
        self._unscale_edges(exits.nodes)
        for node in exits.nodes:
            node.metadata[self] = OUTPUT
        return outputs

    def _after_steps(self) -> tuple[float, int]:
        if self._overflowed is None:
            return self._scale, self._good_steps
        if self._overflowed:
            return self._scale * self.backoff_factor, 0
        if self._good_steps + 1 < self.growth_interval:
            return self._scale, self._good_steps + 1
        grown = self._scale * self.growth_factor
        return (grown if math.isfinite(grown) else self._scale), 0

    def _enter(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.requires_grad:
            return tensor
        # A copy, not a view: what the model writes into a view would cut the hook's node out of the graph.
        entered = tensor.clone()
        self._unscale(entered.grad_fn, range(1))
        return entered

    def _unscale_edges(self, roots: Sequence[Any]) -> None:
        """Divide by the scale on every edge of the graph below ``roots`` that leaves the model."""
        todo = list(roots)
        seen = set(todo)
        while todo:
            node = todo.pop()
            if self in node.metadata:  # done already: an input, or part of an earlier call's graph
                continue
            leaving = []
            _refuse_reentrant(node)
            for place, (below, _) in enumerate(node.next_functions):
                if below is None:
                    continue
                if self._leaves(below):
                    leaving.append(place)
                elif below not in seen:
                    seen.add(below)
                    todo.append(below)
            if leaving:
                self._unscale(node, leaving)

    def _leaves(self, node: Any) -> bool:
        return type(node).__name__ == "AccumulateGrad" or node.metadata.get(self) == OUTPUT

    def _unscale(self, node: Any, places: Sequence[int]) -> None:
        """Divide the gradients that ``node`` hands on at ``places``."""
        node.metadata[self] = EDGE
        node.register_hook(lambda gradients, _: self._unscaled(gradients, places))

    def scaled(self, gradient: torch.Tensor) -> torch.Tensor:
        """A gradient that enters the model, scaled.

        Raises:
            SettingsError: The backward is to be differentiated itself. What that brings would enter the model's graph
                elsewhere than at its outputs, and be divided by a scale it was never multiplied by.
        """
        if torch.is_grad_enabled():  # so it is in a backward with create_graph=True, and in no other
            raise SettingsError(
                "Loss scaling does not go with create_graph=True: the second derivative would be wrong by the scale. "
                "Use mixed_precision='bf16' for this model.",
                setting="mixed_precision",
            )
        return gradient * self._scale

    def _unscaled(self, gradients: Sequence[torch.Tensor | None], places: Sequence[int]) -> tuple[Any, ...]:
        inverse = (
            1.0 / self._scale
        )  # the present scale: it changes between backwards only, so it is the one multiplied by
        changed = list(gradients)
        for place in places:
            gradient = changed[place]
            changed[place] = None if gradient is None else gradient * inverse
        return tuple(changed)


class _Exits:
    """Where gradients enter the model: what it returned, and what it left in attributes.

    Args:
        scaling: The scaling of the model.
        convert: What to do to each tensor that the model returned.
    """

    def __init__(self, scaling: LossScaling, convert: Convert) -> None:
        self.nodes: list[Any] = []
        self._scaling = scaling
        self._convert = convert
        self._returned: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def returned(self, tensor: torch.Tensor) -> torch.Tensor:
        """What the caller gets for a tensor that the model returned; the same for the same tensor."""
        if id(tensor) not in self._returned:
            converted = self._convert(tensor)
            if tensor.requires_grad:
                converted = self._scaled(tensor.clone() if converted is tensor else converted)
            self._returned[id(tensor)] = (tensor, converted)
        return self._returned[id(tensor)][1]

    def attributes(self, module: nn.Module) -> None:
        """Scale what the forward left in attributes for the loss to use, such as an auxiliary loss."""
        for each in module.modules():
            own = vars(each)
            for name, value in own.items():
                if name not in _MODULES_OWN and _may_hold_losses(value):
                    changed = map_tensors(value, self._left)
                    if changed is not value:
                        own[name] = changed

    def _left(self, tensor: torch.Tensor) -> torch.Tensor:
        node: Any = tensor.grad_fn
        if node is None or node.metadata.get(self._scaling) == OUTPUT:
            return tensor
        return self._scaled(tensor.clone())

    def _scaled(self, copied: torch.Tensor) -> torch.Tensor:
        # A copy, because the model may use the tensor itself as well: that part of its gradient is scaled already.
        copied.register_hook(self._scaling.scaled)  # type: ignore[no-untyped-call]
        self.nodes.append(copied.grad_fn)
        return copied


_MODULES_OWN = frozenset(vars(nn.Module()))
_MOST_LOSSES = 256  # a longer list in an attribute is data, and looking through it at every step would cost time


def _may_hold_losses(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or (isinstance(value, (list, tuple, dict)) and len(value) <= _MOST_LOSSES)


def _refuse_reentrant(node: Any) -> None:
    if type(node).__name__ == "CheckpointFunctionBackward":
        raise SettingsError(
            "Loss scaling cannot see into a reentrant checkpoint: its gradients would be wrong by the scale. "
            "Use torch.utils.checkpoint with use_reentrant=False, or mixed_precision='bf16'.",
            setting="mixed_precision",
        )
