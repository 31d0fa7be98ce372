"""The decisions of a step as values on the device: overflow, norm, clipping and "skip", without blocking the host.

The optimizers' kernels read the decision (`control`), so the host can queue an update before it knows whether the
update applies. The host reads its own information (`summary`) once, at any time:

```text
facts: (8,) float64     [largest, history, -history, settings, -settings, stop, order, -order], joined over the ranks
                        by one all-reduce MAX
sums: (2,) int64        of `reductions.square_sums_into`, joined by one all-reduce SUM
control: (2,) float32   [factor of every gradient, whether the update applies (1 or 0)]
summary: (6,) float64   [finite (1 or 0), norm, same history (1 or 0), same settings (1 or 0), stop (1 or 0), same
                        order (1 or 0)]
```

The arithmetic is bitwise identical to the host's, `reductions.norm_from` and `zero/grad_norm.py:clip_factor` in
float64. The module does not depend on ranks or optimizers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from zeroaccel.ops.device_kernels import kernels_for
from zeroaccel.ops.reductions import SUM_BITS, power_of_two


def write_facts(largest: Tensor, history: int, settings: int, stop: bool, order: int, facts: Tensor) -> None:
    """Writes the values that the ranks compare at a step, in a form in which one maximum compares them all.

    Example:
        >>> largest, facts = torch.tensor([2.5]).view(torch.int32), torch.empty(8, dtype=torch.float64)
        >>> write_facts(largest, 7, 9, True, 3, facts)
        >>> facts.tolist()
        [2.5, 7.0, -7.0, 9.0, -9.0, 1.0, 3.0, -3.0]

    Args:
        largest: (1,) int32, from `reductions.max_abs_into`.
        history: digest below 2**52 of this rank's collectives so far.
        settings: digest below 2**52 of its optimizer's hyperparameters.
        stop: True if this rank has a request to stop.
        order: digest below 2**52 of the order of its gathers and reductions.
        facts: (8,) float64 on the device of `largest`; gets inf if `largest` is inf or NaN.
    """
    kernels = kernels_for(facts.device)
    if kernels is not None:
        kernels.write_facts(largest, history, settings, stop, order, facts)
        return
    value = largest.view(torch.float32).to(torch.float64)
    facts[:1].copy_(torch.where(value.isfinite(), value, math.inf))
    for place, digest in enumerate((history, -history, settings, -settings, int(stop), order, -order), start=1):
        facts[place].fill_(digest)


def largest_of_facts(facts: Tensor, largest: Tensor) -> None:
    """Writes the largest magnitude of all ranks from the reduced `facts`, in the form of `reductions.max_abs_into`."""
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
    """Decides from the reduced `facts` and `sums` whether the update applies, and by which factor.

    Example:
        >>> facts = torch.tensor([2.0, 7.0, -7.0, 9.0, -9.0, 0.0, 3.0, -3.0], dtype=torch.float64)
        >>> control, summary = torch.empty(2), torch.empty(6, dtype=torch.float64)
        >>> settings = {"clipping": 0.0, "grad_factor": 1.0, "skip_overflow": True}
        >>> finalize(facts, None, scale=4.0, **settings, control=control, summary=summary)
        >>> control.tolist(), summary.tolist()
        ([0.25, 1.0], [1.0, nan, 1.0, 1.0, 0.0, 1.0])

    Args:
        facts: (8,) float64, see `write_facts`.
        sums: (2,) int64, from `reductions.square_sums_into` with the largest of `facts`; None to compute no norm.
        scale: loss scale, which the gradients still include.
        clipping: maximum norm of the unscaled gradients; 0 for no limit.
        grad_factor: the program's factor; the smaller one of this and the clipping factor applies.
        skip_overflow: skip the update if gradients are not finite.
        control: (2,) float32, gets [min(clip factor, grad_factor) / scale, whether the update applies].
        summary: (6,) float64, gets [finite, norm, same history, same settings, stop, same order]; the norm includes the
            loss scale, and is NaN without `sums`, or unless the first three checks are all 1.
    """
    kernels = kernels_for(facts.device)
    if kernels is not None:
        factors = (scale, clipping, grad_factor)
        kernels.finalize(facts, sums, control, summary, factors, skip_overflow=skip_overflow)
        return

    def number(value: float) -> Tensor:
        # A 0-dim tensor: CUDA replaces a division by a Python number by a product with its reciprocal.
        return torch.full((), value, dtype=torch.float64, device=facts.device)

    finite, same_history, same_settings = facts[0].isfinite(), facts[1] == -facts[2], facts[3] == -facts[4]
    norm = number(math.nan) if sums is None else _norm(facts[0], sums)
    norm = torch.where(finite & same_history & same_settings, norm, math.nan)
    unscaled = torch.where(finite, norm / number(scale), math.inf)
    clip = number(1.0)
    if clipping > 0.0:
        ratio = number(clipping) / (unscaled + 1e-6)
        clip = torch.where(ratio < 1.0, ratio, 1.0)  # 1 for NaN too: without a norm there is no clipping
    factor = torch.where(clip > grad_factor, grad_factor, clip) / number(scale)
    applies = same_history & same_settings
    if skip_overflow:
        applies = applies & finite
    control.copy_(torch.stack((factor, applies.to(torch.float64))))
    flags = [flag.to(torch.float64) for flag in (finite, same_history, same_settings)]
    summary.copy_(torch.stack((flags[0], norm, *flags[1:], facts[5], (facts[6] == -facts[7]).to(torch.float64))))


def _norm(largest: Tensor, sums: Tensor) -> Tensor:
    """Computes `reductions.norm_from`, with the exponent of `largest`, by float64 operations; returns () float64.

    The sum is (high << 25) + low, up to 88 bits. Two parts of at most 52 and 36 bits are exact in float64, so that
    only their addition rounds, like the conversion of the host's integer.
    """
    low_bits, split = (1 << SUM_BITS) - 1, 11
    high, low = sums[0] + (sums[1] >> SUM_BITS), sums[1] & low_bits
    lower = ((high & ((1 << split) - 1)) << SUM_BITS) | low
    total = (high >> split).to(torch.float64) * 2.0 ** (SUM_BITS + split) + lower.to(torch.float64)
    exponent = torch.frexp(largest)[1]
    return _sqrt(total) * power_of_two(exponent - SUM_BITS)


def _sqrt(value: Tensor) -> Tensor:
    """Returns the correctly rounded root. On Intel CPUs torch uses MKL's, which is not always correctly rounded."""
    return torch.full_like(value, math.sqrt(value.item())) if value.device.type == "cpu" else value.sqrt()
