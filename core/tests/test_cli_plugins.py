"""``torchrig plugins`` and ``torchrig backends``."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

import torchrig
from torchrig import errors
from torchrig.cli import COMMANDS, main


def run(*arguments):
    return CliRunner().invoke(main, arguments)


def test_version():
    assert run("--version").output == f"torchrig {torchrig.__version__}\n"


def test_plugins_lists_what_is_installed_with_a_status(install):
    install("acme-tools", {"bad": "bad_module"}, {"bad_module": "raise RuntimeError('ouch')"})
    result = run("plugins")
    assert result.exit_code == 0
    lines = {line.split()[0]: line for line in result.output.splitlines() if line.split()}
    assert "strategy" in lines["single"]
    assert "ok" in lines["single"]
    assert "broken" in lines["bad"]
    assert "acme-tools 1.2.3" in lines["bad"]
    assert "ouch" in lines["bad"]
    assert "openvino" not in lines
    assert "\x1b" not in result.output


def test_backends_lists_every_known_one_and_every_other(install):
    install.backend("acme", "rocket", "acme_module")
    rows = json.loads(run("backends", "--json").output)
    names = [row["name"] for row in rows]
    members = [member.value for member in torchrig.DynamoBackend]
    assert names[: len(members)] == members
    assert names[len(members) :] == ["rocket"]
    statuses = {row["name"]: row["status"] for row in rows}
    assert statuses["openvino"] == "not installed"
    assert statuses["fx2trt"] == "removed"
    assert statuses["rocket"] == "ok"


def test_the_table_of_backends_says_how_to_get_one():
    output = run("backends").output
    assert "pip install torchrig-openvino" in output
    assert "its successor is thunder" in output


def test_json_of_plugins_has_every_column():
    rows = json.loads(run("plugins", "--json").output)
    assert all(
        set(row) == {"name", "kind", "status", "distribution", "version", "summary", "modes", "reason"} for row in rows
    )


@pytest.mark.parametrize(
    ("error", "code"), [(errors.SettingsError("a bad value"), 2), (errors.BackendUnavailable("no device"), 1)]
)
def test_an_error_is_one_message_and_no_traceback(monkeypatch, error, code):
    import torchrig.plugins.inventory

    def fail():
        raise error

    monkeypatch.setattr(torchrig.plugins.inventory, "installed_rows", fail)
    result = run("plugins")
    assert result.exit_code == code
    assert result.output == f"Error: {error}\n"


def test_an_unknown_command_is_refused():
    result = run("plugin")
    assert result.exit_code == 2
    assert "No such command" in result.output


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_help(name):
    result = run(name, "--help")
    assert result.exit_code == 0
    assert "Usage:" in result.output


def test_python_dash_m_does_the_same():
    done = subprocess.run([sys.executable, "-m", "torchrig", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"torchrig {torchrig.__version__}\n"
