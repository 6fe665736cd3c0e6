"""Every hook has a documented signature, and is called through a manager."""

from __future__ import annotations

import inspect

import pluggy
import pytest

from torchrig import hookimpl, hookspecs

SIGNATURES = {
    "describe": (),
    "torch_compile_kwargs": ("request",),
    "device_mesh": ("plan",),
    "units": ("model", "plan", "processes"),
    "check_model": ("model", "plan"),
    "wrap_strategy": ("model", "optimizers", "plan"),
    "compile_region": ("module", "region", "kwargs", "plan"),
    "no_sync": ("model",),
    "clip_grad_norm": ("model", "max_norm", "norm_type"),
    "unwrap": ("model", "keep_compile"),
    "transform": ("model", "plan"),
}
FIRST_RESULT = {"describe", "torch_compile_kwargs", "device_mesh", "units", "no_sync", "clip_grad_norm"}


def manager_with(*plugins):
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    for plugin in plugins:
        manager.register(plugin)
    manager.check_pending()
    return manager


def declared():
    found = vars(hookspecs).items()
    return {name: each for name, each in found if hasattr(each, f"{hookspecs.PROJECT}_spec")}


def test_these_are_the_hooks():
    assert {name: tuple(inspect.signature(each).parameters) for name, each in declared().items()} == SIGNATURES


@pytest.mark.parametrize("name", SIGNATURES)
def test_a_hook_is_documented_and_typed(name):
    hook = declared()[name]
    assert inspect.getdoc(hook)
    annotations = hook.__annotations__
    assert set(annotations) == {*SIGNATURES[name], "return"}


@pytest.mark.parametrize("name", SIGNATURES)
def test_a_hook_is_called_with_what_it_declares(name):
    class Plugin:
        pass

    source = f"def {name}(self, {', '.join(SIGNATURES[name])}): return [{', '.join(SIGNATURES[name])}]"
    scope = {}
    exec(source, scope)
    setattr(Plugin, name, hookimpl(scope[name]))
    values = {argument: object() for argument in SIGNATURES[name]}
    answer = getattr(manager_with(Plugin()).hook, name)(**values)
    expected = list(values.values())
    assert answer == (expected if name in FIRST_RESULT else [expected])


def test_the_markers_are_torchrigs():
    assert hookspecs.PROJECT == hookimpl.project_name == "torchrig"
