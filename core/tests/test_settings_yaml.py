"""The file of settings: how it is read, and that every error names its line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from torchrig.errors import SettingsError
from torchrig.settings import Settings


@pytest.fixture(autouse=True)
def _bare(monkeypatch, tmp_path):
    for name in list(os.environ):
        if name.startswith(("TORCHRIG_", "ACCELERATE_")):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def load(text: str | bytes) -> Settings:
    Path("train.yaml").write_bytes(text.encode() if isinstance(text, str) else text)
    return Settings.from_yaml("train.yaml")


def refused(text: str | bytes) -> SettingsError:
    with pytest.raises(SettingsError) as caught:
        load(text)
    return caught.value


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "null\n", "{}"])
def test_an_empty_file_sets_nothing(text):
    assert load(text) == Settings()


def test_words_that_older_yaml_turns_into_booleans_stay_words():
    settings = load("backend: no\nmixed_precision: no\nfullgraph: yes\ndynamic: off\n")
    assert (settings.backend, settings.mixed_precision) == ("no", "no")
    assert (settings.fullgraph, settings.dynamic) == (True, False)


def test_scalars_are_read_as_yaml_1_2_reads_them():
    block = load(
        "fsdp2: {lr: 1e-4, time: 12:30, day: 2026-01-02, octal: 0o17, hex: 0x1F, ten: 010, half: .5, big: -.inf,"
        " none: ~, empty: , text: '3', yes: True}\n"
    ).plugin_block("fsdp2")
    assert block == {
        "lr": 1e-4,
        "time": "12:30",
        "day": "2026-01-02",
        "octal": 15,
        "hex": 31,
        "ten": 10,
        "half": 0.5,
        "big": float("-inf"),
        "none": None,
        "empty": None,
        "text": "3",
        "yes": True,
    }


def test_origins_of_nested_keys_items_and_anchors():
    settings = load(
        "# first\n"
        "fsdp2: &base\n"
        "  size: 1\n"
        "  inner:\n"
        "    depth: 2\n"
        "deepspeed:\n"
        "  <<: *base\n"
        "  size: 5\n"
        "  again: *base\n"
        "exclude:\n"
        "  - A\n"
        "  - B\n"
    )
    assert settings.plugin_block("deepspeed") == {
        "size": 5,
        "inner": {"depth": 2},
        "again": {"size": 1, "inner": {"depth": 2}},
    }
    expected = {
        "fsdp2": 2,
        "fsdp2.size": 3,
        "fsdp2.inner.depth": 5,
        "deepspeed": 6,
        "deepspeed.size": 8,
        "deepspeed.inner": 4,
        "deepspeed.again": 9,
        "deepspeed.again.size": 3,
        "exclude": 10,
        "exclude.1": 12,
    }
    assert {name: settings.origin(name) for name in expected} == {k: f"train.yaml:{v}" for k, v in expected.items()}


def test_a_plugins_name_is_matched_in_any_spelling():
    settings = load("FSDP2:\n  size: 1\n")
    assert settings.plugin_block("fsdp2") == {"size": 1}
    assert settings.origin("fsdp2.size") == "train.yaml:2"


def test_several_bases_the_first_wins():
    settings = load("fsdp2: &a {x: 1}\ndeepspeed: &b {x: 2, y: 3}\nsingle:\n  <<: [*a, *b]\n")
    assert settings.plugin_block("single") == {"x": 1, "y": 3}


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("mode: x\nmdoe: y\n", 2, "mdoe"),
        ("mode: x\nbackend: no\nmode: y\n", 3, "twice"),
        ("fsdp2:\n  a: 1\n  a: 2\n", 3, "twice"),
        ("fsdp2:\n  a: 1\nFSDP2:\n  b: 1\n", 3, "twice"),
        ("mode: [\n", 2, "YAML"),
        ("mode: x\n  bad: indent\n", 2, "YAML"),
        ("mode: *nowhere\n", 1, "YAML"),
        ("mode: x\n---\nmode: y\n", 2, "YAML"),
        ("\n- a\n", 2, "mapping"),
        ("just text\n", 1, "mapping"),
        ("fsdp2:\n  1: a\n", 2, "key"),
        ("? [a]\n: b\n", 1, "key"),
        ("? &k [*k]\n: b\n", 1, "key"),
        ("fsdp2:\n  x: !!python/object:os.system y\n", 2, "tag"),
        ("fsdp2:\n  x: !!int y\n", 2, "int"),
        ("fsdp2:\n  x: !!bool 3\n", 2, "bool"),
        ("fsdp2:\n  x: !!set {a}\n", 2, "tag"),
        ("fsdp2:\n  x: &x [*x]\n", 2, "deep"),
        ("fsdp2: &x\n  <<: *x\n", 1, "<<"),
        ("fsdp2:\n  <<: 3\n", 2, "<<"),
        ("mode: x\nexclude:\n  - A\n  - 3\n", 4, "exclude"),
        ("mode: x\nplacement: everywhere\n", 2, "placement"),
        ("on_problem:\n  graph_break: warm\n", 2, "warm"),
        ("on_problem:\n  graph_brake: warn\n", 2, "graph_brake"),
        ("fsdp2: yes\n", 1, "mapping"),
        ("mode: x\noptions: 3\n", 2, "options"),
        ("fsdp2: {x: " + "9" * 5000 + "}\n", 1, "int"),
        ("mode: \x01\n", 1, "YAML"),
    ],
)
def test_errors_name_the_line(text, line, said):
    error = refused(text)
    assert error.origin == f"train.yaml:{line}"
    assert said in str(error)


def test_nested_aliases_do_not_explode():
    lines = ["fsdp2:", "  a0: &a0 [1, 1]"]
    lines += [f"  a{n}: &a{n} [*a{n - 1}, *a{n - 1}, *a{n - 1}, *a{n - 1}]" for n in range(1, 25)]
    assert "values" in str(refused("\n".join(lines)))
    merges = ["fsdp2:", "  a0: &a0 {x: 1}"]
    merges += [f"  a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}, *a{n - 1}]}}" for n in range(1, 25)]
    assert "<<" in str(refused("\n".join(merges)))


@pytest.mark.parametrize("text", [b"\xff\xfe\x00", b"mode: \x80", b"[" * 600, b"{" * 600])
def test_bytes_that_are_no_yaml(text):
    assert refused(text).origin.startswith("train.yaml:")


def test_a_byte_order_mark_is_skipped():
    assert load(b"\xef\xbb\xbfmode: x\n").mode == "x"


def test_files_that_cannot_be_read(monkeypatch, tmp_path):
    for path in ("missing.yaml", str(tmp_path), "a\0b", ""):
        with pytest.raises(SettingsError, match="cannot be read") as caught:
            Settings.from_yaml(path)
        assert caught.value.origin == "argument"
    with pytest.raises(SettingsError) as caught:
        Settings.from_yaml(3)  # type: ignore[arg-type]
    assert caught.value.origin == "argument"
    monkeypatch.setenv("TORCHRIG_CONFIG", "missing.yaml")
    with pytest.raises(SettingsError) as caught:
        Settings()
    assert caught.value.origin == "variable TORCHRIG_CONFIG"


def test_a_path_object_will_do(tmp_path):
    (tmp_path / "deep").mkdir()
    path = tmp_path / "deep" / "x.yaml"
    path.write_text("mode: x\n")
    assert Settings.from_yaml(path).origin("mode") == f"{path}:1"
