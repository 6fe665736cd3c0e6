"""The names torchrig knows."""

from __future__ import annotations

import subprocess
import sys

import pytest

from torchrig import catalogue
from torchrig.catalogue import DynamoBackend, canonical, distribution_of, known_names, normalise


def test_dynamo_backend_has_the_promised_members():
    promised = """NO EAGER AOT_EAGER INDUCTOR AOT_TS_NVFUSER NVPRIMS_NVFUSER CUDAGRAPHS OFI FX2TRT ONNXRT TENSORRT
        AOT_TORCHXLA_TRACE_ONCE TORCHXLA_TRACE_ONCE TVM HPU_BACKEND NEURON OPENXLA OPENVINO THUNDER"""
    assert [member.name for member in DynamoBackend] == promised.split()
    assert all(member.value == member.name.lower() == str(member) for member in DynamoBackend)


@pytest.mark.parametrize("spelling", ["aot_eager", "AOT-EAGER", "  Aot_Eager ", DynamoBackend.AOT_EAGER])
def test_names_have_one_spelling(spelling):
    assert normalise(spelling) == "aot_eager"


def test_every_member_is_brought_by_someone_or_removed():
    for member in DynamoBackend:
        removed = catalogue.REMOVED.get(member.value)
        assert distribution_of(removed.successor if removed else member) is not None


def test_the_names_of_one_backend_mean_the_same():
    assert canonical("AOT-torchxla_trace_once") == canonical("torchxla_trace_once") == "openxla"
    assert distribution_of("torchxla_trace_once") == "torchrig-xla"


def test_a_name_is_looked_up_in_its_group():
    assert distribution_of("fsdp2", catalogue.STRATEGIES) == "torchrig-fsdp2"
    assert distribution_of("fsdp2") is None


def test_known_names_hold_the_catalogue_and_what_is_installed(install):
    install("acme", {"Rocket-Fuel": "nowhere"})
    names = known_names()
    assert {"inductor", "fx2trt", "torchxla_trace_once", "fsdp2", "float8", "rocket_fuel"} <= set(names)
    assert list(names) == sorted(set(names))
    assert "rocket_fuel" not in known_names(catalogue.STRATEGIES)


def test_one_unreadable_distribution_hides_no_other(install):
    install("acme", "[torchrig.backends]\nthis line has no equals sign\n")
    install.backend("apex", "apex_fast", "apex_module")
    (install("nameless", {"lost": "x"}) / "METADATA").unlink()
    assert "apex_fast" in known_names()


def test_the_catalogue_imports_no_torch():
    code = (
        "import sys, types; package = types.ModuleType('torchrig'); package.__path__ = [sys.argv[1]];"
        "sys.modules['torchrig'] = package; import torchrig.catalogue as c; c.known_names();"
        "assert 'torch' not in sys.modules"
    )
    folder = catalogue.__file__.rpartition("/")[0]
    subprocess.run([sys.executable, "-c", code, folder], check=True)
