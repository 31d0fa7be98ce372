"""Reads accelerate's loaders on the facade, with a save and a resume; prints the batches of both as JSON.

resumed_loaders.py FOLDER            every case: an uninterrupted run, and resumes from states of it
resumed_loaders.py FOLDER save       the first half of a run that another number of ranks continues
resumed_loaders.py FOLDER load SKIP  the second half, after SKIP batches of its first epoch
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from typing import Any

from zeroaccel import compat

compat.install()

import torch  # noqa: E402
from accelerate import Accelerator, DataLoaderConfiguration, DeepSpeedPlugin  # noqa: E402
from accelerate.utils import set_seed  # noqa: E402
from torch.utils.data import DataLoader, IterableDataset, Sampler  # noqa: E402

COUNT = 22
EPOCHS = 3


class OwnSampler(Sampler[int]):
    def __len__(self) -> int:
        return COUNT

    def __iter__(self) -> Iterator[int]:
        return iter(random.sample(range(COUNT), COUNT))


class Stream(IterableDataset[Any]):
    """Reads its order from a generator of its own, or, with `set_epoch`, from the number of the epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return iter(torch.arange(COUNT) + 100 * self.epoch)


class StreamOfGenerator(IterableDataset[Any]):
    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(4)

    def __iter__(self) -> Iterator[Any]:
        return iter(torch.randperm(COUNT, generator=self.generator))


def made(kind: str) -> DataLoader[Any]:
    samples = torch.arange(COUNT)
    if kind == "stream":
        return DataLoader(Stream(), 2)
    if kind == "stream of a generator":
        return DataLoader(StreamOfGenerator(), 2)
    if kind == "own sampler":
        return DataLoader(samples, 2, sampler=OwnSampler())
    if kind == "workers":
        return DataLoader(samples, 2, shuffle=True, num_workers=1, persistent_workers=True)
    return DataLoader(samples, 2, shuffle=True)


def new_accelerator() -> Any:
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(config))
    model = torch.nn.Linear(2, 2)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    return accelerator


def prepared(accelerator: Any, kind: str, seed: int) -> Any:
    set_seed(seed)
    accelerator._dataloaders = []
    return accelerator.prepare_data_loader(made(kind))


def epoch_of(loader: Any) -> Iterator[list[int]]:
    """Yields the batches of an epoch, in a training that also draws random numbers."""
    for batch in loader:
        torch.rand(3)
        random.random()
        yield batch.tolist()


def saving(accelerator: Any, loader: Any, folder: str, points: set[tuple[int, int]]) -> list[Any]:
    """Trains all epochs, and saves a state after some batches of some epochs."""
    orders = []
    for epoch in range(EPOCHS):
        orders.append([])
        for batch in epoch_of(loader):
            orders[-1].append(batch)
            if (epoch, len(orders[-1])) in points:
                accelerator.save_state(f"{folder}/{epoch}_{len(orders[-1])}")
    return orders


def resumed(accelerator: Any, loader: Any, folder: str, epoch: int, skip: int) -> list[Any]:
    """Resumes like accelerate's example, with `skip_first_batches` in the first epoch."""
    accelerator.load_state(folder)
    first = accelerator.skip_first_batches(loader, skip) if skip else loader
    return [list(epoch_of(first if number == epoch else loader)) for number in range(epoch, EPOCHS)]


def resumed_by_trainer(accelerator: Any, loader: Any, epoch: int, skip: int, length: int) -> list[Any]:
    """Resumes like Trainer, which sets the number of the epoch and skips, and loads no state of the loader.

    It counts the steps of a stream without a length as those of one epoch.
    """
    if "Stream" in str(loader.dataset):
        epoch, skip = 0, epoch * length + skip
    orders = []
    for number in range(epoch, EPOCHS):
        own = accelerator.skip_first_batches(loader, skip) if skip and number == epoch else loader
        own.set_epoch(number)
        orders.append(list(epoch_of(own)))
    return orders


def compare(accelerator: Any, folder: str) -> None:
    for name, kinds, options in (
        ("sharded", ("shuffled", "own sampler", "workers", "stream", "stream of a generator"), {}),
        ("seedable", ("shuffled",), {"use_seedable_sampler": True}),
        ("dispatched", ("shuffled",), {"dispatch_batches": True}),
        ("not dispatched", ("stream", "stream of a generator"), {"dispatch_batches": False}),
    ):
        accelerator.dataloader_config = DataLoaderConfiguration(**options)
        for kind in kinds:
            loader = prepared(accelerator, kind, 0)
            length = 11 if accelerator.num_processes == 1 else 6
            place = f"{folder}/{name} {kind}"
            orders = saving(accelerator, loader, place, {(0, 2), (1, 3), (1, length)})
            accelerator.wait_for_everyone()  # rank 0 writes the model that all load
            for epoch, batch in ((0, 2), (1, 3), (1, length)):
                first, skip = (epoch + 1, 0) if batch == length else (epoch, batch)
                again = resumed(accelerator, prepared(accelerator, kind, 9), f"{place}/{epoch}_{batch}", first, skip)
                equal = again == [orders[first][skip:], *orders[first + 1 :]]
                print(json.dumps([f"{name} {kind} {epoch} {batch}", equal]), flush=True)
                # Without a generator or a seed, orders come from the process's generators, whose states Trainer loads.
                shared = accelerator.num_processes > 1 and kind != "own sampler" and name != "dispatched"
                if shared or "stream" in kind or name == "seedable":
                    again = resumed_by_trainer(accelerator, prepared(accelerator, kind, 0), first, skip, length)
                    expected = [orders[first][skip:], *orders[first + 1 :]]
                    equal = again[: len(expected)] == expected
                    print(json.dumps([f"{name} {kind} {epoch} {batch} by Trainer", equal]), flush=True)


folder, *rest = sys.argv[1:]
accelerator = new_accelerator()
if not rest:
    compare(accelerator, folder)
else:
    loader = prepared(accelerator, "shuffled", 0 if rest[0] == "save" else 9)
    if rest[0] == "save":
        orders = saving(accelerator, loader, folder, {(1, 4)})
    else:
        orders = resumed(accelerator, loader, f"{folder}/1_4", 1, int(rest[1]))
    print(json.dumps([accelerator.process_index, orders]), flush=True)
accelerator.end_training()
