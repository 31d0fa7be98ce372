"""Prepared loaders against a single-process `DataLoader`: the same order, also after any interruption."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)

from tests.support.datasets import Numbers, SizedStream
from zeroaccel.data import (
    DataLoaderConfiguration,
    PreparedLoader,
    prepare_data_loader,
    skip_first_batches,
)
from zeroaccel.errors import CheckpointError, UsageError

Make = Callable[[], DataLoader[Any]]


class Noisy(Numbers):
    """Draws from the run's own random numbers, as augmentations do."""

    def __getitem__(self, index: int) -> Any:
        return index + torch.rand(())


class ReadyBatches(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return (torch.arange(3 * i, 3 * i + 3) for i in range(5))


class Shuffled(Sampler[int]):
    """A user's sampler that draws from the global generators."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.length))
        random.shuffle(order)
        return iter(np.random.permutation(order)[torch.randperm(self.length).numpy()].tolist())

    def __len__(self) -> int:
        return self.length


class Active:
    """A stand-in for an accelerator's gradient state."""

    def __init__(self) -> None:
        self.loaders: list[Any] = []

    def add_dataloader(self, loader: Any) -> None:
        self.loaders.append(loader)

    def next_batch(self) -> None:
        """Does nothing: this state saves nothing at batches."""

    def remove_dataloader(self, loader: Any) -> None:
        self.loaders.remove(loader)

    @property
    def current(self) -> Any:
        return self.loaders[-1] if self.loaders else None


def prepared(make: Make, world_size: int, **options: Any) -> list[PreparedLoader]:
    """Returns a prepared loader for each simulated rank, each around its own `DataLoader`."""
    configuration = DataLoaderConfiguration(dispatch_batches=False, **options)
    return [prepare_data_loader(make(), configuration, rank=rank, world_size=world_size) for rank in range(world_size)]


def gathered(loaders: list[PreparedLoader]) -> list[int]:
    """Returns one epoch in the order of `gather_for_metrics`."""
    found: list[int] = []
    for batches in zip(*loaders, strict=True):
        taken = torch.cat(batches).tolist()
        remainder = loaders[0].remainder
        found += taken[:remainder] if remainder >= 0 else taken
    return found


def alone(loader: DataLoader[Any]) -> list[int]:
    return [item for batch in loader for item in batch.tolist()]


def shuffled(length: int = 23, size: int = 4, **options: Any) -> Make:
    """Makes loaders that shuffle with their own generator."""
    return lambda: DataLoader(
        Numbers(length), size, shuffle=True, generator=torch.Generator().manual_seed(5), **options
    )


MAKERS: dict[str, Make] = {
    "in order": lambda: DataLoader(Numbers(23), 4),
    "shuffled": shuffled(),
    "drop_last": shuffled(24, 4, drop_last=True),
    "replacement": lambda: DataLoader(
        Numbers(9), 3, sampler=RandomSampler(range(9), True, 20, torch.Generator().manual_seed(1))
    ),
    "weighted": lambda: DataLoader(
        Numbers(9), 3, sampler=WeightedRandomSampler([1.0] * 9, 15, generator=torch.Generator().manual_seed(1))
    ),
    "batch sampler": lambda: DataLoader(
        Numbers(23),
        batch_sampler=BatchSampler(RandomSampler(range(23), generator=torch.Generator().manual_seed(3)), 4, False),
    ),
    "sizes of their own": lambda: DataLoader(Numbers(11), batch_sampler=[[0, 1, 2], [3], [4, 5], [6, 7, 8, 9], [10]]),
    "stream": lambda: DataLoader(SizedStream(23), 4),
    "stream of batches": lambda: DataLoader(ReadyBatches(), batch_size=None),
    "single indices": lambda: DataLoader(
        [torch.tensor([3 * i, 3 * i + 1]) for i in range(7)],
        batch_size=None,
        shuffle=True,
        generator=torch.Generator().manual_seed(2),
    ),
}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", MAKERS)
def test_ranks_together_see_the_items_of_a_single_process(name: str, world_size: int) -> None:
    make = MAKERS[name]
    plain, loaders = make(), prepared(make, world_size)
    dropped = name == "drop_last" and world_size == 4
    for _ in range(3):
        expected = alone(plain)
        assert gathered(loaders) == (expected[:16] if dropped else expected)
    assert {loader.epoch for loader in loaders} == {3}


def test_a_batch_is_divided_on_request() -> None:
    make = shuffled(22, 4)
    loaders = prepared(make, 2, split_batches=True)
    assert [batch.shape[0] for batch in loaders[1]] == [2] * 6
    assert [loader.total_batch_size for loader in loaders] == [4, 4]
    assert gathered(prepared(make, 2, split_batches=True)) == alone(make())


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(1, 30),
    part=st.integers(1, 4),
    world_size=st.integers(1, 3),
    drop_last=st.booleans(),
    even=st.booleans(),
    split=st.booleans(),
    stream=st.booleans(),
    stop=st.integers(0, 6),
)
def test_resuming_anywhere_continues_the_order(
    length: int, part: int, world_size: int, drop_last: bool, even: bool, split: bool, stream: bool, stop: int
) -> None:
    size = part * world_size if split else part

    def make() -> DataLoader[Any]:
        if stream:
            return DataLoader(SizedStream(length), size, drop_last=drop_last)
        return shuffled(length, size, drop_last=drop_last)()

    options = {"even_batches": even, "split_batches": split}
    for rank in range(world_size):
        loader, resumed = (prepared(make, world_size, **options)[rank] for _ in range(2))
        assert len(loader) == len(list(loader))
        state = loader.state_dict()
        for taken, _ in enumerate(loader, start=1):
            state = loader.state_dict()
            if taken == stop:
                break
        resumed.load_state_dict(state)
        rest = [batch.tolist() for batch in resumed]
        again = prepared(make, world_size, **options)[rank]
        list(again)
        epoch = [batch.tolist() for batch in again]
        cut = state["batches"]
        if state["epoch"] == 2:  # the epoch was complete, so the next one follows
            assert rest == [batch.tolist() for batch in again]
        else:
            assert rest == epoch[cut:]
        assert resumed.epoch == state["epoch"] + 1


