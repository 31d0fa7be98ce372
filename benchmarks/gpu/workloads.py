"""An engine on the GPU, its batch, and its step."""

from __future__ import annotations

import copy
import gc
from typing import Any

import torch
from contenders_on_gpu import compile_blocks
from plans import PLANS, SIZES
from torch import Tensor

import zeroaccel
from tests.cuda_model.gated_network import GatedNetwork


class Workload:
    """Trains the network, batch and config of the stream model's predictions.

    Args:
        plan: a name in `PLANS`, or of the config.
        size: a name in `SIZES`.
        config: the config; by default that of the plan.
        compiles: True to compile each block.
    """

    def __init__(self, plan: str, size: str, config: dict[str, Any] | None = None, *, compiles: bool = False) -> None:
        torch.manual_seed(0)
        with torch.device("cuda"):
            network = GatedNetwork(SIZES[size])
            self.tokens = torch.randint(SIZES[size].vocabulary, (1, SIZES[size].tokens))
        self.engine, *_ = zeroaccel.initialize(network, config=copy.deepcopy(config or PLANS[plan]))
        if compiles:
            compile_blocks(network)

    def step(self) -> Tensor:
        """Runs one step; returns its loss."""
        loss: Tensor = self.engine(self.tokens)
        self.engine.backward(loss)
        self.engine.step()
        return loss.detach()

    def forward_backward(self) -> None:
        """Runs a step's forward and backward, and drops the gradients."""
        self.engine.backward(self.engine(self.tokens))
        self.engine.zero_grad()

    def close(self) -> None:
        """Frees the memory."""
        self.engine.destroy()
        del self.engine, self.tokens
        gc.collect()  # the engine references itself and the model
        torch.cuda.empty_cache()
