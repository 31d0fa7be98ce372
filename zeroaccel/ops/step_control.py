"""The decisions of a step as values on the device: overflow, norm, clipping and "skip", without a wait of the host.

Kernels of the optimizers read what is decided here (`control`), so the host may queue an update before it knows whether
the update takes place. What the host wants to know itself (`summary`) it reads once, when it likes:

```text
facts: (6,) float64     [largest, history, -history, settings, -settings, stop], joined over the ranks by one
                        all-reduce MAX
sums: (2,) int64        of `reductions.square_sums_into`, joined by one all-reduce SUM
control: (2,) float32   [factor of every gradient, whether the update applies (1 or 0)]
summary: (5,) float64   [finite (1 or 0), norm, same history (1 or 0), same settings (1 or 0), stop (1 or 0)]
```

The arithmetic is that of the host: `reductions.norm_from` and `zero/grad_norm.py:clip_factor` in float64, to the
bit. Knows no ranks and no optimizer.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from zeroaccel.ops.device_kernels import kernels_for
from zeroaccel.ops.reductions import SUM_BITS, power_of_two


def write_facts(largest: Tensor, history: int, settings: int, stop: bool, facts: Tensor) -> None:
    """Writes what the ranks compare at a step, in the form of which one maximum tells all.

    Example:
        >>> largest, facts = torch.tensor([2.5]).view(torch.int32), torch.empty(6, dtype=torch.float64)
        >>> write_facts(largest, 7, 9, True, facts)
        >>> facts.tolist()
        [2.5, 7.0, -7.0, 9.0, -9.0, 1.0]

    Args:
        largest: (1,) int32, of `reductions.max_abs_into`.
        history: digest below 2**52 of the collectives this rank has issued.
        settings: likewise, of its optimizer's hyperparameters.
        stop: this rank was asked to stop.
        facts: (6,) float64 on the device of `largest`; gets inf as the largest where it is inf or NaN.
    """
    kernels = kernels_for(facts.device)
    if kernels is not None:
        kernels.write_facts(largest, history, settings, stop, facts)
        return
    value = largest.view(torch.float32).to(torch.float64)
    facts[:1].copy_(torch.where(value.isfinite(), value, math.inf))
    for place, digest in enumerate((history, -history, settings, -settings, int(stop)), start=1):
        facts[place].fill_(digest)


def largest_of_facts(facts: Tensor, largest: Tensor) -> None:
    """Writes the largest magnitude of all ranks, from the joined `facts`, in the form of `reductions.max_abs_into`."""
    kernels = kernels_for(facts.device)
    if kernels is not None:
        kernels.largest_of_facts(facts, largest)
        return
    largest.copy_(facts[:1].to(torch.float32).view(torch.int32))


def finalize(
    facts: Tensor,
    sums: Tensor | None,
    *,
    scale: float,
    clipping: float,
    grad_factor: float,
    skip_overflow: bool,
    control: Tensor,
    summary: Tensor,
) -> None:
    """Decides whether and by which factor the update applies, from what the ranks have joined.

    Example:
        >>> facts = torch.tensor([2.0, 7.0, -7.0, 9.0, -9.0, 0.0], dtype=torch.float64)
        >>> control, summary = torch.empty(2), torch.empty(5, dtype=torch.float64)
        >>> settings = {"clipping": 0.0, "grad_factor": 1.0, "skip_overflow": True}
        >>> finalize(facts, None, scale=4.0, **settings, control=control, summary=summary)
        >>> control.tolist(), summary.tolist()
        ([0.25, 1.0], [1.0, nan, 1.0, 1.0, 0.0])

    Args:
        facts: (6,) float64, see `write_facts`.
        sums: (2,) int64, of `reductions.square_sums_into` with the largest of `facts`; None where no norm is wanted.
        scale: the loss scale, which the gradients are still multiplied by.
        clipping: the largest norm of the unscaled gradients; 0 for any.
        grad_factor: of the program; the smaller one of this and the clipping factor counts.
        skip_overflow: whether gradients that are not finite leave everything as it is.
        control: (2,) float32, gets [min(clip factor, grad_factor) / scale, whether the update applies].
        summary: (5,) float64, gets [finite, norm, same history, same settings, stop]; the norm is still scaled, and
            NaN where it was not computed or the three checks are not all 1.
    """
    kernels = kernels_for(facts.device)
    if kernels is not None:
        factors = (scale, clipping, grad_factor)
        kernels.finalize(facts, sums, control, summary, factors, skip_overflow=skip_overflow)
        return

    def number(value: float) -> Tensor:
        # A 0-dim tensor: CUDA turns a division by a Python number into a product with its reciprocal.
        return torch.full((), value, dtype=torch.float64, device=facts.device)

    finite, same_history, same_settings = facts[0].isfinite(), facts[1] == -facts[2], facts[3] == -facts[4]
    norm = number(math.nan) if sums is None else _norm(facts[0], sums)
    norm = torch.where(finite & same_history & same_settings, norm, math.nan)
    unscaled = torch.where(finite, norm / number(scale), math.inf)
    clip = number(1.0)
    if clipping > 0.0:
        ratio = number(clipping) / (unscaled + 1e-6)
        clip = torch.where(ratio < 1.0, ratio, 1.0)  # also 1 for NaN: without a norm nothing is clipped
    factor = torch.where(clip > grad_factor, grad_factor, clip) / number(scale)
    applies = same_history & same_settings
    if skip_overflow:
        applies = applies & finite
    control.copy_(torch.stack((factor, applies.to(torch.float64))))
    flags = [flag.to(torch.float64) for flag in (finite, same_history, same_settings)]
    summary.copy_(torch.stack((flags[0], norm, *flags[1:], facts[5])))


def _norm(largest: Tensor, sums: Tensor) -> Tensor:
    """() float64: `reductions.norm_from` with the exponent of `largest`, of float64 operations.

    The sum is (high << 25) + low, up to 88 bits. Two parts of at most 52 and 36 bits are exact as float64, so that
    their addition is the one rounding, as in the conversion of the host's integer.
    """
    low_bits, split = (1 << SUM_BITS) - 1, 11
    high, low = sums[0] + (sums[1] >> SUM_BITS), sums[1] & low_bits
    lower = ((high & ((1 << split) - 1)) << SUM_BITS) | low
    total = (high >> split).to(torch.float64) * 2.0 ** (SUM_BITS + split) + lower.to(torch.float64)
    exponent = torch.frexp(largest)[1]
    return _sqrt(total) * power_of_two(exponent - SUM_BITS)


def _sqrt(value: Tensor) -> Tensor:
    """The nearest float64. On Intel CPUs torch takes MKL's root, which is not always that; a device's is."""
    return torch.full_like(value, math.sqrt(value.item())) if value.device.type == "cpu" else value.sqrt()
