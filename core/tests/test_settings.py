"""Which value wins, what it becomes, and where it is said to come from."""

from __future__ import annotations

import copy
import json
import os
import pickle
from typing import Literal

import pytest
from pydantic import BaseModel, ConfigDict

from torchrig.catalogue import DynamoBackend
from torchrig.errors import SettingsError
from torchrig.settings import OnProblem, Settings


@pytest.fixture(autouse=True)
def _bare(monkeypatch, tmp_path):
    for name in list(os.environ):
        if name.startswith(("TORCHRIG_", "ACCELERATE_")):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def yaml(tmp_path):
    def write(text: str, name: str = "train.yaml") -> str:
        (tmp_path / name).write_text(text, encoding="utf-8")
        return name

    return write


def refused(*args, **kwargs) -> SettingsError:
    make = args[0] if args else Settings
    with pytest.raises(SettingsError) as caught:
        make(*args[1:], **kwargs)
    assert caught.value.origin is not None
    return caught.value


class Plugin(BaseModel):
    """Stands for a plugin's own settings."""

    model_config = ConfigDict(extra="forbid")

    class Inner(BaseModel):
        model_config = ConfigDict(extra="forbid")
        depth: int = 1

    reshard: bool | Literal["auto"] = "auto"
    size: int = 8
    kind: Literal["small", "large"] = "small"
    inner: Inner = Inner()


# -- defaults and single values --------------------------------------------------------------------------------------


def test_defaults_change_nothing():
    settings = Settings()
    assert (settings.strategy, settings.backend, settings.mode, settings.options) == ("auto", "no", None, None)
    assert (settings.fullgraph, settings.dynamic, settings.disable) == (False, None, False)
    assert (settings.regions, settings.exclude, settings.placement) == ("auto", [], "auto")
    assert (settings.on_failure, settings.mixed_precision, settings.transforms) == ("raise", "no", [])
    assert settings.device is None
    assert settings.on_problem == OnProblem(region_not_compiled="warn", graph_break="warn", recompile_limit="warn")
    assert {row.origin for row in settings.rows()} == {"default"}


def test_names_are_normalised_and_callables_kept():
    from torchrig.catalogue import DynamoBackend

    def mine(graph, example_inputs):
        return graph

    assert Settings(backend=DynamoBackend.INDUCTOR).backend == "inductor"
    assert Settings(backend="AOT-Eager").backend == "aot_eager"
    assert Settings(backend=mine).backend is mine
    assert Settings(strategy="FSDP2").strategy == "fsdp2"
    assert Settings(transforms=["Float-8"]).transforms == ["float_8"]


def test_one_action_stands_for_every_kind_of_problem():
    assert set(Settings(on_problem="raise").on_problem.model_dump().values()) == {"raise"}
    one = Settings(on_problem={"graph_break": "ignore"}).on_problem
    assert (one.graph_break, one.recompile_limit) == ("ignore", "warn")
    assert Settings(on_problem=OnProblem(graph_break="raise")).on_problem.graph_break == "raise"


@pytest.mark.parametrize(("given", "meant"), [(True, "auto"), (False, "whole")])
def test_the_old_name_of_regions(given, meant):
    assert Settings(use_regional_compilation=given).regions == meant
    assert Settings(use_regional_compilation=given).origin("regions") == "argument"


def test_regions_take_names_classes_and_patterns():
    assert Settings(regions=["Block", int, "layers.*"]).regions == ["Block", int, "layers.*"]
    assert Settings(regions="Repeated").regions == "repeated"
    assert Settings(exclude={int, "Block"}).exclude == Settings(exclude={"Block", int}).exclude


def test_a_device_object_is_kept_as_text():
    class Device:
        type = "cuda"

        def __str__(self):
            return "cuda:1"

    assert Settings(device=Device()).device == "cuda:1"


def test_later_changes_to_what_was_given_change_nothing():
    given = {"options": {"a": 1}, "exclude": ["A"], "fsdp2": {"sizes": [1]}}
    settings = Settings(**given)
    given["options"]["a"], given["exclude"][0] = 2, "B"
    given["fsdp2"]["sizes"].append(2)
    assert (settings.options, settings.exclude, settings.plugin_block("fsdp2")) == ({"a": 1}, ["A"], {"sizes": [1]})


