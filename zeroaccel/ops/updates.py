"""The optimizers' compiled loops over flat CPU arrays: one read and one write of memory per step.

`shard_step` calls the loops, which are built from the functions of `number_formats`.

Element i of a result depends on element i of the inputs and on the coefficients, never on i, on the length of the
call or on the threads. A moment may be float32, bfloat16 (as uint16), or the codes (uint8) of [Note: 8-bit blocks].

[Note: stochastic rounding] A moment changes by about a thousandth of its value per step. Rounding to nearest with few
bits would discard every change. A 16-bit or 8-bit moment is therefore rounded up with the probability that makes its
expected value exact (Connolly, Higham & Mary 2021, "Stochastic rounding and its probabilistic backward error
analysis"). The random bits are a hash of the weight, the new moment and a key that counts steps, never of a position,
so that the results do not depend on shards or threads.

[Note: 8-bit blocks] BLOCK_NUMEL elements share the exponent of their largest element, in one byte, as in the
microscaling formats (Rouhani et al. 2023, "Microscaling data formats for deep learning"). An element has three mantissa
bits below its leading one, and an exponent relative to the block's: four bits and a sign for a moment with signs, five
bits for a sum of squares. A positive square never becomes 0, because it is a divisor. In a block with an inf or NaN,
all values are NaN. The values of a block are exact in bfloat16, and encoding them again gives the same block.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from zeroaccel.ops.number_formats import (
    Array,
    bits_of,
    compiled,
    encode_bfloat16,
    float_of,
    implement,
    inlined,
    load,
    store,
)

Scalars = tuple[Any, ...]
"""The factor of gradients, float32; a key, uint32, for a kernel with stochastic rounding; coefficients, float32."""

BLOCK_NUMEL = 32
"""Elements of an 8-bit block. Parameters and shards are aligned to it, so that a shard never ends inside a block."""

_ROW = 1024  # elements whose decoded moments a loop buffers at once


def _encoded_moment(array: Any, value: Any, random: Any) -> Any:
    raise NotImplementedError


implement(
    _encoded_moment,
    {
        types.float32: lambda array, value, random: value,
        types.uint16: lambda array, value, random: _encode_bfloat16_stochastic(value, random),
    },
)


@inlined
def _store_moment(array: Any, index: Any, value: Any, random: Any) -> None:
    """Writes a moment: to float32 unchanged, to bfloat16 by [Note: stochastic rounding] with 16 random bits."""
    array[index] = _encoded_moment(array, value, random)


@inlined
def _cut(array: Any, start: Any, stop: Any) -> Any:
    if array is not None:
        return array[start:stop]
    return array


# ---- stochastic rounding ----


@inlined
def _random(weight: Any, moment: Any, key: Any) -> Any:
    """Returns 32 pseudorandom bits; the constants of the last lines are those of Wellons' "lowbias32"."""
    seed = np.uint32(bits_of(weight) ^ np.uint32(bits_of(moment) * np.uint32(0x9E3779B9)) ^ key)
    seed = np.uint32(np.uint32(seed ^ (seed >> 16)) * np.uint32(0x7FEB352D))
    seed = np.uint32(np.uint32(seed ^ (seed >> 15)) * np.uint32(0x846CA68B))
    return np.uint32(seed ^ (seed >> 16))


@inlined
def _encode_bfloat16_stochastic(value: Any, random: Any) -> Any:
    bits = bits_of(value)
    rounded = np.uint32(np.uint32(bits + np.uint32(random & 0xFFFF)) >> 16)
    return np.uint16(rounded) if np.uint32(bits & 0x7F800000) < 0x7F800000 else encode_bfloat16(value)


# ---- 8-bit blocks ----
# `lowest` is the bits of a block's smallest normal magnitude: 2**-14 of its exponent for signed codes, else 2**-30.


@inlined
def _block_exponent(largest: Any) -> Any:
    """Returns a block's exponent byte: that of its largest magnitude (as bits) after rounding up to a code's precision.

    At least 40, so that no code decodes to a subnormal float; 255 marks a block that is not finite.
    """
    exponent = np.uint32(np.uint32(largest + 0xFFFFF) >> 23)
    return np.uint32(255 if exponent >= 254 else (40 if exponent < 40 else exponent))


