"""The line a step log has about offload: seconds of the update, of its transfers, of those hidden, and tiers' rates.

Reads counters that run anyway; `step_report.py` decides when.
"""

from __future__ import annotations

from zeroaccel.offload.file_io import Direction
from zeroaccel.zero.sharded_optimizer import ShardedOptimizer
from zeroaccel.zero.storage.placement import TierSet

__all__ = ["OffloadReport"]

_Times = tuple[float, float, float]  # of the update: in all, waited for transfers, beside other work
_Counts = dict[tuple[str, Direction], tuple[int, float]]


class OffloadReport:
    """Tells what happened since it was last asked.

    Args:
        optimizer: None for inference.
    """

    def __init__(self, tiers: TierSet, optimizer: ShardedOptimizer | None) -> None:
        self._tiers = tiers
        self._optimizer = optimizer
        self._before = self._now()

    def __call__(self, steps: int) -> str:
        """``offload, s per step over 10 steps: update 0.52, transfers 0.61 (0.48 hidden) | optimizer on /nvme (ext4):
        read 1.21 GB/s, write 0.97 GB/s``

        An update of states in memory has no transfers. Hidden is what of the transfers the update did not wait for, and
        with `update_during` what of the update the step did not wait for.
        """
        before, now = self._before, self._now()
        self._before = now
        update, waited, beside = (after - earlier for after, earlier in zip(now[0], before[0], strict=True))
        moved: _Counts = {
            place: (nbytes - before[1][place][0], seconds - before[1][place][1])
            for place, (nbytes, seconds) in now[1].items()
        }
        hidden_part = f" ({max(0.0, beside) / steps:.3f} hidden)" if beside else ""
        parts = [f"update {update / steps:.3f}{hidden_part}"]
        of_states = [seconds for (name, _), (_, seconds) in moved.items() if name.startswith("optimizer")]
        if of_states:
            transfers = max(of_states) if self._together else sum(of_states)
            hidden = max(0.0, transfers - waited)
            parts.append(f"transfers {transfers / steps:.3f} ({hidden / steps:.3f} hidden)")
        line = f"offload, s per step over {steps} step{'s' if steps != 1 else ''}: {', '.join(parts)}"
        for name, tier in self._tiers.tiers.items():
            rates = [
                f"{way} {moved[name, way][0] / moved[name, way][1] / 1e9:.2f} GB/s"
                for way in tier.traffic
                if moved[name, way][1] > 0
            ]
            if rates:
                line += f" | {name.partition(',')[0]} on {tier.name}: {', '.join(rates)}"
        return line

    @property
    def _together(self) -> bool:
        """Whether reads and writes go on at the same time."""
        swapper = self._tiers.swapper
        return swapper is not None and swapper.pipeline_read and swapper.pipeline_write

    def _now(self) -> tuple[_Times, _Counts]:
        counts: _Counts = {
            (name, way): (traffic.nbytes, traffic.seconds)
            for name, tier in self._tiers.tiers.items()
            for way, traffic in tier.traffic.items()
        }
        optimizer = self._optimizer
        if optimizer is None:
            return (0.0, 0.0, 0.0), counts
        return (optimizer.update_seconds, optimizer.waited_seconds, optimizer.hidden_seconds), counts
