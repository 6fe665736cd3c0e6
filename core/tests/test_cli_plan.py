"""``torchrig plan``, run as a person would."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from torchrig.cli import main
from torchrig.cli.options import parsed

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
number = 3

def raises():
    raise ValueError("no\\nweights")

def needs(size):
    return nn.Linear(size, size)

def leaves():
    raise SystemExit(3)

class Wrong:
    pass

def late():
    import late_for_plan
    return late_for_plan.build()
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    (tmp_path / "models_for_plan.py").write_text(MODEL)
    for name in ("models_for_plan", "broken_for_plan", "late_for_plan"):  # each test writes its own
        monkeypatch.delitem(sys.modules, name, raising=False)
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
        (["models_for_plan:build", "--set", "on_problem..x=1"], "name=value"),
        (["models_for_plan:build", "--set", "mode=[1"], "(from --set mode)"),
        (
            ["models_for_plan:build", "--set", "options=1", "--set", "options.a=1"],
            "which --set options sets to a single",
        ),
        (
            ["models_for_plan:number"],
            "'models_for_plan:number' is an int, neither a module nor something that makes one.",
        ),
        (["models_for_plan:Wrong"], "must return an nn.Module, and returned an instance of Wrong."),
        (["models_for_plan:raises"], "models_for_plan:raises() raised ValueError: no weights (models_for_plan.py:19)."),
        (["models_for_plan:needs"], "models_for_plan:needs() raised TypeError: needs() missing 1 required"),
        (["models_for_plan:leaves"], "models_for_plan:leaves() raised SystemExit: 3 (models_for_plan.py:25)."),
    ],
)
def test_a_mistake_is_one_readable_message(run: object, arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code != 0 and message in result.output and "Traceback" not in result.output


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1\nraise RuntimeError('ouch\\nouch')", "import fails: RuntimeError: ouch ouch (broken_for_plan.py:2)."),
        ("def f(:\n  pass", "import fails: SyntaxError: invalid syntax (broken_for_plan.py:1)."),
        ("import sys\nsys.exit(0)", "import fails: SystemExit: 0 (broken_for_plan.py:2)."),
        ("import torch.gone", "was found, and it imports 'torch.gone', which is not there (broken_for_plan.py:1)."),
        ("from torch import gone", "import fails: ImportError: cannot import name 'gone' from 'torch'"),
    ],
)
def test_a_module_that_raises_at_import_is_one_line_with_the_place(
    run: object, tmp_path: Path, source: str, message: str
) -> None:
    (tmp_path / "broken_for_plan.py").write_text(source)
    result = run("broken_for_plan:build")
    assert result.exit_code == 1 and result.output.count("\n") == 1
    assert (
        result.output.startswith("Error: The module 'broken_for_plan' was found, and it") and message in result.output
    )


def test_what_is_not_found_is_not_called_found(run: object) -> None:
    result = run("models_for_plan.inner:build")
    assert result.exit_code == 1 and "The module 'models_for_plan.inner' cannot be found" in result.output


def test_a_factory_may_import_from_the_working_directory(run: object, tmp_path: Path) -> None:
    (tmp_path / "late_for_plan.py").write_text("from models_for_plan import build\n")
    before = list(sys.path)
    assert run("models_for_plan:late").exit_code == 0
    assert sys.path == before


def planned(run: object, *pairs: str) -> dict[str, object]:
    arguments = [each for pair in pairs for each in ("--set", pair)]
    result = run("models_for_plan:build", "--json", *arguments)
    assert result.exit_code == 0, result.output
    return json.loads(result.output)["settings"]


def test_values_are_read_as_in_a_file(run: object) -> None:
    """In YAML 1.1, ``no`` is false, which is no backend at all."""
    told = planned(run, "backend=no", "fullgraph=true", "regions=[Block]", "mode=")
    assert (told["backend"], told["fullgraph"], told["regions"], told["mode"]) == ("no", True, ["Block"], None)


@pytest.mark.parametrize("name", ["on_problem__graph_break", "on_problem.graph_break"])
def test_a_key_is_set_by_its_path_after_the_whole(run: object, name: str) -> None:
    told = planned(run, f"{name}=raise", "on_problem=ignore")
    assert told["on_problem"] == {"region_not_compiled": "ignore", "graph_break": "raise", "recompile_limit": "ignore"}


@pytest.mark.parametrize("name", ["options.triton.cudagraphs", "options__triton.cudagraphs"])
def test_options_keep_the_dots_of_their_names(name: str) -> None:
    assert parsed((f"{name}=true",)) == {"options": {"triton.cudagraphs": True}}