@inlined
def _decode_magnitude(code: Any, lowest: Any) -> Any:
    steps = np.uint32(np.uint32(code) << 20)
    small = float_of(np.uint32(lowest + steps)) - float_of(lowest)
    return small if code < 8 else float_of(np.uint32(steps + (lowest - 0x800000)))


@inlined
def _encode_magnitude(bits: Any, lowest: Any, random: Any) -> Any:
    small = np.uint32(bits_of(float_of(bits) + float_of(lowest)) - lowest)
    steps = np.uint32(small if bits < lowest else bits - (lowest - 0x800000))
    return np.uint32(np.uint32(steps + np.uint32(np.uint32(random & 0xFFFF) << 4)) >> 20)


# A scratch array has four rows of _ROW floats: two moments, the random bits, and for every element the bits of its
# block's smallest normal magnitude. It is one array, because LLVM does not vectorise when it has to compare many
# pointers; indices of a row start at 0, because LLVM must assume that a sum as an index may be negative.


@inlined
def _rows(scratch: Any) -> tuple[Any, Any, Any, Any]:
    return scratch[:_ROW], scratch[_ROW : 2 * _ROW], scratch[2 * _ROW : 3 * _ROW], scratch[3 * _ROW :]


@inlined
def _spread(row: Any, exponents: Any, reach: Any) -> None:
    """Writes the fourth row; all bits are ones for a block that is not finite."""
    for block in range(exponents.size):
        exponent = np.uint32(exponents[block])
        lowest = np.uint32(np.uint32(exponent - reach + 1) << 23)
        value = float_of(np.uint32(0xFFFFFFFF if exponent == 255 else lowest))
        block_row = row[block * BLOCK_NUMEL : (block + 1) * BLOCK_NUMEL]
        for i in range(BLOCK_NUMEL):
            block_row[i] = value


# Codes with and without signs: exponents below the block's, bits of a magnitude, and the first of its random bits.
_SIGNED = (np.uint32(15), np.uint32(0x7F), np.uint32(0))
_UNSIGNED = (np.uint32(31), np.uint32(0xFF), np.uint32(16))


@inlined
def _decode_blocks(scratch: Any, values: Any, codes: Any, exponents: Any, signs: Any) -> None:
    (reach, mask, _), row = signs, _rows(scratch)[3]
    _spread(row, exponents, reach)
    for i in range(codes.size):
        code, lowest = np.uint32(codes[i]), bits_of(row[i])
        magnitude = _decode_magnitude(np.uint32(code & mask), lowest)
        signed = float_of(np.uint32(bits_of(magnitude) | np.uint32(np.uint32(code & (0xFF ^ mask)) << 24)))
        values[i] = np.float32(np.nan) if lowest == 0xFFFFFFFF else signed


@inlined
def _find_exponents(exponents: Any, values: Any, count: Any) -> None:
    for i in range(count, exponents.size * BLOCK_NUMEL):
        values[i] = np.float32(0)
    for block in range(exponents.size):
        numbers = values[block * BLOCK_NUMEL : (block + 1) * BLOCK_NUMEL]
        largest = np.uint32(0)
        for i in range(BLOCK_NUMEL):
            magnitude = np.uint32(bits_of(numbers[i]) & 0x7FFFFFFF)
            largest = magnitude if magnitude > largest else largest
        exponents[block] = np.uint8(_block_exponent(largest))


@inlined
def _encode_blocks(scratch: Any, values: Any, codes: Any, exponents: Any, signs: Any) -> None:
    (reach, mask, shift), (_, _, randoms, row) = signs, _rows(scratch)
    _find_exponents(exponents, values, codes.size)
    _spread(row, exponents, reach)
    for i in range(codes.size):
        bits, lowest = bits_of(values[i]), bits_of(row[i])
        magnitude = np.uint32(bits & 0x7FFFFFFF) if mask == 0x7F else bits
        code = _encode_magnitude(magnitude, lowest, np.uint32(bits_of(randoms[i]) >> shift))
        code = np.uint32(np.uint32(code & mask) | np.uint32(np.uint32(bits >> 24) & (0xFF ^ mask)))
        code = np.uint32(1) if mask == 0xFF and code == 0 and bits > 0 else code
        codes[i] = np.uint8(np.uint32(0) if lowest == 0xFFFFFFFF else code)


