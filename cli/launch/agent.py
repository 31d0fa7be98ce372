"""Runs a `LaunchPlan` on this machine through torch's elastic agent, in this process; returns a `JobEnd`.

In order: the machines meet and compare their settings (`meet_machines`), the agent starts the ranks, `StopSignals` and
`ProcessWatch` handle signals and processes that the agent does not, and the launcher ends orphans after a failure.
`failures` explains the `JobEnd`. The agent's own log does not go to the terminal, since the `JobEnd` has all of it:
`--debug` shows it, `--log_dir` keeps it. No other part of the launcher imports all of torch.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import psutil
from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, PContext, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousHandler,
    RendezvousParameters,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

import zeroaccel
from zeroaccel.comm.environment import timeout_seconds
from zeroaccel.comm.preflight_rendezvous import NodeInfo, PreflightRendezvous, compare_with_first, rendezvous
from zeroaccel.config.launch.launch_settings import LaunchSettings, Streams
from zeroaccel.errors import CollectiveError, ConfigError

from . import runner
from .failures import AFTER_FAILURE_SECONDS, RankEnd, Report, preemption, read_report
from .forked_ranks import ranks_are_forks
from .launch_memory import launch_memory
from .launch_plan import LaunchPlan
from .orphans import LAUNCH_ID, ProcessWatch, end_orphans, ended_with_the_launcher, wake_stopped

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)  # the last is SLURM's warning


class StopSignals:
    """The handlers of the stop signals while a job runs; the former handlers are restored at the end.

    1. Until there are processes, a signal ends the launcher as it would without handlers; at once if
       `may_wait_in_native_code`, since no Python handler runs there.
    2. After `processes_exist`, the first signal raises SignalException, upon which the elastic agent passes the signal
       on and waits; a second one calls `kill`.
    3. After `processes_ended`, signals are ignored until the end, as the remaining work takes seconds.

    Args:
        seconds: time that the processes have to end after the first signal.

    Attributes:
        stopping: true after the first signal.
    """

    def __init__(
        self, kill: Callable[[], object], log: Callable[[str], None], seconds: float, *, may_wait_in_native_code: bool
    ) -> None:
        self._seconds = seconds
        self._kill = kill
        self._log = log
        self._may_wait = may_wait_in_native_code
        self.stopping = False
        self._before = {number: signal.getsignal(number) for number in STOP_SIGNALS}

    def __enter__(self) -> StopSignals:
        if self._may_wait:
            self._handle(signal.SIG_DFL)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def processes_exist(self) -> None:
        self._handle(self._on_signal)

    def processes_ended(self) -> None:
        self._handle(signal.SIG_IGN)

    def _handle(self, handler: signal.Handlers | Callable[[int, FrameType | None], None]) -> None:
        for number in STOP_SIGNALS:
            signal.signal(number, handler)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        name = signal.Signals(number)
        if self.stopping:
            self._kill()
            return
        self.stopping = True
        self._log(f"{name.name}: stopping the processes within {self._seconds:g} s; a second signal kills them")
        raise SignalException(f"the launcher received {name.name}", sigval=name)


_TORCH_WAITS = 600.0  # seconds that torch's rendezvous waits by default
# A machine counts as lost after 7 silent seconds; with torch's own settings after 15.
_KEEP_ALIVE = {"keep_alive_interval": 1, "keep_alive_max_attempt": 7}
_SAME_EVERYWHERE = ("num_processes", "num_machines", "max_restarts", "rdzv_backend", "use_cpu", "timeout")


def meet_machines(
    plan: LaunchPlan, log: Callable[[str], None], arrival_seconds: float | None
) -> PreflightRendezvous | None:
    """Meets the launchers of the other machines; None on one machine, or if --num_machines is a range.

    Raises:
        CollectiveError: a machine did not come, or cannot be reached.
        ConfigError: two machines have different settings.
    """
    settings = plan.settings
    if settings.num_machines == 1 or settings.machine_rank is None or settings.min_machines is not None:
        return None
    waits = settings.rdzv_conf.get("timeout") or settings.rdzv_conf.get("join_timeout") or _TORCH_WAITS
    return rendezvous(
        (plan.host, plan.port),
        settings.machine,
        settings.num_machines,
        node_info(plan),
        arrival_seconds=arrival_seconds if arrival_seconds is not None else float(waits),
        say=log,
    )


def node_info(plan: LaunchPlan) -> NodeInfo:
    """Returns the facts that must be the same on all machines: versions, settings, command and config contents."""
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
    training = sorted(plan.program.environment.items())
    facts |= {name: value for name, value in training if name.startswith("ACCELERATE_")}
    script, config = Path(plan.program.name), settings.deepspeed_config_file
    if settings.min_machines is not None and script.is_file():  # a late machine may have another checkout
        facts[f"the contents of {script}"] = _digest(script, "the script")
    if config is not None:
        facts[f"the contents of {config}"] = _digest(Path(config), "--deepspeed_config_file")
    return NodeInfo(socket.gethostname(), plan.num_local, facts)


def _digest(path: Path, what: str) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    except OSError as error:
        raise ConfigError(f"{what} {path}: {(error.strerror or 'unreadable').lower()}") from None


_TORCH_LOG = "torch.distributed.elastic"


@dataclass(frozen=True)
class JobEnd:
    """The end of the job on this machine. Both fields are empty after a success.

    Attributes:
        failures: the processes that failed.
        signal: the signal that ended the launcher, or 0.
    """

    failures: tuple[RankEnd, ...] = ()
    signal: int = 0


def prefixed_streams(
    settings: LaunchSettings, num_local: int, *, stdout_is_terminal: bool, stderr_is_terminal: bool
) -> Streams:
    """Returns the streams whose lines begin with their rank, in the form of `tee` of torch's agent.

    By default rank 0 writes to the terminal itself, so that its progress bars and debuggers work, and the lines of
    other ranks have prefixes. In a pipe there are no prefixes, so programs read the plain output.

    Example:
        >>> from zeroaccel.config.launch.launch_settings import launch_settings
        >>> settings = launch_settings({"num_processes": 3})
        >>> prefixed_streams(settings, 3, stdout_is_terminal=True, stderr_is_terminal=False)
        {1: 1, 2: 1}
    """
    if settings.tee or settings.redirects or settings.log_line_prefix == "none":
        tee: int | dict[int, int] = settings.tee
        return tee
    if settings.log_line_prefix == "all":
        return int(Std.ALL)
    streams = Std.OUT * stdout_is_terminal | Std.ERR * stderr_is_terminal
    first = 1 if settings.is_main_machine else 0
    return {local_rank: int(streams) for local_rank in range(first, num_local)} if streams else 0


class RankFiles(DefaultLogsSpecs):
    """The files of each rank, for its output and its error report; torch's agent asks for them at each start.

    Adds `additions` to the environment of each rank, logs why the ranks restart, and reads their reports.
    """

    def __init__(
        self,
        folder: Path,
        settings: LaunchSettings,
        additions: Callable[[int], Mapping[str, str]],
        about_to_start: Callable[[], None],
        log: Callable[[str], None],
        tee: Streams,
    ) -> None:
        super().__init__(str(folder), redirects=_std(settings.redirects), tee=_std(tee))
        self._prefixed = tee
        self._additions = additions
        self._about_to_start = about_to_start
        self._log = log
        self._reports: tuple[Path, ...] = ()
        self._ranks: tuple[int, ...] = ()

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        if self._reports:
            attempt, last = envs[0]["TORCHELASTIC_RESTART_COUNT"], envs[0]["TORCHELASTIC_MAX_RESTARTS"]
            self._log(f"{self._why_again()}; starting again ({attempt} of at most {last})")
        destinations = super().reify(envs)
        for local_rank, environment in envs.items():
            environment.update(self._additions(local_rank))
            if self._prefixed.get(local_rank, 0) if isinstance(self._prefixed, dict) else self._prefixed:
                environment["PYTHONUNBUFFERED"] = "1"  # Python buffers output to a file
        self._reports = tuple(Path(path) for path in destinations.error_files.values())
        self._ranks = tuple(int(environment["RANK"]) for environment in envs.values())
        self._about_to_start()
        return destinations

    def end_of(self, rank: int, failure: ProcessFailure) -> RankEnd:
        """Returns the end of a process that failed. Appends its traceback to its own log, if it has one."""
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
        """Returns the ends that the ranks have reported themselves, for cases in which the agent cannot."""
        return tuple(
            RankEnd(self._ranks[local_rank], local_rank, report.pid, report.exit_code, report.time, report)
            for local_rank, report in self._written().items()
        )

    def lost_by(self, killed: Sequence[int]) -> Sequence[int]:
        """Returns the local ranks that ended an attempt now: those killed, or the first to report a failure."""
        if killed:
            return killed
        return [*self._written()][:1]

    def _why_again(self) -> str:
        for rank, report in self._written().items():
            return f"local rank {rank} failed first: {report.headline}"
        return "a process died without a report, or another machine had to start again"

    def _written(self) -> dict[int, Report]:
        """Returns local rank -> its report, the earliest first."""
        reports = {rank: report for rank, path in enumerate(self._reports) if (report := _report_at(path)) is not None}
        return dict(sorted(reports.items(), key=lambda item: item[1].time))


_VISIBLE = "CUDA_VISIBLE_DEVICES"


class Places:
    """The places of this machine that have a rank: `--num_processes MIN:MAX` drops a place that loses its ranks.

    A rank that the system has killed, or that failed first, restarts with all others at the next attempt. If the same
    place loses its rank again, later attempts start no rank there, and its device is idle.

    Attributes:
        used: places, in the order of local ranks.
    """

    def __init__(self, plan: LaunchPlan, log: Callable[[str], None]) -> None:
        self.used = tuple(range(plan.num_local))
        self._fewest = plan.settings.min_processes or plan.num_local
        self._plan = plan
        self._log = log
        self._lost: frozenset[int] = frozenset()

    def note_loss(self, local_ranks: Iterable[int]) -> None:
        """Notes the ranks that an attempt has lost; called once per failed attempt."""
        lost = frozenset(self.used[rank] for rank in local_ranks)
        again, self._lost = sorted(lost & self._lost), lost
        for place in again[: max(0, len(self.used) - self._fewest)]:
            self.used = tuple(other for other in self.used if other != place)
            self._log(f"process {place} was lost twice in a row: continuing with {len(self.used)} processes")

    def additions(self, local_rank: int) -> dict[str, str]:
        """Returns the variables of a rank on top of those of the launcher and torch."""
        found = self._plan.additions(self.used[local_rank])
        if len(self.used) == self._plan.num_local:
            return found
        found["LOCAL_SIZE"] = str(len(self.used))
        if self._plan.device != "cpu":
            visible = found.get(_VISIBLE) or os.environ.get(_VISIBLE) or ",".join(map(str, range(self._plan.num_local)))
            found[_VISIBLE] = ",".join(visible.split(",")[place] for place in self.used)
        return found


def run_plan(plan: LaunchPlan, log: Callable[[str], None], arrival_seconds: float | None = None) -> JobEnd:
    """Starts the processes and waits for all of them; ends the processes of a failed job.

    Args:
        log: prints a line for the user while the job runs.
        arrival_seconds: time that the other machines have to come; by default that of torch's rendezvous.

    Raises:
        CollectiveError: the machines did not meet.
        ConfigError: they have different settings.
    """
    settings = plan.settings
    launch_id, memory_folder = uuid.uuid4().hex, launch_memory(settings)
    folder = Path(tempfile.mkdtemp(prefix="zeroaccel_") if settings.log_dir is None else settings.log_dir)
    succeeded = False
    kill_all, several = partial(end_orphans, launch_id, grace_seconds=0.0), settings.num_machines > 1
    stop_signals = StopSignals(kill_all, log, settings.shutdown_timeout, may_wait_in_native_code=several)
    # A stream that the shell has closed (>&-) is None.
    terminals = [stream is not None and stream.isatty() for stream in (sys.stdout, sys.stderr)]
    streams = prefixed_streams(
        settings, plan.num_local, stdout_is_terminal=terminals[0], stderr_is_terminal=terminals[1]
    )
    places = Places(plan, log)
    files = RankFiles(
        folder,
        settings,
        lambda local_rank: {**places.additions(local_rank), LAUNCH_ID: launch_id, **memory},
        stop_signals.processes_exist,
        log,
        streams,
    )
    _renew_stores(settings)
    watch = ProcessWatch(timeout_seconds(settings.timeout), plan.port, settings.monitor_interval, log)
    guard = ended_with_the_launcher(launch_id, settings.shutdown_timeout)
    forks = ranks_are_forks(plan, {LAUNCH_ID: launch_id}, log)
    with guard, stop_signals, memory_folder as memory, _agent_log(settings), watch, forks:
        try:
            # The object keeps its store open until the ranks have theirs: a slower machine may still read from it.
            preflight = meet_machines(plan, log, arrival_seconds)
            agent = RankAgent(_worker_spec(plan), files, places, stop_signals, settings, log)
            result = _run_agent(agent)
            del preflight
            if result is None:
                log("the job has ended, and this machine was not needed")
            elif result.is_failed():
                return JobEnd(tuple(files.end_of(rank, failure) for rank, failure in sorted(result.failures.items())))
            succeeded = True
            return JobEnd()
        except SignalException as error:
            return _end_by_signal(error, files.ends(), len(places.used))
        except (RendezvousError, DistError) as error:
            if ends := files.ends():
                return JobEnd(ends)  # the agent has lost the store, but the ranks have reported their ends
            raise CollectiveError(_did_not_meet(plan, error)) from error
        finally:
            if not succeeded:
                stop_signals.processes_ended()
                end_orphans(launch_id)
            if settings.log_dir is None:
                shutil.rmtree(folder, ignore_errors=True)


class RankAgent(LocalElasticAgent):
    """torch's elastic agent, with this launcher's time limits and with a rank at each place in use.

    It changes no class of torch. Its processes have `settings.shutdown_timeout` from a signal to SIGKILL, and less
    after a failure; torch has no setting for the latter, and for the former not in every supported release.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        files: RankFiles,
        places: Places,
        stop_signals: StopSignals,
        settings: LaunchSettings,
        log: Callable[[str], None],
    ) -> None:
        super().__init__(spec, files, log_line_prefix_template=f"[{settings.role} ${{rank}}] ")
        self._files = files
        self._places = places
        self._stop_signals = stop_signals
        self._shutdown_seconds = settings.shutdown_timeout
        self._log = log
        self._ending: set[int] = set()  # processes whose end has been noted

    def _rendezvous(self, worker_group: WorkerGroup) -> Any:
        worker_group.spec.local_world_size = len(self._places.used)
        return super()._rendezvous(worker_group)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        found: dict[int, Any] = super()._start_workers(worker_group)
        context = self._pcontext
        assert context is not None, "torch's agent has started no processes"
        # The processes' own watch calls this upon a failure, with torch's time limit.
        context.close = partial(self.close_in_time, context, context.close)  # type: ignore[method-assign]
        return found

    def close_in_time(
        self, context: PContext, close: Callable[..., None], death_sig: signal.Signals | None = None, *_: Any, **__: Any
    ) -> None:
        """Ends the processes in place of the context's own `close`, which is called with our time limit.

        Processes that are stopped (SIGSTOP) are woken first: SIGTERM would not reach them before SIGKILL.
        """
        pids = set(context.pids().values())
        if pids and not self._ending.issuperset(pids):  # the agent calls this twice
            self._ending.update(pids)
            self._places.note_loss(self._files.lost_by(killed_ranks(getattr(context, "subprocess_handlers", {}))))
        stopping, timeout = self._stop_signals.stopping, self._shutdown_seconds
        if not stopping:
            timeout = min(timeout, AFTER_FAILURE_SECONDS)
        start = time.monotonic()
        number = death_sig or signal.SIGTERM
        wake_stopped([child for child in psutil.Process().children() if child.pid in pids], number)
        close(number, timeout)
        if stopping and time.monotonic() - start > timeout:
            self._log(
                f"not all processes ended within {timeout:g} s and were killed; --shutdown_timeout sets this limit"
            )


