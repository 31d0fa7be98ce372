"""Config keys that are only passed on: each value arrives where it takes effect."""

from __future__ import annotations

import gc
import json
import logging
from unittest.mock import patch

import pytest
import torch

import zeroaccel
from tests.support.pool import Ranks
from tests.support.training import Toy, config
from zeroaccel.config import TierPlan, load_config
from zeroaccel.offload.file_io import IoSettings
from zeroaccel.zero.storage.placement import OffloadRules


def test_files_are_read_as_the_aio_section_says() -> None:
    aio = {"block_size": 8192, "queue_depth": 3, "intra_op_parallelism": 2, "overlap_events": False, "checksum": True}
    settings = load_config({"aio": aio})
    assert OffloadRules.of(settings, TierPlan("device", "nvme")).io == IoSettings(8192, 6, overlap=False, checksum=True)
    assert OffloadRules.of(load_config({}), TierPlan("device", "nvme")).io.overlap


def _batch_sizes(drop: bool) -> list[int]:
    settings = {**config(1), "dataloader_drop_last": drop}
    data = [torch.zeros(8, dtype=torch.long)] * 10
    engine, _, loader, _ = zeroaccel.initialize(Toy(), config=settings, training_data=data)
    assert loader is not None
    engine.destroy()
    return [len(batch) for batch in loader]


@pytest.mark.parametrize(("drop", "sizes"), [(False, [2, 2, 1]), (True, [2, 2])])
def test_the_last_batch_of_a_loader_may_be_dropped(ranks: Ranks, drop: bool, sizes: list[int]) -> None:
    assert ranks(2).run(_batch_sizes, drop) == [sizes, sizes]


def _said_of_items(num_items: int, accumulation: int) -> list[str]:
    said: list[str] = []
    data = [torch.zeros(8, dtype=torch.long)] * num_items
    settings = {**config(1), "gradient_accumulation_steps": accumulation}
    with patch("zeroaccel.data.training_data.log_once", lambda _, message: said.append(message)):
        engine, *_ = zeroaccel.initialize(Toy(), config=settings, training_data=data)
    engine.destroy()
    return [message for message in said if message.startswith("training_data")]


@pytest.mark.parametrize(
    ("num_items", "accumulation", "words"),
    [
        (3, 1, "3 items, fewer than the 4 of one step (2 per micro-batch, 1 micro-batches per step, 2 ranks): every "),
        (
            6,
            4,
            "6 items, fewer than the 16 of one step (2 per micro-batch, 4 micro-batches per step, 2 ranks): a step "
            "reads 2 epochs",
        ),
    ],
)
def test_fewer_items_than_a_step_needs_are_reported(
    ranks: Ranks, num_items: int, accumulation: int, words: str
) -> None:
    for said in ranks(2).run(_said_of_items, num_items, accumulation):
        assert [message.startswith(f"training_data: {words}") for message in said] == [True]
    assert ranks(2).run(_said_of_items, 4 * accumulation, accumulation) == [[], []]


def _collecting() -> list[bool]:
    states = [gc.isenabled()]
    engine, *_ = zeroaccel.initialize(Toy(), config={**config(1), "disable_python_gc": True})
    states.append(gc.isenabled())
    engine.destroy()
    return [*states, gc.isenabled()]


def test_the_garbage_collector_is_off_while_training(ranks: Ranks) -> None:
    assert ranks(2).run(_collecting) == [[True, False, True]] * 2


def _said_of_clipping(text: str) -> list[tuple[int, str]]:
    said: list[tuple[int, str]] = []
    with patch("zeroaccel.setup.plan.log_note", lambda level, message: said.append((level, message))):
        engine, *_ = zeroaccel.initialize(Toy(), config=text)
    engine.destroy()
    return [(level, message) for level, message in said if message.startswith("gradient_clipping")]


@pytest.mark.parametrize(("clipping", "warns"), [({}, True), ({"gradient_clipping": 0}, False)])
def test_a_config_file_without_clipping_gives_a_warning(ranks: Ranks, clipping: dict[str, int], warns: bool) -> None:
    tree = {name: value for name, value in config(1).items() if name != "gradient_clipping"}
    for said in ranks(1).run(_said_of_clipping, json.dumps({**tree, **clipping})):
        assert [level for level, _ in said] == [logging.WARNING] * warns
