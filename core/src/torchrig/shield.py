"""The first run of a compiled graph, forward and backward: a backend that fails in it falls back to eager.

Many backends compile, or load what they compiled, only when it first runs. From the run on that went well, forward and
backward, a graph is called just as the backend gave it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import get_device_states, set_device_states

Graph = Callable[..., Sequence[Any]]


class Shielded:
    """A compiled graph whose place the traced one takes if it raises at first.

    Args:
        compiled: What the backend made.
        traced: The graph that it was made of, to be run as it is.
        failed: Told of what the backend raised.
    """

    def __init__(self, compiled: Graph, traced: Graph, failed: Callable[[Exception], None]) -> None:
        self.compiled = compiled
        self.traced = traced
        self._failed = failed
        self._run = self._first

    def __call__(self, *args: Any) -> Sequence[Any]:
        """Run the graph on its inputs, as Dynamo passes them."""
        return self._run(*args)

    def proven(self) -> None:
        """It ran, and its backward where it has one: nothing stands around it from now on."""
        if self._run == self._first:
            self._run = self.compiled

    def fall_back(self, error: Exception) -> None:
        """Run the traced graph from now on."""
        if self._run != self.traced:  # what another call of the graph had under way fails too, and is no news
            self._run = self.traced
            self._failed(error)

    def _first(self, *args: Any) -> Sequence[Any]:
        before, surroundings = list(map(_unwritten, args)), _Surroundings(args)
        learns = torch.is_grad_enabled() and any(_learns(each) for each in args)
        try:
            if learns:
                return _FirstBackward(self, args, surroundings).outputs()
            outputs = self.compiled(*args)
        except Exception as error:
            if _is_checkpoints(error):
                raise
            surroundings.bring_back()
            _write_back(args, before)
            if _is_about_leaves(error):  # the graph writes into an input, which then cannot be detached
                return self._unshielded(args, before, surroundings)
            return self._traced_instead(args, error)
        self.proven()
        return outputs

    def _unshielded(self, args: Sequence[Any], before: Sequence[Any], surroundings: _Surroundings) -> Sequence[Any]:
        try:
            outputs = self.compiled(*args)
        except Exception as error:
            surroundings.bring_back()
            _write_back(args, before)
            return self._traced_instead(args, error)
        self.proven()
        return outputs

    def _traced_instead(self, args: Sequence[Any], error: Exception) -> Sequence[Any]:
        outputs = self.traced(*args)  # raises too where the fault is the user's
        self.fall_back(error)
        return outputs


class _FirstBackward:
    """One run of the graph on detached inputs, so that its backward runs where what it raises can be caught.

    Args:
        graph: The graph.
        args: Its inputs.
        surroundings: What it runs under.
    """

    def __init__(self, graph: Shielded, args: Sequence[Any], surroundings: _Surroundings) -> None:
        self._graph = graph
        self._args = args
        self._surroundings = surroundings
        self._leaves = [_leaf(each) for each in args]
        self._outputs = list(graph.compiled(*self._leaves))
        self._spent = False

    def outputs(self) -> list[Any]:
        """What the graph returned, joined to the inputs by a node whose backward is :meth:`gradients`."""
        places = [place for place, each in enumerate(self._outputs) if _learns(each)]
        joined: Any = _Joined.apply(self, places, *self._args)  # type: ignore[no-untyped-call]
        outputs = list(self._outputs)
        for place, each in zip(places, joined, strict=True):
            outputs[place] = each
        return outputs

    def detached(self, places: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """Those outputs, without what made them."""
        return tuple(self._outputs[place].detach() for place in places)

    def gradients(self, places: Sequence[int], given: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """The gradient of each input, by the compiled backward; by that of the traced graph if it raises."""
        if torch.is_grad_enabled():  # create_graph=True: what is found must depend on the inputs themselves
            return self._traced_again(places, given, list(map(_unwritten, self._args)))
        if self._spent:  # a second backward over the same graph, which not every compiled one can do
            return self._traced_again(places, given, self._fresh_leaves())
        self._spent = True
        try:
            found = _differentiate([self._outputs[place] for place in places], self._leaves, given)
        except Exception as error:
            try:
                found = self._traced_again(places, given, self._fresh_leaves())
            except Exception:
                raise error from None  # of the two, it is the one that the user can do something about
            self._graph.fall_back(error)
            return found
        self._graph.proven()
        return found

    def _traced_again(
        self, places: Sequence[int], given: Sequence[torch.Tensor | None], inputs: Sequence[Any]
    ) -> list[torch.Tensor | None]:
        with torch.enable_grad(), self._surroundings.restored():
            outputs = self._graph.traced(*inputs)
        return _differentiate([outputs[place] for place in places], inputs, given)

    def _fresh_leaves(self) -> list[Any]:
        return [_leaf(_unwritten(each)) for each in self._args]


class _Joined(torch.autograd.Function):
    """Makes outputs that were computed on detached inputs depend on the inputs."""

    @staticmethod
    def forward(ctx: Any, run: _FirstBackward, places: Sequence[int], *args: Any) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.run, ctx.places = run, places
        return run.detached(places)

    @staticmethod
    def backward(ctx: Any, *given: torch.Tensor | None) -> tuple[Any, ...]:
        return (None, None, *ctx.run.gradients(ctx.places, given))


class _Surroundings:
    """The random state and the autocast that a graph ran under; a backward runs under neither.

    Args:
        args: The graph's inputs; they say which devices matter.
    """

    def __init__(self, args: Sequence[Any]) -> None:
        self._cpu = torch.get_rng_state()
        self._devices, self._states = get_device_states(*args)
        types = {"cpu", *(each.device.type for each in args if isinstance(each, torch.Tensor))} - {"meta"}
        self._autocast = [
            (each, torch.get_autocast_dtype(each), torch.is_autocast_enabled(each)) for each in sorted(types)
        ]

    def bring_back(self) -> None:
        """Give the random state back for good."""
        torch.set_rng_state(self._cpu)
        set_device_states(self._devices, self._states)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Bring them back for a while."""
        with ExitStack() as held:
            held.enter_context(torch.random.fork_rng(self._devices))
            self.bring_back()
            for device, dtype, enabled in self._autocast:
                held.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
            yield


