"""Encodes weights as codes and scales of the files that a model comes from, by the rule of these files.

`requantized` replaces decoded values by two `LazyTensor`s each, which a writer evaluates range by range: codes and
scales. Formats: 8-bit floats with scales per tensor, row or block, also powers of two; MXFP4. A block whose values are
those of the source's block gets the source's bytes, so that weights that did not change are written back unchanged.

Letters: a weight has L leading dimensions, R rows and C columns; a block has M rows and N columns, the grid of blocks
⌈R/M⌉ rows and ⌈C/N⌉ columns.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from zeroaccel.checkpoint.atomic_write import write_durably
from zeroaccel.errors import CheckpointError, UsageError, listed
from zeroaccel.logs import logger
from zeroaccel.zero.access.lazy_tensors import Box, LazyTensor, Loaded, Node
from zeroaccel.zero.access.load_safetensors import SafetensorsFolder
from zeroaccel.zero.access.safetensors_file import TensorLocation, dtype_of

_BLOCKS, _SCALES = "_blocks", "_scales"  # MXFP4: names of codes and scales, after that of the weight
_ENDS = ("_scale_inv", "_scale")  # of the names of scales
_OF_ACTIVATIONS = re.compile(r"(input|activation)_scale$")  # which no save changes
_GROUP = 32  # values per scale in MXFP4
_E2M1 = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
_MIDDLES = torch.tensor(
    (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
)  # belong to the lower code, which is even for 0, 2, 4, 6
_MIDDLES[1::2] = torch.nextafter(_MIDDLES[1::2], torch.zeros(3))


@dataclass
class Errors:
    """Errors of encoding, by the kind of tensor: its name without numbers."""

    kinds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(lambda: [0.0] * 5))

    def add(self, name: str, values: Tensor, decoded: Tensor, largest: Tensor, unchanged: Tensor) -> None:
        """Adds blocks of a tensor; `largest` and `unchanged` have an element per block."""
        kind = self.kinds[re.sub(r"\d+", "*", name)]
        error = (decoded - values).abs()
        relative = error / largest.clamp(min=torch.finfo(torch.float32).tiny)
        kind[0] = max(kind[0], relative.max().item()) if relative.numel() else kind[0]
        kind[1] += error.double().sum().item()
        kind[2] += values.double().abs().sum().item()
        kind[3] += unchanged.sum().item()
        kind[4] += unchanged.numel()

    def report(self, folder: Path) -> None:
        """Logs the errors, and writes them to `requantized.json`."""
        rows = {
            name: {
                "max relative error": largest,
                "mean relative error": error / total if total else 0.0,
                "unchanged blocks": same / blocks if blocks else 1.0,
            }
            for name, (largest, error, total, same, blocks) in sorted(self.kinds.items())
        }
        for name, row in rows.items():
            logger.info("requantized %s: %s", name, ", ".join(f"{key} {value:.3g}" for key, value in row.items()))
        write_durably(folder / "requantized.json", json.dumps(rows, indent=2).encode() + b"\n")


class _Weight:
    """A weight to encode.

    Args:
        values: (L..., R, C) decoded.
        codes: the source's codes: (L..., R, C), or (L..., R, C / 32, 16) bytes for MXFP4.
        scales: the source's scales: of the grid's shape, or one per row, or one.
    """

    def __init__(self, name: str, values: LazyTensor, codes: LazyTensor, scales: LazyTensor, errors: Errors) -> None:
        self.name, self.values, self.codes, self.scales, self.errors = name, values, codes, scales, errors
        self.is_mxfp4 = codes.dtype is torch.uint8
        *lead, rows, columns = values.shape
        expected = (*lead, rows, columns // _GROUP, _GROUP // 2) if self.is_mxfp4 else (*lead, rows, columns)
        shapes = [(*lead, 1, 1)] if scales.numel() == math.prod(lead) else [(*lead, rows, 1)]
        self.grid = tuple(scales.shape) if scales.dim() == values.dim() else shapes[0]
        if tuple(codes.shape) != expected or math.prod(self.grid) != scales.numel():
            raise UsageError(
                f"requantize: {name}",
                expected=f"values of the shape that codes {tuple(codes.shape)} and scales {tuple(scales.shape)} have",
                got=tuple(values.shape),
                fix="pass the model that was trained",
            )
        self.block = (-(-rows // self.grid[-2]), -(-columns // self.grid[-1]))
        self._last: tuple[Box, Tensor, Tensor] | None = None

    def encoded(self, box: Box) -> tuple[Tensor, Tensor]:
        """Returns codes, (l..., r, M, c, N), and scales, (l..., r, c), of a box of the grid; keeps the last ones."""
        last = self._last  # one read, because several threads may write
        if last is None or last[0] != box:
            last = self._last = (box, *self._encode(box))
        return last[1:]

    def _encode(self, box: Box) -> tuple[Tensor, Tensor]:
        spans = (*(1 for _ in self.grid[:-2]), *self.block)
        inside = tuple(
            (first * span, min(end * span, size))
            for (first, end), span, size in zip(box, spans, self.values.shape, strict=True)
        )
        values = self._in_blocks(_part(self.values, inside).float())
        largest = values.abs().amax(dim=(-3, -1), keepdim=True)
        if not torch.isfinite(largest).all():
            raise CheckpointError(f"{self.name}", expected="finite values, to encode them", got="inf or nan")
        whole = _part(self.scales, tuple((0, size) for size in self.scales.shape)) if self._is_reshaped() else None
        scales = _part(self.scales, box) if whole is None else whole.view(self.grid)[_slices(box)]
        scales = scales.unsqueeze(-2).unsqueeze(-1)
        if self.is_mxfp4:
            packed = _part(self.codes, (*box, (0, _GROUP // 2)))
            codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2).unsqueeze(-3)
            new, new_scales = _mxfp4(values, largest)
        else:
            codes = self._in_blocks(_part(self.codes, inside))
            new, new_scales = _float8(values, largest, codes.dtype, scales.dtype)
        before, after = _decoded(codes, scales), _decoded(new, new_scales)
        same = torch.zeros_like(largest, dtype=torch.bool)
        for dtype in (self.values.dtype, torch.bfloat16, torch.float16):  # in which the source may have been decoded
            same |= (before.to(dtype).float() == values).all(dim=-1, keepdim=True).all(dim=-3, keepdim=True)
        self.errors.add(self.name, values, torch.where(same, values, after), largest, same)
        return _where(same, codes, new), _where(same, scales, new_scales).squeeze(-1).squeeze(-2)

    def _is_reshaped(self) -> bool:
        return tuple(self.scales.shape) != self.grid

    def _in_blocks(self, region: Tensor) -> Tensor:
        """Returns (l..., r, M, c, N), with zeros after the last row and column."""
        (height, width), (rows, columns) = self.block, region.shape[-2:]
        raw = region.view(torch.uint8) if region.element_size() == 1 else region
        padded = pad(raw, (0, -columns % width, 0, -rows % height)).view(region.dtype)
        return padded.view(*region.shape[:-2], -(-rows // height), height, -(-columns // width), width)

    def codes_of(self, box: Box) -> Tensor:
        """Returns a box of the codes as files have them."""
        if self.is_mxfp4:
            codes = self.encoded(box[:-1])[0].squeeze(-3).unflatten(-1, (_GROUP // 2, 2))
            pairs: Tensor = codes[..., 0] | codes[..., 1] << 4
            return pairs[..., slice(*box[-1])]
        spans = zip(box[-2:], self.block, strict=True)
        grid = (*box[:-2], *((first // span, -(-end // span)) for (first, end), span in spans))
        codes = self.encoded(grid)[0].flatten(-2).flatten(-3, -2)
        starts = (low * span for (low, _), span in zip(grid[-2:], self.block, strict=True))
        rows, columns = (slice(f - start, e - start) for (f, e), start in zip(box[-2:], starts, strict=True))
        return codes.view(torch.uint8)[..., rows, columns].view(codes.dtype)

    def scales_of(self, box: Box) -> Tensor:
        """Returns a box of the scales as files have them."""
        if not self._is_reshaped():
            return self.encoded(box)[1]
        every = self.encoded(tuple((0, size) for size in self.grid))[1]
        return every.reshape(self.scales.shape)[_slices(box)]


class _Encoded(Node):
    """The codes or the scales of a weight."""

    def __init__(self, weight: _Weight, like: LazyTensor, values_of: Callable[[Box], Tensor]) -> None:
        super().__init__(tuple(like.shape), like.dtype)
        self.sources, self._part = (weight.values,), values_of

    def fill(self, box: Box, out: Tensor) -> None:
        out.copy_(self._part(box))


def requantized(values: Mapping[str, Tensor], source: Path) -> tuple[dict[str, Tensor], Errors]:
    """Returns the tensors as the files of `source` have them, codes and scales included; others are unchanged.

    Args:
        values: decoded values by the names of the files.

    Raises:
        UsageError: the files have no codes, or codes of another format than those of this module.
    """
    files, errors = SafetensorsFolder(source), Errors()
    made = dict(values)
    weights = [each for name in files.tensors if (each := _weight(name, files, values, errors)) is not None]
    others = [
        f"{name}: {files.tensors[name].dtype}" for name in values if _is_cast(files.tensors.get(name), made[name])
    ]
    coded = {weight.name for weight, *_ in weights}
    others = [each for each in others if each.partition(":")[0] not in coded]
    if others or not weights:
        raise UsageError(
            f"requantize: {source}",
            expected="8-bit floats with weight_scale_inv or weight_scale, or MXFP4 blocks and scales",
            got=listed(others, "; ") or "files without such codes",
            fix="save without requantize",
        )
    for name, value in values.items():
        place = files.tensors.get(name)
        if place is not None and value.is_floating_point():
            made[name] = value.to(dtype_of(place.dtype)) if name not in coded else value
    for weight, codes, scales in weights:
        made.pop(weight.name)
        made[codes] = LazyTensor(_Encoded(weight, weight.codes, weight.codes_of))
        made[scales] = LazyTensor(_Encoded(weight, weight.scales, weight.scales_of))
    made |= {name: files[name] for name in files.tensors if _OF_ACTIVATIONS.search(name)}
    return made, errors


def _weight(
    name: str, files: SafetensorsFolder, values: Mapping[str, Tensor], errors: Errors
) -> tuple[_Weight, str, str] | None:
    """Returns a weight to encode, with the names of its codes and scales; None for another tensor."""
    base = name.removesuffix(_BLOCKS)
    dtype = files.tensors[name].dtype
    if base != name and dtype == "U8":
        scales, is_float = f"{base}{_SCALES}", False
    elif dtype.startswith("F8_E") and dtype != "F8_E8M0":
        scales, is_float = next((each for end in _ENDS if (each := f"{name}{end}") in files.tensors), ""), True
    else:
        return None
    if base not in values or scales not in files.tensors:
        return None
    value = values[base]
    lazy = value if isinstance(value, LazyTensor) else LazyTensor(Loaded(value))
    # gpt-oss multiplies by the transposed matrix of its files.
    decoded: Any = lazy if is_float else lazy.transpose(-1, -2)
    return _Weight(base, decoded, files[name], files[scales], errors), name, scales


def _is_cast(place: TensorLocation | None, value: Tensor) -> bool:
    """True if a value would be cast to codes."""
    return place is not None and value.is_floating_point() and (place.dtype[0] in "IU" or place.dtype.startswith("F8"))


def _part(tensor: LazyTensor, box: Box) -> Tensor:
    out = torch.empty([end - first for first, end in box], dtype=tensor.dtype)
    tensor.fill(box, out)
    return out


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(*ends) for ends in box)


def _where(same: Tensor, old: Tensor, new: Tensor) -> Tensor:
    """Like `torch.where`, which lacks some of the 8-bit dtypes."""
    if old.element_size() > 1:
        return torch.where(same, old, new)
    return torch.where(same, old.view(torch.uint8), new.view(torch.uint8)).view(old.dtype)


def _float8(values: Tensor, largest: Tensor, dtype: torch.dtype, of_scales: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns codes whose largest is that of the dtype, and scales, by the rule of transformers' FP8 quantizer."""
    top, most = torch.finfo(dtype).max, torch.finfo(torch.float32).max
    factor = torch.where(largest > 0, top / largest, torch.ones_like(largest)).clamp(max=most)
    scales = 1 / factor
    if of_scales.itemsize == 1:  # exponents
        exponent = scales.clamp(min=torch.finfo(torch.float32).tiny).log2().ceil().clamp(-127, 127)
        factor, scales = (-exponent).exp2(), (exponent + 127).to(torch.uint8).view(of_scales)
    elif of_scales is not torch.float32:
        scales = scales.to(of_scales)
        factor = 1 / scales.float()
    return (values * factor).clamp(-top, top).to(dtype), scales


def _mxfp4(values: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    """Returns codes in E2M1 and exponents plus 127: the smallest for which no value exceeds the largest code, 6."""
    mantissa, exponent = torch.frexp(largest / 6)
    exponent = torch.where(largest > 0, exponent - (mantissa == 0.5).int(), -127).clamp(-127, 127)
    codes = torch.bucketize((values * (-exponent.float()).exp2()).abs(), _MIDDLES)
    return (codes + 8 * torch.signbit(values)).to(torch.uint8), (exponent + 127).to(torch.uint8)


def _decoded(codes: Tensor, scales: Tensor) -> Tensor:
    factor = (scales.float() - 127).exp2() if scales.dtype is torch.uint8 else scales.float()
    if codes.dtype is not torch.uint8:
        return codes.float() * factor
    return torch.cat((_E2M1, -_E2M1))[codes.int()] * factor
