"""Functions that a setting names."""

from __future__ import annotations

import os.path

import pytest

import torchrig
from torchrig import named
from torchrig.settings import Settings


def test_a_function_is_looked_up_by_its_name():
    assert named.function("os.path:join", "parallelize", "argument") is os.path.join
    assert named.function(len, "parallelize", "argument") is len
    assert Settings(parallelize=" os.path:join ").parallelize == "os.path:join"
    assert Settings(parallelize=len).parallelize is len
    assert Settings().parallelize is None


@pytest.mark.parametrize(
    ("name", "told"),
    [("no_such_module:f", "ModuleNotFoundError"), ("os:no_such", "no attribute"), ("os:sep", "is no function")],
)
def test_what_cannot_be_looked_up_is_told_with_its_origin(name, told):
    with pytest.raises(torchrig.SettingsError, match=told) as caught:
        named.function(name, "parallelize", "train.yaml:3")
    assert (caught.value.setting, caught.value.origin) == ("parallelize", "train.yaml:3")


@pytest.mark.parametrize("value", ["", "join", "os:", ":join", "os path:join", 3, int])
def test_what_is_no_function_nor_its_name_is_refused(value):
    with pytest.raises(torchrig.SettingsError, match="must be a function, or 'module:function'"):
        Settings(parallelize=value)