def killed_ranks(handlers: Mapping[int, Any]) -> list[int]:
    """Returns the local ranks that a signal has ended by now, from the handlers of torch's agent."""
    return [rank for rank, handler in handlers.items() if (handler.proc.poll() or 0) < 0]


def _renew_stores(settings: LaunchSettings) -> None:
    """Gives the ranks a new store for every attempt, if they may be restarted.

    A store shared with torch's agent keeps entries of the last attempt, such as addresses of ended processes, and a
    rank that reads one before it is written again waits in vain (torch 2.13).
    """
    if settings.max_restarts:
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"


def _worker_spec(plan: LaunchPlan) -> WorkerSpec:
    """Returns the order for the agent. With a range of machines, compares this machine with the first one before.

    Raises:
        ConfigError: they differ; the other machines' job continues.
    """
    settings = plan.settings
    conf: dict[str, Any] = dict(settings.rdzv_conf)
    if settings.min_machines is not None:
        conf = {**_KEEP_ALIVE, **conf}
    if settings.rendezvous == "static":
        conf["rank"] = settings.machine
    elif settings.machine_rank is not None or settings.num_machines == 1:
        conf["is_host"] = settings.is_main_machine  # otherwise torch compares addresses
    parameters = RendezvousParameters(
        settings.rendezvous,
        f"{plan.host}:{plan.port}",
        "zeroaccel",
        settings.min_machines or settings.num_machines,
        settings.num_machines,
        local_addr=plan.address,
        **conf,
    )
    if settings.min_machines is not None:
        backend, store = create_backend(parameters)
        compare_with_first(store, node_info(plan))
        handler: RendezvousHandler = create_handler(store, backend, parameters)
    else:
        handler = get_rendezvous_handler(parameters)
    static = settings.rendezvous == "static"
    return WorkerSpec(
        role=settings.role,
        local_world_size=plan.num_local,
        rdzv_handler=handler,
        entrypoint=plan.command[0],
        # The agent replaces ${local_rank} and turns $$ into $; the arguments must reach the program unchanged.
        args=tuple(word.replace("$", "$$") for word in plan.command[1:]),
        max_restarts=settings.max_restarts,
        monitor_interval=settings.monitor_interval,
        master_addr=plan.host if static else None,
        master_port=plan.port if static else None,
        local_addr=plan.address,
    )


