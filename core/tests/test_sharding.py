"""Shares of a loader: each sample to one process, in the order that one process would have read them."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from torchrig.errors import ArgumentError
from torchrig.hookspecs import Share
from torchrig.loaders import place
from torchrig.sharding import shard


class Numbers(torch.utils.data.Dataset):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, place):
        return place


class Drawn(Sampler):
    """A user's own, that draws from torch's global random state as it goes."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __iter__(self):
        for _ in range(self.length):
            yield int(torch.randint(self.length, ()))


def shares(build, count):
    """One loader for each process; ``build`` is called on each, as a script is run on each."""
    return [shard(build(), Share(index, count), []) for index in range(count)]


def epoch(loaders):
    """What each process reads, as a list of batches."""
    return [[list(map(int, batch)) for batch in loader] for loader in loaders]


def together(batches):
    """What all processes read in each step, in the order in which it was dealt out."""
    steps = []
    for step in zip(*batches, strict=True):
        rounds = zip(*step, strict=True)
        steps.append([sample for dealt in rounds for sample in dealt])
    return steps


@given(
    length=st.integers(0, 40),
    count=st.integers(2, 5),
    batch=st.integers(1, 5),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
)
def test_every_sample_is_read_once_but_for_the_filling_up(length, count, batch, shuffle, drop_last):
    assume(length or not shuffle)  # DataLoader itself refuses

    def build(size=batch):
        order = torch.Generator().manual_seed(7)
        return DataLoader(Numbers(length), batch_size=size, shuffle=shuffle, drop_last=drop_last, generator=order)

    loaders = shares(build, count)
    read = epoch(loaders)
    assert {len(each) for each in read} == {len(loaders[0])}, "all processes take as many steps"
    flat = [sample for step in together(read) for sample in step]
    alone = [list(map(int, each)) for each in build(batch * count)]
    if drop_last:
        assert together(read) == alone, "step for step the samples of one process with a batch of all"
    else:
        expected = [sample for each in alone for sample in each]
        assert flat[:length] == expected
        filled = flat[length:]
        assert len(filled) < count and filled == (expected * count)[: len(filled)]


def test_epochs_differ_and_go_on_as_those_of_one_process():
    def build(size):
        return DataLoader(Numbers(24), batch_size=size, shuffle=True, generator=torch.Generator().manual_seed(3))

    loaders, alone = shares(lambda: build(3), 4), build(12)
    for _ in range(3):
        assert together(epoch(loaders)) == [list(map(int, each)) for each in alone]


@pytest.mark.parametrize(
    "sampler",
    [
        lambda: RandomSampler(Numbers(24)),
        lambda: RandomSampler(Numbers(24), replacement=True, num_samples=40),
        lambda: WeightedRandomSampler([1.0] * 24, 24),
        lambda: Drawn(24),
    ],
)
def test_what_has_no_generator_draws_the_same_on_every_process_and_leaves_the_global_state_alone(sampler):
    torch.manual_seed(0)
    loaders = shares(lambda: DataLoader(Numbers(24), batch_size=4, sampler=sampler()), 2)
    epochs = []
    for _ in range(2):
        read = []
        for index, loader in enumerate(loaders):
            torch.manual_seed(100 + index)  # as of dropout, different on each process
            state = torch.get_rng_state()
            indices = list(loader.sampler)
            assert torch.equal(torch.get_rng_state(), state)
            read.append(indices)
        epochs.append([each for dealt in zip(*read, strict=True) for each in dealt])
        fresh = sampler()
        assert len(epochs[-1]) == len(fresh)
    assert epochs[0] != epochs[1], "an epoch of its own each time"


def test_set_epoch_makes_an_order_come_back():
    for generator in (None, torch.Generator().manual_seed(5)):
        loader = shard(DataLoader(Numbers(24), shuffle=True, generator=generator), Share(0, 2), [])
        orders = []
        for number in (3, 4, 3):
            loader.sampler.set_epoch(number)
            orders.append(list(loader.sampler))
        assert orders[0] == orders[2] != orders[1]


