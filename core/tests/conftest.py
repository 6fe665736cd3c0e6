"""Distributions that are not there: written to a temporary folder on ``sys.path``."""

from __future__ import annotations

import importlib
import sys

import pytest

GOOD_BACKEND = """
from torchrig import BackendInfo, hookimpl
@hookimpl
def describe():
    return BackendInfo(name={name!r}, summary="a test's backend")
@hookimpl
def torch_compile_kwargs(request):
    return {{"backend": "eager"}}
"""


class Installer:
    """Installs made-up distributions for one test."""

    def __init__(self, folder, monkeypatch):
        self.folder = folder
        self.modules = []
        self.monkeypatch = monkeypatch
        monkeypatch.syspath_prepend(folder)

    def __call__(self, distribution, entries, modules=None, group="torchrig.backends", version="1.2.3"):
        """Install ``entries`` (name -> value, or the text of entry_points.txt) and ``modules`` (name -> source)."""
        info = self.folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        if isinstance(entries, dict):
            entries = "\n".join([f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())])
        (info / "entry_points.txt").write_text(entries)
        for name, source in (modules or {}).items():
            (self.folder / f"{name}.py").write_text(source)
            self.modules.append(name)
        importlib.invalidate_caches()
        return info

    def backend(self, distribution, name, module, version="1.2.3"):
        """Install a backend that works."""
        return self(distribution, {name: module}, {module: GOOD_BACKEND.format(name=name)}, version=version)


@pytest.fixture
def install(tmp_path, monkeypatch):
    from torchrig.plugins import selection

    for variable in ("TORCHRIG_PLUGINS", "TORCHRIG_DISABLE_PLUGINS", "TORCHRIG_STRICT_PLUGINS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(selection, "_told", set())
    installer = Installer(tmp_path, monkeypatch)
    yield installer
    for name in installer.modules:
        sys.modules.pop(name, None)
