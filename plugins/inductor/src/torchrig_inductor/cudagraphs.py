"""Backend ``cudagraphs``: eager kernels, recorded once and replayed with one launch."""

from __future__ import annotations

from typing import Any

from torchrig import BackendInfo, Capabilities, CompileRequest, hookimpl


def _unavailable_reason() -> str | None:
    import torch

    if torch.cuda.is_available():
        return None
    built = "with CUDA, but it sees no device" if torch.version.cuda else "without CUDA"
    return f"it records CUDA graphs, and this PyTorch ({torch.__version__}) was built {built}"


@hookimpl
def describe() -> BackendInfo:
    """Say what the backend is."""
    return BackendInfo(
        name="cudagraphs",
        summary="record CUDA graphs of eager kernels",
        capabilities=Capabilities(devices=("cuda",), dynamic_shapes=False),
        probe=_unavailable_reason,
    )


@hookimpl
def torch_compile_kwargs(request: CompileRequest) -> dict[str, Any]:
    """PyTorch's ``cudagraphs`` takes neither a mode nor options."""
    return {"backend": "cudagraphs"}
