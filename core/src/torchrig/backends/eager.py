"""Backend ``eager``: Dynamo captures the graphs and runs them as they are; to debug with, and fast to start."""

from __future__ import annotations

from typing import Any

from torchrig import BackendInfo, CompileRequest, hookimpl


@hookimpl
def describe() -> BackendInfo:
    """Say what the backend is."""
    return BackendInfo(name="eager", summary="capture graphs and run them as they are (to debug with)")


@hookimpl
def torch_compile_kwargs(request: CompileRequest) -> dict[str, Any]:
    """PyTorch's own ``eager`` backend takes neither a mode nor options."""
    return {"backend": "eager"}
