"""What the doctor tells of Inductor: its tools, its folders, and what stops it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from torchrig.doctor import Examination, examine
from torchrig.settings import Settings
from torchrig_inductor import toolchain


@pytest.fixture
def no_compiler(monkeypatch):
    from torch._inductor import config

    monkeypatch.delenv("TORCH_INDUCTOR_INSTALL_GXX", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with config.patch("cpp.cxx", (None, "/there/is/no/compiler")):
        yield


def tools(found: Examination) -> dict[str, str]:
    (detail,) = [each for each in found.details if each.name == "backend inductor"]
    return dict(detail.facts)


def test_the_compiler_is_shown_with_its_version_and_its_place():
    found = tools(examine(Settings))
    assert "/" in found["C++ compiler"] and any(character.isdigit() for character in found["C++ compiler"])
    assert "triton" in found


def test_it_is_judged_where_the_settings_choose_no_backend():
    found = examine(Settings)
    assert (found.backend, found.stops) == ("inductor", ())
    assert "the settings choose 'no'" in found.because


def test_no_compiler_is_a_stop_and_a_row(no_compiler):
    found = examine(lambda: Settings(backend="inductor"))
    assert not found.ok
    assert "set CXX" in found.stops[0] and "/there/is/no/compiler" in found.stops[0]
    assert tools(found)["C++ compiler"].startswith("none found")
    assert [row.status for row in found.plugins if row.name == "inductor"] == ["unavailable"]
    assert not examine(Settings).ok
    assert examine(lambda: Settings(backend="aot_eager")).ok


def test_a_plugin_that_is_switched_off_is_a_stop(monkeypatch):
    monkeypatch.setenv("TORCHRIG_PLUGINS", "")
    (stop,) = examine(Settings).stops
    assert "switched off by TORCHRIG_PLUGINS=" in stop


@pytest.mark.parametrize(
    ("script", "shown"),
    [("#!/bin/sh\necho 'cc 9.9'\n", "cc 9.9 ("), ("#!/bin/sh\n", "/cc"), ("no program", "which cannot be run")],
)
def test_compilers_of_any_kind(tmp_path, monkeypatch, script, shown):
    compiler = tmp_path / "cc"
    compiler.write_text(script)
    compiler.chmod(0o755)
    monkeypatch.setattr(toolchain, "_inductors_choice", lambda: str(compiler))
    assert shown in toolchain.facts()["C++ compiler"]


def test_a_compiler_that_has_gone(monkeypatch, tmp_path):
    monkeypatch.setattr(toolchain, "_inductors_choice", lambda: str(tmp_path / "cc"))
    assert toolchain.facts()["C++ compiler"].endswith("which is not on PATH")


def test_the_folder_is_inductors_own(monkeypatch, tmp_path):
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "given"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    assert toolchain.cache_dirs() == [str(tmp_path / "given"), str(tmp_path / "triton")]
    assert not (tmp_path / "given").exists()
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (named,) = toolchain.cache_dirs()
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
    assert named == cache_dir()
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")  # Inductor set it


def test_a_cache_that_cannot_be_written_stops_inductor(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file"))
    (stop,) = examine(lambda: Settings(backend="inductor")).stops
    assert stop.endswith("file is a file.")


def test_the_command_fails_where_there_is_no_compiler(tmp_path: Path):
    surroundings = {name: value for name, value in os.environ.items() if not name.startswith("TORCHRIG_")}
    surroundings["CXX"] = str(tmp_path / "none")
    command = [sys.executable, "-m", "torchrig", "doctor", "--backend", "inductor", "--set", "device=cpu"]
    done = subprocess.run(command, env=surroundings, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "stopped: " in done.stdout and "no compiler" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.slow_compile
def test_a_compiler_that_only_says_its_version_is_found_out_by_trying(tmp_path: Path):
    compiler = tmp_path / "cc"
    compiler.write_text('#!/bin/sh\ncase "$1" in --version) echo "cc 9.9";; *) echo "no headers" >&2; exit 1;; esac\n')
    compiler.chmod(0o755)
    surroundings = {name: value for name, value in os.environ.items() if not name.startswith("TORCHRIG_")}
    surroundings |= {"CXX": str(compiler), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "torchrig", "doctor", "--backend", "inductor", "--set", "device=cpu", "--json"]
    quick, thorough = (
        subprocess.run([*command, *more], env=surroundings, capture_output=True, text=True, check=False)
        for more in ([], ["--try"])
    )
    assert (quick.returncode, json.loads(quick.stdout)["stops"]) == (0, [])
    assert thorough.returncode == 1
    (stop,) = json.loads(thorough.stdout)["stops"]
    assert stop.startswith("A small model was to be compiled: backend 'inductor' failed:")