def test_noise_that_comes_with_the_data_is_the_same_after_resuming() -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(Noisy(12), 2, shuffle=True)

    torch.manual_seed(1)
    (loader,) = prepared(make, 1)
    found: list[list[float]] = []
    for batch in loader:
        found.append(batch.tolist())
        torch.rand(3)  # such as dropout
        if len(found) == 2:
            state, drawn = loader.state_dict(), torch.get_rng_state()
    (resumed,) = prepared(make, 1)
    resumed.load_state_dict(state)
    torch.set_rng_state(drawn)
    again = []
    for batch in resumed:
        again.append(batch.tolist())
        torch.rand(3)
    assert again == found[2:]


def test_iterating_leaves_the_runs_random_numbers_alone() -> None:
    for make in (shuffled(), MAKERS["stream"], lambda: DataLoader(Numbers(6), 2, sampler=Shuffled(6))):
        (loader,) = prepared(make, 1)
        torch.manual_seed(3)
        before = torch.get_rng_state()
        list(skip_first_batches(loader, 1))
        assert torch.equal(torch.get_rng_state(), before)


def test_a_sampler_without_a_generator_draws_the_same_on_all_ranks_and_again() -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(Numbers(20), 2, sampler=Shuffled(20))

    loaders = []
    for rank in range(2):
        torch.manual_seed(rank)  # the ranks' own random numbers differ
        random.seed(rank)
        loaders.append(prepare_data_loader(make(), DataLoaderConfiguration(data_seed=4), rank=rank, world_size=2))
    epochs = [gathered(loaders) for _ in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(20))
    assert epochs[0] != epochs[1]
    resumed = prepare_data_loader(make(), DataLoaderConfiguration(data_seed=4))
    resumed.load_state_dict(resumed.state_dict() | {"epoch": 1, "batches": 3})
    assert alone(resumed) == epochs[1][6:]


def test_a_seedable_order_depends_on_seed_and_epoch_alone() -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(Numbers(16), 4, shuffle=True)

    options = {"use_seedable_sampler": True, "data_seed": 11}
    (loader,) = prepared(make, 1, **options)
    epochs = [alone(loader) for _ in range(3)]
    expected = torch.randperm(16, generator=torch.Generator().manual_seed(11 + 2)).tolist()
    assert epochs[2] == expected
    (other,) = prepared(make, 1, **options)
    other.set_epoch(2)
    assert alone(other) == expected
    other.set_epoch(0)
    assert alone(other) == epochs[0]


