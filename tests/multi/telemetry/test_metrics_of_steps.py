"""Metrics that a run's monitors get at each step: checked against the counted collectives; they change no bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zeroaccel
from tests.support.mixtures import MIXTURE_VOCABULARY, small_mixture
from tests.support.pool import Ranks
from tests.support.training import (
    SGD,
    Run,
    Toy,
    batches,
    config,
    differences,
    finished,
    offloaded,
    recording,
    train_step,
)
from zeroaccel.comm.topology import init_process_group
from zeroaccel.config.parallel import ParallelConfig


def _train(settings: dict[str, Any]) -> tuple[Run, list[int]]:
    """Trains four steps; also returns the bytes that this rank sent in each."""
    torch.manual_seed(7)
    counted, model = recording(), Toy()
    engine, *_ = zeroaccel.initialize(model, config=settings, collectives=counted)
    counted.reset()
    run, sent = Run(), []
    for batch in batches(engine.collectives.rank, 4):
        run.losses.append(train_step(engine, engine(batch)))
        run.norms.append(engine.get_global_grad_norm())
        sent.append(sum(one.nbytes for one in counted.traffic()))
        counted.reset()
    return finished(engine, run), sent


@pytest.mark.parametrize("tier", ["none", "nvme"])
def test_metrics_are_those_of_the_run_and_change_nothing(ranks: Ranks, tier: str, tmp_path: Path) -> None:
    settings = config(3, "bf16", optimizer=SGD, **offloaded(tmp_path, tier, tier))
    monitor = {"jsonl_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "run"}}
    plain = ranks(2).run(_train, settings)
    measured = ranks(2).run(_train, {**settings, **monitor})
    assert [differences(one, other) for (one, _), (other, _) in zip(plain, measured, strict=True)] == [[], []]
    assert [sent for _, sent in plain] == [sent for _, sent in measured]

    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [4, 8, 12, 16]
    run, sent = measured[0]
    assert [line["Train/loss"] for line in lines] == run.losses
    # Both ranks are on one machine. The first step also counts the bytes sent while making the engine.
    assert [line["Sent/inside_bytes"] for line in lines][1:] == sent[1:]
    for line in lines[1:]:
        parts = sum(line[f"Time/{part}_seconds"] for part in ("forward", "backward", "update"))
        assert 0 < parts < line["Time/step_seconds"]
        assert line["Time/reduce_seconds"] <= line["Time/backward_seconds"]
        assert 0 < line["Memory/current_bytes"] <= line["Memory/peak_bytes"]
        rates = {key for key in line if key.startswith("Offload/")}
        if tier == "none":
            assert rates == set()
        else:
            assert {"Offload/update_seconds", "Offload/optimizer_nvme_read_bytes_per_second"} <= rates
            # Momentum and masters of this rank, which are read once.
            assert line["Offload/optimizer_nvme_read_bytes"] > 0


def _routed(kind: str, ep: int, recomputes: bool, settings: dict[str, Any]) -> list[list[Tensor]]:
    """Returns the experts that each layer chose in each step of two micro-steps."""
    init_process_group()
    model: Any = small_mixture(kind)
    if recomputes:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable()
    model.train()
    chosen: list[list[Tensor]] = []
    for block in model.model.layers:
        if kind == "Llama4":
            router = block.feed_forward.router
            router.register_forward_hook(lambda module, args, out: chosen[-1].append(out[0].argmax(1)))
        else:
            block.mlp.gate.register_forward_hook(lambda module, args, out: chosen[-1].append(out[2]))
    engine, *_ = zeroaccel.initialize(model, config=settings, parallel=ParallelConfig(ep=ep))
    generator = torch.Generator().manual_seed(engine.collectives.rank)
    for _ in range(2):
        chosen.append([])
        for _ in range(2):
            ids = torch.randint(MIXTURE_VOCABULARY, (2, 12), generator=generator)
            loss = engine(input_ids=ids, labels=ids).loss
            seen = len(chosen[-1])
            engine.backward(loss)
            del chosen[-1][seen:]  # recomputed
            engine.step()
        if len(chosen) == 1:  # an evaluation does not count as training
            engine.eval()
            chosen.append([])
            engine(input_ids=ids)
            chosen.pop()
            engine.train()
    engine.destroy()
    return chosen


@pytest.mark.parametrize(
    ("kind", "ep", "recomputes"),
    [("Qwen3Moe", 1, True), ("Qwen3Moe", 2, False), ("Llama4", 1, True), ("Llama4", 2, False)],
)
def test_the_load_of_experts_is_that_of_all_ranks(
    ranks: Ranks, kind: str, ep: int, recomputes: bool, tmp_path: Path
) -> None:
    monitor = {"jsonl_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "run"}}
    of_ranks = ranks(2).run(_routed, kind, ep, recomputes, {**config(3, "fp32", 2), **monitor})
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 2
    experts, chosen_per_token = (4, 1) if kind == "Llama4" else (8, 2)
    mean = 2 * 2 * 2 * 12 * chosen_per_token / experts
    for line, *steps in zip(lines, *of_ranks, strict=True):
        of_layers = [
            torch.cat([one.reshape(-1) for step in steps for one in step[layer::2]]).bincount(minlength=experts)
            for layer in (0, 1)
        ]
        assert line["Router/max_tokens_per_expert"] == max(int(counts.max()) for counts in of_layers)
        assert line["Router/mean_tokens_per_expert"] == mean
        assert line["Router/max_over_mean"] == max(int(counts.max()) / mean for counts in of_layers)
        assert line["Router/dropped_tokens"] == 0


def _counted(settings: dict[str, Any]) -> list[int]:
    """Returns the number of load exchanges in each of three steps."""
    ranks = recording()
    engine, *_ = zeroaccel.initialize(small_mixture("Mixtral"), config=settings, collectives=ranks)
    ids = torch.randint(MIXTURE_VOCABULARY, (2, 12))
    found = []
    for _ in range(3):
        ranks.reset()
        train_step(engine, engine(input_ids=ids, labels=ids).loss)
        found.append(sum(call.label == "tokens of experts" for call in ranks.calls))
    engine.destroy()
    return found


def test_loads_are_exchanged_only_where_they_are_reported(ranks: Ranks, tmp_path: Path) -> None:
    monitor = {"jsonl_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "run"}}
    for changes, counts in (({}, [0, 0, 0]), ({"steps_per_print": 2}, [0, 1, 0]), (monitor, [1, 1, 1])):
        assert ranks(2).run(_counted, {**config(3), "steps_per_print": None, **changes}) == [counts, counts]
