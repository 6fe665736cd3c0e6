"""Every touch of PyTorch's private compile surface, in one place.

What is used and why; run on torch 2.13.0, and read in the sources of 2.9.0, where all of it has the same names:

``torch.compile(module).dynamo_ctx``
    The only way from the public call to the context that compiles. Made with an ``nn.Identity``, it lets one context
    compile a plain function (the class's ``forward``) with exactly what ``torch.compile`` would have set up.
``dynamo_ctx.callback``
    Called by the interpreter for each frame it has no compiled code for. Standing around it costs nothing on a step
    that compiles nothing, and it is the narrowest place to hold Dynamo's flags: they are read while a frame is traced.
``_torchdynamo_orig_backend``
    The chain from a callback to the backend; Dynamo matches cache entries by its end, so a wrapper must carry it.
``torch._dynamo.utils.get_compilation_metrics``
    Per frame: the guard that failed before a recompile, why a frame fell back, and at which line.
``torch._dynamo.guards.get_guard_fail_reason_helper``
    Which of one graph's guards fails. Its arguments differ between 2.9 and 2.13.
``torch._functorch.config.force_non_lazy_backward_lowering``
    Has AOTAutograd compile the backward with the forward (2.13; 2.9 has no such flag).
``_dynamo_weak_dynamic_indices``
    What the public ``maybe_mark_dynamic`` leaves on a tensor; there is no public way to take it off again.
``GraphModule.compile_subgraph_reason``
    Why a graph ended, with the user's stack.
``OptimizedModule``
    What ``torch.compile(module)`` gives; ``Module._compiled_call_impl``, which ``module.compile()`` leaves behind, is
    touched in :mod:`torchrig.placement`.

``check_if_dynamo_supported``, ``torch._dynamo.config.disable`` and ``.suppress_errors``
    Whether this Python can compile at all, and what keeps code eager without a word: for ``torchrig doctor``. Run on
    torch 2.13.0.

``core/tests/test_dynamo.py`` fails when one of them goes away. Importing this package imports Dynamo (about two
seconds), so the rest of torchrig imports it only when something is to be compiled.
"""

from __future__ import annotations

from .context import (
    Asked,
    WrappedRegion,
    asked_of,
    configured_backend,
    innermost_backend,
    mode_options,
    watched_context,
    wrap,
)
from .conversion import Break, Conversion, Listener, attributed, current, unwatched
from .flags import FLAGS, Flag, flags, recompile_limit, switches, unsupported
from .reading import break_of, family_of, is_control_flow, is_data_dependent

__all__ = [
    "FLAGS",
    "Asked",
    "Break",
    "Conversion",
    "Flag",
    "Listener",
    "WrappedRegion",
    "asked_of",
    "attributed",
    "break_of",
    "configured_backend",
    "current",
    "family_of",
    "flags",
    "innermost_backend",
    "is_control_flow",
    "is_data_dependent",
    "mode_options",
    "recompile_limit",
    "switches",
    "unsupported",
    "unwatched",
    "watched_context",
    "wrap",
]