def test_set_epoch_keeps_a_loaded_position_in_that_epoch() -> None:
    (loader,) = prepared(shuffled(), 1)
    for _ in range(2):
        next(iter(loader))
    state = loader.state_dict()
    assert (state["epoch"], state["batches"]) == (1, 1)
    (resumed,) = prepared(shuffled(), 1)
    resumed.load_state_dict(state)
    resumed.set_epoch(1)
    assert len(list(resumed)) == 5
    resumed.load_state_dict(state)
    resumed.set_epoch(2)
    assert len(list(resumed)) == 6


def test_a_dataset_gets_the_number_of_each_epoch() -> None:
    class Told(Numbers):
        heard: list[int]

        def set_epoch(self, epoch: int) -> None:
            self.heard = [*getattr(self, "heard", []), epoch]

    dataset = Told(4)
    (loader,) = prepared(lambda: DataLoader(dataset, 2), 1)
    for _ in range(2):
        list(loader)
    assert dataset.heard == [0, 1]


def test_skipping_says_where_an_epoch_starts() -> None:
    (loader,), (whole,) = prepared(shuffled(), 1), prepared(shuffled(), 1)
    epoch = [batch.tolist() for batch in whole]
    assert [batch.tolist() for batch in skip_first_batches(loader, 2)] == epoch[2:]
    assert loader.epoch == 1
    (resumed,) = prepared(shuffled(), 1)
    iterator = iter(resumed)
    next(iterator), next(iterator)
    state = resumed.state_dict()
    (resumed,) = prepared(shuffled(), 1)
    resumed.load_state_dict(state)
    rest = skip_first_batches(resumed, 2)  # for scripts that record the position themselves
    assert len(rest) == 4
    assert [batch.tolist() for batch in rest] == epoch[2:]
    assert resumed.epoch == 1
    assert len(list(resumed)) == 6


def test_skipping_in_a_loader_that_is_not_prepared() -> None:
    loader = DataLoader(Numbers(6), 2)
    assert alone(skip_first_batches(loader, 1)) == [2, 3, 4, 5]
    assert alone(skip_first_batches(loader, 9)) == []
    with pytest.raises(UsageError, match="num_batches"):
        skip_first_batches(loader, -1)


