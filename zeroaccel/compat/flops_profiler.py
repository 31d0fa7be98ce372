"""`deepspeed.profiling.flops_profiler`: operations, parameters and time of a model, counted by torch.

torch's `FlopCounterMode` counts matrix products, convolutions and attention, which are nearly all of a model's
operations. Unlike DeepSpeed's profiler, it does not count elementwise operations (activations, norms).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from zeroaccel.compat.device_accelerator import get_accelerator
from zeroaccel.errors import EngineStateError, UsageError
from zeroaccel.zero.access.param_registry import handle_of

_MAGNITUDES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K"), (1.0, ""))


class OperationProfiler:
    """Counts the operations of a model between `start_profile` and `stop_profile`.

    Args:
        model: the model, or an engine's `module`.
        ds_engine: no effect: sharded parameters are counted in full.
        recompute_fwd_factor: recomputed operations to add, as a share of the counted ones.

    Example:
        >>> profiler = OperationProfiler(torch.nn.Linear(4, 2))
        >>> profiler.start_profile()
        >>> _ = profiler.model(torch.ones(3, 4))
        >>> profiler.stop_profile()
        >>> profiler.get_total_flops(), profiler.get_total_macs(), profiler.get_total_params()
        (48, 24, 10)
        >>> profiler.end_profile()
    """

    def __init__(self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0) -> None:
        self.model, self.ds_engine, self.recompute_fwd_factor = model, ds_engine, recompute_fwd_factor
        self.started = False
        self._counter: FlopCounterMode | None = None
        self._ignored: tuple[type[nn.Module], ...] = ()
        self._begun = self._seconds = 0.0
        self._counting = False

    def start_profile(self, ignore_list: Iterable[type[nn.Module]] | None = None) -> None:
        """Starts a new count.

        Args:
            ignore_list: classes of modules whose operations are excluded.

        Raises:
            EngineStateError: a count is running.
        """
        if self._counting:
            raise EngineStateError("FlopsProfiler.start_profile()", expected="a profiler that is stopped")
        self._ignored = tuple(ignore_list or ())
        self._counter = FlopCounterMode(display=False)
        self.started = self._counting = True
        get_accelerator().synchronize()
        self._begun = time.perf_counter()
        self._counter.__enter__()

    def stop_profile(self) -> None:
        """Ends the count; the numbers remain until `end_profile`. Does nothing without a count."""
        if self._counter is not None and self._counting:
            self._counter.__exit__(None, None, None)
            get_accelerator().synchronize()
            self._seconds = time.perf_counter() - self._begun
            self._counting = False

    def reset_profile(self) -> None:
        """Drops the numbers; a running count restarts from 0."""
        counting = self._counting
        self.end_profile()
        if counting:
            self.start_profile(self._ignored)

    def end_profile(self) -> None:
        """Ends the count, and drops the numbers."""
        self.stop_profile()
        self.started, self._counter, self._seconds = False, None, 0.0

    def get_total_flops(self, as_string: bool = False) -> int | str:
        """Returns the number of operations; a multiply-add counts as two."""
        flops = round(self._flops() * (1.0 + self.recompute_fwd_factor))
        return number_to_string(flops) if as_string else flops

    def get_total_macs(self, as_string: bool = False) -> int | str:
        """Returns the number of multiply-adds."""
        macs = round(self._flops() * (1.0 + self.recompute_fwd_factor)) // 2
        return macs_to_string(macs) if as_string else macs

    def get_total_duration(self, as_string: bool = False) -> float | str:
        """Returns the duration of the count in seconds, including the device's work."""
        seconds = time.perf_counter() - self._begun if self._counting else self._seconds
        return duration_to_string(seconds) if as_string else seconds

    def get_total_params(self, as_string: bool = False) -> int | str:
        """Returns the number of the model's parameters, including other ranks' shards."""
        total = _numel(self.model)
        return params_to_string(total) if as_string else total

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | None = None,
    ) -> None:
        """Prints the count; does nothing before one.

        Args:
            profile_step: number of the counted step, for the report.
            module_depth: depth of the listed modules; -1 for all.
            top_modules: no effect: all modules are listed.
            detailed: print a line for each module with operations, besides the sums.
            output_file: file for the report; by default the standard output.
        """
        if self._counter is None:
            return
        lines = [
            f"flops profiler, step {profile_step}",
            f"params: {self.get_total_params(as_string=True)}",
            f"flops:  {self.get_total_flops(as_string=True)}",
            f"MACs:   {self.get_total_macs(as_string=True)}",
            f"time:   {self.get_total_duration(as_string=True)}",
            *(self._modules(module_depth) if detailed else []),
        ]
        if output_file:
            Path(output_file).parent.mkdir(parents=True, exist_ok=True)
            Path(output_file).write_text("\n".join(lines) + "\n", encoding="utf-8")
        else:
            print("\n".join(lines))

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        """Prints the operations of modules up to this depth, as counted by torch."""
        print("\n".join(self._modules(module_depth)))

    def _modules(self, depth: int) -> list[str]:
        counts = {} if self._counter is None else self._counter.get_flop_counts()
        return [
            f"  {name}: {macs_to_string(sum(of_module.values()) // 2)}"
            for name, of_module in counts.items()
            if depth < 0 or name.count(".") <= depth
        ]

    def _flops(self) -> int:
        """Returns the operations of the model without the ignored modules."""
        if self._counter is None:
            return 0
        counts: Mapping[str, Mapping[Any, int]] = self._counter.get_flop_counts()
        ignored: list[str] = []
        for fqn, module in self.model.named_modules():
            if isinstance(module, self._ignored) and not any(fqn.startswith(f"{outer}.") for outer in ignored):
                ignored.append(fqn)
        root = type(self.model).__name__
        of_ignored = (counts.get(f"{root}.{fqn}" if fqn else root, {}) for fqn in ignored)
        return sum(counts.get("Global", {}).values()) - sum(sum(each.values()) for each in of_ignored)


