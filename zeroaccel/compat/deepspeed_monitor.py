"""`deepspeed.monitor`: events of a script's own, written to the monitors of a config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zeroaccel.config import Config, load_config
from zeroaccel.telemetry.step_report import EventSink
from zeroaccel.telemetry.trackers import build_monitors


class MonitorMaster:
    """Writes to the TensorBoard, CSV and wandb monitors that a config enables; on rank 0.

    Args:
        monitor_config: `DeepSpeedConfig(...).monitor_config`, a config in the format of `deepspeed.initialize`, or the
            monitors of an engine; None for none.

    Attributes:
        enabled: whether there is a monitor.
    """

    def __init__(self, monitor_config: Mapping[str, Any] | Config | EventSink | None) -> None:
        if isinstance(monitor_config, (Mapping, Config)):
            rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
            monitor_config = build_monitors(load_config(monitor_config, unknown_keys="lenient"), rank)
        self._sink = monitor_config
        self.enabled = self._sink is not None and len(self._sink) > 0

    def write_events(self, event_list: Sequence[tuple[str, float, int]]) -> None:
        """Writes (name, value, samples so far) events, and flushes."""
        if self._sink is not None and self.enabled:
            self._sink.write(event_list)
            self._sink.flush()
