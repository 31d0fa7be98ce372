"""Starting and watching the processes of a plan on this machine, through torch's elastic agent, in this process.

Takes a `LaunchPlan` and returns a `JobEnd`; what that means to a person is for `failures` and `launch`. The agent's
own log is kept from the terminal, since all it has to say is in the `JobEnd`: with `--debug` it is shown, with
`--log_dir` it is written there. The only file of the command line that imports torch as a whole.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import psutil
from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, PContext, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, launch_agent

from zeroaccel.comm.environment import timeout_seconds
from zeroaccel.config.launch.launch_settings import LaunchSettings, Streams
from zeroaccel.errors import CollectiveError

from . import runner
from .failures import AFTER_FAILURE_SECONDS, RankEnd, Report, read_report
from .leftovers import LAUNCH_ID, end_leftovers, wake_stopped
from .plan import LaunchPlan
from .preflight import meet_machines
from .process_watch import ProcessWatch
from .stopping import Stopping

__all__ = ["JobEnd", "run_plan"]

_SHUTDOWN_SECONDS = 10  # for the processes to end after a signal to the launcher; then they are killed
_TORCH_LOG = "torch.distributed.elastic"


@dataclass(frozen=True)
class JobEnd:
    """How the job ended on this machine. Both fields are empty after a success.

    Attributes:
        failures: the processes that failed.
        signal: the signal that ended the launcher, or 0.
    """

    failures: tuple[RankEnd, ...] = ()
    signal: int = 0


class RankFiles(DefaultLogsSpecs):
    """The files of each process: its output, its error report. Asked for whenever the processes are started.

    Also gives each process what `additions` adds to its environment, tells why the processes are started again, and
    finds what each of them left behind.
    """

    def __init__(
        self,
        folder: Path,
        settings: LaunchSettings,
        additions: Callable[[int], Mapping[str, str]],
        about_to_start: Callable[[], None],
        say: Callable[[str], None],
    ) -> None:
        super().__init__(str(folder), redirects=_std(settings.redirects), tee=_std(settings.tee))
        self._additions = additions
        self._about_to_start = about_to_start
        self._say = say
        self._reports: tuple[Path, ...] = ()
        self._ranks: tuple[int, ...] = ()

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        if self._reports:
            attempt, last = envs[0]["TORCHELASTIC_RESTART_COUNT"], envs[0]["TORCHELASTIC_MAX_RESTARTS"]
            self._say(f"{self._why_again()}; starting again ({attempt} of at most {last})")
        destinations = super().reify(envs)
        for local_rank, environment in envs.items():
            environment.update(self._additions(local_rank))
        self._reports = tuple(Path(path) for path in destinations.error_files.values())
        self._ranks = tuple(int(environment["RANK"]) for environment in envs.values())
        self._about_to_start()
        return destinations

    def end_of(self, rank: int, failure: ProcessFailure) -> RankEnd:
        """What is known of a process that failed. Its traceback goes into its own log as well, where it has one."""
        path = self._reports[failure.local_rank]
        report = _report_at(path)
        log = path.with_name("stderr.log")
        if report is not None and log.exists():
            with log.open("a") as file:
                print(report.traceback or report.headline, file=file)
        return RankEnd(
            rank=rank,
            local_rank=failure.local_rank,
            pid=failure.pid,
            status=failure.exitcode,
            noticed=failure.timestamp,
            report=report,
            fault=_stack_at(path.with_name(runner.FAULT_FILE)),
        )

    def ends(self) -> tuple[RankEnd, ...]:
        """What the processes have said of their ends themselves, where the agent cannot say it."""
        found = []
        for local_rank, (rank, path) in enumerate(zip(self._ranks, self._reports, strict=True)):
            if (report := _report_at(path)) is not None:
                found.append(RankEnd(rank, local_rank, report.pid, report.exit_code, report.time, report))
        return tuple(found)

    def _why_again(self) -> str:
        reports = {rank: report for rank, path in enumerate(self._reports) if (report := _report_at(path)) is not None}
        if not reports:
            return "a process died without a report, or another machine had to start again"
        rank, report = min(reports.items(), key=lambda item: item[1].time)
        return f"local rank {rank} failed first: {report.headline}"


def run_plan(plan: LaunchPlan, say: Callable[[str], None], arrival_seconds: float | None = None) -> JobEnd:
    """Starts the processes, waits for all of them, and leaves none behind unless all succeeded.

    Args:
        say: tells the user something while the job runs.
        arrival_seconds: how long the other machines may take to come; by default as long as torch's rendezvous waits.

    Raises:
        CollectiveError: the machines did not meet.
        ConfigError: they want different things.
    """
    settings = plan.settings
    launch_id = uuid.uuid4().hex
    is_temporary = settings.log_dir is None
    folder = Path(tempfile.mkdtemp(prefix="zeroaccel_") if settings.log_dir is None else settings.log_dir)
    succeeded = False
    stopping = Stopping(
        lambda: end_leftovers(launch_id, grace_seconds=0.0), say, may_wait_in_native_code=settings.num_machines > 1
    )
    files = RankFiles(
        folder,
        settings,
        lambda local_rank: {**plan.additions(local_rank), LAUNCH_ID: launch_id},
        stopping.processes_exist,
        say,
    )
    if settings.max_restarts:
        _renew_stores()
    watch = ProcessWatch(timeout_seconds(settings.timeout), plan.port, settings.monitor_interval, say)
    with stopping, _agent_log(settings), _processes_end_in_time(), watch:
        try:
            meeting = meet_machines(plan, say, arrival_seconds)  # its store lives until the ranks have theirs
            # The agent fills in ${local_rank} and turns $$ into $; the arguments are meant as they are.
            command = [word.replace("$", "$$") for word in plan.command[1:]]
            launch_agent(_launch_config(plan, files), plan.command[0], command)
            del meeting
            succeeded = True
            return JobEnd()
        except ChildFailedError as error:
            return JobEnd(tuple(files.end_of(rank, failure) for rank, failure in sorted(error.failures.items())))
        except SignalException as error:
            return JobEnd(signal=int(error.sigval))
        except (RendezvousError, DistError) as error:
            if ends := files.ends():
                return JobEnd(ends)  # the agent has lost the store, after its processes have told why they end
            raise CollectiveError(_did_not_meet(plan, error)) from error
        finally:
            if not succeeded:
                stopping.processes_ended()
                end_leftovers(launch_id)
            if is_temporary:
                shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _processes_end_in_time() -> Iterator[None]:
    """Has the elastic agent end processes sooner than after its 30 s, for which it has no setting once one has failed.

    Those that are stopped (SIGSTOP) are woken first: the agent's SIGTERM would not reach them before its SIGKILL.
    """
    close = PContext.close

    def close_in_time(
        context: PContext, death_sig: signal.Signals | None = None, timeout: int = AFTER_FAILURE_SECONDS
    ) -> None:
        number = death_sig or signal.SIGTERM
        own = set(context.pids().values())  # some of which may have ended, and be other processes' by now
        wake_stopped([child for child in psutil.Process().children() if child.pid in own], number)
        close(context, number, min(timeout, _SHUTDOWN_SECONDS))

    PContext.close = close_in_time  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        PContext.close = close  # type: ignore[method-assign]


def _renew_stores() -> None:
    """Gives the ranks a new store for every attempt.

    The one that torch's agent would share with them keeps what the last attempt wrote, such as addresses of processes
    that are gone, and a rank that reads one before it is written anew waits for nobody (torch 2.13).
    """
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"


def _launch_config(plan: LaunchPlan, files: RankFiles) -> LaunchConfig:
    settings = plan.settings
    conf: dict[str, Any] = dict(settings.rdzv_conf)
    if settings.rendezvous == "static":
        conf["rank"] = settings.machine
    elif settings.machine_rank is not None or settings.num_machines == 1:
        conf["is_host"] = settings.is_main_machine  # otherwise torch compares addresses
    known = {field.name for field in fields(LaunchConfig)}
    # Not in every release that is supported. Without them the agent waits for 30 s, and handles all signals itself.
    newer: dict[str, Any] = {"shutdown_timeout": _SHUTDOWN_SECONDS, "signals_to_handle": "SIGQUIT"}
    return LaunchConfig(
        min_nodes=settings.min_machines or settings.num_machines,
        max_nodes=settings.num_machines,
        nproc_per_node=plan.num_local,
        logs_specs=files,
        run_id="zeroaccel",
        role=settings.role,
        rdzv_endpoint=f"{plan.host}:{plan.port}",
        rdzv_backend=settings.rendezvous,
        rdzv_configs=conf,
        max_restarts=settings.max_restarts,
        monitor_interval=settings.monitor_interval,
        log_line_prefix_template=f"[{settings.role} ${{rank}}] ",
        local_addr=plan.address,
        **{name: value for name, value in newer.items() if name in known},
    )


def _std(streams: Streams) -> Std | dict[int, Std]:
    if isinstance(streams, int):
        return Std(streams)
    return {local_rank: Std(choice) for local_rank, choice in streams.items()}


def _report_at(path: Path) -> Report | None:
    try:
        data: Mapping[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):  # none, or half of one
        return None
    return read_report(data)


def _stack_at(path: Path) -> str:
    """What a crash left, without the frames of `runner`."""
    try:
        lines = path.read_text(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return "\n".join(line for line in lines if runner.__file__ not in line)


def _did_not_meet(plan: LaunchPlan, error: Exception) -> str:
    settings = plan.settings
    words = str(error.__cause__ or error).strip().splitlines()
    return (
        f"machine {settings.machine} of {settings.num_machines} did not meet the others at {plan.host}:{plan.port}: "
        f"{words[0] if words else type(error).__name__}"
    )


@contextmanager
def _agent_log(settings: LaunchSettings) -> Iterator[None]:
    log = logging.getLogger(_TORCH_LOG)
    handlers: list[logging.Handler] = [logging.NullHandler()]
    if settings.log_dir is not None:
        handlers.append(logging.FileHandler(Path(settings.log_dir, f"launcher_{settings.machine}.log")))
    if settings.debug:
        handlers.append(logging.StreamHandler())
    for handler in handlers:
        handler.setFormatter(logging.Formatter("[elastic %(levelname).1s %(asctime)s] %(message)s"))
        log.addHandler(handler)
    propagate, log.propagate = log.propagate, False
    try:
        yield
    finally:
        log.propagate = propagate
        for handler in handlers:
            log.removeHandler(handler)
            handler.close()
