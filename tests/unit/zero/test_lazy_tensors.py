"""Lazy tensors: any range of a recorded result has the bits of the whole computation, and only its bytes are read."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.log_lines import log_lines
from zeroaccel.compat import transformers_loading
from zeroaccel.errors import UsageError
from zeroaccel.zero.access import lazy_tensors
from zeroaccel.zero.access.lazy_tensors import LazyTensor, Loaded, OpenFile, Stored, read_into, release
from zeroaccel.zero.access.safetensors_file import tensor_locations

Tensors = dict[str, Tensor]


def _stored(folder: Path) -> tuple[Tensors, Tensors, OpenFile]:
    """Returns tensors, and the same as lazy tensors of a file."""
    generator = torch.Generator().manual_seed(0)
    whole: Tensors = {f"w{index}": torch.randn(12, 10, generator=generator).bfloat16() for index in range(4)}
    whole["wide"] = torch.randn(300, 1024, generator=generator)
    whole["codes"] = torch.randn(256, 384, generator=generator).to(torch.float8_e4m3fn)
    whole["scales"] = torch.rand(2, 3, generator=generator)
    whole["bytes"] = torch.randint(0, 255, (8, 32), dtype=torch.uint8, generator=generator)
    path = folder / "model.safetensors"
    save_file(whole, path)
    file = OpenFile(path)
    return whole, {name: LazyTensor(Stored(name, place, file)) for name, place in tensor_locations(path)}, file


def _dequantized(t: Tensors) -> Tensor:
    codes = t["codes"].to(torch.float32).reshape(2, 128, 3, 128)
    return (codes * t["scales"].unsqueeze(-1).unsqueeze(1)).to(torch.bfloat16).reshape(256, 384)


def _looked_up(t: Tensors) -> Tensor:
    table = torch.arange(16).float().square()
    low, high = (t["bytes"] & 15).long(), (t["bytes"] >> 4).long()
    return torch.stack([table[low], table[high]], dim=-1).reshape(8, 64)


CASES: dict[str, Callable[[Tensors], Tensor]] = {
    "stored": lambda t: t["wide"],
    "row": lambda t: t["wide"][5],
    "one element": lambda t: t["scales"][1, 1].clone(),
    "transposed": lambda t: t["wide"].t(),
    "transposed copy": lambda t: t["wide"].transpose(0, 1).contiguous(),
    "cast": lambda t: t["wide"].to(torch.bfloat16),
    "merged experts": lambda t: torch.cat([torch.stack([t["w0"], t["w1"]]), torch.stack([t["w2"], t["w3"]])], dim=1),
    "merged and transposed": lambda t: torch.stack([t["w0"], t["w1"]], dim=1).transpose(0, 2).contiguous(),
    "merged and split again": lambda t: torch.chunk(torch.stack([t["w0"], t["w1"]]), 2, 0)[1].squeeze(0),
    "a third of the columns": lambda t: torch.chunk(t["wide"], 3, dim=1)[1].contiguous(),
    "unequal parts": lambda t: torch.split(t["wide"], [100, 200])[1],
    "permuted heads": lambda t: t["w0"].view(3, 2, 2, 10).transpose(1, 2).reshape(12, 10),
    "interleaved columns": lambda t: t["w0"].reshape(12, 5, 2).transpose(1, 2).reshape(12, 10),
    "interleaved after a joint": lambda t: torch.cat([t["w0"], t["w1"]]).reshape(12, 2, 10).transpose(0, 1).flatten(),
    "repeated": lambda t: t["w0"][None].expand(3, 12, 10).reshape(36, 10),
    "with a tensor in memory": lambda t: torch.cat([t["w0"], torch.ones(2, 10, dtype=torch.bfloat16)]),
    "blocks of codes and scales": _dequantized,
    "looked up": _looked_up,
    "no form for ranges": lambda t: torch.sort(t["w0"], dim=0).values + 1,
}


@pytest.mark.parametrize("name", CASES)
def test_any_range_has_the_bits_of_the_whole(name: str, tmp_path: Path) -> None:
    whole, lazy, _ = _stored(tmp_path)
    expected, result = CASES[name](whole), CASES[name](lazy)
    assert isinstance(result, LazyTensor)
    assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
    draw, flat = random.Random(0), expected.reshape(-1)
    for _ in range(20):
        start = draw.randrange(flat.numel())
        stop = draw.randrange(start, flat.numel() + 1)
        out = torch.empty(stop - start, dtype=expected.dtype)
        read_into(result, start, out)
        assert torch.equal(out, flat[start:stop])


@pytest.mark.parametrize(
    "name", ["stored", "transposed copy", "cast", "merged experts", "a third of the columns", "unequal parts"]
)
def test_ranks_read_each_byte_once(name: str, tmp_path: Path) -> None:
    whole, lazy, file = _stored(tmp_path)
    result, expected = CASES[name](lazy), CASES[name](whole)
    needed = expected.numel() * (4 if "wide" in name or expected.dtype is torch.float32 or name == "cast" else 2)
    for rank in range(4):
        share = result.numel() // 4
        read_into(result, rank * share, torch.empty(share, dtype=result.dtype))
    assert needed * 0.99 <= file.read_nbytes <= needed * 1.02


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_transposed_experts_are_read_once(world_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An expert that is larger than a chunk is one chunk; one that two ranks share is read by both of them."""
    monkeypatch.setattr(lazy_tensors, "_CHUNK_NBYTES", 1024)
    table = SimpleNamespace(FP4_VALUES=[0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    monkeypatch.setitem(sys.modules, "transformers.integrations.mxfp4", table)  # whose import takes seconds
    tensors = {
        "blocks": torch.randint(0, 256, (8, 6, 3, 16), dtype=torch.uint8),
        "scales": torch.randint(110, 125, (8, 6, 3), dtype=torch.uint8),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    file = OpenFile(tmp_path / "model.safetensors")
    lazy = {name: LazyTensor(Stored(name, at, file)) for name, at in tensor_locations(file.path)}
    expected = transformers_loading._mxfp4_values(tensors["blocks"], tensors["scales"]).reshape(-1)
    values = transformers_loading._mxfp4_values(lazy["blocks"], lazy["scales"])
    expert, found = expected.numel() // 8, []
    ends = [0, *(8 * expert * rank // world_size + 7 for rank in range(1, world_size)), 8 * expert]
    for first, end in itertools.pairwise(ends):
        found.append(torch.empty(end - first, dtype=torch.bfloat16))
        read_into(values, first, found[-1])
    assert torch.equal(torch.cat(found), expected)
    nbytes = sum(each.nbytes for each in tensors.values())
    assert nbytes <= file.read_nbytes <= nbytes * (1 + (world_size - 1) / 8)


def test_casts_of_codes_have_the_bits_of_torch() -> None:
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"):
        if not hasattr(torch, name):
            continue
        codes = torch.arange(512).to(torch.uint8).view(getattr(torch, name))
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            result = torch.empty(511, dtype=dtype)
            read_into(LazyTensor(Loaded(codes)).to(dtype), 1, result)
            assert result.view(torch.uint8).tolist() == codes.to(dtype)[1:].view(torch.uint8).tolist(), (name, dtype)


def test_a_cast_rounds_also_if_the_next_one_does_not() -> None:
    values = torch.randn(4096)
    result = torch.empty(4096)
    read_into(LazyTensor(Loaded(values)).bfloat16().to(torch.float32), 0, result)
    assert torch.equal(result, values.bfloat16().float())
    assert not torch.equal(result, values)


def test_a_code_beyond_its_table_is_an_error(tmp_path: Path) -> None:
    codes = _stored(tmp_path)[1]["bytes"]
    with pytest.raises(IndexError, match="of bytes: the table has 16"):
        read_into(torch.arange(16.0)[codes.int()], 0, torch.empty(codes.numel()))


class _NewMemory(TorchDispatchMode):
    """Counts bytes of the results that have memory of their own."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and func._schema.returns[0].alias_info is None:
            self.nbytes += made.nbytes
        return made


@pytest.mark.parametrize("numel", [1 << 10, 1 << 19])
def test_decoding_makes_one_copy_in_the_dtype_of_the_computation(numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazy_tensors, "_CACHED_NUMEL", numel)
    tensors = {"codes": torch.randn(256, 384).to(torch.float8_e4m3fn), "scales": torch.rand(2, 3)}
    lazy = _dequantized({name: LazyTensor(Loaded(each)) for name, each in tensors.items()})
    result = torch.empty(256 * 384 - 700, dtype=torch.bfloat16)
    with _NewMemory() as counted:
        read_into(lazy, 300, result)
    assert torch.equal(result, _dequantized(tensors).view(-1)[300:-400])
    assert counted.nbytes < 1.1 * result.numel() * (1 + 4)  # codes and float32


def test_a_whole_computation_is_named_and_freed(tmp_path: Path) -> None:
    _, lazy, file = _stored(tmp_path)
    result = torch.roll(lazy["w2"], 1, 0)
    assert not file.read_nbytes
    with log_lines() as lines:
        read_into(result, 0, torch.empty(4, dtype=torch.bfloat16))
        read_into(result, 4, torch.empty(4, dtype=torch.bfloat16))
    assert file.read_nbytes == 240
    assert [line for line in lines if "w2: every rank reads it whole, since aten.roll.default" in line]
    release(result)
    read_into(result, 0, torch.empty(4, dtype=torch.bfloat16))
    assert file.read_nbytes == 480


def test_a_write_to_a_lazy_tensor_is_an_error(tmp_path: Path) -> None:
    _, lazy, _ = _stored(tmp_path)
    with pytest.raises(UsageError, match="w1"):
        lazy["w1"].mul_(2)
    out = torch.zeros(12, 10, dtype=torch.bfloat16)
    out.copy_(lazy["w1"])  # the lazy tensor is only read
    assert out.abs().sum() > 0


def test_a_file_that_ends_early_is_named(tmp_path: Path) -> None:
    _, lazy, file = _stored(tmp_path)
    file.path.write_bytes(file.path.read_bytes()[:-1])
    last = max(lazy, key=lambda name: lazy[name].node.offset)  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match=rf"model\.safetensors: ends within tensor {last}"):
        read_into(lazy[last], 0, torch.empty(lazy[last].numel(), dtype=lazy[last].dtype))
    file.close()
    file.path.unlink()
    with pytest.raises(UsageError, match=r"model\.safetensors: cannot be read"):
        read_into(lazy["w0"], 0, torch.empty(1, dtype=torch.bfloat16))


def test_tensors_in_memory(tmp_path: Path) -> None:
    values = torch.arange(12).view(3, 4).t()
    out = torch.empty(5, dtype=torch.int64)
    for source in (values, LazyTensor(Loaded(values))):
        read_into(source, 2, out)
        assert out.tolist() == values.flatten()[2:7].tolist()
