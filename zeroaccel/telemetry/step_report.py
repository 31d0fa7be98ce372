"""The report of a training run: step lines, time per phase, memory after each phase, offload rates, monitor events.

The engine marks its phases and steps on a `StepReport`; everything is off by default and then costs one comparison.
Lines go to the logger `zeroaccel.report`, which shows them at any level of `zeroaccel`: the config enables them
(`steps_per_print`, `wall_clock_breakdown`, `memory_breakdown`). Only rank 0 reports. Reports do not change results;
`wall_clock_breakdown` synchronizes with the device around each phase, so a timed run may be slower.
"""

from __future__ import annotations

import logging
import resource
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, Protocol

import psutil
import torch
from torch import Tensor, nn

from zeroaccel.config import Config
from zeroaccel.logs import logger
from zeroaccel.offload.tier import Tier
from zeroaccel.telemetry import timeline
from zeroaccel.telemetry.norm_spikes import SpikeWatch
from zeroaccel.telemetry.performance import OffloadCounters, PerformanceMeter, PhaseClock, RouterLoad, UpdateTimes
from zeroaccel.telemetry.throughput import Throughput
from zeroaccel.telemetry.trackers import Monitors

_BREAKDOWN_STEPS = 10
"""Steps between breakdowns if `steps_per_print` is not set."""

_GIB = 2**30
_ROUTED = ("mean_tokens_per_expert", "max_tokens_per_expert", "max_over_mean", "dropped_tokens")

_lines = logger.getChild("report")
_lines.setLevel(logging.INFO)


# -- memory


class MemoryUse(NamedTuple):
    """Bytes in use by this process on its device.

    Attributes:
        current: memory allocated by torch on an accelerator, or the resident set on the CPU.
        peak: largest `current` so far.
    """

    current: int
    peak: int


def memory_now(device: torch.device) -> MemoryUse:
    """Returns the memory of this process on `device`."""
    if device.type != "cpu":
        module = torch.get_device_module(device)
        return MemoryUse(module.memory_allocated(device), module.max_memory_allocated(device))
    current = int(psutil.Process().memory_info().rss)
    return MemoryUse(current, max(current, _peak_rss()))


def _peak_rss() -> int:
    """Returns bytes. Linux reports them per process image; getrusage there also counts programs before an exec."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


# -- one step


@dataclass(frozen=True)
class StepFacts:
    """The state of training after a step.

    Attributes:
        step: number of optimizer steps, including skipped ones.
        skipped: number of skipped steps.
        samples: number of samples over all ranks.
        lrs: learning rate of each param group.
        grad_norm: global norm before clipping; inf for a skipped step, None if it is not computed.
        loss_scale: None if losses are not scaled.
        loss: mean over the step's micro-batches on this rank, or None.
    """

    step: int
    skipped: int
    samples: int
    lrs: Sequence[float]
    grad_norm: float | None = None
    loss_scale: float | None = None
    loss: float | None = None


def format_step(
    facts: StepFacts,
    samples_per_second: float | None,
    routed: Mapping[str, float] = MappingProxyType({}),
    rates: str = "",
) -> str:
    """``step 100 | skipped 2 | lr 1.000e-04 | grad norm 0.5120 | loss scale 65536 | 123.4 samples/s``, then the rates
    since the last line (`Rates.text`); for a mixture of experts also ``tokens per expert 32.0, most 57 (1.78x),
    dropped 0``, counted since the last line.
    """
    parts = [f"step {facts.step}", f"skipped {facts.skipped}", f"lr {', '.join(f'{lr:.3e}' for lr in facts.lrs)}"]
    if facts.grad_norm is not None:
        parts.append(f"grad norm {facts.grad_norm:.4f}")
    if facts.loss_scale is not None:
        parts.append(f"loss scale {facts.loss_scale:g}")
    if samples_per_second is not None:
        parts.append(f"{samples_per_second:.1f} samples/s")
    if rates:
        parts.append(rates)
    if routed:
        mean, most, ratio, dropped = (routed[f"Router/{key}"] for key in _ROUTED)
        parts.append(f"tokens per expert {mean:.1f}, most {most:.0f} ({ratio:.2f}x), dropped {dropped:.0f}")
    return " | ".join(parts)


def format_phases(milliseconds: Mapping[str, float], steps: int) -> str:
    """``ms per step over 10 steps: forward 12.30 | backward 25.10 | step 4.20``"""
    shown = " | ".join(f"{name} {mean:.2f}" for name, mean in milliseconds.items())
    return f"ms per step over {steps} step{'s' if steps != 1 else ''}: {shown}"


def format_memory(after: Mapping[str, MemoryUse], kind: str) -> str:
    """``allocated GiB after: forward 1.20 | backward 1.91 | step 1.30 | peak 2.31``"""
    shown = [f"{name} {memory.current / _GIB:.2f}" for name, memory in after.items()]
    peak = max((memory.peak for memory in after.values()), default=0)
    return f"{kind} GiB after: {' | '.join([*shown, f'peak {peak / _GIB:.2f}'])}"


def step_events(facts: StepFacts) -> list[tuple[str, float, int]]:
    """Returns (name, value, samples so far) for monitors. Param groups after the first have their index in the name."""
    values = {
        "Train/loss": facts.loss,
        **{f"Train/lr{f'/group{index}' if index else ''}": lr for index, lr in enumerate(facts.lrs)},
        "Train/grad_norm": facts.grad_norm,
        "Train/loss_scale": facts.loss_scale,
    }
    return [(name, value, facts.samples) for name, value in values.items() if value is not None]


# -- the report


class ReportedScale(Protocol):
    """The loss scale interface that a report uses."""

    @property
    def scales(self) -> bool:
        """False if losses are not scaled, as in bf16 and fp32."""

    @property
    def value(self) -> float:
        """Factor of the loss."""


class ReportedEngine(Protocol):
    """The engine interface that a report uses after a step."""

    global_steps: int
    skipped_steps: int
    global_samples: int

    @property
    def loss_scale(self) -> ReportedScale:
        """Loss scale of the next step."""

    def get_lr(self) -> Sequence[float]:
        """Returns the learning rate of each param group."""

    def get_global_grad_norm(self) -> float | None:
        """Returns the norm of the step's gradients."""