@pytest.mark.parametrize(
    ("length", "drop_last", "words"),
    [
        (0, False, "epoch 0 has no batch: the dataset is empty"),
        (
            3,
            True,
            "epoch 0 has no batch: the dataset has 3 samples, fewer than the 4 that all ranks need for one batch",
        ),
        (4, True, ""),
        (4, False, ""),
    ],
)
def test_an_epoch_without_a_batch_warns(
    length: int, drop_last: bool, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[str] = []
    monkeypatch.setattr("zeroaccel.data.prepared_loader.log_once", lambda _, message: logged.append(message))
    loader = prepare_data_loader(DataLoader(Numbers(length), 4, drop_last=drop_last))
    assert len(list(loader)) == (1 if length == 4 else 0)
    assert [message.startswith(f"data loader: {words}") for message in logged] == [True] * bool(words)


@pytest.mark.parametrize(
    ("length", "split", "words"),
    [
        (8, False, ""),
        (9, False, ""),  # only the last round of an epoch repeats samples
        (6, False, "fewer than the 8 of one batch on each of 2 ranks: 2 samples are repeats"),
        (6, False, "use DataLoader(batch_size=3) or less, or fewer processes"),
        (3, True, "use DataLoader(batch_size=2) or less, or fewer processes"),
        (1, False, "use at most 1 processes"),
    ],
)
def test_repeats_in_the_first_round_warn_once(
    length: int, split: bool, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: set[str] = set()
    monkeypatch.setattr("zeroaccel.data.prepared_loader.log_once", lambda _, message: logged.add(message))
    settings = DataLoaderConfiguration(split_batches=split)
    for rank in (0, 1):
        loader = prepare_data_loader(DataLoader(Numbers(length), 4), settings, rank=rank, world_size=2)
        assert len(list(loader)) == len(list(loader)) > 0
    assert len(logged) == bool(words)
    assert all(message.startswith(f"data loader: an epoch has {length} samples") for message in logged)
    assert all(words in message for message in logged)


def test_the_last_batch_is_known_while_it_is_used() -> None:
    active = Active()
    outer = prepare_data_loader(DataLoader(Numbers(6), 2), watch=active)
    inner = prepare_data_loader(DataLoader(SizedStream(3), 2), watch=active)
    flags = []
    for _ in outer:
        flags.append(active.current.end_of_dataloader)
        assert [active.current.end_of_dataloader for _ in inner] == [False, True]
        assert active.current is outer
    assert flags == [False, False, True]
    assert active.current is None
    for _ in outer:
        break
    assert active.current is None


def test_workers_change_nothing() -> None:
    options = {"num_workers": 2, "persistent_workers": True}
    (loader,) = prepared(shuffled(**options), 1)
    plain = prepared(shuffled(), 1)[0]
    for _ in range(2):
        ends = []
        for batch, expected in zip(loader, plain, strict=True):
            assert torch.equal(batch, expected)
            ends.append(loader.end_of_dataloader)
        assert ends == [False] * 5 + [True]
    (stream,) = prepared(lambda: DataLoader(SizedStream(6), 2, num_workers=2), 1)
    assert sum(len(batch) for batch in stream) == 12  # each worker reads the whole stream, as with torch's loader
    assert stream.end_of_dataloader


def test_a_prepared_loader_is_a_loader_with_the_given_attributes() -> None:
    given = DataLoader(Numbers(10), 2, collate_fn=torch.tensor)
    loader = prepare_data_loader(given, rank=0, world_size=2, device="meta")
    assert isinstance(loader, DataLoader)
    assert prepare_data_loader(loader) is loader
    assert (loader.dataset, loader.batch_size, loader.collate_fn) == (given.dataset, 2, torch.tensor)
    assert (len(loader), loader.total_batch_size, loader.total_dataset_length) == (3, 4, 10)
    assert {batch.device.type for batch in loader} == {"meta"}
    with pytest.raises(AttributeError):
        _ = loader.nothing_of_that_name


def test_another_number_of_ranks_goes_on_at_the_same_sample(caplog: pytest.LogCaptureFixture) -> None:
    loaders = prepared(shuffled(32, 2), 4)
    iterators = [iter(loader) for loader in loaders]
    seen = [batch for _ in range(2) for iterator in iterators for batch in next(iterator).tolist()]
    state = loaders[0].state_dict()
    two = prepared(shuffled(32, 2), 2)
    for loader in two:
        loader.load_state_dict(state)
    assert seen + gathered(two) == alone(shuffled(32, 2)())
    three = prepared(shuffled(32, 2), 3)
    for loader in three:
        loader.load_state_dict(state)
    assert three[0].batches_given == 2
    assert "the last 4 are repeated" in caplog.text


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda: [1, 2], {}, "expected a torch.utils.data.DataLoader, got 'list'"),
        (
            lambda: DataLoader(Numbers(4), sampler=DistributedSampler(Numbers(4), 2, 0)),
            {},
            "DistributedSampler, which has already sharded it",
        ),
        (lambda: DataLoader(Numbers(4), 3), {"split_batches": True}, "a multiple of the 2 ranks.* got 3"),
        (
            lambda: DataLoader(ReadyBatches(), batch_size=None),
            {"split_batches": True},
            "whole batches from the dataset",
        ),
        (
            lambda: type("Own", (DataLoader,), {"__iter__": lambda self: iter(())})(Numbers(4)),
            {},
            "Own, which defines its own __iter__",
        ),
        (lambda: DataLoader(Numbers(4)), {"dispatch_batches": True}, "collectives with dispatch_batches"),
    ],
)
def test_loaders_that_cannot_be_sharded_are_refused_by_name(make: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        prepare_data_loader(make(), DataLoaderConfiguration(**options), rank=0, world_size=2)


def test_the_position_of_other_data_is_refused() -> None:
    (loader,) = prepared(lambda: DataLoader(Numbers(8), 2), 1)
    (longer,) = prepared(lambda: DataLoader(Numbers(12), 2), 1)
    with pytest.raises(CheckpointError, match="an epoch of 6 batches per rank, got '4 batches'"):
        longer.load_state_dict(loader.state_dict())
    with pytest.raises(CheckpointError, match="the state of a prepared loader"):
        longer.load_state_dict({"epoch": 1})


# -- balance="tokens"


def _long_tail(count: int) -> list[dict[str, torch.Tensor]]:
    draws = torch.Generator().manual_seed(7)
    lengths = torch.exp(5.0 + torch.randn(count, generator=draws)).clamp(4, 4096).long()
    return [{"input_ids": torch.full((int(n),), index)} for index, n in enumerate(lengths)]


class _LongStream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(_long_tail(600))


def _ids(samples: list[Any]) -> list[torch.Tensor]:
    return [sample["input_ids"] for sample in samples]


def _balanced(ranks: int, dataset: Any = None, **options: Any) -> list[PreparedLoader]:
    def make() -> DataLoader[Any]:
        data = _long_tail(600) if dataset is None else dataset
        shuffle = not isinstance(data, IterableDataset)
        generator = torch.Generator().manual_seed(3)
        return DataLoader(data, 4, shuffle=shuffle, generator=generator, collate_fn=_ids)

    return prepared(make, ranks, **{"balance": "tokens", **options})


def _spreads(loaders: list[PreparedLoader]) -> tuple[float, float, list[int]]:
    """Returns mean and maximum over the rounds of the most tokens of a rank by their mean, and the samples."""
    ratios, samples = [], []
    for batches in zip(*loaders, strict=True):
        tokens = [sum(map(len, batch)) for batch in batches]
        ratios.append(max(tokens) * len(tokens) / sum(tokens))
        samples += [int(ids[0]) for batch in batches for ids in batch]
    return sum(ratios) / len(ratios), max(ratios), samples


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_ranks_get_equal_tokens_of_the_same_samples(ranks: int) -> None:
    length = 600 // (4 * ranks) * 4 * ranks
    data = _long_tail(length)
    unsorted = _spreads(_balanced(ranks, data, balance=None))
    mean, _, samples = _spreads(loaders := _balanced(ranks, data))
    assert unsorted[0] > 1.25
    assert mean <= 1.05
    assert sorted(samples) == list(range(length))
    assert samples != unsorted[2]
    assert _spreads(loaders)[2] != samples  # another order in another epoch
    assert _spreads(_balanced(ranks, data))[2] == samples
    numbers = [len(sample["input_ids"]) for sample in data]
    assert _spreads(_balanced(ranks, data, lengths=numbers))[2] == samples


def test_a_stream_and_batches_that_ranks_share_are_balanced() -> None:
    mean, _, samples = _spreads(_balanced(2, _LongStream()))
    assert mean <= 1.05
    assert sorted(samples) == list(range(600))
    assert _spreads(_balanced(2, split_batches=True))[0] <= 1.05


@pytest.mark.parametrize("dataset", [None, _LongStream()])
def test_a_balanced_order_goes_on_after_resuming(dataset: Any) -> None:
    whole = _spreads(_balanced(2, dataset))[2]
    loaders = _balanced(2, dataset)
    for loader in loaders:
        for _ in zip(range(70), loader, strict=False):
            pass
    resumed = _balanced(2, dataset)
    for loader, before in zip(resumed, loaders, strict=True):
        loader.load_state_dict(before.state_dict())
    assert _spreads(resumed)[2] == whole[70 * 8 :]


def test_a_balanced_position_on_other_ranks_goes_on_at_a_window(caplog: pytest.LogCaptureFixture) -> None:
    data = _long_tail(1200)
    loaders = _balanced(2, data)
    for loader in loaders:
        for _ in zip(range(140), loader, strict=False):
            pass
    state = loaders[0].state_dict()
    four = _balanced(4, data)
    for loader in four:
        loader.load_state_dict(state)
    assert "the last 96 are repeated" in caplog.text  # windows of 512 and 1024 samples, 1120 samples read
    first = _spreads(_balanced(2, data))[2][:1024]
    assert sorted(first + _spreads(four)[2])[:1200] == list(range(1200))
    with pytest.raises(CheckpointError, match="the DataLoaderConfiguration\\(balance\\) of the saved run"):
        prepared(lambda: DataLoader(data, 4), 2)[0].load_state_dict(state)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: DataLoader(Numbers(12), 2), "loader of Numbers: 'int' has no number of tokens"),
        (lambda: DataLoader(["a b", "c"], 1), "loader of list: 'str' has no number of tokens"),
        (lambda: DataLoader(SizedStream(12), 2), "loader of SizedStream: 'int' has no number of tokens"),
        (lambda: DataLoader(Numbers(12), batch_sampler=[[0, 1, 2], [3]]), "its batches have their own sizes"),
    ],
)
def test_a_loader_without_lengths_is_named_and_keeps_its_order(
    make: Make, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    balanced = [list(loader) for loader in prepared(make, 2, balance="tokens")]
    assert reason in caplog.text
    assert str(balanced) == str([list(loader) for loader in prepared(make, 2)])


def test_another_word_for_balance_is_refused() -> None:
    with pytest.raises(UsageError, match="\"tokens\" or None, got 'samples'"):
        prepared(lambda: DataLoader(Numbers(8), 2), 2, balance="samples")
