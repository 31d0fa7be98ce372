"""The engine on a CUDA device: equal bits at all stages, and memory in proportion to the shards."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.training import Toy, config, differences, train

pytestmark = pytest.mark.gpu


def _on_device() -> Toy:
    return Toy().cuda()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD", "RMSprop"])
def test_stages_give_the_same_bits_on_one_device(precision: str, optimizer: str) -> None:
    section: dict[str, Any] = {"type": optimizer, "params": {"lr": 1e-3}}
    runs = [train(config(stage, precision, optimizer=section), make=_on_device) for stage in range(4)]
    for other in runs[1:]:
        assert differences(runs[0], other) == []
    assert all(weight.is_cuda for weight in runs[0].weights.values())


def test_destroy_gives_the_memory_back() -> None:
    train(config(3, "bf16"), 2, make=_on_device)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(5):
        train(config(3, "bf16"), 2, make=_on_device)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before + (1 << 20)
