"""Each way a plugin can be missing, broken, doubled, switched off or gone. Case 35."""

from __future__ import annotations

import importlib

import pluggy
import pytest

import torchrig
from torchrig import entrypoints, errors, plugins
from torchrig.hookspecs import BackendInfo, CompileRequest
from torchrig.plugins import loading
from torchrig.plugins.inventory import backend_rows, catalogue_rows, installed_rows

HEAD = "from torchrig import BackendInfo, StrategyInfo, hookimpl\n"
DESCRIBE = HEAD + "@hookimpl\ndef describe():\n    return BackendInfo(name='bad', summary='')\n"
GOOD_BACKEND = (
    HEAD
    + """
@hookimpl
def describe():
    return BackendInfo(name="rocket", summary="")
@hookimpl
def torch_compile_kwargs(request):
    return {}
"""
)
KWARGS = "@hookimpl\ndef torch_compile_kwargs(request):\n    return {}\n"


def request(**changes):
    given = {"backend": "x", "mode": None, "options": None, "fullgraph": False, "dynamic": None, "device": "cpu"}
    return CompileRequest(**{**given, **changes})


# --- what works


@pytest.mark.parametrize("name", ["eager", "EAGER", torchrig.DynamoBackend.EAGER])
def test_a_built_in_comes_through_its_entry_point(name):
    plugin = plugins.load_backend(name)
    assert (plugin.name, plugin.distribution, plugin.version) == ("eager", "torchrig", torchrig.__version__)
    assert plugin.hooks.torch_compile_kwargs(request()) == {"backend": "eager"}


def test_no_compiles_nothing():
    assert plugins.load_backend("no").info.compiles is False


def test_a_third_party_backend_works_under_any_spelling(install):
    install.backend("acme", "Rocket-Fuel", "acme_module")
    assert plugins.load_backend("rocket_fuel").name == "rocket_fuel"


def test_only_what_is_selected_is_imported(install):
    install("acme", {"bomb": "acme_bomb"}, {"acme_bomb": "raise RuntimeError"})
    assert plugins.load_backend("eager").name == "eager"


def test_an_alias_of_the_catalogue_finds_the_plugin(install):
    install.backend("acme-xla", "openxla", "acme_xla")
    assert plugins.load_backend("aot_torchxla_trace_once").name == "openxla"
    assert {row.name: row.status for row in backend_rows()}["torchxla_trace_once"] == "ok"


def test_the_first_copy_of_a_distribution_counts(install, tmp_path_factory, monkeypatch):
    install.backend("acme", "rocket", "acme_new", version="2.0")
    other = tmp_path_factory.mktemp("old")
    monkeypatch.syspath_prepend(other)
    old = other / "acme-1.0.dist-info"
    old.mkdir()
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: Acme\nVersion: 1.0\n")
    (old / "entry_points.txt").write_text("[torchrig.backends]\nrocket = acme_new\n")
    importlib.invalidate_caches()
    assert plugins.load_backend("rocket").version == "1.0"


# --- selected and broken

