"""Before ranks start on several machines: their launchers meet, compare what they have, and try the network.

Says what is compared; how it is done is in `zeroaccel.comm.preflight_rendezvous`. Called by `agent`.
"""

from __future__ import annotations

import hashlib
import platform
import shlex
import socket
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import zeroaccel
from zeroaccel.comm.preflight_rendezvous import NodeInfo, PreflightRendezvous, rendezvous
from zeroaccel.errors import ConfigError

from .plan import LaunchPlan

__all__ = ["card_of", "meet_machines"]

_TORCH_WAITS = 600.0  # seconds, its rendezvous, by default
_SAME_EVERYWHERE = ("num_processes", "num_machines", "max_restarts", "rdzv_backend", "use_cpu", "timeout")


def meet_machines(
    plan: LaunchPlan, say: Callable[[str], None], arrival_seconds: float | None
) -> PreflightRendezvous | None:
    """Meets the launchers of the other machines; None where there are none, or where they come and go.

    Raises:
        CollectiveError: a machine did not come, or cannot be reached.
        ConfigError: two machines want different things.
    """
    settings = plan.settings
    if settings.num_machines == 1 or settings.machine_rank is None or settings.min_machines is not None:
        return None
    waits = settings.rdzv_conf.get("timeout") or settings.rdzv_conf.get("join_timeout") or _TORCH_WAITS
    return rendezvous(
        (plan.host, plan.port),
        settings.machine,
        settings.num_machines,
        card_of(plan),
        arrival_seconds=arrival_seconds if arrival_seconds is not None else float(waits),
        say=say,
    )


def card_of(plan: LaunchPlan) -> NodeInfo:
    """What must be the same on all machines: versions, settings, the command and the config's contents."""
    settings = plan.settings
    facts = {
        "the version of zeroaccel": zeroaccel.__version__,
        "the version of torch": metadata.version("torch"),
        "the version of Python": ".".join(platform.python_version_tuple()[:2]),
        "the kind of device": plan.device,
        "the command": shlex.join((plan.program.kind, plan.program.name, *plan.program.arguments)),
        "processes per machine": str(plan.num_local),
    }
    facts |= {f"--{name}": str(getattr(settings, name)) for name in _SAME_EVERYWHERE}
    facts |= {name: value for name, value in sorted(plan.told.items()) if name.startswith("ACCELERATE_")}
    if settings.deepspeed_config_file is not None:
        facts[f"the contents of {settings.deepspeed_config_file}"] = _digest(Path(settings.deepspeed_config_file))
    return NodeInfo(socket.gethostname(), plan.num_local, facts)


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    except OSError as error:
        raise ConfigError(f"--deepspeed_config_file {path}: {(error.strerror or 'unreadable').lower()}") from None
