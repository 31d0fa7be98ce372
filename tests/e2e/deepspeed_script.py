"""A script written for DeepSpeed; `test_deepspeed_parity.py` runs it with DeepSpeed, and with zeroaccel in its place.

deepspeed_script.py STAGE
"""

from __future__ import annotations

import json
import sys
from typing import Any

import deepspeed  # type: ignore[import-not-found]
import torch
from torch import Tensor, nn


class Block(nn.Module):
    """A small transformer-like block, so that stage 3 gathers the model in parts."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 3 * width)
        self.narrow = nn.Linear(3 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = hidden + self.narrow(torch.tanh(self.wide(self.norm(hidden))))
        return result


def main(stage: int) -> None:
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 24), *[Block(24) for _ in range(3)], nn.Linear(24, 5))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 5e-3, "weight_decay": 0.01, "torch_adam": True}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_max_lr": 5e-3, "warmup_num_steps": 4, "total_num_steps": 20},
        },
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    generator = torch.Generator().manual_seed(1 + deepspeed.comm.get_rank())
    losses, norms = [], []
    for step in range(40):
        inputs = torch.randn(4, 12, generator=generator)
        loss = nn.functional.cross_entropy(engine(inputs), inputs[:, :5].argmax(1))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if step % 2:
            norms.append(float(engine.get_global_grad_norm()))
    if deepspeed.comm.get_rank() == 0:
        print(json.dumps({"engine": deepspeed.__version__, "losses": losses, "norms": norms}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
