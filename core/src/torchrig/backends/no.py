"""Backend ``no``: the model stays eager."""

from __future__ import annotations

from typing import Any

from torchrig import BackendInfo, CompileRequest, hookimpl


@hookimpl
def describe() -> BackendInfo:
    """Say what the backend is."""
    return BackendInfo(name="no", summary="compile nothing", compiles=False)


@hookimpl
def torch_compile_kwargs(request: CompileRequest) -> dict[str, Any]:
    """There is nothing to hand to ``torch.compile``."""
    return {}
