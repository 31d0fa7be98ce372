"""Time, memory, bytes on links and offload rates of each step, as events for monitors.

`StepReport` makes them where there is a monitor; the keys are listed in docs/tracking.md, and `zeroaccel report` shows
them. Everything is read from clocks and counters that run anyway, but the bytes that are sent, which a meter counts per
message: no collective, no wait for a device.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping

import torch

from zeroaccel.comm.collectives import Collectives
from zeroaccel.comm.transport import Meter
from zeroaccel.offload.tier import Tier

UpdateTimes = Callable[[], tuple[float, float, float]]
"""Seconds of all updates so far: in all, of it waiting for a tier, and of it overlapped."""

_PHASES = {"forward": "forward", "backward": "backward", "reduce": "reduce", "step": "update"}


class PerformanceMeter:
    """Measures the steps of one engine, on the rank that reports.

    1. `watch` once, `begin` and `end` around phases. 2. `events` after each step: what is new since the last call.
    3. `close` takes the meters off.

    Args:
        device: that is computed on. On CUDA a phase is timed only where the host waits for it (`synchronizes`), since
            otherwise the host only queues its work.
        synchronizes: the phases end with a wait for the device.
    """

    def __init__(self, device: torch.device, *, synchronizes: bool = False) -> None:
        self._times_phases = device.type != "cuda" or synchronizes
        self._begun: dict[str, float] = {}
        self._seconds: dict[str, float] = {}
        self._sent: Counter[str] = Counter()
        self._last_step: tuple[float, int] | None = None
        self._tiers: Mapping[str, Tier] = {}
        self._update_times: UpdateTimes | None = None
        self._offloaded: dict[str, tuple[int, float]] = {}
        self._updated = 0.0
        self._metered: list[tuple[Collectives, Meter | None]] = []

    def watch(self, collectives: Collectives, tiers: Mapping[str, Tier], update_times: UpdateTimes | None) -> None:
        """Chooses what is counted: messages of these collectives, transfers of these tiers and updates beside them."""
        here = next(set(node) for node in collectives.nodes if collectives.topology.rank in node)
        experts = collectives.part_holders
        for part in (collectives, collectives.parts, experts, None if experts is None else experts.parts):
            if part is not None:
                self._count_messages(part, here)
        self._tiers, self._update_times = tiers, update_times if tiers else None

    def _count_messages(self, collectives: Collectives, here: set[int]) -> None:
        # A `RecordingCollectives` has its meter there.
        metered: Collectives = getattr(collectives, "inner", collectives)
        before = metered.meter

        def count(tag: int, receiver: int, nbytes: int) -> None:
            self._sent["inside" if receiver in here else "across"] += nbytes
            if before is not None:
                before(tag, receiver, nbytes)

        metered.meter = count
        self._metered.append((metered, before))

    def close(self) -> None:
        """Counts no more messages."""
        while self._metered:
            metered, before = self._metered.pop()
            metered.meter = before

    def begin(self, phase: str) -> None:
        """A phase begins; one that an exception left open begins anew."""
        if self._times_phases:
            self._begun[phase] = time.perf_counter()

    def end(self, phase: str) -> None:
        """A phase ends."""
        begun = self._begun.pop(phase, None)
        if begun is not None:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - begun

    def events(self, samples: int, memory: tuple[int, int]) -> dict[str, float]:
        """Name -> value of the step that ends now.

        Args:
            samples: over all ranks, so far.
            memory: bytes now and at the peak.
        """
        now = time.perf_counter()
        values: dict[str, float] = {}
        if self._last_step is not None:
            before, samples_before = self._last_step
            values["Time/step_seconds"] = now - before
            values["Time/samples_per_second"] = (samples - samples_before) / (now - before)
        self._last_step = now, samples
        values |= {
            f"Time/{name}_seconds": self._seconds[phase] for phase, name in _PHASES.items() if phase in self._seconds
        }
        self._seconds.clear()
        values["Memory/current_bytes"], values["Memory/peak_bytes"] = memory
        values |= {f"Sent/{link}_bytes": self._sent[link] for link in ("inside", "across") if link in self._sent}
        self._sent.clear()
        return values | self._of_offload()

    def _of_offload(self) -> dict[str, float]:
        values: dict[str, float] = {}
        if self._update_times is not None:
            updated, _, _ = self._update_times()
            values["Offload/update_seconds"], self._updated = updated - self._updated, updated
        for name, tier in self._tiers.items():
            for way, traffic in tier.traffic.items():
                key = f"{name.replace(', ', '_')}_{way}"
                nbytes, seconds = traffic.nbytes, traffic.seconds
                nbytes_before, seconds_before = self._offloaded.get(key, (0, 0.0))
                self._offloaded[key] = nbytes, seconds
                if seconds > seconds_before:
                    values[f"Offload/{key}_bytes"] = nbytes - nbytes_before
                    values[f"Offload/{key}_bytes_per_second"] = (nbytes - nbytes_before) / (seconds - seconds_before)
        return values
