"""``torchrig doctor``: what it shows, what it keeps to itself, and what it finds that stops a compile."""

from __future__ import annotations

import getpass
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

import torchrig
from torchrig.cli import main
from torchrig.doctor import discreet, examine, folders, machine, obstacles
from torchrig.settings import Settings

BACKEND = """
from torchrig import BackendInfo, hookimpl

@hookimpl
def describe():
    return BackendInfo(
        name="rocket",
        summary="a test's backend",
        probe=lambda: {reason!r},
        facts=lambda: {facts},
        cache_dirs=lambda: {folders!r},
    )

@hookimpl
def torch_compile_kwargs(request):
    return {{"backend": "eager"}}
"""


@pytest.fixture
def rocket(install: Any) -> Any:
    """Install backend ``rocket``, with what it says of itself."""

    def add(reason: str | None = None, facts: str = "{}", folders: tuple[str, ...] = ()) -> None:
        source = BACKEND.format(reason=reason, facts=facts, folders=folders)
        install("acme", {"rocket": "rocket_module"}, {"rocket_module": source})

    return add


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["doctor", *arguments])


def told(*arguments: str) -> dict[str, Any]:
    result = run(*arguments, "--json")
    found = json.loads(result.output)
    assert result.exit_code == (0 if found["ok"] else 1)
    return found