# -- precedence: each layer over each weaker one ---------------------------------------------------------------------

LAYERS = ("argument", "variable TORCHRIG_MODE", "train.yaml:2", "variable ACCELERATE_DYNAMO_MODE")


def build(monkeypatch, yaml, present):
    if LAYERS[1] in present:
        monkeypatch.setenv("TORCHRIG_MODE", "variable")
    if LAYERS[3] in present:
        monkeypatch.setenv("ACCELERATE_DYNAMO_MODE", "accelerate")
    if LAYERS[2] in present:
        monkeypatch.setenv("TORCHRIG_CONFIG", yaml("disable: true\nmode: yaml\n"))
    return Settings(**({"mode": "argument"} if LAYERS[0] in present else {}))


@pytest.mark.parametrize("weak", range(1, 4))
@pytest.mark.parametrize("strong", range(3))
def test_the_stronger_layer_wins(monkeypatch, yaml, strong, weak):
    settings = build(monkeypatch, yaml, {LAYERS[strong], LAYERS[weak]})
    winner = min(strong, weak)
    assert settings.mode == ("argument", "variable", "yaml", "accelerate")[winner]
    assert settings.origin("mode") == LAYERS[winner]


@pytest.mark.parametrize("layer", range(4))
def test_each_layer_wins_over_the_default(monkeypatch, yaml, layer):
    assert build(monkeypatch, yaml, {LAYERS[layer]}).origin("mode") == LAYERS[layer]


def test_a_file_in_the_call_wins_over_the_configured_one(monkeypatch, yaml):
    monkeypatch.setenv("TORCHRIG_CONFIG", yaml("mode: configured", "other.yaml"))
    settings = Settings.from_yaml(yaml("backend: eager"), dynamic=True)
    assert (settings.mode, settings.backend, settings.dynamic) == (None, "eager", True)


def test_none_is_a_value_that_wins(monkeypatch):
    monkeypatch.setenv("TORCHRIG_MODE", "max-autotune")
    assert (Settings(mode=None).mode, Settings(mode=None).origin("mode")) == (None, "argument")


def test_mappings_are_merged_key_by_key(monkeypatch, yaml):
    monkeypatch.setenv("TORCHRIG_FSDP2__RESHARD", "false")
    monkeypatch.setenv("TORCHRIG_ON_PROBLEM__GRAPH_BREAK", "ignore")
    path = yaml("on_problem: raise\nfsdp2:\n  reshard: true\n  size: 3\n")
    settings = Settings.from_yaml(path, fsdp2={"kind": "large"})
    assert settings.plugin_block("FSDP2") == {"reshard": False, "size": 3, "kind": "large"}
    assert settings.on_problem.model_dump() == {
        "region_not_compiled": "raise",
        "graph_break": "ignore",
        "recompile_limit": "raise",
    }
    assert settings.origin("fsdp2.reshard") == "variable TORCHRIG_FSDP2__RESHARD"
    assert settings.origin("fsdp2.size") == "train.yaml:4"
    assert settings.origin("fsdp2.kind") == "argument"
    assert settings.origin("on_problem.graph_break") == "variable TORCHRIG_ON_PROBLEM__GRAPH_BREAK"
    assert settings.origin("on_problem.recompile_limit") == "train.yaml:1"


def test_what_a_stronger_layer_took_away_has_no_origin(yaml):
    settings = Settings.from_yaml(yaml("options:\n  a: 1\n"), options=None)
    assert (settings.options, settings.origin("options"), settings.origin("options.a")) == (None, "argument", "default")