# ---- optimizer updates: (master, states..., grad, out, (grad_scale, coefficients...)) ----
# In the formulas, x is the master and d the gradient after `grad_scale`; each operator rounds once to float32.


@inlined
def _adam(x: Any, gradient: Any, m: Any, v: Any, scalars: Any) -> tuple[Any, Any, Any, Any]:
    """Returns the new x, m, v of an element, and its random bits."""
    grad_scale, key, decay, l2, weight1, beta2, weight2, inverse_root, eps, negative_step = scalars
    d = gradient * grad_scale + l2 * x
    m = m + weight1 * (d - m)
    v = v * beta2 + (weight2 * d) * d
    new = x * decay + (negative_step * m) / (np.sqrt(v) * inverse_root + eps)
    return new, m, v, _random(x, m, key)


@compiled
def adam(master: Array, exp_avg: Array, exp_avg_sq: Array, grad: Array, out: Array | None, scalars: Scalars) -> None:
    """Adam (Kingma & Ba 2015, Algorithm 1) and AdamW (Loshchilov & Hutter 2019, Algorithm 2).

    ```text
    d = grad * grad_scale + l2 * x          l2    = weight_decay, or 0 in decoupled mode
    x = x * decay                           decay = 1 - lr * weight_decay, or 1 in L2 mode
    m = m + weight1 * (d - m)               weight1 = 1 - beta1
    v = v * beta2 + (weight2 * d) * d       weight2 = 1 - beta2
    x = x + (negative_step * m) / (sqrt(v) * inverse_root + eps)
                                            negative_step = -lr / (1 - beta1**t), inverse_root = 1 / sqrt(1 - beta2**t)
    ```
    The order is that of torch.optim.AdamW(foreach=False), which however divides by the root and computes m by one FMA.
    """
    for i in range(master.size):
        x, m, v, random = _adam(master[i], load(grad, i), load(exp_avg, i), load(exp_avg_sq, i), scalars)
        _store_moment(exp_avg, i, m, random)
        _store_moment(exp_avg_sq, i, v, np.uint32(random >> 16))
        master[i] = x
        store(out, i, x)


@compiled
def adam_blocks(
    master: Array,
    exp_avg: Array,
    exp_avg_exponents: Array,
    exp_avg_sq: Array,
    exp_avg_sq_exponents: Array,
    grad: Array,
    out: Array | None,
    scalars: Scalars,
) -> None:
    """`adam` with moments in 8-bit blocks, which begin at element 0."""
    scratch = np.empty(4 * _ROW, np.float32)
    ms, vs, randoms, _ = _rows(scratch)
    for begin in range(0, master.size, _ROW):
        end = min(begin + _ROW, master.size)
        first, last = begin // BLOCK_NUMEL, (end + BLOCK_NUMEL - 1) // BLOCK_NUMEL
        m_codes, m_exponents = exp_avg[begin:end], exp_avg_exponents[first:last]
        v_codes, v_exponents = exp_avg_sq[begin:end], exp_avg_sq_exponents[first:last]
        _decode_blocks(scratch, ms, m_codes, m_exponents, _SIGNED)
        _decode_blocks(scratch, vs, v_codes, v_exponents, _UNSIGNED)
        xs, gs, rounded = master[begin:end], grad[begin:end], _cut(out, begin, end)
        for i in range(end - begin):
            xs[i], ms[i], vs[i], random = _adam(xs[i], load(gs, i), ms[i], vs[i], scalars)
            randoms[i] = float_of(random)
            store(rounded, i, xs[i])
        _encode_blocks(scratch, ms, m_codes, m_exponents, _SIGNED)
        _encode_blocks(scratch, vs, v_codes, v_exponents, _UNSIGNED)