class StepReport:
    """Collects the phases and steps of one engine and logs what the config enables.

    1. `begin(phase)` and `end(phase)` around forward, backward, reduce and step; `loss(loss)` after each backward.
    2. `step(engine)` after each optimizer step: events to the monitors, and every `steps_per_print` steps the lines.
    3. `close()` closes the monitors.

    Args:
        device: device to time and measure.
        rank: ranks other than 0 report nothing.
        steps_per_print: steps between two step lines, or None. The breakdowns come in the same steps, or every 10.
        wall_clock_breakdown: report the time per phase.
        memory_breakdown: report the memory after each phase.
        monitors: trackers that receive events at every step, or None.
        is_monitored: True if the config has monitors, on any rank.
        peak_tflops: TFLOPS of the device for the MFU; None looks the device up.

    Attributes:
        monitors: trackers that receive events; None without any, and on ranks that do not report.
        offload: returns the line about offload for a number of steps, logged with the time breakdown; None without
            offload.
        performance: measures each step for the monitors; None without monitors.
        loss_listener: called with the loss of each micro-batch, or None.
        step_listener: called at the end of each optimizer step, or None.
        throughput: counts tokens and FLOPs, or None.
        spikes: warns about gradient norms that stand out, or None.
        watches_inputs: True if steps are reported, on any rank.
        at_step: called at the end of each optimizer step, on every rank, or None.
    """

    def __init__(
        self,
        *,
        device: torch.device | None = None,
        rank: int = 0,
        steps_per_print: int | None = None,
        wall_clock_breakdown: bool = False,
        memory_breakdown: bool = False,
        monitors: Monitors | None = None,
        is_monitored: bool = False,
        peak_tflops: float | None = None,
    ) -> None:
        reports = rank == 0
        self._device = device or torch.device("cpu")
        self._step_lines = steps_per_print is not None and reports
        self._every = steps_per_print or _BREAKDOWN_STEPS
        # Steps between two counts of routed tokens, equal on all ranks, which add up their counts.
        self._routed_every = 1 if is_monitored else steps_per_print
        self._clock = PhaseClock(self._device) if wall_clock_breakdown and reports else None
        self._memory: dict[str, MemoryUse] | None = {} if memory_breakdown and reports else None
        self.monitors = monitors if monitors is not None and len(monitors) and reports else None
        self.offload: Callable[[int], str] | None = None
        self.loss_listener: Callable[[Tensor], None] | None = None
        self.step_listener: Callable[[], None] | None = None
        self._traced: dict[str, timeline.Mark] = {}
        self.performance: PerformanceMeter | None = None
        if self.monitors is not None:
            self.performance = PerformanceMeter(self._device, synchronizes=self._clock is not None)
        # The clock that waits for the device comes first.
        clocks = self._clock, None if self.performance is None else self.performance.phases
        self._clocks = [clock for clock in clocks if clock is not None]
        self._routers: RouterLoad | None = None
        self._routed: dict[str, float] = {}  # for the last line
        self.throughput: Throughput | None = None
        self.spikes: SpikeWatch | None = None
        self.watches_inputs, self.peak_tflops = self._routed_every is not None, peak_tflops
        self.at_step: Callable[[], object] | None = None
        self._losses: list[Tensor] = []
        self._steps = 0  # since the last lines
        self._since: tuple[int, float] | None = None  # samples and time at the last lines, or after the first step

    @classmethod
    def of(cls, config: Config, device: torch.device, rank: int, monitors: Monitors) -> StepReport:
        """Makes the report that a config requests."""
        sections = (config.tensorboard, config.csv_monitor, config.jsonl_monitor, config.wandb)
        return cls(
            device=device,
            rank=rank,
            steps_per_print=config.steps_per_print,
            wall_clock_breakdown=config.wall_clock_breakdown,
            memory_breakdown=config.memory_breakdown,
            monitors=monitors,
            is_monitored=any(section.enabled for section in sections),
            peak_tflops=config.peak_tflops,
        )

    def watch_routers(
        self,
        experts: Sequence[tuple[nn.Module, int]],
        routers: Sequence[tuple[nn.Module, int]],
        add: Callable[[Tensor], None],
    ) -> None:
        """Counts the tokens of a mixture's experts (see `RouterLoad`), if they are reported. (all ranks)"""
        if (experts or routers) and self._routed_every is not None:
            self._routers = RouterLoad(experts, routers, self._device, add)

    def begin(self, phase: str) -> None:
        """Marks the start of a phase."""
        if timeline.active is not None:
            timeline.active.end_backward()
            self._traced[phase] = timeline.active.mark()
        if self.throughput is not None:
            self.throughput.enter()
        for clock in self._clocks:
            clock.begin(phase)

    def end(self, phase: str) -> None:
        """Marks the end of a phase."""
        for clock in self._clocks:
            clock.end(phase)
        if self._memory is not None:
            self._memory[phase] = memory_now(self._device)
        if timeline.active is not None:
            timeline.active.end_backward()
            if phase in self._traced:
                timeline.active.add("phase", phase, self._traced.pop(phase))
        if self.throughput is not None:
            self.throughput.leave()

    def whole_call(self) -> AbstractContextManager[None]:
        """Returns a block that is one call of the engine; its forwards are of parts of the model, and not counted."""
        return nullcontext() if self.throughput is None else self.throughput.whole_call()

    def batches(self, batches: Iterable[object]) -> None:
        """Counts the tokens of the micro-batches of a `whole_call`: mappings, or pairs with the inputs first."""
        if self.throughput is not None:
            for batch in batches:
                self.throughput.count(batch if isinstance(batch, Sequence) else (batch,), {})

    def forward(self, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        """Counts the tokens of a forward that trains."""
        if self.throughput is not None and torch.is_grad_enabled():
            self.throughput.count_forward(args, kwargs)

    def loss(self, loss: Tensor) -> None:
        """Takes the loss of a micro-batch; copied to the host only at the end of the step, and only for a monitor."""
        if self.monitors is not None:
            self._losses.append(loss.detach())
        if self.spikes is not None:
            self.spikes.loss(loss)
        if self.loss_listener is not None:
            self.loss_listener(loss)

    def step(self, engine: ReportedEngine) -> None:
        """Reports a completed optimizer step."""
        with self.whole_call():
            self._report(engine)

    def _report(self, engine: ReportedEngine) -> None:
        self._steps += 1
        if self._routers is not None and engine.global_steps % (self._routed_every or 1) == 0:
            self._routed = self._routers.take()
        is_due = engine.global_steps % self._every == 0
        rates = self.throughput.take() if self.throughput is not None and is_due else None
        if self.monitors is not None:
            facts = _facts(engine, self._mean_loss())
            measured = (
                {} if self.performance is None else self.performance.events(facts.samples, memory_now(self._device))
            )
            of_ranks = {} if rates is None else rates.events()
            values = [(name, value, facts.samples) for name, value in {**measured, **of_ranks, **self._routed}.items()]
            begun = time.perf_counter()
            self.monitors.write([*step_events(facts), *values])
            if self.throughput is not None:
                self.throughput.outside += time.perf_counter() - begun
        if is_due:
            self._log(engine, "" if rates is None else rates.text())
            self._steps = 0
            if self.monitors is not None:
                self.monitors.flush()
            self._since = (engine.global_samples, time.perf_counter())
        elif self._since is None:
            self._since = (engine.global_samples, time.perf_counter())
            if self.throughput is not None:
                self.throughput.start()
        if self.at_step is not None:
            self.at_step()
        if self.step_listener is not None:
            self.step_listener()

    def close(self) -> None:
        """Closes the monitors."""
        if self.performance is not None:
            self.performance.close()
        if self._routers is not None:
            self._routers.close()
        if self.monitors is not None:
            self.monitors.close()
            self.monitors = None

    def _log(self, engine: ReportedEngine, rates: str) -> None:
        if self._step_lines:
            speed = self._samples_per_second(engine.global_samples)
            _lines.info(format_step(_facts(engine), speed, self._routed, rates))
        if self._clock is not None:
            milliseconds = {name: seconds * 1e3 / self._steps for name, seconds in self._clock.take().items()}
            _lines.info(format_phases(milliseconds, self._steps))
            if self.offload is not None:
                _lines.info(self.offload(self._steps))
        if self._memory is not None:
            _lines.info(format_memory(self._memory, "resident" if self._device.type == "cpu" else "allocated"))

    def _samples_per_second(self, samples: int) -> float | None:
        if self._since is None:
            return None
        before, begun = self._since
        return (samples - before) / (time.perf_counter() - begun)

    def _mean_loss(self) -> float | None:
        losses, self._losses = self._losses, []
        return sum(float(loss) for loss in losses) / len(losses) if losses else None


def _facts(engine: ReportedEngine, loss: float | None = None) -> StepFacts:
    return StepFacts(
        step=engine.global_steps,
        skipped=engine.skipped_steps,
        samples=engine.global_samples,
        lrs=engine.get_lr(),
        grad_norm=engine.get_global_grad_norm(),
        loss_scale=engine.loss_scale.value if engine.loss_scale.scales else None,
        loss=loss,
    )


# -- offload


class OffloadReport:
    """Summarizes update and transfer times since the last call.

    Args:
        tiers: see `OffloadCounters`.
        overlaps_io: True if reads and writes of optimizer states run at the same time.
        resident: returns the bytes of masters and states that stay on the device.
    """

    def __init__(
        self,
        tiers: Mapping[str, Tier],
        update_times: UpdateTimes,
        *,
        overlaps_io: bool = False,
        resident: Callable[[], int] = int,
    ) -> None:
        self._counters = OffloadCounters(tiers, update_times)
        self._overlaps_io, self._resident = overlaps_io, resident

    def __call__(self, steps: int) -> str:
        """``offload, s per step over 10 steps: update 0.52, transfers 0.61 (0.48 hidden) | optimizer on /nvme (ext4):
        read 1.21 GB/s, write 0.97 GB/s``

        An update of states in memory has no transfers. "Hidden" is the part of the transfers that the update did not
        wait for and, with `update_during`, the part of the update that the step did not wait for. With "backward",
        "early updates 97% kept" is the share of the elements that were updated early. With `ratio` or `device_budget`,
        the bytes of masters and states that stay on the device follow.
        """
        (update, waited, overlapped, early, used), moved = self._counters.take()
        hidden_part = f" ({max(0.0, overlapped) / steps:.3f} hidden)" if overlapped else ""
        parts = [f"update {update / steps:.3f}{hidden_part}"]
        if early:
            parts.append(f"early updates {used / early:.0%} kept")
        of_states = [seconds for (name, _), (_, seconds) in moved.items() if name.startswith("optimizer")]
        if of_states:
            # Pipelined reads and writes share the wall clock, so their times must not be added.
            transfers = max(of_states) if self._overlaps_io else sum(of_states)
            hidden = max(0.0, transfers - waited)
            parts.append(f"transfers {transfers / steps:.3f} ({hidden / steps:.3f} hidden)")
        if (resident := self._resident()) > 0:
            parts.append(f"{resident / 1e9:.3g} GB of the optimizer on the device")
        line = f"offload, s per step over {steps} step{'s' if steps != 1 else ''}: {', '.join(parts)}"
        for name, tier in self._counters.tiers.items():
            rates = [
                f"{way} {moved[name, way][0] / moved[name, way][1] / 1e9:.2f} GB/s"
                for way in tier.traffic
                if moved[name, way][1] > 0
            ]
            if rates:
                line += f" | {name.partition(',')[0]} on {tier.name}: {', '.join(rates)}"
        return line
