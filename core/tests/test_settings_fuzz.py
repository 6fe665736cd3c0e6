"""Whatever is thrown at the settings, the outcome is settings, or a SettingsError that names an origin."""

from __future__ import annotations

import json
import os
import string
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torchrig import entrypoints
from torchrig.errors import SettingsError
from torchrig.settings import Settings

FIELDS = [*Settings.model_fields, "use_regional_compilation", "fsdp2", "Deep-Speed", "mdoe"]
WORDS = [
    *(
        "auto",
        "no",
        "bf16",
        "repeated",
        "whole",
        "inductor",
        "raise",
        "warn",
        "eager",
        "inplace",
        "true",
        "off",
        "none",
    ),
    *("null", "default", "[]", "{}", "{", '["A"]', '{"graph_break": "warn"}', "1e999", "NaN", "-0", "", " ", "~", "<<"),
]
# What a shell can hold: no NUL, and bytes that are no UTF-8 arrive as lone surrogates.
shell_text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12) | st.binary(
    max_size=8
).map(lambda raw: raw.replace(b"\0", b"").decode("utf-8", "surrogateescape"))
words = st.sampled_from(WORDS) | st.text(max_size=10)
leaves = st.none() | st.booleans() | st.integers() | st.floats() | words | st.binary(max_size=3) | st.just(print)
nested = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(words | st.sampled_from(FIELDS) | st.integers(), inner, max_size=3)
        | st.tuples(inner)
        | st.frozensets(st.integers() | words, max_size=2)
    ),
    max_leaves=8,
)
values = nested | st.sampled_from([int, "graph_break", {"graph_break": "warn"}, ["Block", "layers.*"]])
wild_arguments = st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=8), values, max_size=4)


def plain_json(value) -> bool:
    try:
        return bool(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError):
        return False


# Values that are right, as a file or a variable can hold them: nonsense alone would never get past its first error.
action = st.sampled_from(["warn", "raise", "ignore"])
classes = st.lists(st.sampled_from(["Block", "layers.*"]), min_size=1, max_size=2)
RIGHT = {
    "strategy": st.sampled_from(["auto", "Single"]),
    "backend": st.sampled_from(["no", "eager", "AOT-Eager", "Mine"]),
    "mode": st.sampled_from([None, "max-autotune"]),
    "options": st.none() | st.dictionaries(st.sampled_from(["a", "a.b"]), st.integers() | st.booleans(), max_size=2),
    "fullgraph": st.booleans(),
    "dynamic": st.none() | st.booleans(),
    "regions": st.sampled_from(["auto", "whole"]) | classes,
    "exclude": classes,
    "placement": st.sampled_from(["auto", "wrap"]),
    "on_problem": action | st.dictionaries(st.sampled_from(["graph_break", "recompile_limit"]), action),
    "device": st.sampled_from([None, "cpu", "cuda:0"]),
    "fsdp2": st.dictionaries(st.sampled_from(["a", "b"]), nested.filter(plain_json), max_size=2),
}
right = st.fixed_dictionaries({}, optional=RIGHT)


def merged(one, other):
    return st.builds(lambda a, b: {**a, **b}, one, other)


arguments = right | wild_arguments | merged(right, wild_arguments)

suffixes = st.lists(
    st.sampled_from([field.upper() for field in FIELDS] + ["GRAPH_BREAK", "X", "", "CONFIG", "PLUGINS", "a"])
    | st.text(string.ascii_uppercase + "_", max_size=6)
    | shell_text,
    min_size=1,
    max_size=3,
).map("__".join)
ours = st.sampled_from([f"TORCHRIG_{field.upper()}" for field in FIELDS]) | suffixes.map(
    lambda suffix: ("TORCHRIG_" + suffix).replace("=", "")
)
accelerates = st.sampled_from(["BACKEND", "MODE", "USE_FULLGRAPH", "USE_DYNAMIC", "USE_REGIONAL_COMPILATION"])
variable_values = st.sampled_from(WORDS) | shell_text
wild_environments = st.dictionaries(ours | accelerates.map("ACCELERATE_DYNAMO_".__add__), variable_values, max_size=4)