@compiled
def lion(master: Array, exp_avg: Array, grad: Array, out: Array | None, scalars: Scalars) -> None:
    """Lion (Chen et al. 2023, Algorithm 2).

    ```text
    d = grad * grad_scale
    c = beta1 * m + weight1 * d             weight1 = 1 - beta1
    x = x * decay + negative_lr * sign(c)   decay = 1 - lr * weight_decay; sign(NaN) = NaN
    m = beta2 * m + weight2 * d             weight2 = 1 - beta2
    ```
    """
    grad_scale, key, decay, beta1, weight1, beta2, weight2, negative_lr = scalars
    for i in range(master.size):
        d = load(grad, i) * grad_scale
        m = load(exp_avg, i)
        c = beta1 * m + weight1 * d
        m = beta2 * m + weight2 * d
        random = _random(master[i], m, key)
        direction = np.float32(1) if c > np.float32(0) else (np.float32(-1) if c < np.float32(0) else c)
        x = master[i] * decay + negative_lr * direction
        _store_moment(exp_avg, i, m, random)
        master[i] = x
        store(out, i, x)


@compiled
def adagrad(master: Array, square_sum: Array, grad: Array, out: Array | None, scalars: Scalars) -> None:
    """Adagrad (Duchi et al. 2011, the diagonal form of Figure 1).

    ```text
    d = grad * grad_scale + l2 * x
    s = s + d * d
    x = x + (negative_lr * d) / (sqrt(s) + eps)
    ```
    """
    grad_scale, key, l2, eps, negative_lr = scalars
    for i in range(master.size):
        x = master[i]
        d = load(grad, i) * grad_scale + l2 * x
        s = load(square_sum, i) + d * d
        random = _random(x, s, key)
        x = x + (negative_lr * d) / (np.sqrt(s) + eps)
        _store_moment(square_sum, i, s, random)
        master[i] = x
        store(out, i, x)


@compiled
def rmsprop(
    master: Array,
    square_avg: Array,
    momentum_buffer: Array | None,
    grad_avg: Array | None,
    grad: Array,
    out: Array | None,
    scalars: Scalars,
) -> None:
    """RMSprop (Hinton 2012, lecture 6e; centered: Graves 2013, arXiv:1308.0850; in the form of torch.optim.RMSprop).

    ```text
    d = grad * grad_scale + l2 * x
    s = s * alpha + (weight * d) * d        weight = 1 - alpha
    a = a + weight * (d - a)                only with `grad_avg`; without it, c = s
    c = max(s - a * a, 0)                   torch omits the max: rounding below 0 gives NaN
    d = d / (sqrt(c) + eps)
    d = b = momentum * b + d                only with `momentum_buffer`
    x = x + negative_lr * d
    ```
    """
    grad_scale, l2, alpha, weight, eps, momentum, negative_lr = scalars
    for i in range(master.size):
        x = master[i]
        d = load(grad, i) * grad_scale + l2 * x
        s = square_avg[i] * alpha + (weight * d) * d
        square_avg[i] = s
        if grad_avg is not None:
            a = grad_avg[i]
            a = a + weight * (d - a)
            grad_avg[i] = a
            s = s - a * a
            s = np.float32(0) if s < np.float32(0) else s
        d = d / (np.sqrt(s) + eps)
        if momentum_buffer is not None:
            d = momentum * momentum_buffer[i] + d
            momentum_buffer[i] = d
        x = x + negative_lr * d
        master[i] = x
        store(out, i, x)


@compiled
def sgd(master: Array, momentum_buffer: Array | None, grad: Array, out: Array | None, scalars: Scalars) -> None:
    """SGD with momentum (Sutskever et al. 2013, in the form of torch.optim.SGD).

    ```text
    d = grad * grad_scale + l2 * x
    b = momentum * b + weight * d           weight = 1 - dampening, or 1 at the first step
    d = grad_weight * d + buffer_weight * b (0, 1), or with Nesterov (1, momentum)
    x = x + negative_lr * d
    ```
    Without a buffer, the two middle lines are omitted.
    """
    grad_scale, l2, momentum, weight, grad_weight, buffer_weight, negative_lr = scalars
    for i in range(master.size):
        x = master[i]
        d = load(grad, i) * grad_scale + l2 * x
        if momentum_buffer is not None:
            b = momentum * momentum_buffer[i] + weight * d
            momentum_buffer[i] = b
            d = grad_weight * d + buffer_weight * b
        x = x + negative_lr * d
        master[i] = x
        store(out, i, x)
