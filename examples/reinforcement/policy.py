"""The model of train.py and generate.py: predicts the next token from the last one."""

from __future__ import annotations

from torch import Tensor, nn

TOKENS, LENGTH, SAMPLES = 16, 12, 64


class Policy(nn.Module):
    """(samples, length) tokens -> (samples, length, TOKENS) logits of the tokens that follow."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, 32)
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, TOKENS))

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.layers(self.embed(tokens))
        return logits