# -- variables -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        ("TORCHRIG_BACKEND", "AOT-eager", "backend", "aot_eager"),
        ("TORCHRIG_MODE", "None", "mode", None),
        ("TORCHRIG_FULLGRAPH", "yes", "fullgraph", True),
        ("TORCHRIG_DYNAMIC", "0", "dynamic", False),
        ("TORCHRIG_DYNAMIC", "null", "dynamic", None),
        ("TORCHRIG_REGIONS", "whole", "regions", "whole"),
        ("TORCHRIG_REGIONS", "Block", "regions", ["Block"]),
        ("TORCHRIG_REGIONS", "Block, layers.*,", "regions", ["Block", "layers.*"]),
        ("TORCHRIG_REGIONS", '["Block"]', "regions", ["Block"]),
        ("TORCHRIG_USE_REGIONAL_COMPILATION", "false", "regions", "whole"),
        ("TORCHRIG_TRANSFORMS", "float8,int8", "transforms", ["float8", "int8"]),
        ("TORCHRIG_OPTIONS", '{"triton.cudagraphs": true}', "options", {"triton.cudagraphs": True}),
        ("TORCHRIG_OPTIONS__SHAPE_PADDING", "False", "options", {"shape_padding": False}),
        ("TORCHRIG_OPTIONS__SIZE", "3", "options", {"size": 3}),
        ("TORCHRIG_OPTIONS__KIND", "3x", "options", {"kind": "3x"}),
        ("TORCHRIG_OPTIONS", "none", "options", None),
        ("TORCHRIG_MODE", "  ", "mode", None),
    ],
)
def test_how_a_variable_is_read(monkeypatch, name, text, field, value):
    monkeypatch.setenv(name, text)
    assert getattr(Settings(), field) == value


@pytest.mark.parametrize("name", ["CONFIG", "PLUGINS", "DISABLE_PLUGINS", "STRICT_PLUGINS"])
def test_variables_that_are_no_settings(monkeypatch, name):
    monkeypatch.setenv(f"TORCHRIG_{name}", "")
    assert Settings() == Settings()


def test_a_key_set_on_its_own_wins_over_the_whole_mapping(monkeypatch):
    monkeypatch.setenv("TORCHRIG_FSDP2", '{"size": 1, "kind": "large"}')
    monkeypatch.setenv("TORCHRIG_FSDP2__SIZE", "2")
    monkeypatch.setenv("TORCHRIG_FSDP2__INNER__DEPTH", "4")
    assert Settings().plugin_block("fsdp2") == {"size": 2, "kind": "large", "inner": {"depth": 4}}
    assert Settings().origin("fsdp2.kind") == "variable TORCHRIG_FSDP2"
    assert Settings().origin("fsdp2.inner.depth") == "variable TORCHRIG_FSDP2__INNER__DEPTH"


# -- accelerate ------------------------------------------------------------------------------------------------------


def launch(monkeypatch, **changed):
    """What ``accelerate launch`` of accelerate 1.15 sets, and the settings it leads to."""
    unused = {
        "BACKEND": "NO",
        "MODE": "default",
        "USE_FULLGRAPH": "False",
        "USE_DYNAMIC": "False",
        "USE_REGIONAL_COMPILATION": "False",
    }
    for name, text in {**unused, **changed}.items():
        monkeypatch.setenv(f"ACCELERATE_DYNAMO_{name}", text)
    return Settings()


def test_what_accelerate_sets_unasked_switches_nothing_on(monkeypatch):
    """Case 15: the launcher's USE_DYNAMIC=False must not force static shapes."""
    assert launch(monkeypatch) == Settings()
    assert {row.origin for row in launch(monkeypatch).rows()} == {"default"}


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        ("BACKEND", "AOT_EAGER", "backend", "aot_eager"),
        ("MODE", "max-autotune", "mode", "max-autotune"),
        ("USE_FULLGRAPH", "True", "fullgraph", True),
        ("USE_DYNAMIC", "1", "dynamic", True),
        ("USE_REGIONAL_COMPILATION", "yes", "regions", "auto"),
    ],
)
def test_what_was_asked_of_accelerate_is_done(monkeypatch, name, text, field, value):
    settings = launch(monkeypatch, **{name: text})
    assert getattr(settings, field) == value
    assert settings.origin(field) == f"variable ACCELERATE_DYNAMO_{name}"


def test_accelerates_regions_give_way_to_the_users(monkeypatch):
    launch(monkeypatch, USE_REGIONAL_COMPILATION="true")
    assert Settings(regions="whole").regions == "whole"


