"""The flags of PyTorch's compiler: those that prepared models are traced with, and those that keep code eager."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config
import torch.fx.experimental._config


@dataclass(frozen=True)
class Flag:
    """A flag of PyTorch's compiler that prepared models are traced with, and why.

    Args:
        config: The configuration module it is in.
        name: Its name.
        value: Its value while a frame of a prepared model is traced.
        reason: What goes wrong without it.
        training: Whether it is set for modules in training mode only.
        daring: Whether tracing may fail because of it; what does is traced again without.
    """

    config: Any
    name: str
    value: Any
    reason: str
    training: bool = False
    daring: bool = False


FLAGS: tuple[Flag, ...] = (
    Flag(
        torch._dynamo.config,
        "allow_unspec_int_on_nn_module",
        True,
        "a layer's own number read in forward would else cost one graph a layer, then run eager at the eighth",
    ),
    Flag(
        torch._dynamo.config,
        "skip_nnmodule_hook_guards",
        False,
        "a hook put on a block's child after the first call would else never fire (pytorch#117758)",
    ),
    Flag(
        torch._dynamo.config,
        "capture_scalar_outputs",
        True,
        "mixture-of-experts routing reads token counts; it would else break the graph",
    ),
    Flag(
        torch._dynamo.config,
        "capture_dynamic_output_shape_ops",
        True,
        "an expert takes the tokens routed to it, however many; it would else break the graph at each expert",
        daring=True,
    ),
    Flag(
        torch._dynamo.config,
        "skip_fwd_side_effects_in_bwd_under_checkpoint",
        True,
        "a side effect in a checkpointed block would else be refused (torch 2.10 and later have the flag)",
    ),
    Flag(
        torch.fx.experimental._config,
        "use_duck_shape",
        False,
        "a sequence as long as the batch is large would else be taken for it, and need a graph of its own",
    ),
    Flag(
        torch._functorch.config,
        "force_non_lazy_backward_lowering",
        True,
        "a backend that fails on the backward would else raise in the middle of the loop, from loss.backward()",
        training=True,  # a forward that nothing is learnt from may never need its backward
    ),
    Flag(
        torch._dynamo.config,
        "optimize_ddp",
        False,
        "DDPOptimizer would cut what runs compiled inside of DistributedDataParallel (a model compiled whole, a region "
        "larger than a bucket) into one graph a bucket, and it refuses buckets of less than 1 MB",
    ),
)


@contextmanager
def flags(training: bool, daring: bool) -> Iterator[None]:
    """Hold the flags of :data:`FLAGS` that this torch has."""
    with ExitStack() as held:
        for flag in FLAGS:
            wanted = (training or not flag.training) and (daring or not flag.daring)
            if wanted and hasattr(flag.config, flag.name):
                held.enter_context(flag.config.patch(flag.name, flag.value))
        yield


def unsupported() -> str | None:
    """Why Dynamo cannot compile in this Python at all; ``None`` where it can."""
    try:
        torch._dynamo.eval_frame.check_if_dynamo_supported()
    except RuntimeError as error:
        return str(error)
    return None


def switches() -> dict[str, bool]:
    """Dynamo's flags that keep code eager without a word, and whether they are on.

    ``disable`` compiles nothing; ``suppress_errors`` runs eager what cannot be compiled.
    """
    return {name: bool(getattr(torch._dynamo.config, name, False)) for name in ("disable", "suppress_errors")}


def recompile_limit() -> int:
    """How often Dynamo recompiles one function before it runs it eager."""
    return torch._dynamo.config.recompile_limit
