"""What ``TORCH_LOGS`` shows of torchrig's decisions, and what ``TORCH_TRACE`` keeps of its plans and reports."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from toys import Stack

import torchrig
from torchrig import trace

SCRIPT = """
import warnings
warnings.simplefilter("ignore")
{imports}
from toys import Block, Stack

class Branching(Block):
    def forward(self, x):
        x = self.linear(x)
        if x.sum() > 0:
            x = x + 1
        return x

model = torchrig.prepare(Stack({block}), backend="eager")
model(torch.ones(2, 4)).sum().backward()
print(torchrig.plan(Stack({block}), backend="eager").to_json())
torchrig.report(model)
torchrig.unwrap(model, keep_compile=False)
"""
TORCH_FIRST, TORCHRIG_FIRST = "import torch, torchrig", "import torchrig, torch"
BRANCHING = SCRIPT.format(imports=TORCH_FIRST, block="Branching")


def run(source: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a Python of its own: PyTorch reads both variables when it is imported."""
    toys = str(Path(__file__).parent / "support")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TORCH_LOGS", "TORCH_TRACE"))}
    path = os.pathsep.join(filter(None, (toys, os.environ.get("PYTHONPATH", ""))))
    done = subprocess.run(
        [sys.executable, "-c", source],
        env={**kept, "PYTHONPATH": path, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize("imports", [TORCH_FIRST, TORCHRIG_FIRST])
def test_torch_logs_shows_every_decision(imports: str) -> None:
    shown = run(SCRIPT.format(imports=imports, block="Branching"), TORCH_LOGS="+torchrig").stderr
    assert "torchrig/plan.py" in shown
    for said in (
        "Stack: strategy single (auto: by the number of processes)",
        "Stack: backend eager (argument)",
        "Stack: device ",
        "Stack: region Branching: ",
        "Stack: region Branching is at layers.0, layers.1, layers.2",
        "Stack: step 1: compile Branching x3 by eager: ",
        "Stack: torch.compile gets {'fullgraph': False, 'dynamic': None, 'backend': 'eager'}",
        "done: compile Branching x3 by eager",
        "done: wrap Stack by single",
        "Branching: forward (",
        "compiled for train in",
        "Branching breaks at <string>:",
        "Stack: compiled forwards and layers are taken off",
    ):
        assert said in shown, shown


def test_without_the_plus_only_the_plan_and_problems_are_shown() -> None:
    shown = run(BRANCHING, TORCH_LOGS="torchrig").stderr
    assert "Stack: strategy single" in shown and "Branching breaks at" in shown
    assert "done:" not in shown and "compiled for train" not in shown and "is at" not in shown


def test_nothing_is_shown_by_default() -> None:
    assert run(BRANCHING).stderr == ""


def test_a_library_that_keeps_silent() -> None:
    """No handler but the null one, no level of its own."""
    logger = logging.getLogger("torchrig")
    assert any(isinstance(each, logging.NullHandler) for each in logger.handlers)
    assert logger.level == logging.NOTSET


@pytest.fixture
def told() -> Iterator[list[str]]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("torchrig")
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield messages
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


def test_a_recompile_is_told_with_its_guard(told: list[str]) -> None:
    model = torchrig.prepare(Stack(), backend="eager", dynamic=False)
    for size in (2, 3):
        model(torch.ones(size, 4))
    (recompile,) = [each for each in told if "recompiled (train)" in each]
    assert "toys.py" in recompile and "size mismatch" in recompile
    assert any("compiled again for train" in each and "guard that failed:" in each for each in told)


def test_a_fall_back_is_told(told: list[str]) -> None:
    def faulty(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no such kernel")

    model = torchrig.prepare(Stack(), backend=faulty, on_failure="eager")
    with pytest.warns(torchrig.CompileProblemWarning):
        model(torch.ones(2, 4))
    assert "Block falls back to eager: backend 'faulty' failed: RuntimeError: no such kernel" in told


def test_what_is_taken_back_is_told(told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from torchrig import execution

    def fail(self: Any) -> None:
        raise OSError("no room")

    monkeypatch.setattr(execution.Run, "_wrap", fail)
    with pytest.raises(OSError, match="no room"):
        torchrig.prepare(Stack(), backend="eager")
    assert "prepare raised OSError; changes to take back 3: no room" in told


def test_why_nothing_is_compiled_is_told(told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    plan = torchrig.plan(Stack(), backend="eager")
    assert plan.regions == ()
    assert "Stack: TORCH_COMPILE_DISABLE=1 is set in the environment: nothing is compiled." in told


def artifacts(folder: Path) -> list[tuple[str, Any]]:
    """The named JSON artifacts of a trace: a line that ends in JSON, then the payload's lines, each after a tab."""
    (file,) = folder.iterdir()
    found: list[tuple[str, list[str]]] = []
    wanted = False
    for line in file.read_text().splitlines():
        if line.startswith("\t"):
            if wanted:
                found[-1][1].append(line[1:])
            continue
        head = json.loads(line[line.index("{") :])
        wanted = head.get("artifact", {}).get("name", "").startswith("torchrig_")
        if wanted:
            assert head["artifact"]["encoding"] == "json"
            found.append((head["artifact"]["name"], []))
    return [(name, json.loads("\n".join(lines))) for name, lines in found]


def test_the_trace_holds_the_plan_and_the_report(tmp_path: Path) -> None:
    done = run(SCRIPT.format(imports=TORCH_FIRST, block="Block"), TORCH_TRACE=str(tmp_path))
    found = artifacts(tmp_path)
    assert [name for name, _ in found] == ["torchrig_plan", "torchrig_report", "torchrig_report"]
    assert found[0][1] == json.loads(done.stdout)
    assert [each["instances"] for each in found[1][1]["kinds"]] == [3]
    assert found[2][1]["graphs"] == 1


OTHERS = {"gone": SimpleNamespace(), "other arguments": SimpleNamespace(trace_structured=lambda name: None)}


@pytest.mark.parametrize("logging_of_torch", OTHERS.values(), ids=OTHERS)
def test_a_torch_without_it_changes_nothing(monkeypatch: pytest.MonkeyPatch, logging_of_torch: Any) -> None:
    monkeypatch.setattr(trace, "torch", SimpleNamespace(_logging=logging_of_torch))
    model = torchrig.prepare(Stack(), backend="eager")
    model(torch.ones(2, 4))
    assert torchrig.report(model).graphs == 1


def test_no_payload_is_made_where_nobody_traces() -> None:
    done = run(
        "import torch\nfrom torchrig import trace\n"
        "trace.artifact('torchrig_first', lambda: '{}')\n"  # PyTorch finds out here that there is nowhere to write
        "trace.artifact('torchrig_plan', lambda: print('made'))\n"
    )
    assert done.stdout == ""
