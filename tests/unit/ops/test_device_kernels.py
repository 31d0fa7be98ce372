"""The CUDA kernels, compiled for the host: bits equal to the host's loops, for every format and special value."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.tensors import every_pattern
from tests.unit.ops.kernels_on_host import HostRunner, host_kernels
from zeroaccel.comm import quantized
from zeroaccel.comm.quantized import FP8, INT4, INT8, Codec, RowOrder
from zeroaccel.ops import SGD, Adagrad, Adam, Lion, RMSprop, changed, reductions, shard_step, step_control
from zeroaccel.ops.cupy_kernels import kernel_names
from zeroaccel.ops.device_kernels import SOURCE, Argument, DeviceKernels
from zeroaccel.ops.reductions import max_abs, norm_exponent, square_sums
from zeroaccel.ops.shard_step import ShardOptimizer

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OUTS = [None, *DTYPES]
OPTIMIZERS: dict[str, Callable[[Tensor], ShardOptimizer]] = {
    "adamw": lambda x: Adam([x], lr=0.01, weight_decay=0.1),
    "adam": lambda x: Adam([x], lr=0.01, weight_decay=0.1, adamw_mode=False, bias_correction=False),
    "adamw-bf16": lambda x: Adam([x], lr=0.01, weight_decay=0.1, moments_dtype="bf16"),
    "adamw-int8": lambda x: Adam([x], lr=0.01, weight_decay=0.1, moments_dtype="int8"),
    "lion": lambda x: Lion([x], lr=0.01, weight_decay=0.1),
    "lion-bf16": lambda x: Lion([x], lr=0.01, moments_dtype="bf16"),
    "adagrad": lambda x: Adagrad([x], lr=0.01, weight_decay=0.1),
    "adagrad-bf16": lambda x: Adagrad([x], lr=0.01, moments_dtype="bf16"),
    "rmsprop": lambda x: RMSprop([x], lr=0.01, weight_decay=0.1),
    "rmsprop-centered": lambda x: RMSprop([x], lr=0.01, centered=True),
    "rmsprop-momentum": lambda x: RMSprop([x], lr=0.01, momentum=0.9, centered=True),
    "sgd": lambda x: SGD([x], lr=0.01, weight_decay=0.1),
    "momentum": lambda x: SGD([x], lr=0.01, momentum=0.9, dampening=0.3),
    "nesterov": lambda x: SGD([x], lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.1),
}
SPECIAL = [0.0, 1.0, 1.5, 3e38, 1e38, 65504.0, 65519.9, 65520.0, 2.0**-126, 2.0**-140, 2.0**-149, 2.0**-24, 2.0**-25]
SPECIALS = [sign * value for value in (*SPECIAL, math.inf, math.nan) for sign in (1.0, -1.0)]


def random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def spread(numel: int, seed: int) -> Tensor:
    """Returns normally distributed values over many powers of two."""
    exponents = torch.randint(-30, 4, (numel,), generator=random(seed))
    return torch.ldexp(torch.randn(numel, generator=random(seed + 1)), exponents)


def bits(tensor: Tensor) -> Tensor:
    """Returns the bits, with one pattern for every NaN, whose sign and payload are not specified."""
    if not tensor.is_floating_point():
        return tensor
    integer = torch.int32 if tensor.element_size() == 4 else torch.int16
    return torch.where(tensor.isnan(), torch.nan, tensor).view(integer)


def assert_same(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    for place, (one, other) in enumerate(zip(found, wanted, strict=True)):
        off = (bits(one) != bits(other)).nonzero().flatten()
        assert off.numel() == 0, f"tensor {place}: {off.numel()} differ, at {off[:5]}: {one[off[:5]]}, {other[off[:5]]}"


# -- updates


def fill(tensor: Tensor, name: str, seed: int) -> None:
    """Fills a state's tensor with random values or codes."""
    if tensor.dtype is torch.uint8:
        # No exponent of a non-finite block, which would hide the other codes.
        low, high = (100, 140) if name.endswith("exponents") else (0, 256)
        tensor.copy_(torch.randint(low, high, tensor.shape, generator=random(seed)))
        return
    values = spread(tensor.numel(), seed)
    tensor.copy_(values.abs() if name in ("exp_avg_sq", "sum", "square_avg") else values)


