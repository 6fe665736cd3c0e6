"""Loaders: batches arrive on the device, and all else is the loader's own."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections import UserDict, namedtuple

import pytest
import torch
from torch.nn.utils import rnn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler, TensorDataset

from torchrig.loaders import place, to_device

META = torch.device("meta")
Point = namedtuple("Point", ["x", "label"])


@dataclasses.dataclass(frozen=True)
class Sample:
    image: torch.Tensor
    name: str


class Encoding(UserDict):
    """As a tokenizer's: not a dict, with a ``to`` of its own."""

    def to(self, device):
        return Encoding({key: value.to(device) for key, value in self.data.items()})


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(6.0))


class Numbers(Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, place):
        return torch.tensor(float(place))


def loader(**kwargs):
    return DataLoader(Numbers(), batch_size=4, **kwargs)


def test_on_the_cpu_the_loader_itself_comes_back():
    given = loader()
    assert place(given, torch.device("cpu")) is given


def test_batches_arrive_on_the_device_and_again_in_the_next_epoch():
    placed = place(loader(), META)
    for _ in range(2):
        batches = list(placed)
        assert [batch.shape[0] for batch in batches] == [4, 4, 2]
        assert {batch.device for batch in batches} == {META}


def test_placing_twice_wraps_once():
    placed = place(loader(), META)
    assert place(placed, META) is placed
    back = place(placed, torch.device("cpu"))
    assert next(iter(back)).device.type == "cpu"


@pytest.mark.parametrize(
    ("batch", "tensors"),
    [
        (torch.ones(2), lambda batch: [batch]),
        ([torch.ones(2), (torch.ones(1), "text")], lambda batch: [batch[0], batch[1][0]]),
        ({"a": torch.ones(2), "b": {"c": [torch.ones(1)]}, "n": 3}, lambda batch: [batch["a"], batch["b"]["c"][0]]),
        (Point(torch.ones(2), "cat"), lambda batch: [batch.x]),
        (Sample(torch.ones(2), "cat"), lambda batch: [batch.image]),
        (Encoding(ids=torch.ones(2)), lambda batch: [batch["ids"]]),
        ([Encoding(ids=torch.ones(2)), None], lambda batch: [batch[0]["ids"]]),
        (rnn.pack_sequence([torch.ones(2), torch.ones(1)]), lambda batch: [batch.data]),
    ],
)
def test_every_tensor_moves_and_the_make_stays(batch, tensors):
    before = [tensor.device.type for tensor in tensors(batch)]
    moved = to_device(batch, META)
    assert type(moved) is type(batch)
    assert {tensor.device for tensor in tensors(moved)} == {META}
    assert [tensor.device.type for tensor in tensors(batch)] == before


def test_a_tokenizers_encoding_moves_by_its_own_method():
    base = pytest.importorskip("transformers.tokenization_utils_base")
    moved = to_device(base.BatchEncoding({"input_ids": torch.ones(2)}), META)
    assert isinstance(moved, base.BatchEncoding)
    assert moved["input_ids"].device == META


@pytest.mark.parametrize("batch", ["text", ["a", "b"], {"k": 1}, 3.5, None, Point("x", "y"), torch.Tensor, [int, "x"]])
def test_what_holds_no_tensor_is_left_alone(batch):
    assert to_device(batch, META) is batch


@pytest.mark.parametrize("pinned", [False, True])
def test_a_pinned_loader_copies_without_blocking(monkeypatch, pinned):
    class Pinned(DataLoader):  # pinning itself needs an accelerator
        def __iter__(self):
            return iter([torch.ones(1)])

    asked = []
    monkeypatch.setattr(
        torch.Tensor, "to", lambda self, device, *, non_blocking: asked.append((device, non_blocking)) or self
    )
    list(place(Pinned(Numbers(), pin_memory=pinned), META))
    assert asked == [(META, pinned)]


def test_the_length_is_the_loaders_and_so_is_its_error():
    assert len(place(loader(), META)) == 3
    with pytest.raises(TypeError) as bare:
        len(DataLoader(Stream()))
    with pytest.raises(TypeError) as placed:
        len(place(DataLoader(Stream()), META))
    assert str(placed.value) == str(bare.value)
    assert len(list(place(DataLoader(Stream(), batch_size=4), META))) == 2


def test_attributes_are_the_loaders_to_read_and_to_set():
    dataset = TensorDataset(torch.ones(4, 1))
    sampler = BatchSampler(SequentialSampler(dataset), 2, drop_last=False)
    given = DataLoader(dataset, batch_sampler=sampler)
    placed = place(given, META)
    assert placed.dataset is dataset
    assert placed.batch_sampler is sampler
    placed.timeout = 3
    placed.epoch = 7
    assert (given.timeout, given.epoch) == (3, 7)
    with pytest.raises(ValueError, match="dataset attribute should not be set"):
        placed.dataset = None
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = placed.nothing_of_the_kind


def test_it_is_a_data_loader_to_those_who_ask():
    placed = place(loader(), META)
    assert isinstance(placed, DataLoader)
    assert not isinstance(placed, TensorDataset)
    assert "DeviceLoader" in repr(placed)


@pytest.mark.parametrize("again", [lambda each: pickle.loads(pickle.dumps(each)), copy.copy, copy.deepcopy])
def test_it_pickles_and_copies(again):
    placed = again(place(loader(), META))
    assert [batch.device for batch in placed] == [META] * 3
    assert placed.batch_size == 4