def _run_agent(agent: RankAgent) -> RunResult | None:
    """Runs the agent to its end; None if the job ended while this machine waited for a place in it."""
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"  # `StopSignals` has the others; read by newer releases
    handler = agent.get_worker_group().spec.rdzv_handler
    try:
        result: RunResult | None = agent.run()
    except SignalException:
        raise  # without a shutdown, which would end the job of the other machines
    except BaseException:
        handler.shutdown()
        raise
    handler.shutdown()
    return result


def _std(streams: Streams) -> Std | dict[int, Std]:
    if isinstance(streams, int):
        return Std(streams)
    return {local_rank: Std(choice) for local_rank, choice in streams.items()}


def _report_at(path: Path) -> Report | None:
    try:
        data: Mapping[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):  # no file, or half of one
        return None
    return read_report(data)


def _stack_at(path: Path) -> str:
    """Returns the stack that a crash left, without the frames of `runner` and `fork_server`."""
    try:
        lines = path.read_text(errors="replace").strip().splitlines()
    except OSError:
        return ""
    launcher_folder = f"{Path(runner.__file__).parent}{os.sep}"
    return "\n".join(line for line in lines if launcher_folder not in line)


def _did_not_meet(plan: LaunchPlan, error: Exception) -> str:
    machine, place = f"machine {plan.settings.machine} of {plan.settings.num_machines}", f"{plan.host}:{plan.port}"
    if isinstance(error, RendezvousClosedError):
        return f"{machine}: the job at {place} has ended; the other machines did not wait for this one"
    words = str(error.__cause__ or error).strip().splitlines()
    return f"{machine} did not meet the others at {place}: {words[0] if words else type(error).__name__}"


def _end_by_signal(error: SignalException, ends: tuple[RankEnd, ...], num_local: int) -> JobEnd:
    return JobEnd(ends) if preemption(ends, num_local) else JobEnd(signal=int(error.sigval))


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
