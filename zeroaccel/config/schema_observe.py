"""The sections through which a run is watched: metric writers, communication log, timers, profiler.

One of the schema files that `schema` assembles. None of these changes what is trained. Writers are off unless
`enabled`; the packages they need are imported by whoever writes, not here.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator

from zeroaccel.config.section import (
    ConfigSection,
    Flag,
    Name,
    NonNegativeNumber,
    PositiveCount,
    Text,
    Texts,
    Whole,
    lowered,
)

__all__ = [
    "Comet",
    "CommsLogger",
    "CsvMonitorSection",
    "FlopsProfiler",
    "LogLevel",
    "TensorBoard",
    "ThroughputTimer",
    "Timers",
    "Trackio",
    "Wandb",
]

LogLevel = Annotated[Literal["debug", "info", "warning", "error", "critical"], BeforeValidator(lowered)]


class _MetricFiles(ConfigSection):
    enabled: Flag = False
    """Write them."""
    output_path: Text = ""
    """Folder to write to; empty is the working directory."""
    job_name: Name = "zeroaccel"
    """Folder within it, one per run."""


class TensorBoard(_MetricFiles):
    """Metrics as TensorBoard event files (needs the package tensorboard)."""


class CsvMonitorSection(_MetricFiles):
    """Metrics as CSV files, one per metric."""


class Wandb(ConfigSection):
    """Metrics to Weights & Biases."""

    enabled: Flag = False
    """Send them (needs the package wandb)."""
    group: Text | None = None
    """Group of runs."""
    team: Text | None = None
    """Team the project belongs to."""
    project: Name = "zeroaccel"
    """Project the run belongs to."""


class Comet(ConfigSection):
    """Metrics to Comet."""

    enabled: Flag = False
    """Send them."""
    samples_log_interval: PositiveCount = 100
    """Samples between two reports."""
    project: Text | None = None
    """Project the experiment belongs to."""
    workspace: Text | None = None
    """Workspace of the project."""
    api_key: Text | None = None
    """Key of the account."""
    experiment_name: Text | None = None
    """Name shown for the experiment."""
    experiment_key: Text | None = None
    """Key of the experiment, 32 to 50 letters and digits."""
    online: Flag | None = None
    """False keeps the data on this machine."""
    mode: Text | None = None
    """"get", "create" or "get_or_create"."""


class Trackio(ConfigSection):
    """Metrics to Trackio."""

    enabled: Flag = False
    """Send them."""
    project: Name = "zeroaccel"
    """Project the run belongs to."""


class CommsLogger(ConfigSection):
    """A log of the collectives: how many, how large, how long."""

    enabled: Flag = False
    """Keep the log."""
    verbose: Flag = False
    """Also log each call as it happens."""
    prof_all: Flag = True
    """All operations; false takes only those of prof_ops."""
    debug: Flag = False
    """Add the caller to each line."""
    prof_ops: Texts = ()
    """Names of the operations to log, as "all_gather"."""


class ThroughputTimer(ConfigSection):
    """Samples per second, measured over the step."""

    enabled: Flag = True
    """Measure it."""
    synchronized: Flag = True
    """Wait for the device before reading the clock."""


class Timers(ConfigSection):
    """Clocks of the engine."""

    throughput: ThroughputTimer = ThroughputTimer()
    """Samples per second."""


class FlopsProfiler(ConfigSection):
    """A profile of the operations of one step."""

    is_open = True
    is_read = False

    enabled: Flag = False
    """Take the profile."""
    recompute_fwd_factor: NonNegativeNumber = 0.0
    """Forward passes that recomputation adds to one step."""
    profile_step: PositiveCount = 1
    """Step that is profiled."""
    module_depth: Whole = -1
    """Depth of the modules shown; -1 is the innermost."""
    top_modules: PositiveCount = 1
    """Modules shown per depth."""
    detailed: Flag = True
    """Show each module."""
    output_file: Text | None = None
    """File to write to; absent, standard output."""
