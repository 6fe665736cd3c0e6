"""Backend ``inductor``: PyTorch's own code generator, with its modes and options."""

from __future__ import annotations

from typing import Any

from torchrig import BackendInfo, BackendUnavailable, CompileRequest, hookimpl

from . import options, toolchain

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


@hookimpl
def describe() -> BackendInfo:
    """Say what the backend is."""
    return BackendInfo(
        name="inductor",
        summary="TorchInductor: generated C++ and Triton kernels",
        recomputes=True,
        modes=MODES,
        options=options.names,
        probe=toolchain.missing_here,
        facts=toolchain.facts,
        cache_dirs=toolchain.cache_dirs,
    )


@hookimpl
def torch_compile_kwargs(request: CompileRequest) -> dict[str, Any]:
    """The mode or the options; PyTorch takes only one of the two.

    Raises:
        SettingsError: An option's value is not of its type.
        BackendUnavailable: The code generator for the request's device is missing. The probe looks for that of the
            machine's default device; this is the other case, such as a CPU model on a CUDA machine.
    """
    reason = toolchain.missing_for(request.device)
    if reason is not None:
        raise BackendUnavailable(f"The backend 'inductor' cannot be used on {request.device}: {reason}")
    if request.options:
        return {"backend": "inductor", "options": options.check(request.options)}
    return {"backend": "inductor"} if request.mode is None else {"backend": "inductor", "mode": request.mode}
