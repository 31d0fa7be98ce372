"""What a run's monitors get of each step: against what the collectives counted, and without changing a bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import zeroaccel
from tests.support.pool import Ranks
from tests.support.training import SGD, Run, Toy, batches, config, differences, offloaded, recording


def _train(settings: dict[str, Any]) -> tuple[Run, list[int]]:
    """Four steps; bytes that this rank sent in each."""
    torch.manual_seed(7)
    counted, model = recording(), Toy()
    engine, *_ = zeroaccel.initialize(model, config=settings, collectives=counted)
    counted.reset()
    run, sent = Run(), []
    for batch in batches(engine.collectives.rank, 4):
        loss = engine(batch)
        engine.backward(loss)
        engine.step()
        run.losses.append(loss.item())
        run.norms.append(engine.get_global_grad_norm())
        sent.append(sum(one.nbytes for one in counted.traffic()))
        counted.reset()
    engine.destroy()
    run.weights = {name: param.detach().clone() for name, param in model.named_parameters()}
    return run, sent


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
    # Both ranks are on one machine. The first step also has what was sent while the engine was made.
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
