"""Backend ``aot_eager``: AOTAutograd's forward and backward graphs, run as they are; to debug with."""

from __future__ import annotations

from typing import Any

from torchrig import BackendInfo, CompileRequest, hookimpl


@hookimpl
def describe() -> BackendInfo:
    """Say what the backend is."""
    summary = "AOTAutograd's graphs, run as they are (to debug with)"
    return BackendInfo(name="aot_eager", summary=summary, recomputes=True)


@hookimpl
def torch_compile_kwargs(request: CompileRequest) -> dict[str, Any]:
    """PyTorch's ``aot_eager`` takes neither a mode nor options."""
    return {"backend": "aot_eager"}
