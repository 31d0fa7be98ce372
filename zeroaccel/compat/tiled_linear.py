"""`deepspeed.zero.TiledLinear`: a linear layer in tiles, each of which is gathered by itself at stage 3."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from zeroaccel.errors import UsageError
from zeroaccel.zero import GatheredParameters


class SplitsError(UsageError, RuntimeError):
    """More tiles than features, or fewer than one; a RuntimeError as well, which DeepSpeed raises."""


class TiledLinear(nn.Module):
    """y = x W^T + b by tiles of W, one after the other; (..., in_features) -> (..., out_features).

    Args:
        in_features, out_features, bias: as of `nn.Linear`.
        in_splits, out_splits: tiles along the two sides; as equal as the numbers allow, the longer ones first.
        input_is_already_split: forward takes a sequence of `in_splits` tensors.
        combine_out_splits: False returns a list of `out_splits` tensors.
        linear_cls: makes a tile; `kwargs` are more of its arguments.
        init_linear: a layer to copy the weights of.

    Raises:
        SplitsError: more tiles than features, or fewer than one.

    Example:
        >>> layer = torch.nn.Linear(5, 4)
        >>> tiled = TiledLinear(5, 4, in_splits=2, out_splits=2, init_linear=layer)
        >>> x = torch.ones(3, 5)
        >>> torch.allclose(tiled(x), layer(x))
        True
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: Callable[..., nn.Module] = nn.Linear,
        init_linear: nn.Linear | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        for name, splits, features in (("in", in_splits, in_features), ("out", out_splits, out_features)):
            if not 1 <= splits <= features:
                raise SplitsError(f"TiledLinear({name}_splits)", expected=f"from 1 to {features}", got=splits)
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.in_splits, self.out_splits = in_splits, out_splits
        self.input_is_already_split, self.combine_out_splits = input_is_already_split, combine_out_splits
        self.in_parts, self.out_parts = _bounds(in_features, in_splits), _bounds(out_features, out_splits)
        # The bias of a row is in its last tile: it must be added once.
        self.linears = nn.ModuleList(
            nn.ModuleList(
                linear_cls(width, height, bias=bias and column == in_splits - 1, **kwargs)
                for column, width in enumerate(_sizes(self.in_parts))
            )
            for height in _sizes(self.out_parts)
        )
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, input_: Tensor | Sequence[Tensor]) -> Any:
        """The layer's output; a list of its parts with `combine_out_splits` False."""
        parts = self._inputs(input_)
        outputs = [self._row(row, parts) for row in self.linears]
        return self._combined(outputs) if self.combine_out_splits else outputs

    @torch.no_grad()
    def copy_params_from(self, other: nn.Linear) -> None:
        """Copies the weights and biases of a layer. (all ranks, at stage 3)

        Raises:
            UsageError: it has another shape, or a bias where this has none, or none where this has one.
        """
        expected = ((self.out_features, self.in_features), self.use_bias)
        actual = (tuple(other.weight.shape), other.bias is not None)
        if actual != expected:
            raise UsageError(
                "TiledLinear.copy_params_from: (shape, whether biased)", expected=str(expected), got=actual
            )
        for row, tiles in enumerate(self.linears):
            rows = slice(self.out_parts[row], self.out_parts[row + 1])
            assert isinstance(tiles, nn.ModuleList), "rows of tiles"
            for column, tile in enumerate(tiles):
                columns = slice(self.in_parts[column], self.in_parts[column + 1])
                with GatheredParameters(list(tile.parameters()), modifier_rank=0):
                    named = dict(tile.named_parameters())
                    named["weight"].copy_(other.weight[rows, columns])
                    if "bias" in named:
                        named["bias"].copy_(other.bias[rows])

    def _inputs(self, input_: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
        if not self.input_is_already_split:
            assert isinstance(input_, Tensor), "a whole input is one tensor"
            return torch.split(input_, _sizes(self.in_parts), dim=-1)
        parts = [input_] if isinstance(input_, Tensor) else input_
        if len(parts) != self.in_splits:
            raise UsageError("TiledLinear(input)", expected=f"{self.in_splits} parts", got=len(parts))
        return parts

    def _row(self, tiles: Any, parts: Sequence[Tensor]) -> Any:
        """The sum of the tiles of one row."""
        return sum((tile(part) for tile, part in zip(tiles[1:], parts[1:], strict=True)), start=tiles[0](parts[0]))

    def _combined(self, outputs: Sequence[Any]) -> Any:
        return torch.cat(list(outputs), dim=-1)


class TiledLinearReturnBias(TiledLinear):
    """`TiledLinear` of a class whose forward returns (output, bias), as Megatron's; and so does this."""

    def _row(self, tiles: Any, parts: Sequence[Tensor]) -> Any:
        results = [tile(part) for tile, part in zip(tiles, parts, strict=True)]
        biases = [bias for _, bias in results if bias is not None]
        return sum((output for output, _ in results[1:]), start=results[0][0]), biases[-1] if biases else None

    def _combined(self, outputs: Sequence[Any]) -> Any:
        biases = [bias for _, bias in outputs if bias is not None]
        return torch.cat([output for output, _ in outputs], dim=-1), torch.cat(biases, dim=-1) if biases else None


def _bounds(features: int, splits: int) -> list[int]:
    """Where `splits` parts begin, and where the last ends; of unequal ones the first are longer by one."""
    size, longer = divmod(features, splits)
    return [0, *accumulate(size + (index < longer) for index in range(splits))]


def _sizes(bounds: Sequence[int]) -> list[int]:
    return [stop - start for start, stop in pairwise(bounds)]
