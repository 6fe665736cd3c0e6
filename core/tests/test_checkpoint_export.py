"""``torchrig checkpoint``: the model of a checkpoint for ``load_state_dict`` and for the transformers library."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from toys import Stack

import torchrig
from torchrig.cli import main


class Tied(Stack):
    """A stack whose last layer is its first, and that has a buffer of another type."""

    def __init__(self):
        super().__init__()
        self.last = self.first
        self.register_buffer("count", torch.tensor([3, 4]))


class Telling(nn.Linear):
    def get_extra_state(self):
        return {"told": 1}

    def set_extra_state(self, state):
        pass


@pytest.fixture
def saved(tmp_path):
    model = torchrig.prepare(Tied(), backend="eager")
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    torchrig.save_checkpoint(tmp_path / "run", model, optimizer, schedule=schedule, epoch=3)
    return tmp_path / "run", model


def call(*arguments, code=0):
    done = CliRunner().invoke(main, [str(each) for each in arguments])
    assert done.exit_code == code, done.output
    return done.output


def test_an_export_loads_strictly(saved):
    path, model = saved
    file = path.with_name("run-export") / "model.safetensors"
    assert call("checkpoint", "export", path).splitlines() == [str(file)]
    bare = Tied()
    bare.load_state_dict(load_file(file), strict=True)
    assert all(map(torch.equal, bare.state_dict().values(), model.state_dict().values()))
    assert bare.count.dtype is torch.int64
    with safe_open(file, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    assert [each.name for each in file.parent.iterdir()] == ["model.safetensors"]


def test_where_an_export_goes(saved, tmp_path):
    path, _ = saved
    for out, file in (("a/b.safetensors", "a/b.safetensors"), ("c", "c/model.safetensors")):
        assert call("checkpoint", "export", path, "--out", tmp_path / out).strip() == str(tmp_path / file)
        assert (tmp_path / file).is_file()


def test_a_large_model_is_written_in_parts(saved, tmp_path):
    path, _ = saved
    written = call("checkpoint", "export", path, "--out", tmp_path / "x", "--max-shard-size", "0.1KB").splitlines()
    files, index = written[:-1], json.loads((tmp_path / "x" / "model.safetensors.index.json").read_text())
    assert files == [
        str(tmp_path / "x" / f"model-{n:05d}-of-{len(files):05d}.safetensors") for n in range(1, len(files) + 1)
    ]
    loaded = {key: value for file in files for key, value in load_file(file).items()}
    assert all(sum(each.nbytes for each in load_file(file).values()) <= 100 for file in files)
    assert index["weight_map"] == {
        key: each for key, each in index["weight_map"].items() if key in load_file(tmp_path / "x" / each)
    }
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in loaded.values())
    Tied().load_state_dict(loaded, strict=True)
    assert call("checkpoint", "export", path, "--out", tmp_path / "y", "--max-shard-size", "1 GiB").count("\n") == 1


def test_a_size_that_is_none_is_told(saved):
    assert "'large' is no size" in call("checkpoint", "export", saved[0], "--max-shard-size", "large", code=1)


def test_what_is_no_tensor_is_left_out_and_told(tmp_path):
    torchrig.save_checkpoint(tmp_path / "run", nn.Sequential(Telling(2, 2)))
    assert "Left out, as they are no tensors: 0._extra_state" in call("checkpoint", "export", tmp_path / "run")


def test_info_tells_what_is_in_it(saved):
    path, _ = saved
    told = json.loads(call("checkpoint", "info", path, "--json", "--check"))
    expected = {"model": "Tied", "strategy": "single", "backend": "eager", "world_size": 1, "checked": True}
    assert told.items() >= expected.items()
    assert (told["parameters"], told["keys"], told["optimizers"]) == (82, 11, ["AdamW"])
    assert told["extras"] == {"schedule": "ConstantLR", "epoch": "value"}
    text = call("checkpoint", "info", path)
    assert "parameters   82" in text and "extras       schedule (ConstantLR), epoch (value)" in text


def test_info_of_a_damaged_checkpoint(saved):
    path, _ = saved
    (file,) = path.glob("data-*/__0_0.distcp")
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    call("checkpoint", "info", path)
    assert "is damaged" in call("checkpoint", "info", path, "--check", code=1)
    assert "is damaged" in call("checkpoint", "export", path, code=1)
    assert "does not exist" in call("checkpoint", "info", path / "no", code=1)


def test_saving_and_loading_need_no_safetensors(saved, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    path, model = saved
    torchrig.save_checkpoint(path, model)
    torchrig.load_checkpoint(path, model)


@pytest.mark.models
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("size", [[], ["--max-shard-size", "5KB"]], ids=["one file", "parts"])
def test_transformers_loads_an_export(tmp_path, tied, size):
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        tie_word_embeddings=tied,
    )  # fmt: skip
    model = torchrig.prepare(LlamaForCausalLM(config), backend="eager")
    torchrig.save_checkpoint(tmp_path / "run", model)
    call("checkpoint", "export", tmp_path / "run", "--out", tmp_path / "hub", *size)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hub")
    assert type(loaded) is LlamaForCausalLM
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) is tied
    expected = model.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[key]) for key, value in loaded.state_dict().items())
    tokens = torch.arange(6).reshape(1, 6)
    assert torch.equal(loaded(tokens).logits, torchrig.unwrap(model, keep_compile=False).eval()(tokens).logits)
