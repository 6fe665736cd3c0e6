"""What every test here starts from: nothing compiled yet, and one Inductor cache for the whole run."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator

import pytest

# Set before torch is imported: tiny models are slower on many threads, and processes of a test share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "2")

_own_cache: str | None = None
if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
    _own_cache = os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="torchrig-tests-")


def pytest_unconfigure() -> None:
    """Remove the run's Inductor cache, unless it was given from outside."""
    if _own_cache is not None:
        shutil.rmtree(_own_cache, ignore_errors=True)


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    """Forget compiled code after each test: Dynamo keeps it per code object, and its limits would add up."""
    yield
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.reset()


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the caller's own ``TORCHRIG_*`` and ``ACCELERATE_DYNAMO_*`` variables out of the tests."""
    for name in list(os.environ):
        if name.startswith(("TORCHRIG_", "ACCELERATE_DYNAMO_")):
            monkeypatch.delenv(name)