def as_variables(right_values) -> dict[str, str]:
    """Right values as a shell would set them; one key of a mapping on its own, where there is one."""
    made: dict[str, object] = {}
    for name, value in right_values.items():
        if isinstance(value, dict) and len(value) == 1 and "a.b" not in value:
            made.update({f"{name}__{key}": inner for key, inner in value.items()})
        else:
            made[name] = value
    return {
        f"TORCHRIG_{name.upper()}": (value if isinstance(value, str) else json.dumps(value)).replace("\0", "")
        for name, value in made.items()
    }


right_environments = right.map(as_variables)
environments = right_environments | wild_environments | merged(right_environments, wild_environments)

json_text = st.dictionaries(st.sampled_from(FIELDS), st.recursive(words, st.lists, max_leaves=4), max_size=4).map(
    json.dumps
)
right_yaml = right.map(lambda values: json.dumps(values, indent=1))
yaml_line = st.tuples(
    st.sampled_from(["", "  ", "- ", "? ", "# "]),
    st.sampled_from([*FIELDS, "<<", "graph_break", "&a", "*a", "!!int", "!x", "1"]),
    st.sampled_from([": ", ":", " ", ": &a ", ": *a", ": [", ": {", ": |\n  "]),
    words | st.sampled_from(["!!int x", "!!float x", "!!set {a}", "!x y"]),
).map("".join)
yaml_texts = (
    st.text(max_size=60)
    | st.text(":-?[]{}&*!|>'\"%@`#, \n\tab1~<\\x", max_size=40)
    | st.lists(yaml_line, max_size=6).map("\n".join)
    | json_text
)
texts = st.one_of(right_yaml, right_yaml, yaml_texts).map(lambda text: text.encode("utf-8", "surrogatepass"))
files = st.none() | st.binary(max_size=60) | texts

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "80"))
fuzzed = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(scope="module", autouse=True)
def _installed_plugins_read_once():
    """The scan of all installed metadata takes 20 ms; the settings make it at every unknown name."""
    found = entrypoints.scan()
    with mock.patch.object(entrypoints, "scan", return_value=found):
        yield


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz") / "train.yaml"


def outcome(make) -> Settings | None:
    """The settings, or nothing where they were refused as they should be."""
    try:
        made = make()
    except SettingsError as refused:
        check_refusal(refused)
        return None
    assert isinstance(made, Settings)
    return made


def check_refusal(error: SettingsError) -> None:
    assert error.origin
    assert error.origin in str(error)
    assert error.origin != "default"


def bare_environment(extra: dict[str, str]):
    kept = {name: text for name, text in os.environ.items() if not name.startswith(("TORCHRIG_", "ACCELERATE_"))}
    return mock.patch.dict(os.environ, {**kept, **extra}, clear=True)


@fuzzed
@given(arguments, environments, files)
def test_any_mix_of_arguments_variables_and_yaml(file, given_arguments, environment, raw):
    environment.pop("TORCHRIG_CONFIG", None)
    with bare_environment(environment):
        if raw is None:
            made = outcome(lambda: Settings(**given_arguments))
        else:
            file.write_bytes(raw)
            made = outcome(lambda: Settings.from_yaml(file, **given_arguments))
    if made is not None:
        assert {row.origin for row in made.rows()} - {"argument", "default"} <= origins_of(environment, raw, file)
        json.dumps(made.to_dict(), allow_nan=False)


def origins_of(environment, raw, file) -> set[str]:
    lines = 0 if raw is None else len(raw.decode("utf-8-sig", "replace").splitlines()) + 1
    return {f"variable {name}" for name in environment} | {f"{file}:{line}" for line in range(1, lines + 1)}


@fuzzed
@given(files.filter(lambda raw: raw is not None))
def test_any_file_named_by_a_variable(file, raw):
    file.write_bytes(raw)
    with bare_environment({"TORCHRIG_CONFIG": str(file)}):
        outcome(Settings)


@fuzzed
@given(arguments, arguments)
def test_any_replacement(first, second):
    with bare_environment({}):
        made = outcome(lambda: Settings(**first))
        if made is not None:
            outcome(lambda: made.replace(**second))


@fuzzed
@given(shell_text | st.sampled_from(["/", "/dev", "~", "a/" * 3000]))
def test_any_path(path):
    with bare_environment({"TORCHRIG_CONFIG": path}):
        outcome(Settings)
