"""The workspace: versions in step, complete distributions, pinned public names, a cheap import, examples that run."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import torchrig

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
CORE = ROOT / "core"
PLUGINS = sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))
DISTRIBUTIONS = [CORE, *PLUGINS]

PUBLIC = {
    "AlreadyPreparedError", "AmbiguousPluginError", "ArgumentError", "BackendError", "BackendInfo",
    "BackendNotInstalled", "BackendRemoved", "BackendUnavailable", "Capabilities", "CheckpointError",
    "CompileProblem", "CompileProblemWarning", "CompileRequest", "DynamoBackend", "GraphBreak", "Plan", "PluginError",
    "PluginLoadError", "RankFailed", "RecompileLimitReached", "Region", "RegionCompileError", "RegionError",
    "RegionNotCompiled",
    "Report", "Settings", "SettingsError", "Share", "Step", "StrategyError", "StrategyInfo", "StrategyNotInstalled",
    "StrategyUnavailable", "TorchrigError", "TorchrigWarning", "TransformInfo", "Unit", "Wrapped", "clip_grad_norm_",
    "compile_regions", "has_compiled_regions", "hookimpl", "is_compiled", "load_checkpoint", "no_sync", "plan",
    "prepare", "report", "save_checkpoint", "unwrap", "warmup",
}  # fmt: skip


# Who may touch PyTorch's private surface: a module more is a decision.
PRIVATE_ROOMS = {
    "fsdp2": {"private.py"},
    "core": {"context.py", "flags.py", "foreign.py", "reading.py", "trace.py", "watcher.py"},
    "inductor": {"options.py", "toolchain.py"},
}


def pyproject(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "pyproject.toml").read_text())


def run_python(*arguments: str, **variables: str) -> str:
    """What a fresh Python prints, started without settings from outside."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHRIG_")}
    done = subprocess.run(
        [sys.executable, *arguments], env={**environment, **variables}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


each_distribution = pytest.mark.parametrize("folder", DISTRIBUTIONS, ids=lambda folder: folder.name)
each_plugin = pytest.mark.parametrize("folder", PLUGINS, ids=lambda folder: folder.name)


def test_there_are_plugins_to_check():
    assert [folder.name for folder in DISTRIBUTIONS[:2]] == ["core", "fsdp2"]


@each_distribution
def test_one_version_for_all(folder):
    assert pyproject(folder)["project"]["version"] == torchrig.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+", torchrig.__version__)


def test_the_changelog_tells_of_this_version():
    assert f"## {torchrig.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def lockstep() -> str:
    """The range of torchrig versions that belong together before 1.0: one minor version."""
    major, minor, _ = torchrig.__version__.split(".")
    return f">={major}.{minor}.0,<{major}.{int(minor) + 1}"


@each_plugin
def test_a_plugin_needs_the_core_of_its_own_minor_version(folder):
    assert f"torchrig{lockstep()}" in pyproject(folder)["project"]["dependencies"]


@each_plugin
def test_core_offers_every_plugin_as_an_extra(folder):
    extras = pyproject(CORE)["project"]["optional-dependencies"]
    assert extras[folder.name] == [f"torchrig-{folder.name}{lockstep()}"]
    assert any(f"torchrig[{folder.name}]" in each or folder.name in each for each in extras["all"])


@each_distribution
def test_a_distribution_is_complete(folder):
    project = pyproject(folder)["project"]
    package = folder / "src" / project["name"].replace("-", "_")
    expected = ("README.md", "LICENSE", "tests", f"{package}/py.typed", f"{package}/__init__.py")
    assert [name for name in expected if not (folder / name).exists()] == []
    assert list(folder.glob("tests/test_*.py"))
    assert project["requires-python"] == ">=3.10"
    assert project["license"] == "Apache-2.0"
    assert "Apache License" in (folder / "LICENSE").read_text()


def test_the_root_is_not_a_distribution():
    assert set(pyproject(ROOT)) == {"tool"}


def test_every_distribution_is_made_by_the_makefile_and_typed_and_layered():
    tools = pyproject(ROOT)["tool"]
    packages = {pyproject(folder)["project"]["name"].replace("-", "_") for folder in DISTRIBUTIONS}
    assert set(tools["mypy"]["packages"]) == packages
    assert set(tools["importlinter"]["root_packages"]) == packages
    (made,) = re.findall(r"^PACKAGES := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert made.split() == [str(folder.relative_to(ROOT)) for folder in DISTRIBUTIONS]


def test_public_names_are_pinned():
    assert set(torchrig.__all__) == PUBLIC
    assert all(hasattr(torchrig, name) for name in PUBLIC)


def test_public_errors_are_of_one_tree():
    errors = [
        each for name in PUBLIC if isinstance(each := getattr(torchrig, name), type) and issubclass(each, Exception)
    ]
    assert all(issubclass(each, torchrig.TorchrigError | Warning) for each in errors)


def test_import_is_cheap_and_brings_no_plugin():
    print_modules = "import sys, json, torchrig; print(json.dumps(sorted(sys.modules)))"
    loaded = set(json.loads(run_python("-c", print_modules)))
    plugins = {pyproject(folder)["project"]["name"].replace("-", "_") for folder in PLUGINS}
    dear = {"torch._dynamo", "torch._inductor", "pydantic_settings", "pydantic", "rich", "click", "yaml"}
    before = set(json.loads(run_python("-c", print_modules.replace("torchrig", "torch"))))
    assert (loaded - before) & (dear | plugins) == set()
    assert "torch._dynamo" not in loaded


@each_distribution
def test_private_torch_is_touched_in_known_rooms_only(folder):
    touching = {file.name for file in folder.glob("src/**/*.py") if private_torch(file.read_text())}
    assert touching == PRIVATE_ROOMS.get(folder.name, set())


def private_torch(source: str) -> list[str]:
    """The private modules of torch that some code imports or reads, such as ``torch._dynamo``."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            names = [ast.unparse(node)] if isinstance(node, ast.Attribute) else []
        found += [name for name in names if re.match(r"torch\.(\w+\.)*_[a-z]", name)]
    return [name for name in found if not name.startswith("torch.utils._pytree")]  # as stable as public names


@pytest.mark.parametrize(
    ("source", "private"),
    [
        ("import torch._dynamo", True),
        ("from torch._inductor import config", True),
        ("from torch import _dynamo", True),
        ("torch._C._get_tracing_state()", True),
        ("import torch.nn as nn", False),
        ("torch.compile(model)", False),
        ("module._modules", False),
    ],
)
def test_what_counts_as_private(source, private):
    assert bool(private_torch(source)) is private


def example(*flags: str, **variables: str) -> str:
    tiny = ("--steps", "3", "--layers", "3", "--width", "32", "--batch", "2")
    return run_python(str(ROOT / "examples" / "train.py"), *tiny, *flags, **variables)


def test_the_example_learns_the_same_compiled_and_saves_a_bare_checkpoint(tmp_path):
    example("--backend", "no", "--checkpoint", str(tmp_path / "bare.pt"), "--json", str(tmp_path / "bare.json"))
    said = example(
        "--checkpoint", str(tmp_path / "rig.pt"), "--json", str(tmp_path / "rig.json"), TORCHRIG_BACKEND="eager"
    )  # fmt: skip
    assert "step 3/3" in said
    assert "Block" in said
    bare, rig = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("bare", "rig"))
    assert rig["losses"] == pytest.approx(bare["losses"], abs=1e-5)
    assert (bare["report"]["graphs"], rig["report"]["graphs"], rig["report"]["breaks"]) == (0, 1, 0)
    assert rig["peak_mb"] > 0
    states = [torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("bare", "rig")]
    assert list(states[0]) == list(states[1])
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(*map(dict.values, states), strict=True))


def test_the_readmes_example_runs():
    readme = (ROOT / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    assert len(code.splitlines()) <= 20
    said = run_python("-c", code.replace('backend="inductor"', 'backend="eager"'))
    assert re.search(r"Sequential +12 +1 +0 +0 ", said)  # instances, graphs, recompiles, breaks: as its comment says
