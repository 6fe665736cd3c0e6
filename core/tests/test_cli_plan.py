"""``torchrig plan``, run as a person would."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from torchrig.cli import main

MODEL = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
    def forward(self, x):
        return self.linear(x)

def build():
    return nn.Sequential(*[Block() for _ in range(3)])

ready = build()
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    (tmp_path / "models_for_plan.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> Result:
        return CliRunner().invoke(main, ["plan", *arguments])

    return call


@pytest.mark.parametrize("factory", ["models_for_plan:build", "models_for_plan:ready"])
def test_a_plan_is_printed(run: object, factory: str) -> None:
    result = run(factory, "--backend", "eager")
    assert result.exit_code == 0, result.output
    assert "Block x3" in result.output and "\x1b" not in result.output


def test_a_plan_as_json(run: object, tmp_path: Path) -> None:
    (tmp_path / "train.yaml").write_text("backend: eager\n")
    result = run("models_for_plan:build", "--config", "train.yaml", "--set", "fullgraph=true", "--json")
    told = json.loads(result.output)
    assert told["backend"] == "eager" and told["compile_kwargs"]["fullgraph"] is True


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["models_for_plan"], "module:factory"),
        (["models_for_plan:nothing"], "cannot be found"),
        (["no_such_module:build"], "cannot be found"),
        (["models_for_plan:build", "--backend", "eagr"], "Did you mean 'eager'?"),
        (["models_for_plan:build", "--set", "fullgraph"], "name=value"),
    ],
)
def test_a_mistake_is_one_readable_message(run: object, arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code != 0 and message in result.output and "Traceback" not in result.output
