"""`deepspeed.runtime.lr_schedules` beyond the schedules: names of their parameters, and flags for a script's parser."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from zeroaccel.optim.lr_schedules import VALID_LR_SCHEDULES

# Flag -> (type, default, what it is). Flags of type bool take no value.
_FLAGS: Mapping[str, tuple[type, Any, str]] = {
    "lr_schedule": (str, None, "class of the schedule"),
    "lr_range_test_min_lr": (float, 0.001, "LRRangeTest: learning rate at the start"),
    "lr_range_test_step_rate": (float, 1.0, "LRRangeTest: how fast it grows"),
    "lr_range_test_step_size": (int, 1000, "LRRangeTest: steps between two changes"),
    "lr_range_test_staircase": (bool, False, "LRRangeTest: change in stairs"),
    "cycle_first_step_size": (int, 1000, "OneCycle: steps up"),
    "cycle_first_stair_count": (int, -1, "OneCycle: stairs on the way up"),
    "cycle_second_step_size": (int, -1, "OneCycle: steps down; -1 for as many as up"),
    "cycle_second_stair_count": (int, -1, "OneCycle: stairs on the way down"),
    "decay_step_size": (int, 1000, "OneCycle: steps between two changes after the cycle"),
    "cycle_min_lr": (float, 0.01, "OneCycle: learning rate at the foot"),
    "cycle_max_lr": (float, 0.1, "OneCycle: learning rate at the peak"),
    "decay_lr_rate": (float, 0.0, "OneCycle: decay of the learning rate after the cycle"),
    "cycle_momentum": (bool, False, "OneCycle: cycle the momentum, too"),
    "cycle_min_mom": (float, 0.8, "OneCycle: momentum at the peak"),
    "cycle_max_mom": (float, 0.9, "OneCycle: momentum at the foot"),
    "decay_mom_rate": (float, 0.0, "OneCycle: decay of the momentum after the cycle"),
    "warmup_min_lr": (float, 0.0, "Warmup*: learning rate at the start"),
    "warmup_max_lr": (float, 0.001, "Warmup*: learning rate after the warmup"),
    "warmup_num_steps": (int, 1000, "Warmup*: steps of the warmup"),
    "warmup_type": (str, "log", "Warmup*: log or linear"),
    "warmup_min_ratio": (float, 0.01, "WarmupCosineLR: share of the learning rate at the start"),
    "cos_min_ratio": (float, 0.01, "WarmupCosineLR: share of the learning rate at the end"),
}
_CLASSES = {
    "LR_RANGE_TEST": "LRRangeTest",
    "ONE_CYCLE": "OneCycle",
    "WARMUP_COSINE_LR": "WarmupCosineLR",
    "WARMUP_DECAY_LR": "WarmupDecayLR",
    "WARMUP_LR": "WarmupLR",
}
CONSTANTS: Mapping[str, str] = (
    {name.upper(): name for name in (*_FLAGS, "edge_value", "mid_value", "total_num_steps")}
    | _CLASSES
    | {"WARMUP_LOG_RATE": "log", "WARMUP_LINEAR_RATE": "linear"}
)
"""Constant of the module -> its value, a key of a scheduler's `params`, or the class of one."""

_PREFIXES = {
    "LRRangeTest": ("lr_range_test_",),
    "OneCycle": ("cycle_", "decay_"),
    "WarmupCosineLR": ("warmup_num_steps", "warmup_type", "warmup_min_ratio", "cos_"),
    "WarmupDecayLR": ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type"),
    "WarmupLR": ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type"),
}


def __getattr__(name: str) -> str:
    if name in CONSTANTS:
        return CONSTANTS[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds a flag for each parameter of the schedules, and `--lr_schedule`."""
    group = parser.add_argument_group("Convergence Tuning", "learning-rate schedule")
    for name, (kind, default, text) in _FLAGS.items():
        if kind is bool:
            group.add_argument(f"--{name}", action="store_true", help=text)
        else:
            group.add_argument(f"--{name}", type=kind, default=default, help=text)
    return parser


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """(these flags of the command line, its other words)."""
    return add_tuning_arguments(argparse.ArgumentParser()).parse_known_args()


def get_config_from_args(args: Any) -> tuple[dict[str, Any] | None, str | None]:
    """(a config's `scheduler` section by these flags, None); or (None, why there is none)."""
    kind = getattr(args, "lr_schedule", None)
    if kind is None:
        return None, "--lr_schedule is not specified on command line"
    if kind not in VALID_LR_SCHEDULES:
        return None, f"{kind} is not supported LR schedule"
    prefixes = _PREFIXES[kind]
    params = {name: getattr(args, name) for name in _FLAGS if name.startswith(prefixes) and hasattr(args, name)}
    return {"type": kind, "params": {name: value for name, value in params.items() if value not in (None, -1)}}, None


def get_lr_from_config(config: Mapping[str, Any]) -> tuple[float | None, str]:
    """(the learning rate that a `scheduler` section begins or peaks with, ""); or (None, what is missing)."""
    kind, params = config.get("type"), config.get("params")
    if kind is None or params is None:
        return None, f"LR schedule {'type' if kind is None else 'params'} not defined in config"
    key = {"LRRangeTest": "lr_range_test_min_lr", "OneCycle": "cycle_max_lr"}.get(kind, "warmup_max_lr")
    return (params[key], "") if key in params else (None, f"{key} not defined in config")