def both_updates(
    name: str,
    master: Tensor,
    grad: Tensor,
    out_dtype: torch.dtype | None,
    kernels: DeviceKernels,
    change: Callable[[str, Tensor], None] = lambda name, tensor: None,
) -> tuple[list[Tensor], list[Tensor]]:
    """Returns master, state and rounded copy after an update by the kernel, and the same by the host's loop."""
    results = []
    for by_kernel in (True, False):
        param = master.clone()
        optimizer = OPTIMIZERS[name](param)
        out = None if out_dtype is None else torch.full((param.numel(),), 3.0, dtype=out_dtype)
        buffers, _ = optimizer._advance(optimizer.param_groups[0], param)
        entries = {key: value for key, value in optimizer.state[param].items() if isinstance(value, Tensor)}
        for place, (entry, tensor) in enumerate(entries.items()):
            fill(tensor, entry, place)
            change(entry, tensor)
        buffers, coefficients = optimizer._advance(optimizer.param_groups[0], param)
        scalars = [v if isinstance(v, np.uint32) else np.float32(v) for v in (0.37, *coefficients)]
        if by_kernel:
            kernels.update(optimizer.kernel_name(), [param, *buffers], grad, out, None, scalars)
        else:
            optimizer._update_on_cpu([param, *buffers, out], grad, scalars)
        results.append([param, *entries.values(), *([] if out is None else [out])])
    return results[0], results[1]


