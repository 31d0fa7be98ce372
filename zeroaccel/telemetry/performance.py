"""Time, memory, bytes on links, offload rates and load of experts of each step, as events for monitors.

`StepReport` makes them if there is a monitor; docs/tracking.md lists the keys, and `zeroaccel report` shows them. The
load of experts is counted on the device and read after the step, like the loss. A meter counts each message's bytes.
Everything else comes from clocks and counters that run anyway, without collectives or waits for a device.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zeroaccel.comm.collectives import Collectives
from zeroaccel.comm.transport import Meter
from zeroaccel.offload.file_io import Direction
from zeroaccel.offload.tier import Tier

UpdateTimes = Callable[[], tuple[float, ...]]
"""Seconds of all updates so far: the total, the part that waited for a tier, and the overlapped part."""

_PHASES = {"forward": "forward", "backward": "backward", "reduce": "reduce", "step": "update"}


class PhaseClock:
    """Time spent in named phases, which may nest or overlap.

    1. `begin(name)` and `end(name)`, any number of times. 2. `take()`: the sums since the last call.

    Args:
        waits: `begin` and `end` wait for the device.
    """

    def __init__(self, device: torch.device, *, waits: bool = True) -> None:
        self._device, self._waits = device, waits and device.type != "cpu"
        self._begun: dict[str, float] = {}
        self._seconds: dict[str, float] = {}

    def begin(self, name: str) -> None:
        """Starts a phase; restarts one that an exception left open."""
        self._begun[name] = self._now()

    def end(self, name: str) -> None:
        """Ends a phase; ignored if the phase was not started."""
        begun = self._begun.pop(name, None)
        if begun is not None:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._now() - begun

    def take(self) -> dict[str, float]:
        """Returns the seconds of each phase since the last call, in the order in which phases first ended."""
        seconds, self._seconds = self._seconds, {}
        return seconds

    def _now(self) -> float:
        if self._waits:
            torch.get_device_module(self._device).synchronize(self._device)
        return time.perf_counter()


class OffloadTimes(NamedTuple):
    """Times and transfers of some steps.

    Attributes:
        update: seconds of all updates: the total, the part that waited for a tier, and the overlapped part; then
            `ShardedOptimizer.early_numel` and `kept_numel`.
        moved: (name of a tier, direction) -> bytes, and seconds with a transfer in flight.
    """

    update: tuple[float, ...]
    moved: Mapping[tuple[str, Direction], tuple[int, float]]


class OffloadCounters:
    """Cost of updates and transfers of tiers since its construction, from counters that run anyway.

    Args:
        tiers: tiers whose traffic is counted, by name ("optimizer, nvme").
    """

    def __init__(self, tiers: Mapping[str, Tier], update_times: UpdateTimes) -> None:
        self.tiers, self._update_times = tiers, update_times
        self._before = self._now()

    def take(self) -> OffloadTimes:
        """Returns the values since the last call."""
        before, now = self._before, self._now()
        self._before = now
        moved = {
            place: (nbytes - before.moved[place][0], seconds - before.moved[place][1])
            for place, (nbytes, seconds) in now.moved.items()
        }
        update = tuple(after - earlier for after, earlier in zip(now.update, before.update, strict=True))
        return OffloadTimes(update, moved)

    def _now(self) -> OffloadTimes:
        moved = {
            (name, way): (traffic.nbytes, traffic.seconds)
            for name, tier in self.tiers.items()
            for way, traffic in tier.traffic.items()
        }
        return OffloadTimes(self._update_times(), moved)


class PerformanceMeter:
    """Measures the steps of one engine, on the rank that reports.

    1. `watch` once. 2. `events` after each step returns values since the last call. 3. `close` removes the meters.

    Args:
        device: device that computes. On an accelerator a phase is timed only if the host waits for it (`synchronizes`),
            because otherwise the host only queues its work.
        synchronizes: True if phases end with a wait for the device.

    Attributes:
        phases: clock of the phases; None if they are not timed.
    """

    def __init__(self, device: torch.device, *, synchronizes: bool = False) -> None:
        self.phases = PhaseClock(device, waits=False) if device.type == "cpu" or synchronizes else None
        self._sent: Counter[str] = Counter()
        self._last_step: tuple[float, int] | None = None
        self._offloaded: OffloadCounters | None = None
        self._metered: list[tuple[Collectives, Meter | None]] = []

    def watch(self, collectives: Collectives, tiers: Mapping[str, Tier], update_times: UpdateTimes) -> None:
        """Starts counting: messages of these collectives, transfers of these tiers, and updates."""
        here = next(set(node) for node in collectives.nodes if collectives.topology.rank in node)
        experts = collectives.part_holders
        for group in (collectives, collectives.parts, experts, None if experts is None else experts.parts):
            if group is not None:
                self._count_messages(group, here)
        self._offloaded = OffloadCounters(tiers, update_times) if tiers else None

    def _count_messages(self, collectives: Collectives, here: set[int]) -> None:
        # The meter of a `RecordingCollectives` is on its inner object.
        metered: Collectives = getattr(collectives, "inner", collectives)
        before = metered.meter

        def count(tag: int, receiver: int, nbytes: int) -> None:
            self._sent["inside" if receiver in here else "across"] += nbytes
            if before is not None:
                before(tag, receiver, nbytes)

        metered.meter = count
        self._metered.append((metered, before))

    def close(self) -> None:
        """Stops counting messages."""
        while self._metered:
            metered, before = self._metered.pop()
            metered.meter = before

    def events(self, samples: int, memory: tuple[int, int]) -> dict[str, float]:
        """Returns name -> value for the step that ends now.

        Args:
            samples: samples so far, over all ranks.
            memory: current and peak bytes.
        """
        now = time.perf_counter()
        values: dict[str, float] = {}
        if self._last_step is not None:
            before, samples_before = self._last_step
            values["Time/step_seconds"] = now - before
            values["Time/samples_per_second"] = (samples - samples_before) / (now - before)
        self._last_step = now, samples
        seconds = {} if self.phases is None else self.phases.take()
        values |= {f"Time/{name}_seconds": seconds[phase] for phase, name in _PHASES.items() if phase in seconds}
        values["Memory/current_bytes"], values["Memory/peak_bytes"] = memory
        values |= {f"Sent/{link}_bytes": self._sent[link] for link in ("inside", "across") if link in self._sent}
        self._sent.clear()
        return values | self._of_offload()

    def _of_offload(self) -> dict[str, float]:
        if self._offloaded is None:
            return {}
        times = self._offloaded.take()
        values = {"Offload/update_seconds": times.update[0]}
        for (name, way), (nbytes, seconds) in times.moved.items():
            if seconds > 0:
                key = f"Offload/{name.replace(', ', '_')}_{way}"
                values |= {f"{key}_bytes": nbytes, f"{key}_bytes_per_second": nbytes / seconds}
        return values


class RouterLoad:
    """Numbers of tokens that a mixture's routers send to each expert in training, over the ranks that share a model.

    Recomputed forwards do not count. 1. `take` after a step: the numbers since the last call. 2. `close`.

    Args:
        experts: modules whose second argument is the chosen experts, (T, K), with their numbers of experts.
        routers: modules whose first output is the scores of all experts, (T, E), which choose the `top_k` best, with
            their numbers of experts.
        device: device on which they count.
        add: replaces a small tensor in host memory by its sum over the ranks. (all ranks)
    """

    def __init__(
        self,
        experts: Iterable[tuple[nn.Module, int]],
        routers: Iterable[tuple[nn.Module, int]],
        device: torch.device,
        add: Callable[[Tensor], None],
    ) -> None:
        self._add = add
        self._handles: list[RemovableHandle] = []
        self._sizes: list[int] = []  # E + 1 for each module: the last counts choices that are no expert
        for module, count in experts:
            take_choices = partial(self._count_choices, sum(self._sizes), count)
            self._handles.append(module.register_forward_pre_hook(take_choices, with_kwargs=True))
            self._sizes.append(count + 1)
        for module, count in routers:
            self._handles.append(module.register_forward_hook(partial(self._count_best, sum(self._sizes), count)))
            self._sizes.append(count + 1)
        self._counts = torch.zeros(sum(self._sizes), dtype=torch.int64, device=device)

    def take(self) -> dict[str, float]:
        """Returns name -> value; empty if nothing was routed. (all ranks)"""
        counts = self._counts.cpu()  # one wait for the device
        self._counts = torch.zeros_like(self._counts)
        self._add(counts)
        values = iter(counts.tolist())
        loads = [load for size in self._sizes if any(load := list(islice(values, size)))]
        if not loads:
            return {}
        means = [sum(load[:-1]) / (len(load) - 1) for load in loads]
        return {
            "Router/max_tokens_per_expert": max(max(load[:-1]) for load in loads),
            "Router/mean_tokens_per_expert": sum(means) / len(means),
            "Router/max_over_mean": max(
                max(load[:-1]) / mean if mean else 0.0 for load, mean in zip(loads, means, strict=True)
            ),
            "Router/dropped_tokens": sum(load[-1] for load in loads),
        }

    def close(self) -> None:
        """Stops counting."""
        while self._handles:
            self._handles.pop().remove()

    def _count_choices(
        self, start: int, experts: int, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        self._count(module, start, experts, lambda: [*args, *named.values()][1])

    def _count_best(self, start: int, experts: int, module: nn.Module, args: Any, output: Any) -> None:
        self._count(module, start, experts, lambda: output[0].detach().topk(module.top_k, dim=1).indices)

    def _count(self, module: nn.Module, start: int, experts: int, chosen: Callable[[], Tensor]) -> None:
        if not module.training or torch._C._current_graph_task_id() != -1:
            return
        choices = chosen().reshape(-1).long()
        choices = torch.where((choices < 0) | (choices >= experts), experts, choices) + start
        self._counts.scatter_add_(0, choices, torch.ones_like(choices))
