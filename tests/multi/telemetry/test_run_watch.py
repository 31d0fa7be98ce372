"""Reports of a run: tokens per second over the ranks, and parameters that no backward has reached."""

from __future__ import annotations

import logging
import re
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import zeroaccel
from tests.support.mesh_training import NEEDS_SPLIT_LAYERS, NEEDS_STAGES, small_llama, train_micro_step
from tests.support.pool import Ranks
from tests.support.training import config, recording, train_step
from zeroaccel import ParallelConfig, PipelineConfig
from zeroaccel.engine import _states_nbytes
from zeroaccel.logs import logger
from zeroaccel.telemetry import throughput


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
    # The steps take a millisecond each, in which the times of two ranks differ by chance. Only tokens count here.
    only_tokens = mock.patch.object(throughput, "TIME_MARGIN", 1.0)
    only_tokens.start()
    for _ in range(steps):
        ids = torch.randint(0, 16, (2, 4 * (1 + rank)))
        mask = torch.ones_like(ids)
        mask[0, 2:] = 0
        train_step(engine, engine(ids, attention_mask=mask, sometimes=rank == 1))
    exchanges = sum(call.label.startswith("tokens of the ranks") for call in counted.calls)
    engine.destroy()
    only_tokens.stop()
    logger.removeHandler(lines)
    return lines.texts, exchanges


def test_parameters_that_no_rank_trains_are_named_once(ranks: Ranks) -> None:
    (first, _), (second, _) = ranks(2).run(_lines, {"steps_per_print": None}, 12)
    assert second == []
    (text,) = [line for line in first if "never had a gradient" in line]
    assert "10 steps: 2 trainable parameters" in text
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
        assert re.search(r"peak [\d.]+ [KMG]iB, model states [\d.]+ [KMG]?i?[Bb]", line)
        assert "padding 33.3 % | " in line  # of 8 + 16 positions, 2 + 6 are hidden
        assert line.endswith("slowest rank 1: 1.33x the mean tokens")
    assert len(first) == 2


def test_runs_without_lines_exchange_no_tokens(ranks: Ranks) -> None:
    assert [exchanges for _, exchanges in ranks(2).run(_lines, {"steps_per_print": None}, 2)] == [0, 0]


def _spiked(changes: dict[str, Any], spike: bool) -> tuple[list[str], list[float | None]]:
    """Trains 14 steps; in the last but one, rank 1's second micro-batch has labels that are far off."""
    lines = _Lines()
    logger.addHandler(lines)
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    settings = {**config(3), "gradient_accumulation_steps": 2, "steps_per_print": 100, **changes}
    engine, *_ = zeroaccel.initialize(model, config=settings)
    rank, norms = engine.collectives.rank, []
    generator = torch.Generator().manual_seed(rank)
    for step in range(14):
        for micro in range(2):
            x = torch.randn(4, 4, generator=generator)
            far = 100.0 if spike and step == 12 and rank == 1 and micro == 1 else 0.0
            engine.backward((engine(x) - x.sum(1, keepdim=True) - far).square().mean())
            engine.step()
        norms.append(engine.get_global_grad_norm())
    engine.destroy()
    logger.removeHandler(lines)
    return lines.texts, norms


@pytest.mark.parametrize("stage", [0, 3])
def test_a_spike_names_units_rank_and_samples(ranks: Ranks, stage: int) -> None:
    changes = {"zero_optimization": {"stage": stage}}
    (first, _), (second, _) = ranks(2).run(_spiked, changes, spike=True)
    assert second == []
    (text,) = first
    assert text.startswith("step 13: gradient norm ")
    assert "by unit: " in text
    assert "on rank 1, micro-batch 1, " in text
    samples = 2 * 2 * config(3)["train_micro_batch_size_per_gpu"]
    assert text.endswith(f"samples {12 * samples} to {13 * samples - 1} of this run")


def test_a_steady_run_has_no_spike_and_watching_changes_no_norm(ranks: Ranks) -> None:
    watched = ranks(2).run(_spiked, {}, spike=False)
    plain = ranks(2).run(_spiked, {"steps_per_print": None}, spike=False)
    assert [texts for texts, _ in watched] == [[], []]
    assert [norms for _, norms in watched] == [norms for _, norms in plain]


def _states_of_a_parameter(stage: int) -> float:
    """Returns the bytes of model states of a parameter in bf16, trained by AdamW."""
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    changes = {"bf16": {"enabled": True}, "zero_optimization": zero}
    model = nn.Linear(64, 64, bias=False)
    engine, *_ = zeroaccel.initialize(model, config={**config(stage), **changes})
    train_step(engine, engine(torch.ones(2, 64, dtype=torch.bfloat16)).float().square().mean())
    nbytes = _states_nbytes(engine, torch.device("cpu"))
    engine.destroy()
    return nbytes / model.weight.numel()


def test_model_states_are_those_of_the_stage(ranks: Ranks) -> None:
    # Weights and gradients of 2 bytes each, a master and two moments of 4.
    for stage, expected in ((0, 2 + 2 + 12), (1, 2 + 2 + 6), (2, 2 + 1 + 6), (3, 1 + 1 + 6)):
        assert ranks(2).run(_states_of_a_parameter, stage) == [expected] * 2


def _counts(mesh: str) -> list[float]:
    """Trains two steps of two micro-batches of 2 x 16 tokens; returns tokens, positions and FLOPs of all ranks."""
    places, changes = {"sp": {"sp": 2}, "tp": {"tp": 2}, "pp": {"pp": 2}}.get(mesh, {}), {}
    staged = mesh in ("pp", "layer_major")
    if mesh == "layer_major":
        changes["pipeline"] = PipelineConfig(schedule="layer_major")
    settings = {**config(1), "gradient_accumulation_steps": 2, "steps_per_print": 1}
    engine, *_ = zeroaccel.initialize(small_llama(), config=settings, parallel=ParallelConfig(**places), **changes)
    found: list[list[float]] = []
    counter = engine._report.throughput
    gather = counter._gather

    def noted(own: tuple[float, ...]) -> Any:
        of_ranks = gather(own)
        found.append([sum(rank[index] for rank in of_ranks) for index in range(3)])
        return of_ranks

    counter._gather = noted
    generator = torch.Generator().manual_seed(1)  # ranks of one sequence, tensor or pipeline have one batch
    for _ in range(2):
        batches = []
        for _ in range(2):
            ids = torch.randint(64, (2, 16), generator=generator)
            mask = torch.ones_like(ids)
            mask[0, 12:] = 0
            batches.append({"input_ids": ids, "attention_mask": mask, "labels": ids})
        if staged:
            engine.train_batch(iter(batches))
        for batch in () if staged else batches:
            train_micro_step(engine, engine.sequence_group.shard(batch) if mesh == "sp" else batch)
    engine.destroy()
    (counted,) = found
    return counted


@pytest.mark.parametrize(
    ("mesh", "times"),
    [
        ("dp", 2),
        ("sp", 1),
        pytest.param("tp", 1, marks=NEEDS_SPLIT_LAYERS),
        pytest.param("pp", 1, marks=NEEDS_STAGES),
        ("layer_major", 2),
    ],
)
def test_a_token_counts_once_on_each_mesh(ranks: Ranks, mesh: str, times: int) -> None:
    model = small_llama()
    weights = {name: (param.shape, True) for name, param in model.named_parameters()}
    flops = throughput.work_of(model, weights, []).of(tokens=2 * 2 * 16, length=16)
    counted = ranks(2).run(_counts, mesh)
    assert counted == [[times * 56, times * 64, 0.0 if mesh == "pp" else times * flops]] * 2