def get_model_profile(
    model: nn.Module,
    input_shape: tuple[int, ...] | None = None,
    args: Iterable[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | None = None,
    ignore_modules: Iterable[type[nn.Module]] | None = None,
    mode: str = "forward",
) -> tuple[int | str, int | str, int | str]:
    """Puts a model in eval mode; returns (operations, multiply-adds, parameters) of one forward.

    Args:
        input_shape: shape of the only argument, in the dtype of the parameters.
        args, kwargs: arguments to use instead of `input_shape`.
        print_profile, detailed, module_depth, top_modules, output_file: as in `OperationProfiler.print_model_profile`.
        warm_up: number of forwards before the counted one.
        as_string: return texts such as "1.5 GMACs" instead of numbers.
        ignore_modules: classes of modules whose operations are excluded.
        mode: method to call, "forward" or "generate".

    Raises:
        UsageError: no input, or another mode.
    """
    if mode not in ("forward", "generate"):
        raise UsageError("get_model_profile(mode)", expected='"forward" or "generate"', got=mode)
    inputs, named = list(args), dict(kwargs or {})
    if input_shape is not None:
        first = next(model.parameters(), torch.empty(0))
        inputs = [torch.ones(tuple(input_shape), dtype=first.dtype, device=first.device)]
    if not inputs and not named:
        raise UsageError("get_model_profile", expected="input_shape, args or kwargs", got=None)
    model.eval()
    call = model if mode == "forward" else model.generate
    profiler = OperationProfiler(model)
    for _ in range(warm_up):
        call(*inputs, **named)  # type: ignore[operator]
    profiler.start_profile(ignore_modules)
    try:
        call(*inputs, **named)  # type: ignore[operator]
    finally:
        profiler.stop_profile()
    totals = (profiler.get_total_flops, profiler.get_total_macs, profiler.get_total_params)
    flops, macs, params = (total(as_string) for total in totals)
    if print_profile:
        profiler.print_model_profile(warm_up, module_depth, top_modules, detailed, output_file)
    profiler.end_profile()
    return flops, macs, params


def number_to_string(num: float, units: str | None = None, precision: int = 2) -> str:
    """Returns "1.5 G" for 1.5e9; `units`, one of T, G, M, K or "", replaces the automatic unit."""
    sizes = {unit: size for size, unit in _MAGNITUDES}
    unit = next((u for size, u in _MAGNITUDES if num >= size), "") if units is None else units
    return f"{round(num / sizes.get(unit, 1.0), precision):g} {unit}"


def macs_to_string(macs: float, units: str | None = None, precision: int = 2) -> str:
    """Returns a text such as "1.5 GMACs"."""
    return f"{number_to_string(macs, units, precision)}MACs"


def flops_to_string(flops: float, units: str | None = None, precision: int = 2) -> str:
    """Returns a text such as "1.5 GFLOPS"."""
    return f"{number_to_string(flops, units, precision)}FLOPS"


def params_to_string(params_num: float, units: str | None = None, precision: int = 2) -> str:
    """Returns a text such as "1.5 B", where B is 1e9."""
    text = number_to_string(params_num, units.replace("B", "G") if units else units, precision)
    return text.replace("G", "B").strip()


def duration_to_string(duration: float, units: str | None = None, precision: int = 2) -> str:
    """Returns a text such as "1.5 s", "12 ms" or "3 us"; `units` is "s", "ms" or "us"."""
    scales = {"s": 1.0, "ms": 1e3, "us": 1e6}
    unit = units or next((u for u, scale in scales.items() if duration * scale >= 1), "us")
    return f"{round(duration * scales[unit], precision):g} {unit}"


def _numel(module: nn.Module) -> int:
    """Returns the number of parameters, including other ranks' shards."""
    handles = ((param, handle_of(param)) for param in module.parameters())
    return sum(param.numel() if handle is None else handle.slot.whole_numel for param, handle in handles)