# Separate device functions read gradients and write copies, so each dtype of both is enough; for each pair, the host's
# loops would be compiled again.
@pytest.mark.parametrize(
    ("grad_dtype", "out_dtype"),
    [
        (torch.float32, None),
        (torch.float32, torch.float32),
        (torch.float32, torch.float16),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_has_the_bits_of_the_host(name: str, grad_dtype: torch.dtype, out_dtype: torch.dtype | None) -> None:
    kernels = host_kernels()
    for numel in (1, 31, 1024, 30_001):
        master, grad = spread(numel, 10), spread(numel, 20).to(grad_dtype)
        assert_same(*both_updates(name, master, grad, out_dtype, kernels))


@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_16_bit_gradient_has_the_bits_of_the_host(name: str, grad_dtype: torch.dtype) -> None:
    grad = every_pattern(grad_dtype)
    assert_same(*both_updates(name, spread(grad.numel(), 5), grad, grad_dtype, host_kernels()))


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_special_values_have_the_bits_of_the_host(name: str, out_dtype: torch.dtype) -> None:
    pairs = torch.tensor(list(itertools.product(SPECIALS, SPECIALS)))
    master, grad = (column.contiguous() for column in pairs.unbind(1))

    def special(entry: str, tensor: Tensor) -> None:
        if tensor.dtype is torch.uint8:
            return
        values = torch.tensor(SPECIALS)[torch.arange(tensor.numel()) * 7 % len(SPECIALS)]
        tensor.copy_(values.abs() if entry in ("exp_avg_sq", "sum") else values)

    assert_same(*both_updates(name, master, grad, out_dtype, host_kernels(), special))
    assert_same(*both_updates(name, master, grad, out_dtype, host_kernels()))


@pytest.mark.parametrize("architecture", [700, 800])
def test_every_8_bit_code_has_the_bits_of_the_host(architecture: int) -> None:
    """All pairs of exponent and code, including 255 (not finite) and 0, with shuffles and with sm_80's reductions."""
    numel = 256 * 256 + 17

    def exhaustive(entry: str, tensor: Tensor) -> None:
        place = torch.arange(tensor.numel())
        tensor.copy_(place // 8 % 256 if entry.endswith("exponents") else (place * 37 + place // 256) % 256)

    master, grad = torch.randn(numel, generator=random(3)), torch.zeros(numel)
    grad[::3] = spread(grad[::3].numel(), 9)
    found, wanted = both_updates("adamw-int8", master, grad, torch.bfloat16, host_kernels(architecture), exhaustive)
    assert_same(found, wanted)
    assert (wanted[2] == 255).any()
    assert ((wanted[2] > 40) & (wanted[2] < 254)).any()


def shifted(tensor: Tensor, places: int) -> Tensor:
    """Returns the same values at an address that lies `places` elements behind a multiple of 16 bytes."""
    moved = torch.zeros(tensor.numel() + 32, dtype=tensor.dtype)
    begin = -moved.data_ptr() // tensor.element_size() % (16 // tensor.element_size()) + places
    return moved[begin : begin + tensor.numel()].copy_(tensor)


@pytest.mark.parametrize("name", ["adamw", "adamw-bf16", "adamw-int8", "rmsprop-momentum"])
@pytest.mark.parametrize("which", range(4))
def test_arrays_at_odd_addresses_have_the_same_bits(name: str, which: int) -> None:
    """One array of the four kinds begins in the middle of 16 bytes, so that no thread loads four elements at once."""
    numel, kernels = 2500, host_kernels()
    results = []
    for places in (0, 1, 2, 3):
        param = spread(numel, 3)
        optimizer = OPTIMIZERS[name](param)
        buffers, _ = optimizer._advance(optimizer.param_groups[0], param)
        for place, (entry, tensor) in enumerate(optimizer.state[param].items()):
            if isinstance(tensor, Tensor):
                fill(tensor, entry, place)
        buffers, coefficients = optimizer._advance(optimizer.param_groups[0], param)
        moved = [None if each is None else shifted(each, places * (which == 0)) for each in buffers]
        master, grad = shifted(param, places * (which == 1)), shifted(spread(numel, 4).half(), places * (which == 2))
        out = shifted(torch.zeros(numel).bfloat16(), places * (which == 3))
        scalars = [v if isinstance(v, np.uint32) else np.float32(v) for v in (0.37, *coefficients)]
        kernels.update(optimizer.kernel_name(), [master, *moved], grad, out, None, scalars)
        results.append([each for each in (master, *moved, out) if each is not None])
    for other in results[1:]:
        assert_same(other, results[0])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_control_replaces_the_factor_and_can_stop_an_update(name: str) -> None:
    kernels, numel = host_kernels(), 1500
    results = []
    for control, factor in ((None, 0.25), (torch.tensor([0.25, 1.0]), 9.0), (torch.tensor([0.25, 0.0]), 9.0)):
        param, out = spread(numel, 1), torch.full((numel,), 3.0, dtype=torch.bfloat16)
        optimizer = OPTIMIZERS[name](param)
        buffers, coefficients = optimizer._advance(optimizer.param_groups[0], param)
        before = [tensor.clone() for tensor in (param, *buffers, out) if tensor is not None]
        scalars = [v if isinstance(v, np.uint32) else np.float32(v) for v in (factor, *coefficients)]
        kernels.update(optimizer.kernel_name(), [param, *buffers], spread(numel, 2), out, control, scalars)
        results.append([tensor for tensor in (param, *buffers, out) if tensor is not None])
    assert_same(results[1], results[0])
    assert_same(results[2], before)
    assert not torch.equal(results[0][0], before[0])


# -- the norm


def norm_values(dtype: torch.dtype) -> Iterator[Tensor]:
    for numel in (1, 255, 1024, 100_003):
        yield spread(numel, 3).to(dtype)
    yield torch.zeros(5000, dtype=dtype)
    if dtype is torch.float32:
        finite = torch.tensor([value for value in SPECIALS if math.isfinite(value)])
        yield finite
        for exponent in range(-149, 128, 9):
            yield torch.ldexp(spread(300, exponent + 200).clamp(-1, 1), torch.tensor(exponent))
    else:
        every = every_pattern(dtype)
        yield every[every.isfinite()]
        if dtype is torch.bfloat16:
            for exponent in (-90, -99, -101, -110, -125, -130):  # the range where subnormals matter
                yield every[every.float().abs() < 2.0**exponent]


def packed(sums: Sequence[int]) -> int:
    """Returns the sum that an upper and a lower part stand for; a carry may be in either."""
    return (sums[0] << reductions.SUM_BITS) + sums[1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_norm_has_the_integers_of_the_host(dtype: torch.dtype) -> None:
    kernels = host_kernels()
    for values in norm_values(dtype):
        largest, sums = torch.zeros(1, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
        half = values.numel() // 2
        for part in (values[:half].contiguous(), values[half:].contiguous()):
            kernels.max_abs_into(part, largest)
        assert largest.view(torch.float32).item() == max_abs(values)
        for part in (values[:half].contiguous(), values[half:].contiguous()):
            kernels.square_sums_into(part, largest, sums)
        assert packed(sums.tolist()) == packed(square_sums(values, norm_exponent(max_abs(values))))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_non_finite_values_are_above_every_number(dtype: torch.dtype, bad: float) -> None:
    values = spread(3000, 1).to(dtype)
    values[2999] = bad
    largest, sums = torch.zeros(1, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    host_kernels().max_abs_into(values, largest)
    assert int(largest) >= 0x7F800000
    host_kernels().square_sums_into(values, largest, sums)
    assert sums.tolist() == [0, 0]


# -- codes


@pytest.fixture
def by_kernels(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Returns a function that switches codes in host memory to the kernels."""
    kernels = host_kernels()
    return lambda: monkeypatch.setattr(quantized, "kernels_for", lambda device: kernels)


CODECS = [INT8, INT4, FP8, Codec(8, 32), Codec(4, 34), Codec(8, 32, floating=True)]


def code_values(numel: int, dtype: torch.dtype) -> Tensor:
    values = spread(numel, numel).to(dtype)
    for place, special in enumerate((math.inf, math.nan, 3e38, 2.0**-140)):
        if numel > 700 * place + 1000:
            values[700 * place + 300] = torch.tensor(special, dtype=torch.float64).to(dtype)  # inf, beyond the range
    return values


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_codes_have_the_bits_of_the_host(codec: Codec, dtype: torch.dtype, by_kernels: Callable[[], None]) -> None:
    longest = 100 * codec.block_numel + 77
    cases = [code_values(numel, dtype) for numel in (0, 1, 2, 3, 255, 256, 257, 511, 512, 513, 5000, longest)]
    if dtype is not torch.float32:
        cases += every_pattern(dtype)[torch.randperm(1 << 16, generator=random(4))].split(max(1 << 12, 8 * longest))[:8]

    def found() -> list[list[Tensor]]:
        results = []
        for values in cases:
            code = torch.full((codec.nbytes(values.numel()),), 77, dtype=torch.uint8)
            quantized.quantize(values, codec, code)
            # Only float16 values decode to float16: the host's loop leaves an overflow undefined.
            formats = DTYPES if dtype is torch.float16 else DTYPES[:2]
            outs = [torch.full((values.numel(),), 7.0, dtype=out) for out in formats]
            for out in outs:
                quantized.dequantize(code, codec, out)
            total = spread(values.numel(), 8)
            total[::5] = -0.0
            quantized.dequantize_add(code, codec, total)
            results.append([code, *outs, total])
        return results

    wanted = found()
    by_kernels()
    for one, other in zip(found(), wanted, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("codec", [INT8, INT4, FP8, Codec(8, 2048), Codec(4, 1 << 12)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_codes_at_odd_addresses_have_the_same_bits(codec: Codec, dtype: torch.dtype) -> None:
    """Values and numbers begin in the middle of 16 bytes, and some blocks are longer than a warp keeps."""
    kernels, numel, results = host_kernels(), 2 * codec.block_numel + 24, []
    values = spread(numel, 2).to(dtype)
    for places in (0, 1, 2, 4):
        code = torch.full((1, codec.nbytes(numel)), 77, dtype=torch.uint8)
        kernels.encode(shifted(values, places).view(1, -1), code, codec.format)
        out, total = shifted(torch.zeros(numel).to(dtype), places), shifted(spread(numel, 9), places)
        kernels.decode(code, out.view(1, -1), codec.format)
        kernels.decode(code, total.view(1, -1), codec.format, adds=True)
        results.append([code, out, total])
    wanted = torch.empty_like(results[0][0][0])
    quantized.quantize(values, codec, wanted)
    assert torch.equal(results[0][0][0], wanted)
    for other in results[1:]:
        assert_same(other, results[0])


@pytest.mark.parametrize("codec", [INT8, INT4, FP8], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_coded_and_summed_together(codec: Codec, dtype: torch.dtype, by_kernels: Callable[[], None]) -> None:
    ranks, runs, numel, own = 3, 2, 1237, 1
    values = torch.stack([spread(numel, row) for row in range(6)]).to(dtype)
    values[4, 3] = math.nan
    skip = (own * runs, (own + 1) * runs)

    def found() -> list[Tensor]:
        results = []
        for order in (None, RowOrder([5, 0, 4, 1, 3, 2])):
            codes = torch.full((ranks * runs, codec.nbytes(numel)), 77, dtype=torch.uint8)
            quantized.quantize_rows(values, codec, codes, order, skip)
            totals, out = torch.full((runs, numel), 9.0), torch.zeros(2, numel, dtype=torch.bfloat16)
            quantized.sum_rows(codes.view(ranks, runs, -1), codec, values, own, totals, order)
            quantized.dequantize_rows(codes[:2], codec, out)
            results += [codes, totals, out]
        return results

    wanted = found()
    assert (wanted[0][skip[0] : skip[1]] == 77).all()
    by_kernels()
    assert_same(found(), wanted)


@pytest.mark.parametrize("codec", [INT4, FP8], ids=str)
def test_rows_take_one_launch_each(codec: Codec, by_kernels: Callable[[], None]) -> None:
    by_kernels()
    kernels = quantized.kernels_for(torch.device("cpu"))
    assert kernels is not None
    runner = kernels._runner
    assert isinstance(runner, HostRunner)
    values, codes = torch.zeros(8, 1000), torch.zeros(8, codec.nbytes(1000), dtype=torch.uint8)
    quantized.quantize_rows(values, codec, codes, None, (2, 4))
    quantized.sum_rows(codes.view(4, 2, -1), codec, values, 1, torch.zeros(2, 1000))
    quantized.dequantize_rows(codes, codec, torch.zeros(8, 1000))
    assert runner.launched == ["encode", "sum_codes", "decode"]


# -- launches


class Counted(DeviceKernels):
    """Counts the bytes that launches read and write, without running them."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.names: list[str] = []

    def launch(
        self,
        name: str,
        arguments: Sequence[Argument],
        *,
        reads: Sequence[Tensor | None],
        writes: Sequence[Tensor | None],
        blocks: int,
        rows: int = 1,
    ) -> None:
        self.names.append(name)
        self.nbytes += sum(tensor.nbytes for tensor in (*reads, *writes) if tensor is not None)
        passed = {id(argument) for argument in arguments if isinstance(argument, Tensor)}
        named = {id(tensor) for tensor in (*reads, *writes) if tensor is not None}
        assert named == passed, f"the reads and writes of {name} are not the tensors among its arguments"


@pytest.mark.parametrize(
    ("name", "grad_dtype", "most"),
    [
        ("adamw", torch.float32, 40),
        ("adamw", torch.bfloat16, 34),
        ("adamw-bf16", torch.bfloat16, 26),
        ("adamw-int8", torch.bfloat16, 22),
        ("lion", torch.bfloat16, 26),
        ("momentum", torch.bfloat16, 26),
    ],
)
def test_a_boundary_moves_few_bytes(name: str, grad_dtype: torch.dtype, most: int) -> None:
    """Norm, update and rounded copy of one flat buffer, by the tensors that the launches declare as read or written."""
    numel, kernels = 1 << 16, Counted()
    master, grad, out = torch.zeros(numel), torch.zeros(numel, dtype=grad_dtype), torch.zeros(numel).bfloat16()
    optimizer = OPTIMIZERS[name](master)
    buffers, coefficients = optimizer._advance(optimizer.param_groups[0], master)
    largest, sums = torch.zeros(1, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    kernels.max_abs_into(grad, largest)
    kernels.square_sums_into(grad, largest, sums)
    scalars = [v if isinstance(v, np.uint32) else np.float32(v) for v in (1.0, *coefficients)]
    kernels.update(optimizer.kernel_name(), [master, *buffers], grad, out, torch.ones(2), scalars)
    assert len(kernels.names) == 3
    assert kernels.nbytes / numel <= most


@pytest.mark.parametrize("numel", [1, 7, 8, 9, 4099])
@pytest.mark.parametrize("shift", [0, 1])
def test_changed_bits_have_those_of_the_host(numel: int, shift: int) -> None:
    before = torch.randint(-(2**15), 2**15, (numel + shift,), dtype=torch.int16)[shift:]
    after = torch.where(torch.rand(numel) < 0.3, before ^ 1 << 15, before)
    marked = torch.randint(0, 256, (-(-numel // 8),), dtype=torch.uint8)
    marked[-1] &= (1 << (numel - 1) % 8 + 1) - 1
    found, wanted = marked.clone(), marked.clone()
    host_kernels().mark_changed(before, after, found)
    changed.mark_changed(before, after, wanted)
    assert torch.equal(found, wanted)


def test_every_kernel_is_one_of_the_source() -> None:
    kernels = Counted()
    row, code = torch.zeros(1, 100), torch.zeros(1, INT8.nbytes(100), dtype=torch.uint8)
    largest, sums, facts = torch.zeros(1, dtype=torch.int32), torch.zeros(2, dtype=torch.int64), torch.zeros(8)
    kernels.max_abs_into(row, largest)
    kernels.square_sums_into(row, largest, sums)
    kernels.write_facts(largest, 1, 2, False, 3, facts)
    kernels.largest_of_facts(facts, largest)
    kernels.finalize(facts, sums, torch.zeros(2), torch.zeros(6), (1.0, 1.0, 1.0), skip_overflow=True)
    kernels.mark_changed(facts, facts, code)
    kernels.encode(row, code, INT8.format)
    kernels.decode(code, row, INT8.format)
    kernels.sum_codes(code.view(1, 1, -1), row, 0, torch.zeros(1, 100), INT8.format)
    kernels.decode_levels(code, torch.zeros(1, 128), torch.zeros(16), 64, 8, has_exponents=False)
    updates = {OPTIMIZERS[name](torch.zeros(1)).kernel_name() for name in OPTIMIZERS}
    many = {"adam_many", "lamb_moments", "lamb_apply", "muon_momentum", "muon_apply"}  # `test_ops_full_tensors.py`
    assert sorted({*kernels.names, *updates, *many}) == sorted(kernel_names(SOURCE.read_text()))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_tensors_of_a_device_use_its_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On tensors without memory: the package's functions launch kernels and read no values."""
    kernels = Counted()
    for module in (reductions, step_control, quantized, shard_step):
        monkeypatch.setattr(module, "kernels_for", lambda device: kernels if device.type == "meta" else None)
    with torch.device("meta"):
        master, grad, out = torch.zeros(100), torch.zeros(100), torch.zeros(100).bfloat16()
        largest, sums = torch.zeros(1, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
        facts, control, summary = torch.zeros(8), torch.zeros(2), torch.zeros(6)
        codes = torch.zeros(1, INT8.nbytes(100), dtype=torch.uint8)
    reductions.max_abs_into(grad, largest)
    step_control.write_facts(largest, 1, 2, False, 3, facts)
    step_control.largest_of_facts(facts, largest)
    reductions.square_sums_into(grad, largest, sums)
    factors = {"scale": 2.0, "clipping": 1.0, "grad_factor": 1.0}
    step_control.finalize(facts, sums, skip_overflow=True, control=control, summary=summary, **factors)
    optimizer = OPTIMIZERS[name](master)
    optimizer.step_shard(optimizer.param_groups[0], master, grad, grad_scale=control, out=out)
    quantized.quantize(grad, INT8, codes[0])
    quantized.dequantize(codes[0], INT8, grad)
    quantized.dequantize_add(codes[0], INT8, grad)
    boundary = ["max_abs", "write_facts", "largest_of_facts", "square_sums", "finalize", optimizer.kernel_name()]
    assert kernels.names == [*boundary, "encode", "decode", "decode"]
