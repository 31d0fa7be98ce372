"""Which dtype and device the buffers of modules have: running statistics, tables, masks, codebooks.

[Note: buffers] What computes with a parameter needs its buffers in the same dtype: statistics of a BatchNorm, vectors
of a power iteration, codebooks. So a floating-point buffer follows the parameters of its module, or of the nearest
module around it that has any, as after `model.bfloat16()`: it is cast where all of these are cast. Where one of them
had the dtype already, the program has made a mixture that it can compute with, and the buffer stays as it is.
Frequencies and angles of rotary embeddings stay too: positions are multiplied with them, and in bf16 position 257 is
256.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from zeroaccel.comm.collectives import Collectives

__all__ = ["BufferDtypes", "broadcast_buffers", "cast_buffers", "dtype_before", "forget_cast", "note_cast"]

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)  # 8 bits are codes, with a scale somewhere
_ROTARY = re.compile(r"Rotary|RoPE|ROPE|Rope(?![a-z])")
_BUILT_AS = "_built_as"  # an attribute: a weak table would keep torch from swapping the tensor


@dataclass(frozen=True)
class BufferDtypes:
    """Decides the dtype of every floating-point buffer; see [Note: buffers].

    Attributes:
        precision: what parameters become.
        asked: what the config says all buffers become (`data_types.buffer_dtype`); None decides for each.
        fp32_names: parameters and buffers that are fp32 whatever else is said.
    """

    precision: torch.dtype
    asked: torch.dtype | None
    fp32_names: frozenset[str]

    def of(self, model: nn.Module) -> dict[str, torch.dtype]:
        """fqn -> dtype of every floating-point buffer; to be asked before the engine casts the parameters."""
        follows = self._following(model)
        found: dict[str, torch.dtype] = {}
        for prefix, module in model.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is None or not buffer.is_floating_point():
                    continue
                fqn = f"{prefix}.{name}" if prefix else name
                if fqn in self.fp32_names:
                    found[fqn] = torch.float32
                elif self.asked is not None:
                    found[fqn] = self.asked
                elif buffer.dtype not in _FLOATS or _holds_angles(module, name):
                    found[fqn] = buffer.dtype
                else:
                    around = next((at for at in _outwards(prefix) if at in follows), None)
                    found[fqn] = self.precision if around is not None and follows[around] else buffer.dtype
        return found

    def _following(self, model: nn.Module) -> dict[str, bool]:
        """Prefix -> whether all floating parameters of a module are cast: its own, if it has any, else those below."""
        own: dict[str, bool] = {}
        for name, param in model.named_parameters(remove_duplicate=False):
            if param.is_floating_point() and name not in self.fp32_names:
                prefix = name.rpartition(".")[0]
                own[prefix] = own.get(prefix, True) and dtype_before(param) is not self.precision
        found = dict(own)
        for prefix, is_cast in own.items():
            for outer in _outwards(prefix):
                if outer not in own:
                    found[outer] = found.get(outer, True) and is_cast
        return found


def cast_buffers(model: nn.Module, device: torch.device, dtypes: Mapping[str, torch.dtype]) -> None:
    """Moves buffers to the device, and gives those named in `dtypes` their dtype."""
    moved: dict[tuple[int, torch.dtype], torch.Tensor] = {}  # a buffer that modules share stays one
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            target = dtypes.get(f"{prefix}.{name}" if prefix else name, buffer.dtype)
            key = id(buffer), target
            if key not in moved:
                moved[key] = buffer.to(device=device, dtype=target)
            module._buffers[name] = moved[key]


def broadcast_buffers(model: nn.Module, collectives: Collectives) -> None:
    """Makes the module buffers of all ranks those of rank 0. (all ranks)"""
    for name, buffer in model.named_buffers():
        if buffer.numel() and not buffer.is_meta:
            flat = buffer.detach().contiguous()
            collectives.broadcast(flat, 0, f"buffer {name}")
            buffer.detach().copy_(flat)


def note_cast(param: nn.Parameter, dtype: torch.dtype) -> None:
    """The parameter, which the program made in `dtype`, is cast before there is an engine."""
    vars(param).setdefault(_BUILT_AS, dtype)


def forget_cast(param: nn.Parameter) -> None:
    """An engine has taken the parameter over, and cast the buffers beside it."""
    vars(param).pop(_BUILT_AS, None)


def dtype_before(param: nn.Parameter) -> torch.dtype:
    """The dtype that the program made a parameter in, whatever it was cast to while it was built or loaded."""
    found: torch.dtype = vars(param).get(_BUILT_AS, param.dtype)
    return found


def _holds_angles(module: nn.Module, name: str) -> bool:
    """Whether a buffer holds frequencies or angles, rather than the cosines and sines of these."""
    if name.endswith("inv_freq"):
        return True
    return bool(_ROTARY.search(type(module).__name__)) and "cos" not in name and "sin" not in name


def _outwards(prefix: str) -> Iterator[str]:
    """The prefix of a module, then those of the modules around it, that of the model, "", last."""
    while prefix:
        yield prefix
        prefix = prefix.rpartition(".")[0]
    yield ""
