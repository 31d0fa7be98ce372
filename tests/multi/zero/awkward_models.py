"""Models with floating-point buffers, like those of torch's and users' layers; each maps (n, 16) to (n, 1)."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

WIDTH = 16


class Codebook(nn.Module):
    """Vector quantization with a codebook that follows its inputs by moving averages."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(8, WIDTH))
        self.register_buffer("count", torch.ones(8))
        self.register_buffer("total", self.codes.clone())

    def forward(self, x: Tensor) -> Tensor:
        chosen = torch.cdist(x.float(), self.codes.float()).argmin(-1)
        if self.training:
            with torch.no_grad():
                hits = nn.functional.one_hot(chosen, 8).to(x.dtype)
                self.count.mul_(0.9).add_(hits.sum(0), alpha=0.1)
                self.total.mul_(0.9).add_(hits.T @ x, alpha=0.1)
                self.codes.copy_(self.total / self.count.unsqueeze(-1))
        return x + (self.codes[chosen] - x).detach()


class Positions(nn.Module):
    """Added sines, a mask with -inf, and a bias that is looked up by relative position."""

    def __init__(self) -> None:
        super().__init__()
        angles = torch.arange(4).unsqueeze(1) / 10 ** torch.arange(4)
        self.register_buffer("sines", torch.cat([angles.sin(), angles.cos()], 1)[:, :4].clone(), persistent=False)
        self.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))
        self.register_buffer("hidden", torch.zeros(4, dtype=torch.bool))
        self.register_buffer("distance", torch.arange(4).unsqueeze(1) - torch.arange(4) + 3)
        self.bias = nn.Embedding(7, 1)
        self.qkv = nn.Linear(4, 12)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x.unflatten(-1, (4, 4)) + self.sines).chunk(3, -1)
        scores = q @ k.mT + self.bias(self.distance).squeeze(-1) + self.mask
        return x + (scores.masked_fill(self.hidden, 0).softmax(-1) @ v).flatten(-2)


class RotaryEmbedding(nn.Module):
    """Computes angles in fp32, as transformers does, with a cache of cosines that is used unconverted."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1 / 10000 ** (torch.arange(0, 4, 2) / 4), persistent=False)
        self.register_buffer("cos_cached", torch.ones(4, 4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(300.0, 304.0), self.inv_freq.float()).repeat(1, 2)
        x = x.unflatten(-1, (4, 4))
        turned = torch.cat([-x[..., 2:], x[..., :2]], -1)
        return ((x * angles.cos().to(x.dtype) + turned * angles.sin().to(x.dtype)) * self.cos_cached).flatten(-2)


def _between(*layers: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(_linear(), *layers, _linear(), nn.Linear(WIDTH, 1))


def _linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def _old(normalize: Callable[[nn.Module], nn.Module]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return normalize(_linear())

    return make


def _around(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(_linear(), make(), nn.GELU(), nn.Linear(WIDTH, 1))


def _image(convolution: Callable[[], nn.Module], norm: Callable[[], nn.Module], *shape: int) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(
        nn.Unflatten(1, (1, *shape)), convolution(), norm(), nn.ReLU(), nn.Flatten(), nn.Linear(4 * WIDTH, 1)
    )


def _instances() -> nn.Module:
    norm = nn.InstanceNorm1d(4, affine=True, track_running_stats=True)
    return nn.Sequential(nn.Unflatten(1, (4, 4)), norm, nn.Flatten())


BATCH_NORMS: dict[str, Callable[[], nn.Module]] = {
    "BatchNorm1d": _around(lambda: nn.BatchNorm1d(WIDTH)),
    "BatchNorm1d without weights": _around(lambda: nn.BatchNorm1d(WIDTH, affine=False)),
    "BatchNorm2d": _image(lambda: nn.Conv2d(1, 4, 3, padding=1), lambda: nn.BatchNorm2d(4), 4, 4),
    "BatchNorm3d": _image(lambda: nn.Conv3d(1, 4, 1), lambda: nn.BatchNorm3d(4), 2, 2, 4),
}
MODELS: dict[str, Callable[[], nn.Module]] = {
    **BATCH_NORMS,
    "InstanceNorm1d with statistics": _around(_instances),
    "GroupNorm": _around(lambda: nn.GroupNorm(4, WIDTH)),
    "spectral_norm, parametrized": _around(lambda: parametrizations.spectral_norm(_linear())),
    "spectral_norm by hooks": _around(_old(spectral_norm)),
    "weight_norm, parametrized": _around(lambda: parametrizations.weight_norm(_linear())),
    "weight_norm by hooks": _around(_old(weight_norm)),
    "orthogonal": _around(lambda: parametrizations.orthogonal(_linear(), orthogonal_map="matrix_exp")),
    "codebook": _around(Codebook),
    "positions": _around(Positions),
    "rotary": _around(RotaryEmbedding),
}
