"""What loaders tell of the batch sizes to come, and what a plan makes of it."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler
from toys import Stack

import torchrig
from torchrig.shapes import dynamic_batch


class Stream(IterableDataset[int]):
    def __iter__(self):
        yield from range(5)


class Buckets(BatchSampler):
    def __iter__(self):
        yield from ([0, 1], [2, 3, 4])


def loader(length=10, **more):
    return DataLoader(range(length), **{"batch_size": 4, **more})


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        (loader(10), {4}),
        (loader(8), None),
        (loader(10, drop_last=True), None),
        (loader(10, batch_size=None), None),
        (loader(10, batch_size=1), None),
        (DataLoader(Stream(), batch_size=4), {4}),
        (DataLoader(Stream(), batch_size=4, drop_last=True), None),
        (DataLoader(range(10), batch_sampler=BatchSampler(SequentialSampler(range(10)), 4, False)), {4}),
        (DataLoader(range(10), batch_sampler=Buckets(SequentialSampler(range(10)), 4, False)), set()),
    ],
    ids=["rest", "even", "dropped", "unbatched", "ones", "stream", "stream dropped", "batch sampler", "own sampler"],
)
def test_a_loader_tells_whether_its_batches_vary(given, sizes):
    found = dynamic_batch([given])
    assert (None if found is None else found.sizes) == sizes


def test_nothing_is_drawn_from_a_loader_for_it():
    before = torch.get_rng_state()
    dynamic_batch([loader(10, shuffle=True)])
    assert torch.equal(before, torch.get_rng_state())


def test_several_loaders_vary_together():
    both = dynamic_batch([loader(10), loader(7, batch_size=3), loader(8)])
    assert both.sizes == {4, 3} and "2 of 4" in both.reason and "1 of 3" in both.reason
    assert [size for size in range(1, 10) if both.varies(size)] == [3, 4, 6, 8, 9]
    assert dynamic_batch([loader(10), DataLoader(range(9), batch_sampler=Buckets(range(9), 4, False))]).varies(5)


def test_the_plan_says_what_is_open_and_why():
    note = "The first dimension is dynamic from the first step: the DataLoader's last batch holds 2 of 4 samples."
    assert note in torchrig.plan(Stack(), loader(10), backend="eager").notes
    assert not torchrig.plan(Stack(), loader(8), backend="eager").notes
    assert not torchrig.plan(Stack(), loader(10)).notes
    assert not torchrig.plan(Stack(), loader(10), backend="eager", dynamic=True).notes


def test_the_plan_says_that_a_last_batch_of_one_costs_a_graph():
    assert "size 1 gets a graph of its own" in torchrig.plan(Stack(), loader(9), backend="eager").notes[0]


def test_dynamic_false_is_obeyed_and_its_price_told():
    made = torchrig.plan(Stack(), loader(10), backend="eager", dynamic=False)
    assert made.dynamic_batch is None
    assert made.notes == (
        "Each batch size gets a graph of its own (dynamic=False): the DataLoader's last batch holds 2 of 4 samples.",
    )
