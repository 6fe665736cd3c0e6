"""``torchrig config show``."""

from __future__ import annotations

import json
import os

import pytest
from click.testing import CliRunner

from torchrig.cli import main


@pytest.fixture(autouse=True)
def _bare(monkeypatch, tmp_path):
    for name in list(os.environ):
        if name.startswith(("TORCHRIG_", "ACCELERATE_")):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def show(*arguments: str):
    return CliRunner().invoke(main, ["config", "show", *arguments])


def test_every_value_with_its_origin(monkeypatch, tmp_path):
    (tmp_path / "train.yaml").write_text("mode: x\nfsdp2:\n  size: 1\n")
    monkeypatch.setenv("TORCHRIG_BACKEND", "eager")
    result = show("--config", "train.yaml")
    assert result.exit_code == 0
    lines = [line.split() for line in result.output.splitlines()]
    assert ["mode", "x", "train.yaml:1"] in lines
    assert ["backend", "eager", "variable", "TORCHRIG_BACKEND"] in lines
    assert ["fsdp2.size", "1", "train.yaml:3"] in lines
    assert ["fullgraph", "false", "default"] in lines
    assert "\x1b" not in result.output


def test_json(monkeypatch):
    monkeypatch.setenv("TORCHRIG_REGIONS", "A,B")
    rows = {row["name"]: row for row in json.loads(show("--json").output)}
    assert rows["regions"] == {"name": "regions", "value": ["A", "B"], "origin": "variable TORCHRIG_REGIONS"}
    assert rows["device"]["value"] is None


def test_a_bad_setting_is_one_line_and_a_failure(monkeypatch):
    monkeypatch.setenv("TORCHRIG_MDOE", "x")
    result = show()
    assert result.exit_code == 2
    assert "TORCHRIG_MDOE" in result.output
    assert "Traceback" not in result.output