def test_all_that_a_bug_report_needs_is_shown(rocket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rocket(facts='{"rocket fuel": "1.2"}')
    monkeypatch.setenv("TORCHRIG_MODE", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    result = run("--backend", "rocket")
    assert result.exit_code == 0
    for shown in (
        torch.__version__,
        torch.backends.cpu.get_cpu_capability(),
        f"torchrig {torchrig.__version__}",
        "rocket",
        "acme 1.2.3",
        "rocket fuel",
        "OMP_NUM_THREADS",
        "on_problem.graph_break",
        "A compile with backend rocket (the settings' backend (from argument))",
        "would run",
    ):
        assert shown in " ".join(result.output.split()) or shown in result.output, shown
    assert "\x1b" not in result.output


def test_the_same_as_json(rocket: Any) -> None:
    rocket(facts='{"rocket fuel": "1.2"}')
    found = told("--backend", "rocket")
    assert found["machine"]["torch"].startswith(torch.__version__)
    assert {"name": "backend rocket", "facts": {"rocket fuel": "1.2"}, "cache_dirs": []} in found["details"]
    assert {"name": "backend", "value": "rocket", "origin": "argument"} in found["settings"]
    assert ("rocket", "ok") in {(row["name"], row["status"]) for row in found["plugins"]}
    assert (found["backend"], found["stops"], found["ok"]) == ("rocket", [], True)


def test_a_settings_error_is_shown_and_the_rest_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHRIG_BACKEN", "inductor")
    found = told()
    assert "TORCHRIG_BACKEND" in found["settings_error"]
    assert found["settings"] == [] and found["machine"] and found["plugins"]
    assert any(
        each.startswith("The settings cannot be read: TORCHRIG_BACKEN is no variable") for each in found["stops"]
    )
    assert found["environment"]["TORCHRIG_BACKEN"] == "inductor"
    assert "TORCHRIG_BACKEN is no variable" in run().output


@pytest.mark.parametrize("arguments", [(), ("--set", "mode=fast")])
def test_a_settings_error_of_an_argument_too(arguments: tuple[str, ...]) -> None:
    found = told("--backend", "eagr", *arguments)
    assert not found["ok"]
    assert any("Did you mean 'eager'?" in each for each in found["stops"])


@pytest.mark.parametrize("variable", ["TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE"])
def test_what_switches_the_compiler_off(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "1")
    found = told("--backend", "eager")
    assert found["stops"] == [f"{variable}=1 is set in the environment: nothing is compiled."]
    assert found["environment"][variable] == "1"


def test_disable_is_a_stop() -> None:
    assert told("--backend", "eager", "--set", "disable=true")["stops"] == [
        "disable=True (from argument): nothing is compiled."
    ]


def test_dynamos_own_switches() -> None:
    import torch._dynamo

    with torch._dynamo.config.patch(disable=True, suppress_errors=True):
        found = told("--backend", "eager")
    assert [each.split(" is on")[0] for each in found["stops"]] == ["torch._dynamo.config.disable"]
    assert [each.split(" is on")[0] for each in found["doubts"]] == ["torch._dynamo.config.suppress_errors"]


def test_a_python_that_pytorch_cannot_compile_in(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._dynamo

    monkeypatch.setattr(sys, "version_info", (3, 99, 0, "final", 0))
    with pytest.raises(RuntimeError, match="not yet supported"):
        torch._dynamo.eval_frame.check_if_dynamo_supported()
    assert any(
        "not yet supported for torch.compile" in each for each in examine(lambda: Settings(backend="eager")).stops
    )


@pytest.mark.parametrize(
    ("backend", "stop"), [("openvino", "pip install torchrig-openvino"), ("rocket", "no launch pad")]
)
def test_a_backend_that_cannot_be_used(rocket: Any, backend: str, stop: str) -> None:
    rocket(reason="no launch pad")
    found = told("--backend", backend)
    assert len(found["stops"]) == 1 and stop in found["stops"][0]


def test_without_the_default_backend_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchrig import errors

    def missing(name: str) -> None:
        raise errors.BackendNotInstalled(
            f"backend {name!r} comes with torchrig-inductor: pip install torchrig-inductor"
        )

    monkeypatch.setattr(obstacles, "load_backend", missing)
    found = told()
    assert (found["backend"], found["ok"]) == ("eager", True)
    assert "pip install torchrig-inductor" in found["because"]


def test_a_strategy_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    found = told("--backend", "eager", "--strategy", "xla")
    assert any("torchrig-xla" in each for each in found["stops"])
    assert told("--backend", "eager", "--set", "device=cuda:77")["stops"]


def test_facts_that_cannot_be_told_are_told_as_that(rocket: Any) -> None:
    rocket(facts="1 / 0")
    (detail,) = [each for each in told("--backend", "rocket")["details"] if each["name"] == "backend rocket"]
    assert detail["facts"] == {"facts": "asking for them raised ZeroDivisionError: division by zero"}


def test_a_broken_plugin_is_a_row_and_stops_nothing(install: Any) -> None:
    install("acme", {"bad": "bad_module"}, {"bad_module": "raise RuntimeError('ouch')"})
    found = told("--backend", "eager")
    assert found["ok"]
    assert [row["status"] for row in found["plugins"] if row["name"] == "bad"] == ["broken"]


def test_a_cache_is_measured_and_left_alone(rocket: Any, tmp_path: Path) -> None:
    cache, later = tmp_path / "cache", tmp_path / "not" / "yet"
    (cache / "inner").mkdir(parents=True)
    (cache / "inner" / "kernel.so").write_bytes(b"x" * 2**20)
    rocket(folders=(str(cache), str(later)))
    found = {folder["path"]: folder for folder in told("--backend", "rocket")["folders"]}
    first = next(folder for path, folder in found.items() if path.endswith("cache"))
    assert (first["files"], first["megabytes"], first["owner"], first["problem"]) == (1, 1.0, "you", None)
    assert any(path.endswith("yet") and not folder["exists"] for path, folder in found.items())
    assert not later.parent.exists() and [each.name for each in cache.iterdir()] == ["inner"]


def test_a_cache_that_cannot_be_written_stops_its_backend_alone(rocket: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    rocket(folders=(str(tmp_path / "file" / "cache"),))
    stops = told("--backend", "rocket")["stops"]
    assert len(stops) == 1 and "is a file" in stops[0] and "where compiled code is kept" in stops[0]
    assert told("--backend", "eager")["ok"]


def test_a_folder_that_refuses_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Permissions do not stop root, under whom tests may run; a refusal is made."""

    def refuse(**_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(folders.tempfile, "TemporaryFile", refuse)
    assert folders.look_at(str(tmp_path), "backend x").problem == "it cannot be written to (Permission denied)"
    missing = folders.look_at(str(tmp_path / "a" / "b"), "backend x").problem
    assert missing == f"{tmp_path} cannot be written to (Permission denied)"
    reason = folders.temporary()
    assert reason is not None and "Permission denied" in reason and "TMPDIR" in reason


def test_a_folder_in_somebodys_private_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    private, ask = tmp_path / "private", Path.stat

    def refuse(path: Path, **options: Any) -> os.stat_result:
        if private in path.parents:
            raise PermissionError(13, "Permission denied")
        return ask(path, **options)

    private.mkdir()
    monkeypatch.setattr(Path, "stat", refuse)
    found = folders.look_at(str(private / "cache"), "backend x")
    assert (found.exists, found.problem) == (False, None)  # root may write there; others are told that they may not


def test_a_folder_of_somebody_else_is_doubtful(rocket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rocket(folders=(str(tmp_path),))
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    found = told("--backend", "rocket")
    assert any(f"it belongs to another user (uid {own})" in each for each in found["doubts"])


def test_a_disk_that_loads_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Noexec:
        f_flag = os.ST_NOEXEC

    monkeypatch.setattr(os, "statvfs", lambda path: Noexec)
    assert "noexec" in str(folders.look_at(str(tmp_path), "backend x").problem)


def test_no_home_no_name_no_secret(rocket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "alice"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("LOGNAME", "alice")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/scratch/alice/cache")
    monkeypatch.setenv("TORCH_HOME", str(home / "torch"))
    monkeypatch.setenv("TORCHRIG_ROCKET__API_TOKEN", "hush-hush")
    monkeypatch.setenv("TORCH_PROXY", "http://alice:hush-hush@host/")
    monkeypatch.setenv("AWS_SECRET", "hush-hush")
    monkeypatch.setenv("MY_OWN", "hush-hush")
    rocket(facts=f"{{'compiler': {str(home / 'bin' / 'cc')!r}}}", folders=(str(home / "cache"),))
    for result in (run("--backend", "rocket"), run("--backend", "rocket", "--json")):
        assert "hush-hush" not in result.output
        assert "alice" not in result.output
        assert "MY_OWN" not in result.output and "AWS_SECRET" not in result.output
        assert "~/bin/cc" in result.output
        assert "/scratch/~/cache" in result.output
        assert discreet.HIDDEN in result.output


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/home/al/x", "~/x"),
        ("/home/al", "~"),
        ("/home/al2/x", "/home/al2/x"),
        ("/tmp/cache_al", "/tmp/cache_~"),
        ("/tmp/al/x", "/tmp/~/x"),
        ("/tmp/also/x", "/tmp/also/x"),
        ("al is also a word", "al is also a word"),
        ("http://a:b@host/x", "http://~@host/x"),
        ("PyTorch_al", "PyTorch_~"),
    ],
)
def test_what_is_shortened(monkeypatch: pytest.MonkeyPatch, text: str, shown: str) -> None:
    monkeypatch.setattr(Path, "home", lambda: Path("/home/al"))
    monkeypatch.setattr(getpass, "getuser", lambda: "al")
    assert discreet.shortened({"a": [(text,)]}) == {"a": [(shown,)]}


def test_a_user_without_a_name_or_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> str:
        raise KeyError("uid not found")

    def homeless() -> Path:
        raise RuntimeError("no home")

    monkeypatch.setattr(getpass, "getuser", unknown)
    monkeypatch.setattr(Path, "home", homeless)
    assert discreet.shortened("/a/b") == "/a/b"


def test_which_variables_are_shown() -> None:
    given = {
        "TORCHRIG_MODE": "a",
        "TORCHINDUCTOR_X": "b",
        "TORCH_LOGS": "c",
        "TORCHDYNAMO_VERBOSE": "d",
        "ACCELERATE_DYNAMO_MODE": "e",
        "CXX": "f",
        "OMP_NUM_THREADS": "g",
        "WORLD_SIZE": "h",
    }
    others = {"PATH": "x", "HOME": "x", "MASTER_ADDR": "x", "HF_TOKEN": "x", "CXXFLAGS": "x"}
    assert machine.environment({**given, **others}) == given


def test_a_small_model_is_compiled_where_asked() -> None:
    result = run("--backend", "eager", "--try")
    assert result.exit_code == 0
    assert result.output.rstrip().endswith("runs: a small model was compiled")
    assert not told("--backend", "eager")["tried"]


FAULTY = """
from torchrig import BackendInfo, hookimpl

@hookimpl
def describe():
    return BackendInfo(name="faulty", summary="raises")

@hookimpl
def torch_compile_kwargs(request):
    def compile(graph, inputs):
        raise RuntimeError("Python.h: No such file")
    return {"backend": compile}
"""


def test_what_only_a_compile_shows_is_a_stop(install: Any) -> None:
    install("acme", {"faulty": "faulty_module"}, {"faulty_module": FAULTY})
    assert told("--backend", "faulty")["ok"]
    found = told("--backend", "faulty", "--try")
    assert len(found["stops"]) == 1 and "RuntimeError: Python.h: No such file" in found["stops"][0]


def test_a_model_that_was_left_eager_without_a_word_is_a_stop() -> None:
    import torch._dynamo

    with torch._dynamo.config.patch(disable=True):
        (stop,) = obstacles.tried(Settings(), "eager")
    assert "no graph was built" in stop


def test_nothing_is_tried_where_it_cannot_run() -> None:
    found = told("--backend", "eager", "--set", "disable=true", "--try")
    assert (found["tried"], len(found["stops"])) == (False, 1)


@pytest.mark.parametrize("variable", ["TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE"])
def test_a_process_started_with_the_compiler_off_says_so_once(variable: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torchrig", "doctor", "--backend", "eager", "--json"],
        env={**os.environ, variable: "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert json.loads(done.stdout)["stops"] == [f"{variable}=1 is set in the environment: nothing is compiled."]


def test_a_fresh_process_says_the_same_and_compiles_nothing() -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TORCHRIG_")}
    done = subprocess.run(
        [sys.executable, "-m", "torchrig", "doctor", "--backend", "eager"],
        env=kept,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.rstrip().endswith("would run: nothing was found that stops it")
