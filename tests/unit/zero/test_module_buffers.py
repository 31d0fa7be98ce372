"""The dtype of each buffer, also of shared and absent ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zeroaccel.zero.precision import BufferDtypes, cast_buffers, dtype_before, note_cast


class Table(nn.Module):
    """Float buffers and no parameters."""

    def __init__(self, **tables: torch.Tensor) -> None:
        super().__init__()
        for name, table in tables.items():
            self.register_buffer(name, table)


def _dtypes(model: nn.Module, asked: torch.dtype | None = None, fp32: tuple[str, ...] = ()) -> dict[str, str]:
    found = BufferDtypes(torch.bfloat16, asked, frozenset(fp32)).of(model)
    return {name: str(dtype).removeprefix("torch.") for name, dtype in found.items()}


def _block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), Table(mask=torch.zeros(2), index=torch.arange(2)))


def test_buffers_follow_the_parameters_that_are_cast() -> None:
    assert _dtypes(_block()) == dict.fromkeys(("1.running_mean", "1.running_var", "2.mask"), "bfloat16")


def test_buffers_beside_parameters_that_are_in_the_precision_stay() -> None:
    model = _block()
    model[0].bfloat16()
    assert _dtypes(model)["1.running_mean"] == "bfloat16"  # its own parameters are cast
    assert _dtypes(model)["2.mask"] == "float32"  # one of those around it is not
    nested = nn.Sequential(_block(), nn.Linear(2, 2).bfloat16())
    assert _dtypes(nested)["0.2.mask"] == "bfloat16"  # the nearest module with parameters decides


def test_names_and_what_the_config_asks_for_come_first() -> None:
    assert _dtypes(_block(), fp32=("1.running_var",))["1.running_var"] == "float32"
    assert set(_dtypes(_block(), torch.float16, ("2.mask",)).values()) == {"float16", "float32"}
    kept = ("0.weight", "0.bias", "1.weight", "1.bias")  # nothing is cast
    assert set(_dtypes(_block(), fp32=kept).values()) == {"float32"}
    assert _dtypes(Table(mask=torch.zeros(1))) == {"mask": "float32"}  # no parameters at all


@pytest.mark.parametrize(
    ("kind", "name", "expected"),
    [
        ("LlamaRotaryEmbedding", "inv_freq", "float32"),
        ("VisionRope2D", "freqs", "float32"),
        ("RoPE", "cache", "float32"),
        ("RotaryEmbedding", "cos_cached", "bfloat16"),
        ("RotaryEmbedding", "_sin_cached", "bfloat16"),
        ("Attention", "inv_freq", "float32"),
        ("Attention", "original_inv_freq", "float32"),
        ("Properties", "freqs", "bfloat16"),
        ("EuRopean", "freqs", "bfloat16"),
        ("Positions", "sines", "bfloat16"),
    ],
)
def test_rotary_frequencies_stay(kind: str, name: str, expected: str) -> None:
    table = type(kind, (Table,), {})(**{name: torch.ones(2)})
    assert _dtypes(nn.Sequential(nn.Linear(1, 1), table)) == {f"1.{name}": expected}


def test_codes_in_8_bits_stay() -> None:
    model = nn.Sequential(nn.Linear(1, 1), Table(codes=torch.ones(2).to(torch.float8_e4m3fn)))
    assert _dtypes(model) == {"1.codes": "float8_e4m3fn"}


def test_a_parameter_that_was_cast_while_it_was_built_counts_as_cast() -> None:
    model = _block().bfloat16()
    model[1].running_mean = model[1].running_mean.float()
    assert _dtypes(model)["1.running_mean"] == "float32"
    for param in model[1].parameters():
        note_cast(param, torch.float32)
        note_cast(param, torch.bfloat16)  # again: the first counts
        assert dtype_before(param) is torch.float32
    assert _dtypes(model)["1.running_mean"] == "bfloat16"


def test_buffers_are_cast_in_place() -> None:
    model = _block()
    model.register_buffer("table", torch.ones(2, dtype=torch.float64))
    model.register_buffer("hidden", torch.ones(2), persistent=False)
    model.register_buffer("nothing", None)
    model[2].table = model.table
    model[2].register_buffer("again", model.table)
    cast_buffers(model, torch.device("cpu"), {"table": torch.float16, "2.again": torch.float16})
    assert model.table is model[2].again  # a shared one stays shared
    assert (model.table.dtype, model.hidden.dtype, model.nothing) == (torch.float16, torch.float32, None)
    assert model[1].num_batches_tracked.dtype is torch.long
    assert "hidden" not in model.state_dict()
