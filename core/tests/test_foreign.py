"""Callables and names registered with PyTorch, as backends."""

from __future__ import annotations

import functools

import pytest
import torch

from torchrig import errors, plugins
from torchrig.hookspecs import CompileRequest


def plain(graph, inputs):
    return graph.forward


def taking(graph, inputs, mode=None, options=None):
    return graph.forward


class Compiler:
    def __call__(self, graph, inputs, **kwargs):
        return graph.forward


def kwargs(plugin, **changes):
    given = {"backend": "x", "mode": None, "options": None, "fullgraph": False, "dynamic": None, "device": "cpu"}
    request = CompileRequest(**{**given, **changes})
    plugins.check_request(plugin.info, request)
    return plugins.make_manager([plugin]).hook.torch_compile_kwargs(request=request)


@pytest.mark.parametrize(
    ("function", "name"),
    [(plain, "plain"), (Compiler(), "Compiler"), (functools.partial(taking, mode=1), "taking")],
)
def test_a_callable_is_a_backend_with_a_name(function, name):
    plugin = plugins.load_backend(function)
    assert plugin.name == name
    assert kwargs(plugin) == {"backend": function}


@pytest.mark.parametrize("function", [taking, Compiler()])
def test_mode_and_options_go_where_torch_compile_would_send_them(function):
    plugin, options = plugins.load_backend(function), {"a": 1}
    made = kwargs(plugin, mode="fast", options=options)
    assert made == {"backend": function, "mode": "fast", "options": {"a": 1}}
    assert made["options"] is not options
    assert kwargs(plugin, mode="default") == {"backend": function}


@pytest.mark.parametrize("asked", [{"mode": "fast"}, {"options": {"a": 1}}])
def test_a_function_without_a_place_for_it_says_no_at_prepare(asked):
    with pytest.raises(errors.SettingsError, match=r"'plain' takes no") as caught:
        kwargs(plugins.load_backend(plain), **asked)
    assert caught.value.setting == next(iter(asked))


def test_a_registered_name_is_found_in_any_case(monkeypatch):
    from torch._dynamo.backends import registry

    torch._dynamo.register_backend(taking, name="My-Compiler")
    try:
        plugin = plugins.load_backend("my-compiler")
        assert kwargs(plugin, mode="fast") == {"backend": "My-Compiler", "mode": "fast"}
    finally:
        registry._BACKENDS.pop("My-Compiler")
        registry._COMPILER_FNS.pop("My-Compiler")


def test_a_registered_name_that_pytorch_cannot_load(monkeypatch):
    from torch._dynamo.backends import registry

    class Entry:
        def load(self):
            raise ImportError("no such library")

    monkeypatch.setitem(registry._BACKENDS, "half_there", Entry())
    with pytest.raises(errors.BackendUnavailable, match=r"'half_there' is registered with PyTorch.*no such library"):
        plugins.load_backend("half_there")


def test_what_it_makes_of_a_request_is_what_torch_compile_takes():
    made = kwargs(plugins.load_backend(taking), mode="fast", options={"a": 1})
    compiled = torch.compile(lambda x: x + 1, **{"backend": made["backend"], "options": made["options"]})
    assert compiled(torch.ones(2)).tolist() == [2.0, 2.0]