def _is_checkpoints(error: Exception) -> bool:
    """Whether activation checkpointing raised it, to end a forward that it runs a second time early."""
    return type(error).__module__ == "torch.utils.checkpoint"


def _is_about_leaves(error: Exception) -> bool:
    return "leaf Variable" in str(error) and "in-place" in str(error)


def _write_back(args: Sequence[Any], before: Sequence[Any]) -> None:
    """Undo what a run that failed wrote into its inputs."""
    for value, copied in zip(args, before, strict=True):
        if value is not copied and not torch.equal(value, copied):
            value.copy_(copied)


def _learns(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _leaf(value: Any) -> Any:
    return value.detach().requires_grad_() if _learns(value) else value


def _unwritten(value: Any) -> Any:
    """A copy of what the forward may have written into, a batch norm's statistics for one: once is enough.

    A tensor's version does not tell: batch norm leaves it as it was (torch 2.13).
    """
    written = isinstance(value, torch.Tensor) and not value.requires_grad and not isinstance(value, nn.Parameter)
    return value.clone() if written else value


def _differentiate(
    outputs: Sequence[torch.Tensor], inputs: Sequence[Any], given: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """The gradient of each input; ``None`` for what has none. Differentiable itself where gradients are on."""
    reached = [(output, gradient) for output, gradient in zip(outputs, given, strict=True) if gradient is not None]
    places = [place for place, each in enumerate(inputs) if _learns(each)]
    found: list[torch.Tensor | None] = [None] * len(inputs)
    if reached:
        gradients = torch.autograd.grad(
            [output for output, _ in reached],
            [inputs[place] for place in places],
            [gradient for _, gradient in reached],
            create_graph=torch.is_grad_enabled(),
            allow_unused=True,
        )
        for place, gradient in zip(places, gradients, strict=True):
            found[place] = gradient
    return found