def test_all_else_is_the_loaders_own():
    def collate(samples):
        return tuple(samples)

    def init(worker):
        pass

    class Own(DataLoader):
        extra = None

    given_ = Own(
        Numbers(20), batch_size=3, shuffle=True, num_workers=2, collate_fn=collate, drop_last=True, timeout=9,
        worker_init_fn=init, multiprocessing_context="spawn", prefetch_factor=5, persistent_workers=True,
        generator=torch.Generator(), pin_memory=False,
    )  # fmt: skip
    given_.extra = "mine"
    made = shard(given_, Share(1, 2), [])
    assert type(made) is Own and made is not given_
    different = {name for name in vars(given_) if vars(given_)[name] is not vars(made)[name]}
    assert different == {"sampler", "batch_sampler"}
    assert isinstance(given_.sampler, RandomSampler), "the one that was given is as before"
    assert (made.batch_size, made.batch_sampler.batch_size, made.batch_sampler.drop_last, len(made)) == (3, 3, True, 3)


def test_workers_bring_the_share():
    loaders = shares(lambda: DataLoader(Numbers(10), batch_size=2, num_workers=1), 2)
    assert epoch(loaders) == [[[0, 2], [4, 6], [8]], [[1, 3], [5, 7], [9]]]


class Buckets(Sampler):
    """Batches of samples that belong together."""

    batch_size = 2
    drop_last = False

    def __len__(self):
        return 5

    def __iter__(self):
        return iter([[0, 1], [2, 3], [4, 5], [6, 7], [8]])


def test_batches_of_the_users_own_sampler_are_dealt_out_whole():
    loaders = shares(lambda: DataLoader(Numbers(9), batch_sampler=Buckets()), 2)
    assert epoch(loaders) == [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7], [0, 1]]]
    assert (len(loaders[0]), loaders[0].batch_sampler.batch_size) == (3, 2)


def test_a_plain_batch_sampler_is_as_good_as_a_batch_size():
    sampler = lambda: BatchSampler(SequentialSampler(Numbers(8)), 2, drop_last=False)  # noqa: E731
    loaders = shares(lambda: DataLoader(Numbers(8), batch_sampler=sampler()), 2)
    assert epoch(loaders) == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]


def test_a_dataset_that_makes_its_own_batches():
    loaders = shares(lambda: DataLoader(Numbers(5), batch_size=None), 2)
    assert [list(each) for each in loaders] == [[0, 2, 4], [1, 3, 0]]


def test_an_iterable_dataset_is_refused_with_what_to_do():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(4))

    loader = DataLoader(Stream())
    with pytest.raises(ArgumentError, match=r"Stream is an iterable dataset.*shard_loaders=False"):
        shard(loader, Share(0, 2), [])
    assert shard(loader, Share(0, 1), []) is loader


def test_a_distributed_sampler_of_the_users_own_stays_and_one_for_other_processes_is_refused():
    sampler = DistributedSampler(Numbers(8), num_replicas=2, rank=1)
    loader = DataLoader(Numbers(8), sampler=sampler)
    assert shard(loader, Share(1, 2), []) is loader
    with pytest.raises(ArgumentError, match=r"DistributedSampler reads part 1 of 2.*part 0 of 4"):
        shard(loader, Share(0, 4), [])


def test_dealing_twice_deals_once_and_a_placed_loader_stays_placed():
    once = shard(DataLoader(Numbers(8)), Share(0, 2), [])
    assert shard(once, Share(0, 2), []) is once
    placed = place(DataLoader(TensorDataset(torch.ones(4))), torch.device("meta"))
    dealt = shard(placed, Share(0, 2), [])
    assert [batch.device.type for (batch,) in dealt] == ["meta"] * 2


@pytest.mark.parametrize("again", [lambda each: pickle.loads(pickle.dumps(each)), copy.deepcopy])
def test_it_pickles_and_copies(again):
    loader = again(shard(DataLoader(Numbers(4)), Share(1, 2), []))
    assert epoch([loader]) == [[[1], [3]]]


def test_what_was_changed_can_be_taken_back():
    generator = torch.Generator().manual_seed(3)
    before, undos = generator.get_state(), []
    shard(DataLoader(Numbers(4), shuffle=True, generator=generator), Share(0, 2), undos)
    generator.manual_seed(4)
    for undo in undos:
        undo()
    assert torch.equal(generator.get_state(), before)
