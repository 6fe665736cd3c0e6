"""The three backends: what they take, what they refuse before the model is touched, and where they can run."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import torchrig
from torchrig import errors, plugins
from torchrig.hookspecs import CompileRequest
from torchrig_inductor import cudagraphs, inductor, toolchain


def kwargs(backend="inductor", **changes):
    given = {"backend": backend, "mode": None, "options": None, "fullgraph": False, "dynamic": None, "device": "cpu"}
    request = CompileRequest(**{**given, **changes})
    plugin = plugins.load_backend(backend)
    plugins.check_request(plugin.info, request)
    return plugins.make_manager([plugin]).hook.torch_compile_kwargs(request=request)


@pytest.fixture
def no_compiler(monkeypatch):
    from torch._inductor import config

    monkeypatch.delenv("TORCH_INDUCTOR_INSTALL_GXX", raising=False)
    with config.patch("cpp.cxx", (None, "/there/is/no/compiler")):
        yield


def test_each_comes_from_this_distribution():
    for name in ("inductor", "aot_eager"):
        assert plugins.load_backend(name).distribution == "torchrig-inductor"


def test_importing_the_plugin_imports_no_compiler():
    code = (
        "import sys, torchrig_inductor as t; [p.describe() for p in (t.inductor, t.aot_eager, t.cudagraphs)];"
        "sys.exit(any(name in sys.modules for name in ('torch._inductor.config', 'torch._dynamo')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("mode", inductor.MODES)
def test_modes_are_those_of_torch(mode):
    assert mode in torch._inductor.list_mode_options()
    assert kwargs(mode=mode) == {"backend": "inductor", "mode": mode}


def test_nothing_asked_is_nothing_said():
    assert kwargs() == {"backend": "inductor"}
    assert kwargs("aot_eager") == {"backend": "aot_eager"}


def test_an_unknown_mode():
    with pytest.raises(errors.SettingsError) as caught:
        kwargs(mode="max_autotune")
    assert (caught.value.setting, caught.value.nearest) == ("mode", "max-autotune")


def test_options_are_a_copy_spelled_as_inductor_does():
    given = {"shape-padding": True, "triton.cudagraphs": False}
    made = kwargs(options=given, mode="default")
    assert made == {"backend": "inductor", "options": {"shape_padding": True, "triton.cudagraphs": False}}
    assert given == {"shape-padding": True, "triton.cudagraphs": False}


def test_an_unknown_option():
    with pytest.raises(errors.SettingsError) as caught:
        kwargs(options={"triton.cudagraph": True})
    assert (caught.value.setting, caught.value.nearest) == ("options", "triton.cudagraphs")


VALUES = [
    ("shape_padding", True),
    ("shape_padding", "yes"),
    ("triton.cudagraphs", 1),
    ("max_autotune_gemm_backends", "ATEN"),
    ("max_autotune_gemm_backends", 3),
    ("cpp.threads", 2),
    ("cpp.threads", 2.0),
]


@pytest.mark.parametrize(("name", "value"), VALUES)
def test_a_value_is_refused_exactly_where_torch_refuses_it(name, value):
    try:
        torch._TorchCompileInductorWrapper(None, {name: value}, None)
        refused = False
    except RuntimeError:
        refused = True
    if refused:
        with pytest.raises(errors.SettingsError, match=name) as caught:
            kwargs(options={name: value})
        assert caught.value.setting == "options"
    else:
        assert kwargs(options={name: value})["options"] == {name: value}


def test_a_guard_filter_is_an_option_too():
    def keep_all(guards):
        return [True] * len(guards)

    assert kwargs(options={"guard_filter_fn": keep_all})["options"] == {"guard_filter_fn": keep_all}
    with pytest.raises(errors.SettingsError, match="guard_filter_fn"):
        kwargs(options={"guard_filter_fn": 1})


@pytest.mark.parametrize("name", ["aot_eager", "eager"])
@pytest.mark.parametrize("asked", [{"mode": "max-autotune"}, {"options": {"shape_padding": True}}])
def test_the_others_take_neither_mode_nor_options(name, asked):
    with pytest.raises(errors.SettingsError, match=rf"Backend '{name}' takes no"):
        kwargs(name, **asked)


def test_no_compiler_is_said_at_prepare(no_compiler, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    model = torch.nn.Linear(2, 2)
    with pytest.raises(errors.BackendUnavailable, match=r"no compiler.*/there/is/no/compiler.*set CXX"):
        torchrig.prepare(model, backend="inductor")
    assert torchrig.unwrap(model) is model


def test_a_cpu_model_on_a_cuda_machine_needs_the_compiler_as_well(no_compiler, monkeypatch):
    monkeypatch.setattr(toolchain, "missing_here", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(toolchain, "_no_triton", lambda: None)
    with pytest.raises(errors.BackendUnavailable, match=r"cannot be used on cpu.*no compiler"):
        kwargs(device="cpu")


def test_a_compiler_that_has_gone_from_path(monkeypatch, tmp_path):
    assert toolchain.missing_for("cpu") is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no compiler" in toolchain.missing_for("cpu")


@pytest.mark.parametrize("variable", ["PATH", "CXX"])
def test_no_compiler_from_the_start(variable, tmp_path):
    code = "from torchrig_inductor import toolchain; print(toolchain.missing_for('cpu'))"
    surroundings = {name: value for name, value in os.environ.items() if name != "CXX"}
    surroundings[variable] = str(tmp_path / "none")
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=surroundings, capture_output=True, text=True, check=True)
    assert "no compiler" in done.stdout


def test_on_cuda_the_reason_is_triton(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda name: None)
    assert "triton is not installed" in toolchain.missing_here()


def test_other_devices_bring_their_own_generator():
    assert toolchain.missing_for("xpu") is None


def test_cudagraphs_needs_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(errors.BackendUnavailable, match=r"'cudagraphs' \(torchrig-inductor .*CUDA graphs"):
        plugins.load_backend("cudagraphs")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert kwargs("cudagraphs", device="cuda") == {"backend": "cudagraphs"}


def test_a_probe_initialises_no_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: pytest.fail("CUDA was initialised"))
    for backend in (inductor, cudagraphs):
        backend.describe().unavailable_reason()


@pytest.mark.slow_compile
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_a_model_trains_as_it_does_in_eager():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    inputs = torch.randn(4, 8)
    expected = model(inputs)
    prepared = torchrig.prepare(model, backend="inductor", options={"shape_padding": True})
    torch.testing.assert_close(prepared(inputs), expected)
    prepared(inputs).sum().backward()
    assert torchrig.report(prepared).graphs == 1
