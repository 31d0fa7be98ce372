"""Reports of a run: tokens per second over the ranks, and parameters that no backward has reached."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

import zeroaccel
from tests.support.pool import Ranks
from tests.support.training import config, recording, train_step
from zeroaccel.logs import logger


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


class _Towers(nn.Module):
    """A tower that all ranks use, one that only rank 1 uses, and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.used, self.sometimes, self.never = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, sometimes: bool) -> Tensor:
        x = self.frozen(self.used(self.embedding(input_ids)))
        return (self.sometimes(x) if sometimes else x).square().mean()


def _lines(changes: dict[str, Any], steps: int) -> tuple[list[str], int]:
    """Trains; returns this rank's lines and the number of exchanges of tokens."""
    lines = _Lines()
    logger.addHandler(lines)
    torch.manual_seed(3)
    counted = recording()
    engine, *_ = zeroaccel.initialize(_Towers(), config={**config(3), **changes}, collectives=counted)
    rank = engine.collectives.rank
    counted.reset()
    for _ in range(steps):
        ids = torch.randint(0, 16, (2, 4 * (1 + rank)))
        mask = torch.ones_like(ids)
        mask[0, 2:] = 0
        train_step(engine, engine(ids, attention_mask=mask, sometimes=rank == 1))
    exchanges = sum(call.label.startswith("tokens of the ranks") for call in counted.calls)
    engine.destroy()
    logger.removeHandler(lines)
    return lines.texts, exchanges


def test_parameters_that_no_rank_trains_are_named_once(ranks: Ranks) -> None:
    (first, _), (second, _) = ranks(2).run(_lines, {"steps_per_print": None}, 12)
    assert second == []
    (text,) = [line for line in first if "never had a gradient" in line]
    assert "step 10: 2 trainable parameters" in text
    assert "never.weight, never.bias" in text
    assert "sometimes" not in text
    assert "frozen" not in text


def test_a_run_of_fewer_steps_says_nothing(ranks: Ranks) -> None:
    (first, _), _ = ranks(2).run(_lines, {"steps_per_print": None}, 9)
    assert first == []


def test_step_lines_count_the_tokens_of_all_ranks(ranks: Ranks) -> None:
    (first, exchanges), (second, others) = ranks(2).run(_lines, {"steps_per_print": 2, "peak_tflops": 1.0}, 4)
    # The time starts after the first step, so the line at step 2 has the one step since.
    assert (exchanges, others, second) == (2, 2, [])
    for line in first:
        assert " tokens/s | " in line
        assert "(MFU " in line
        assert "padding 33.3 % | " in line  # of 8 + 16 positions, 2 + 6 are hidden
        assert line.endswith("slowest rank 1: 1.33x the mean tokens")
    assert len(first) == 2


def test_runs_without_lines_exchange_no_tokens(ranks: Ranks) -> None:
    assert [exchanges for _, exchanges in ranks(2).run(_lines, {"steps_per_print": None}, 2)] == [0, 0]
