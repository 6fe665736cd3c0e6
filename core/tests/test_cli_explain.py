"""``torchrig explain``, run as a person would: one step, and what of it compiled."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from torchrig.cli import main
from torchrig.trial import call

MODEL = """
import torch
from torch import nn

class Block(nn.Module):
    branches = False
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
    def forward(self, x):
        x = self.linear(x)
        if self.branches and x.sum() > 0:
            x = x * 2
        return torch.relu(x)

class Branching(Block):
    branches = True

class Net(nn.Module):
    block = Block
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList(self.block() for _ in range(3))
    def forward(self, x, scale=1):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return {"loss": x.mean() * scale, "logits": x}

class BranchingNet(Net):
    block = Branching

class Grows(Net):
    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
            x = torch.cat([x, x])
        return x

class Fails(Net):
    def forward(self, x):
        raise ValueError("no\\nluck")

class FailsBackward(Net):
    def forward(self, x):
        x = super().forward(x)["logits"]
        if x.requires_grad:
            x.register_hook(lambda gradient: 1 / 0)
        return x

x = torch.ones(2, 4)
numbers = [torch.ones(2, 4)]
wide = torch.ones(2, 5)

def pair():
    return torch.ones(2, 4), 2

def named():
    return {"x": torch.ones(2, 4), "scale": 2}

def text():
    return "x"

def raises():
    raise OSError("no data")
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "models_for_explain.py").write_text(MODEL)
    monkeypatch.delitem(sys.modules, "models_for_explain", raising=False)
    monkeypatch.chdir(tmp_path)

    def explain(model: str, batch: str, *arguments: str) -> Result:
        names = [f"models_for_explain:{each}" for each in (model, batch)]
        return CliRunner().invoke(main, ["explain", names[0], "--batch", names[1], *arguments])

    return explain


@pytest.mark.parametrize("batch", ["x", "numbers", "pair", "named"])
def test_a_model_that_compiles_is_explained(run: Any, batch: str) -> None:
    result = run("Net", batch, "--json")
    told = json.loads(result.output)
    assert (result.exit_code, told["graphs"], told["breaks"], told["ok"]) == (0, 1, 0, True)
    assert told["kinds"][0]["modes"] == {"train": 1}


def test_backend_no_is_captured_with_eager_and_says_so(run: Any) -> None:
    output = run("Net", "x").output
    assert "note: backend 'no' compiles nothing: captured with 'eager'" in output
    assert "backend eager" in output
    assert "note:" not in run("Net", "x", "--backend", "eager").output


def test_a_break_is_told_with_its_place_its_reason_and_a_hint(run: Any) -> None:
    """Case 49."""
    result = run("BranchingNet", "x")
    assert result.exit_code == 1
    assert "Branching breaks at " in result.output
    assert "models_for_explain.py:12: " in result.output
    assert "torch.where" in result.output


def test_each_recompile_is_told_with_its_place_the_guard_and_a_hint(run: Any) -> None:
    result = run("Grows", "x", "--set", "dynamic=false")
    assert result.exit_code == 0
    lines = [line for line in result.output.splitlines() if "recompiled (train)" in line]
    assert len(lines) == 2
    assert all("models_for_explain.py:10: " in line and "size mismatch" in line for line in lines)
    assert "dynamic=True" in lines[0] and "dynamic=True" not in lines[1]  # the same hint is told once


def test_in_eval_mode_no_backward_is_run(run: Any) -> None:
    told = json.loads(run("FailsBackward", "x", "--eval", "--json").output)
    assert [list(kind["modes"]) for kind in told["kinds"]] == [["eval, no_grad"]]


@pytest.mark.parametrize(
    ("model", "batch", "message"),
    [
        ("Fails", "x", "The forward of models_for_explain:Fails on models_for_explain:x raised ValueError: no luck"),
        ("FailsBackward", "x", "The backward of models_for_explain:FailsBackward on models_for_explain:x raised Zero"),
        ("Net", "wide", "mat1 and mat2 shapes cannot be multiplied (2x5 and 4x4) (models_for_explain.py:26)."),
        ("Net", "text", "'models_for_explain:text' must be a tensor, a tuple, a dict, or a function that returns one"),
        ("Net", "raises", "models_for_explain:raises() raised OSError: no data (models_for_explain.py:67)."),
        ("Net", "nothing", "'models_for_explain:nothing' cannot be found"),
    ],
)
def test_a_mistake_of_the_users_is_one_readable_line(run: Any, model: str, batch: str, message: str) -> None:
    result = run(model, batch)
    assert result.exit_code == 1
    assert message in result.output
    assert result.output.startswith("Error: ") and result.output.count("\n") == 1


def test_a_wrong_batch_is_one_line_on_the_console_too(run: Any) -> None:
    """PyTorch logs a traceback of its own, on the console as it was when PyTorch was imported."""
    command = [sys.executable, "-m", "torchrig", "explain", "models_for_explain:Net"]
    done = subprocess.run([*command, "--batch", "models_for_explain:wide"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("Error: The forward of") and done.stderr.count("\n") == 1


def test_what_the_backend_raises_is_a_fall_back_in_the_report(run: Any, install: Any) -> None:
    source = """
        import torch
        from torchrig import BackendInfo, hookimpl
        @hookimpl
        def describe():
            return BackendInfo(name="faulty", summary="raises")
        @hookimpl
        def torch_compile_kwargs(request):
            def compile(graph, inputs):
                raise RuntimeError("no such kernel")
            return {"backend": compile}
        """
    install("acme", {"faulty": "faulty_module"}, {"faulty_module": textwrap.dedent(source)})
    result = run("Net", "x", "--backend", "faulty")
    assert result.exit_code == 1
    assert "Block fell back: backend 'faulty' failed: RuntimeError: no such kernel" in result.output
    raised = run("Net", "x", "--backend", "faulty", "--set", "on_failure=raise")
    assert raised.exit_code == 1
    assert raised.output.startswith("Error: Backend 'faulty' failed to compile region Block")


def test_a_problem_that_is_to_be_raised_is_raised(run: Any) -> None:
    result = run("BranchingNet", "x", "--set", "on_problem=raise")
    assert result.exit_code == 1
    assert result.output.startswith("Error: Region Branching breaks at")


def test_nothing_compiled_is_not_well(run: Any) -> None:
    result = run("Net", "x", "--set", "disable=true")
    assert result.exit_code == 1
    assert "disable=True (from argument): nothing is compiled." in result.output


def test_the_models_own_warnings_are_shown(run: Any, tmp_path: Path) -> None:
    source = MODEL.replace(
        "        x = self.first(x)\n", "        warnings.warn('mine')\n        x = self.first(x)\n", 1
    )
    (tmp_path / "models_for_explain.py").write_text(f"import warnings\n{source}")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run("Net", "x")
    assert [str(each.message) for each in caught if each.category is UserWarning] == ["mine"]


def test_a_batch_is_passed_as_its_kind_says() -> None:
    def model(*args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    tensor = torch.ones(1)
    assert call(model, (1, 2)) == ((1, 2), {})
    assert call(model, [1, 2]) == ((1, 2), {})
    assert call(model, {"x": 1}) == ((), {"x": 1})
    assert call(model, tensor) == ((tensor,), {})
