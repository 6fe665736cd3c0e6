"""PyTorch's structured trace, the file that ``TORCH_TRACE=folder`` asks for and tlparse reads: torchrig's part in it.

``torch._logging.trace_structured`` is private, and the only way in. Run on torch 2.13.0, where an ``artifact`` with a
name and an encoding becomes a file of tlparse's output; a torch without it gets no artifact and is otherwise as before.
The payload is made only where a trace is being written. ``core/tests/test_logs.py`` fails when it goes away.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

logger = logging.getLogger(__name__)


def artifact(name: str, payload: Callable[[], str]) -> None:
    """Write a JSON artifact.

    Args:
        name: What it is called; ``"torchrig_plan"`` and ``"torchrig_report"`` are torchrig's.
        payload: Makes the JSON text.
    """
    metadata = {"name": name, "encoding": "json"}
    try:
        # expect_trace_id: it belongs to no compiled frame, and would else have its own call stack recorded.
        torch._logging.trace_structured(  # type: ignore[attr-defined]
            "artifact", metadata_fn=lambda: metadata, payload_fn=payload, expect_trace_id=False
        )
    except Exception:  # it may go, or take other arguments; a trace is no reason to stop a training run
        logger.debug("no %s in PyTorch's structured trace", name, exc_info=True)