def test_a_bad_word_from_accelerate(monkeypatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_FULLGRAPH", "maybe")
    error = refused()
    assert (error.setting, error.origin) == ("fullgraph", "variable ACCELERATE_DYNAMO_USE_FULLGRAPH")


# -- plugins' blocks -------------------------------------------------------------------------------------------------


def test_a_block_is_validated_by_the_plugins_model():
    settings = Settings(fsdp2={"reshard": True, "inner": {"depth": 3}})
    assert settings.validate_block("fsdp2", Plugin) == Plugin(reshard=True, inner=Plugin.Inner(depth=3))
    assert settings.validate_block("deepspeed", Plugin) == Plugin()
    assert settings.plugin_block("deepspeed") is None


@pytest.mark.parametrize(
    ("text", "setting", "line", "nearest"),
    [
        ("fsdp2:\n  rehsard: true\n", "fsdp2.rehsard", 2, "reshard"),
        ("fsdp2:\n  kind: smal\n", "fsdp2.kind", 2, "small"),
        ("fsdp2:\n  size: big\n", "fsdp2.size", 2, None),
        ("fsdp2:\n  inner:\n    dept: 1\n", "fsdp2.inner.dept", 3, "depth"),
        ("fsdp2:\n  inner:\n    depth: []\n", "fsdp2.inner.depth", 3, None),
        ("fsdp2:\n  reshard: aut\n", "fsdp2.reshard", 2, "auto"),
    ],
)
def test_a_bad_value_in_a_block(yaml, text, setting, line, nearest):
    error = refused(Settings.from_yaml(yaml(text)).validate_block, "fsdp2", Plugin)
    assert (error.setting, error.origin, error.nearest) == (setting, f"train.yaml:{line}", nearest)
    assert "Input should be" not in str(error)


def test_every_kind_a_value_may_be_is_named():
    error = refused(Settings(fsdp2={"reshard": "often"}).validate_block, "fsdp2", Plugin)
    assert str(error).startswith("fsdp2.reshard must be true or false, or one of auto, and is 'often'. (from argument)")


def test_a_missing_value_in_a_block_is_the_blocks_fault(yaml):
    class Needs(BaseModel):
        stage: int

    error = refused(Settings.from_yaml(yaml("deepspeed:\n  x: 1\n")).validate_block, "deepspeed", Needs)
    assert (error.setting, error.origin) == ("deepspeed.stage", "train.yaml:1")
    assert str(error).startswith("deepspeed.stage is needed, and is not given.")


# -- what settings can do --------------------------------------------------------------------------------------------


def test_replace_counts_as_an_argument_and_keeps_the_rest(monkeypatch, yaml):
    settings = Settings.from_yaml(yaml("mode: default\nfsdp2:\n  size: 1\non_problem: raise\n"))
    monkeypatch.setenv("TORCHRIG_DISABLE", "true")
    monkeypatch.setenv("TORCHRIG_NONSENSE", "1")
    changed = settings.replace(backend="eager", fsdp2={"kind": "large"}, on_problem={"graph_break": "warn"})
    assert (changed.backend, changed.origin("backend")) == ("eager", "argument")
    assert (changed.mode, changed.origin("mode")) == ("default", "train.yaml:1")
    assert changed.plugin_block("fsdp2") == {"size": 1, "kind": "large"}
    assert changed.origin("fsdp2.size") == "train.yaml:3"
    assert (changed.on_problem.graph_break, changed.on_problem.recompile_limit) == ("warn", "raise")
    assert changed.disable is False
    assert settings.backend == "no"


def test_replace_refuses_as_the_constructor_does():
    assert refused(Settings().replace, mdoe="x").nearest == "mode"


def test_equality_is_by_values_not_origins(monkeypatch):
    given = Settings(mode="default", fsdp2={"size": 1})
    monkeypatch.setenv("TORCHRIG_MODE", "default")
    monkeypatch.setenv("TORCHRIG_FSDP2__SIZE", "1")
    assert Settings() == given
    assert Settings().origin("mode") != given.origin("mode")
    assert given != given.replace(fsdp2={"size": 2})
    assert given != given.replace(disable=True)
    assert given != "settings"


@pytest.mark.parametrize("duplicate", [copy.deepcopy, copy.copy, lambda made: pickle.loads(pickle.dumps(made))])
def test_copies_keep_values_and_origins(yaml, duplicate):
    settings = Settings.from_yaml(yaml("mode: default\nfsdp2:\n  size: 1\n"), backend=print)
    made = duplicate(settings)
    assert made == settings
    assert made.rows() == settings.rows()
    assert made.replace(disable=True).origin("fsdp2.size") == "train.yaml:3"


def test_settings_do_not_change():
    settings = Settings()
    error = refused(setattr, settings, "mode", "x")
    assert "replace(mode=" in str(error)
    assert settings.mode is None


def test_rows_name_every_setting_and_every_key(yaml):
    settings = Settings.from_yaml(yaml("fsdp2:\n  inner:\n    depth: 2\noptions:\n  a.b: 1\n"))
    rows = {row.name: (row.value, row.origin) for row in settings.rows()}
    assert rows["fsdp2.inner.depth"] == (2, "train.yaml:3")
    assert rows["options.a.b"] == (1, "train.yaml:5")
    assert rows["on_problem.graph_break"] == ("warn", "default")
    assert set(Settings.model_fields) - {"options", "on_problem", "blocks"} <= set(rows)


def test_to_dict_is_json():
    settings = Settings(backend=print, exclude=[Plugin, "A"], options={"f": len, "n": float("nan")}, fsdp2={"a": (1,)})
    made = json.loads(json.dumps(settings.to_dict(), allow_nan=False))
    assert made["backend"] == "builtins.print"
    assert made["exclude"] == [f"{__name__}.Plugin", "A"]
    assert made["options"] == {"f": "builtins.len", "n": "nan"}
    assert made["fsdp2"] == {"a": [1]}


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "setting", "nearest"),
    [
        ({"mdoe": "x"}, "mdoe", "mode"),
        ({"fsdp3": {}}, "fsdp3", "fsdp2"),
        ({"blocks": {}}, "blocks", None),
        ({"_env_file": "x"}, "_env_file", None),
        ({"self": 1}, "self", None),
        ({"placement": "inplcae"}, "placement", "inplace"),
        ({"placement": None}, "placement", None),
        ({"on_failure": "egaer"}, "on_failure", "eager"),
        ({"mixed_precision": "bf1"}, "mixed_precision", "bf16"),
        ({"mixed_precision": False}, "mixed_precision", None),
        ({"on_problem": "rais"}, "on_problem", "raise"),
        ({"on_problem": {"graph_brake": "warn"}}, "on_problem.graph_brake", "graph_break"),
        ({"on_problem": {"graph_break": "warm"}}, "on_problem.graph_break", "warn"),
        ({"on_problem": ["warn"]}, "on_problem", None),
        ({"fullgraph": "ture"}, "fullgraph", "true"),
        ({"fullgraph": None}, "fullgraph", None),
        ({"dynamic": 2}, "dynamic", None),
        ({"regions": "repeted"}, "regions", "repeated"),
        ({"regions": "nested"}, "regions", None),
        ({"regions": []}, "regions", None),
        ({"regions": [3]}, "regions", None),
        ({"exclude": "Block"}, "exclude", None),
        ({"transforms": [""]}, "transforms", None),
        ({"backend": 3}, "backend", None),
        ({"backend": " "}, "backend", None),
        ({"strategy": None}, "strategy", None),
        ({"mode": 1}, "mode", None),
        ({"mode": ""}, "mode", None),
        ({"options": [1]}, "options", None),
        ({"options": {1: 2}}, "options", None),
        ({"device": 0}, "device", None),
        ({"fsdp2": 1}, "fsdp2", None),
        ({"FSDP2": {}, "fsdp2": {}}, "fsdp2", None),
        ({"use_regional_compilation": "perhaps"}, "use_regional_compilation", None),
        ({"use_regional_compilation": True, "regions": "whole"}, "use_regional_compilation", None),
    ],
)
def test_bad_arguments(arguments, setting, nearest):
    error = refused(**arguments)
    assert (error.setting, error.origin, error.nearest) == (setting, "argument", nearest)