BROKEN = {
    "import": ("bad_module", "import there_is_no_such_module", "ModuleNotFoundError", ModuleNotFoundError),
    "exit": ("bad_module", "import sys; sys.exit(3)", "SystemExit", SystemExit),
    "syntax": ("bad_module", "def", "SyntaxError", SyntaxError),
    "attribute": ("bad_module:thing", "", "thing", AttributeError),
    "value": ("bad module:", "", "not of the form", ValueError),
    "hooks": ("bad_module", "", "must implement the hook describe()", None),
    "object": ("bad_module:x", "x = 3", "must implement the hook describe()", None),
    "needed": ("bad_module", DESCRIBE, "must implement the hook torch_compile_kwargs()", None),
    "unknown": ("bad_module", DESCRIBE + KWARGS + "@hookimpl\ndef compile_all(): pass\n", "compile_all", None),
    "arguments": ("bad_module", DESCRIBE + KWARGS.replace("request", "requst"), "requst", None),
    "raises": ("bad_module", DESCRIBE.replace("return", "1 / 0 #") + KWARGS, "ZeroDivisionError", ZeroDivisionError),
    "kind": (
        "bad_module",
        DESCRIBE.replace("BackendInfo(", "StrategyInfo(") + KWARGS,
        "must return a BackendInfo",
        None,
    ),
    "nothing": ("bad_module", DESCRIBE.replace("return", "#") + "    pass\n" + KWARGS, "returned NoneType", None),
    "name": ("bad_module", DESCRIBE.replace("'bad'", "'good'") + KWARGS, "calls itself 'good'", None),
    "probe": ("bad_module", DESCRIBE.replace("summary", "probe=lambda: 1 / 0, summary") + KWARGS, "division", None),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_plugin_that_is_selected(install, case):
    value, source, says, cause = BROKEN[case]
    install("acme-tools", {"bad": value}, {"bad_module": source})
    with pytest.raises(errors.PluginLoadError, match=r"acme-tools 1\.2\.3") as caught:
        plugins.load_backend("bad")
    message = str(caught.value)
    assert says in message
    assert message.endswith("TORCHRIG_DISABLE_PLUGINS=bad")
    assert isinstance(caught.value.__cause__, cause or Exception)


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_plugin_is_one_row_and_takes_no_other_down(install, case):
    value, source, says, _ = BROKEN[case]
    install("acme-tools", {"bad": value}, {"bad_module": source})
    install.backend("apex", "apex_fast", "apex_module")
    rows = {row.name: row for row in installed_rows()}
    assert rows["bad"].status == "broken"
    assert says in rows["bad"].reason
    assert rows["apex_fast"].status == rows["eager"].status == "ok"


def test_a_keyboard_interrupt_during_an_import_is_the_users(install):
    install("acme", {"bad": "bad_module"}, {"bad_module": "raise KeyboardInterrupt"})
    with pytest.raises(KeyboardInterrupt):
        plugins.load_backend("bad")


# --- broken and not selected


@pytest.mark.parametrize(("value", "says"), [("gone_module:x", "there is no module 'gone_module'"), ("a b", "form")])
def test_a_broken_plugin_nobody_selected_is_one_warning(install, recwarn, value, says):
    install("acme", {"bad": value})
    with pytest.warns(errors.TorchrigWarning, match=f"{says}.*TORCHRIG_DISABLE_PLUGINS=bad"):
        assert plugins.load_backend("eager").name == "eager"
    plugins.load_backend("eager")
    plugins.load_strategy("single")
    assert not recwarn.list


def test_metadata_that_cannot_be_read_is_one_warning_and_a_row(install):
    (install("acme", {"x": "y"}) / "METADATA").unlink()
    with pytest.warns(errors.TorchrigWarning, match=r"acme-1\.2\.3\.dist-info: it has no name"):
        plugins.load_backend("eager")
    assert [row.status for row in installed_rows() if "acme" in row.distribution] == ["broken"]


def test_a_line_without_a_name_is_one_warning_and_hides_no_other(install):
    install("acme", "[torchrig.backends]\nrocket = acme_module\n= zed_a\n", {"acme_module": GOOD_BACKEND})
    with pytest.warns(
        errors.TorchrigWarning, match=r"acme: line 3 of its entry_points\.txt names no plugin: '= zed_a'"
    ):
        assert plugins.load_backend("rocket").name == "rocket"
    assert [(row.name, row.status) for row in installed_rows() if row.distribution == "acme"] == [
        ("rocket", "ok"),
        ("", "broken"),
    ]


def test_a_broken_plugin_that_is_switched_off_is_not_mentioned(install, monkeypatch):
    install("acme", {"bad": "gone_module"})
    monkeypatch.setenv("TORCHRIG_DISABLE_PLUGINS", "bad")
    plugins.load_backend("eager")
    assert {row.name: row.status for row in installed_rows()}["bad"] == "disabled"


def test_strict_makes_any_broken_plugin_an_error(install, monkeypatch):
    install("acme", {"bad": "bad_module"}, {"bad_module": "raise RuntimeError('ouch')"})
    monkeypatch.setenv("TORCHRIG_STRICT_PLUGINS", "1")
    with pytest.raises(errors.PluginLoadError, match=r"acme 1\.2\.3.*ouch"):
        plugins.load_backend("eager")
    monkeypatch.setenv("TORCHRIG_STRICT_PLUGINS", "0")
    assert plugins.load_backend("eager").name == "eager"


# --- two that claim one name


@pytest.mark.parametrize("name", ["rocket", "eager"])
def test_nothing_is_picked_silently(install, monkeypatch, name):
    install.backend("acme", name, "acme_module")
    if name == "rocket":
        install.backend("bcme", name, "bcme_module")
    other = "bcme" if name == "rocket" else "torchrig"
    with pytest.raises(errors.AmbiguousPluginError, match=name) as caught:
        plugins.load_backend(name)
    assert "acme 1.2.3" in str(caught.value)
    assert other in str(caught.value)
    assert {row.status for row in installed_rows() if row.name == name} == {"ambiguous"}
    monkeypatch.setenv("TORCHRIG_DISABLE_PLUGINS", "acme")
    assert plugins.load_backend(name).distribution == other


# --- known, and not usable


def test_not_installed():
    with pytest.raises(errors.BackendNotInstalled) as caught:
        plugins.load_backend("OpenVINO")
    assert str(caught.value) == "backend 'openvino' comes with torchrig-openvino: pip install torchrig-openvino"


@pytest.mark.parametrize("name", ["tvm", "openxla"])
def test_a_name_with_a_distribution_of_its_own_is_not_taken_from_pytorch(name):
    with pytest.raises(errors.BackendNotInstalled, match="pip install torchrig-"):
        plugins.load_backend(name)


def test_a_strategy_or_transform_that_is_not_installed(monkeypatch):
    monkeypatch.setattr(entrypoints, "scan", lambda: ((), ()))
    with pytest.raises(errors.StrategyNotInstalled, match="pip install torchrig-fsdp2"):
        plugins.load_strategy("fsdp2")
    with pytest.raises(errors.PluginError, match="pip install torchrig-torchao"):
        plugins.load_transform("float8")


def test_a_strategy_of_torchrigs_own_that_is_not_shipped_yet(monkeypatch):
    monkeypatch.setattr(entrypoints, "scan", lambda: ((), ()))
    with pytest.raises(errors.StrategyNotInstalled, match="does not bring it yet") as caught:
        plugins.load_strategy("ddp")
    assert "pip install" not in str(caught.value)


def test_unavailable_here_with_the_reason(install):
    source = DESCRIBE.replace("summary", "probe=lambda: 'no rockets on this machine', summary") + KWARGS
    install("acme", {"bad": "bad_module"}, {"bad_module": source})
    with pytest.raises(errors.BackendUnavailable, match=r"'bad' \(acme 1\.2\.3\).*no rockets on this machine"):
        plugins.load_backend("bad")
    row = next(row for row in installed_rows() if row.name == "bad")
    assert (row.status, row.reason) == ("unavailable", "no rockets on this machine")


@pytest.mark.parametrize("answer", ["True", "False", "''", "0", "['no rockets']"])
def test_a_probe_that_does_not_answer_in_text_is_an_error(install, answer):
    source = DESCRIBE.replace("summary", f"probe=lambda: {answer}, summary") + KWARGS
    install("acme", {"bad": "bad_module"}, {"bad_module": source})
    with pytest.raises(errors.PluginLoadError, match=r"acme 1\.2\.3.*probe must return the reason as text, or None"):
        plugins.load_backend("bad")
    assert next(row.status for row in installed_rows() if row.name == "bad") == "broken"


def test_a_plugin_that_cannot_be_hashed_is_told_so(install):
    source = (
        HEAD
        + """
class Plugin:
    __hash__ = None
    @hookimpl
    def describe(self):
        return BackendInfo(name="bad", summary="")
    @hookimpl
    def torch_compile_kwargs(self, request):
        return {}
plugin = Plugin()
"""
    )
    install("acme", {"bad": "bad_module:plugin"}, {"bad_module": source})
    with pytest.raises(errors.PluginLoadError, match="cannot be hashed"):
        plugins.load_backend("bad")


def test_removed_names_the_successor():
    with pytest.raises(
        errors.BackendRemoved, match=r"PyTorch 2\.0 removed it.*tensorrt.*pip install torchrig-tensorrt"
    ):
        plugins.load_backend("fx2trt")
    assert {row.name: row.status for row in backend_rows()}["fx2trt"] == "removed"


def test_removed_is_served_by_an_installed_successor_with_one_warning(install):
    install.backend("acme-thunder", "thunder", "acme_thunder")
    with pytest.warns(errors.TorchrigWarning, match="'thunder' is used instead") as caught:
        assert plugins.load_backend("nvprims_nvfuser").name == "thunder"
    assert len(caught) == 1


def test_removed_with_a_successor_that_cannot_run(install):
    source = DESCRIBE.replace("'bad'", "'thunder', probe=lambda: 'too old'") + KWARGS
    install("acme", {"thunder": "bad_module"}, {"bad_module": source})
    with pytest.raises(errors.BackendRemoved, match="too old"):
        plugins.load_backend("aot_ts_nvfuser")


def test_unknown_names_say_what_is_near():
    with pytest.raises(errors.SettingsError, match=r"register_backend, or a callable") as caught:
        plugins.load_backend("inducter")
    assert (caught.value.setting, caught.value.nearest) == ("backend", "inductor")
    assert "fx2trt" not in caught.value.choices
    with pytest.raises(errors.SettingsError) as caught:
        plugins.load_strategy("fsdp")
    assert (caught.value.setting, caught.value.nearest) == ("strategy", "fsdp2")
    with pytest.raises(errors.SettingsError) as caught:
        plugins.load_transform("float9")
    assert (caught.value.setting, caught.value.nearest) == ("transforms", "float8")


def test_something_that_is_no_backend_at_all():
    with pytest.raises(errors.SettingsError, match="3 is neither"):
        plugins.load_backend(3)


# --- allowed and denied


@pytest.mark.parametrize(
    ("variable", "value", "there"),
    [
        ("TORCHRIG_PLUGINS", "rocket, other", True),
        ("TORCHRIG_PLUGINS", "acme", True),
        ("TORCHRIG_PLUGINS", "other", False),
        ("TORCHRIG_PLUGINS", "", False),
        ("TORCHRIG_DISABLE_PLUGINS", "other", True),
        ("TORCHRIG_DISABLE_PLUGINS", "", True),
        ("TORCHRIG_DISABLE_PLUGINS", "ROCKET", False),
        ("TORCHRIG_DISABLE_PLUGINS", "x,*", False),
    ],
)
def test_allow_and_deny_lists(install, monkeypatch, variable, value, there):
    install.backend("acme", "rocket", "acme_module")
    monkeypatch.setenv(variable, value)
    assert plugins.load_backend("eager").name == "eager"  # torchrig's own always stay
    if there:
        assert plugins.load_backend("rocket").name == "rocket"
    else:
        with pytest.raises(errors.BackendUnavailable, match=rf"switched off by {variable}="):
            plugins.load_backend("rocket")


# --- managers and requests


def test_a_manager_has_the_selected_plugins_alone_in_order():
    backend, strategy = plugins.load_backend("eager"), plugins.load_strategy("single")
    manager = plugins.make_manager([backend, strategy, backend])
    assert isinstance(manager, pluggy.PluginManager)
    assert [name for name, _ in manager.list_name_plugin()] == ["eager", "single"]


class NoHooks:
    pass


class Equal:
    def __eq__(self, other):
        return True

    def __hash__(self):
        return 1


def test_plugins_of_any_two_groups_may_share_a_name():
    backend, strategy = plugins.load_backend("eager"), plugins.load_strategy("single")
    groups = ("torchrig.transforms", "torchrig.backends", "torchrig.strategies", "torchrig.strategies")
    four = [loading.Plugin("x", group, "acme", "1", NoHooks(), backend.info) for group in groups]
    manager = plugins.make_manager([*four, strategy])
    names = [name for name, _ in manager.list_name_plugin()]
    assert names == ["x", "x (backend)", "x (strategy)", "x (strategy 2)", "single"]


def test_two_plugins_that_are_equal_are_an_error_of_torchrigs():
    info = plugins.load_backend("eager").info
    two = [loading.Plugin(name, "torchrig.backends", "acme", "1", Equal(), info) for name in "ab"]
    with pytest.raises(errors.PluginLoadError, match="Plugin 'b' does not fit"):
        plugins.make_manager(two)


INFO = BackendInfo(name="x", summary="", modes=("default", "max-autotune"), options=lambda: ["shape_padding", "a.b"])
PLAIN = BackendInfo(name="x", summary="")


@pytest.mark.parametrize(
    ("info", "asked"),
    [
        (INFO, {"mode": "max-autotune"}),
        (INFO, {"options": {"shape-padding": True, "a.b": 1}}),
        (INFO, {"mode": "default", "options": {"a.b": 1}}),
        (PLAIN, {"mode": "default"}),
        (PLAIN, {"options": {}}),
    ],
)
def test_requests_a_backend_takes(info, asked):
    plugins.check_request(info, request(**asked))


@pytest.mark.parametrize(
    ("info", "asked", "setting", "nearest"),
    [
        (PLAIN, {"mode": "max-autotune"}, "mode", None),
        (INFO, {"mode": "max-autotun"}, "mode", "max-autotune"),
        (PLAIN, {"options": {"a": 1}}, "options", None),
        (INFO, {"options": {"shape_paddin": 1}}, "options", "shape_padding"),
        (INFO, {"mode": "max-autotune", "options": {"a.b": 1}}, "options", None),
    ],
)
def test_requests_a_backend_does_not_take(info, asked, setting, nearest):
    with pytest.raises(errors.SettingsError) as caught:
        plugins.check_request(info, request(**asked))
    assert (caught.value.setting, caught.value.nearest, caught.value.origin) == (setting, nearest, None)


def test_there_is_a_row_for_every_name_of_the_catalogue():
    names = {(row.kind, row.name) for row in catalogue_rows()}
    assert {("backend", member.value) for member in torchrig.DynamoBackend} <= names
    assert {("strategy", "single"), ("strategy", "deepspeed"), ("transform", "int8")} <= names


# --- one hook of one plugin


STRATEGY = (
    HEAD + "from torchrig import Wrapped\n@hookimpl\ndef describe():\n    return StrategyInfo(name='bad', summary='')\n"
)


def asked(manager, plugin):
    return plugins.ask(manager, plugin, "wrap_strategy", torchrig.Wrapped, model="m", optimizers=(), plan=None)


@pytest.mark.parametrize(
    ("body", "came"),
    [
        ("pass", r"NoneType: does it lack a return\?"),
        ("return model", r"str\."),
        ("return Wrapped", "the class Wrapped"),
    ],
)
def test_an_answer_that_is_none_is_told_with_the_plugins_name(install, body, came):
    source = f"{STRATEGY}@hookimpl\ndef wrap_strategy(model, optimizers, plan):\n    {body}\n"
    install("acme-boxed", {"bad": "bad_module"}, {"bad_module": source}, group="torchrig.strategies")
    plugin = plugins.load_strategy("bad")
    manager = plugins.make_manager([plugins.load_strategy("single"), plugin])
    says = r"the hook wrap_strategy\(\) of strategy 'bad' \(acme-boxed 1\.2\.3\) must return a Wrapped, and returned "
    with pytest.raises(errors.PluginLoadError, match=says + came):
        asked(manager, plugin)


def test_only_the_plugin_that_is_meant_is_asked(install):
    source = f"{STRATEGY}@hookimpl\ndef wrap_strategy(model):\n    return Wrapped({{!r}}, ())\n"
    for name in ("one", "two"):
        module = source.replace("'bad'", repr(name)).format(name)
        install(f"acme-{name}", {name: f"{name}_module"}, {f"{name}_module": module}, group="torchrig.strategies")
    both = [plugins.load_strategy(name) for name in ("one", "two")]
    manager = plugins.make_manager(both)
    assert [asked(manager, each).model for each in both] == ["one", "two"]


def test_an_answer_to_a_hook_that_takes_the_first(install):
    backend = plugins.load_backend("eager")
    manager = plugins.make_manager([backend, plugins.load_strategy("single")])
    assert plugins.ask(manager, backend, "torch_compile_kwargs", dict, request=request()) == {"backend": "eager"}
    with pytest.raises(
        errors.PluginLoadError, match=r"backend 'eager' .*must return an int or a str, and returned dict"
    ):
        plugins.ask(manager, backend, "torch_compile_kwargs", (int, str), request=request())