def test_mode_and_options_exclude_each_other_and_both_origins_are_named(monkeypatch, yaml):
    """Case 33."""
    monkeypatch.setenv("TORCHRIG_MODE", "max-autotune")
    error = refused(Settings.from_yaml, yaml("options:\n  a: 1\n"))
    assert "variable TORCHRIG_MODE" in str(error)
    assert "train.yaml:1" in str(error)
    assert Settings.from_yaml("train.yaml", mode=None).options == {"a": 1}


@pytest.mark.parametrize(
    ("name", "text", "nearest"),
    [
        ("TORCHRIG_MDOE", "x", "TORCHRIG_MODE"),
        ("TORCHRIG_mode", "x", "TORCHRIG_MODE"),
        ("TORCHRIG_MODE__X", "x", "TORCHRIG_MODE"),
        ("TORCHRIG_FSPD2__SIZE", "1", "TORCHRIG_FSDP2__SIZE"),
        ("TORCHRIG_FSPD2", "{}", "TORCHRIG_FSDP2"),
        ("TORCHRIG_FSDP2__", "1", "TORCHRIG_FSDP2"),
        ("TORCHRIG_", "1", None),
        ("TORCHRIG_PLUGINS__X", "1", "TORCHRIG_PLUGINS"),
        ("TORCHRIG_BLOCKS", "{}", None),
        ("TORCHRIG_SILENT", "1", None),  # nothing reads it
        ("TORCHRIG_MDOE", "", "TORCHRIG_MODE"),
    ],
)
def test_unknown_variables(monkeypatch, name, text, nearest):
    monkeypatch.setenv(name, text)
    error = refused()
    assert error.origin == f"variable {name}"
    assert nearest is None or error.nearest == nearest
    assert name in str(error)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("TORCHRIG_FULLGRAPH", "perhaps"),
        ("TORCHRIG_PLACEMENT", "everywhere"),
        ("TORCHRIG_OPTIONS", "{"),
        ("TORCHRIG_OPTIONS", '{"a": 1, "a": 2}'),
        ("TORCHRIG_OPTIONS", "[1]"),
        ("TORCHRIG_OPTIONS", "[" * 100_000),
        ("TORCHRIG_REGIONS", "[3]"),
        ("TORCHRIG_FSDP2", "yes"),
        ("TORCHRIG_FSDP2", "3"),
        ("TORCHRIG_FSDP2__A", "{"),
        ("TORCHRIG_ON_PROBLEM", "panic"),
        ("TORCHRIG_ON_PROBLEM__GRAPH_BREAKS", "warn"),
        ("TORCHRIG_FSDP2__" + "__".join("A" * 40), "1"),
    ],
)
def test_bad_variables(monkeypatch, name, text):
    monkeypatch.setenv(name, text)
    assert refused().origin == f"variable {name}"


def test_a_part_of_what_has_no_parts(monkeypatch):
    monkeypatch.setenv("TORCHRIG_FSDP2__SIZE", "1")
    monkeypatch.setenv("TORCHRIG_FSDP2__SIZE__X", "1")
    error = refused()
    assert error.origin == "variable TORCHRIG_FSDP2__SIZE__X"
    assert "TORCHRIG_FSDP2__SIZE sets" in str(error)


def test_what_holds_itself_is_refused():
    endless: dict[str, object] = {}
    endless["again"] = endless
    assert refused(options=endless).origin == "argument"
    wide: list[object] = [1]
    for _ in range(30):
        wide = [wide, wide]
    assert refused(fsdp2={"x": wide}).origin == "argument"


def test_a_value_without_a_repr_is_refused_all_the_same():
    class Shy:
        def __repr__(self):
            raise RuntimeError("no")

    assert "Shy" in str(refused(mode=Shy()))


# -- what only looks like a setting or a backend ----------------------------------------------------------------------


def test_the_enum_of_backends_is_no_backend():
    """The class is callable, and would be taken for a compiler function."""
    error = refused(backend=DynamoBackend)
    assert (error.setting, error.origin) == ("backend", "argument")
    assert "inductor" in error.choices and "the class itself" in str(error)


@pytest.mark.parametrize(("value", "nearest"), [("train.yaml", None), ({"size": 1}, "ofi")])
def test_a_plugins_block_is_proposed_only_for_a_mapping(value, nearest):
    assert refused(config=value).nearest == nearest


def test_a_plugins_block_is_proposed_only_for_a_variable_that_holds_a_mapping(monkeypatch):
    monkeypatch.setenv("TORCHRIG_FSPD2", "yes")
    assert refused().nearest is None
