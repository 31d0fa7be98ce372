"""A job on the machines of a hostfile, started from this machine over ssh, with a `NodeJob` and a session for each.

`plan_node_jobs` plans the processes of each machine and checks everything that can be checked from here.
`MultiNodeJob` starts a `node` per machine, sends "go" when all are ready, and stops all when one fails. It connects by
ssh, or by ZEROACCEL_SSH: any command that takes `[-o option]... -- host command` and connects stdin, stdout and stderr.
It prints output as it comes, each line after the name of its machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import secrets
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import IO, Any, BinaryIO

from zeroaccel.config.launch.launch_settings import LaunchSettings, launch_settings
from zeroaccel.config.launch.launch_sources import ExplicitSettings
from zeroaccel.errors import ConfigError, Preempted

from ..machine import is_known_host, is_own_host
from .failures import RankEnd, Report, exit_code, explain_failure, first_failure, preemption
from .hostfile import Host, read_hostfile, select_hosts
from .launch_plan import DEFAULT_PORT, Program, plan_launch
from .node import MODULE

_OPTIONS = ("BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=15")
_READY_SECONDS = 120.0  # Python has to start there, from a file system that may be slow
_SIBLING_GRACE_SECONDS = 3.0  # for other machines to report the same failure, before they are stopped
_STOP_SECONDS = 20.0  # beyond --shutdown_timeout, for an orderly end of all machines
_ACKNOWLEDGE_SECONDS = 4.0  # for a machine to acknowledge "stop"; then it counts as cut off
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@dataclass(frozen=True)
class NodeJob:
    """One machine and its part of the job.

    Attributes:
        host: name of the machine for ssh.
        order: see `node.Order`; without the token.
        ranks: global ranks that the machine starts.
    """

    host: str
    order: Mapping[str, Any]
    ranks: range


@dataclass
class _SshSession:
    """A running ssh process and the state of the `node` behind it.

    Attributes:
        ready: the node waits for "go".
        ends: the ranks that failed there.
        error: an error before any rank started, and its exit code.
        code: exit code of the ssh process; None while it runs.
        acknowledged: the node has received "stop".
        cut_off: the node has not acknowledged "stop" within `_ACKNOWLEDGE_SECONDS`.
    """

    job: NodeJob
    process: subprocess.Popen[bytes]
    stdin: IO[bytes]
    ready: bool = False
    ends: list[RankEnd] = field(default_factory=list)
    error: tuple[str, int] | None = None
    code: int | None = None
    acknowledged: bool = False
    cut_off: bool = False

    def write(self, line: str) -> None:
        with contextlib.suppress(OSError):  # ssh has ended, which `_reap` reports
            self.stdin.write(f"{line}\n".encode())
            self.stdin.flush()

    def close_stdin(self) -> None:
        """Closes the input of the node, which then stops its job."""
        with contextlib.suppress(OSError):
            self.stdin.close()


def remote_command(ssh: Sequence[str], host: str, python_path: str | None) -> list[str]:
    """Returns the words that start a `node` on a machine. The shell there receives one or two paths, all quoted."""
    words = ["exec", "env", *([f"PYTHONPATH={python_path}"] if python_path else []), sys.executable, "-u", "-m", MODULE]
    options = [word for option in _OPTIONS for word in ("-o", option)]
    return [*ssh, *options, "--", host, shlex.join(words)]


class MultiNodeJob:
    """The sessions of one job on several machines.

    Reader threads only queue events; the thread that calls `run` handles them.

    1. `_start`: an ssh process per machine, which sends its order.
    2. All nodes report "ready": "go" to all of them.
    3. The first failure, signal or timeout sets `_stop_at`; then `_stop_all` sends "stop" to the others.
    4. `_wait` returns when all ssh processes have ended, or at `_give_up_at`; `_conclude` explains the failure.

    Args:
        shutdown_timeout: seconds that ranks have to end after a signal.
        debug: show tracebacks also of errors that were raised on purpose.
    """

    def __init__(self, log: Callable[[str], None], shutdown_timeout: float, *, debug: bool) -> None:
        self._log = log
        self._shutdown_timeout = shutdown_timeout
        self._debug = debug
        self._token = f"\x1e{secrets.token_hex(8)} "
        self._events: queue.SimpleQueue[tuple[_SshSession | None, Any]] = queue.SimpleQueue()
        self._sessions: list[_SshSession] = []
        self._signal = 0
        self._stop_at: float | None = None  # when "stop" is due
        self._stop_sent_at = 0.0
        self._give_up_at: float | None = None  # when the wait ends

    def run(self, jobs: Sequence[NodeJob], ssh: Sequence[str], python_path: str | None) -> int:
        """Starts the job on all machines and waits for its end. Returns the launcher's exit code.

        Args:
            ssh: the program that reaches a machine, with its own arguments.
            python_path: PYTHONPATH on the other machines.

        Raises:
            ConfigError: the program `ssh` does not exist.
        """
        before = {number: signal.signal(number, self._on_signal) for number in _STOP_SIGNALS}
        try:
            for job in jobs:
                self._sessions.append(self._start(job, ssh, python_path))
            self._wait()
        finally:
            for session in self._sessions:
                session.close_stdin()
                if session.process.poll() is None:
                    session.process.terminate()
            for number, handler in before.items():
                signal.signal(number, handler)
        return self._conclude()

    def _start(self, job: NodeJob, ssh: Sequence[str], python_path: str | None) -> _SshSession:
        command = remote_command(ssh, job.host, python_path)
        pipe = subprocess.PIPE
        try:
            # ssh gets its own session: Ctrl-C must reach only the launcher, which sends "stop" over stdin. A SIGINT
            # to ssh would cut the connection before the node could end its ranks.
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
        except OSError as error:
            fix = "install it, or name another command in ZEROACCEL_SSH"
            raise ConfigError(f"{ssh[0]}: {(error.strerror or 'cannot be run').lower()}", fix=fix) from None
        assert process.stdin and process.stdout and process.stderr, "all are pipes"
        session = _SshSession(job, process, process.stdin)
        readers = [
            threading.Thread(target=self._read, args=(session, process.stdout, sys.stdout), daemon=True),
            threading.Thread(target=self._read, args=(session, process.stderr, sys.stderr), daemon=True),
        ]
        for reader in readers:
            reader.start()
        threading.Thread(target=self._reap, args=(session, readers), daemon=True).start()
        session.write(json.dumps({**job.order, "token": self._token}))
        return session

    def _read(self, session: _SshSession, source: BinaryIO, target: Any) -> None:
        with source:
            for line in _lines(source):
                # A record can follow what a rank has printed without a newline.
                output, mark, record = line.partition(self._token)
                if mark:
                    self._events.put((session, json.loads(record)))
                if output or not mark:
                    target.write(f"[{session.job.host}] {output.rstrip()}\n")
                    target.flush()

    def _reap(self, session: _SshSession, readers: Sequence[threading.Thread]) -> None:
        code = session.process.wait()
        for reader in readers:
            reader.join(timeout=5.0)  # an orphan of a rank may hold the pipe open
        self._events.put((session, code))

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self._events.put((None, number))

    def _wait(self) -> None:
        ready_by = time.monotonic() + _READY_SECONDS
        while any(session.code is None for session in self._sessions):
            with contextlib.suppress(queue.Empty):
                self._note(*self._events.get(timeout=0.2))
            now = time.monotonic()
            late = [other.job.host for other in self._sessions if not other.ready and other.code is None]
            if late and now > ready_by and self._stop_at is None:
                self._log(f"{', '.join(late)} did not answer within {_READY_SECONDS:g} s")
                self._stop_at = now
            # Not at the first failure: other machines may be about to report an earlier one, which is the cause.
            if self._stop_at is not None and now >= self._stop_at and self._give_up_at is None:
                self._stop_all(signal.SIGTERM)
            if self._give_up_at is not None and (now > self._give_up_at or self._rest_is_cut_off(now)):
                return

    def _rest_is_cut_off(self, now: float) -> bool:
        """Returns True if no running session has acknowledged "stop" in time: the network is cut or they are down."""
        running = [session for session in self._sessions if session.code is None]
        if self._signal or now < self._stop_sent_at + _ACKNOWLEDGE_SECONDS:
            return False
        if any(session.acknowledged or not session.ready for session in running):
            return False
        for session in running:
            session.cut_off = True
        return bool(running)

    def _note(self, session: _SshSession | None, event: Any) -> None:
        if session is None:
            self._note_signal(event)
        elif isinstance(event, int):
            session.code = event
            if event and self._stop_at is None:
                self._stop_at = time.monotonic() + (_SIBLING_GRACE_SECONDS if session.ready else 0.0)
        elif "ready" in event:
            session.ready = True
            for warning in event["warnings"]:
                self._log(f"{session.job.host}: {warning}")
            self._log(f"{session.job.host}: {event['ready']}")
            if all(other.ready for other in self._sessions) and self._stop_at is None:
                for other in self._sessions:
                    other.write("go")
        elif "stopping" in event:
            session.acknowledged = True
        elif "error" in event:
            session.error = event["error"], event["exit_code"]
        else:
            ends = ({**end, "report": Report(**end["report"]) if end["report"] else None} for end in event["ends"])
            session.ends = [RankEnd(**end) for end in ends]

    def _note_signal(self, number: int) -> None:
        if self._signal:
            for session in self._sessions:
                session.close_stdin()
                session.process.kill()
            return
        self._signal = number
        self._log(f"{signal.Signals(number).name}: stopping all machines; a second signal ends the wait for them")
        self._stop_all(number)

    def _stop_all(self, number: int) -> None:
        self._give_up_at = time.monotonic() + self._shutdown_timeout + _STOP_SECONDS
        self._stop_sent_at = time.monotonic()
        self._stop_at = self._stop_at or self._stop_sent_at
        for session in self._sessions:
            if session.code is None:
                session.write(f"stop {number}")
                if not all(other.ready for other in self._sessions):
                    session.close_stdin()  # it waits for "go" and does not read "stop"

    def _conclude(self) -> int:
        """Reports how the job ended, the cause last. Returns the exit code."""
        ends = [end for session in self._sessions for end in session.ends]
        if saved := preemption(ends, sum(len(session.job.ranks) for session in self._sessions)):
            self._log(f"preempted: {saved}; run the same command again to continue")
            return Preempted.exit_code
        if self._signal:
            running = [session.job.host for session in self._sessions if session.code is None]
            self._log(
                f"{', '.join(running)} did not end in time"
                if running
                else f"stopped by {signal.Signals(self._signal).name}; all machines have ended"
            )
            return 128 + self._signal
        self._report_cut_off()
        failed = [session for session in self._sessions if session.ends]
        if failed:
            return self._report_ranks(failed)
        for session in self._sessions:
            if session.error is not None:
                message, code = session.error
                # Machines with the same set-up fail with the same message: one line for all of them.
                hosts = [
                    other.job.host for other in self._sessions if other.error is not None and other.error[0] == message
                ]
                self._log(f"{', '.join(hosts)}: {message}")
                return code
        lost = [session for session in self._sessions if session.code != 0]
        for session in lost:
            if not session.cut_off:
                self._log(f"{session.job.host}: {_lost(session)}")
        return 1 if lost else 0

    def _report_cut_off(self) -> None:
        if hosts := [session.job.host for session in self._sessions if session.cut_off]:
            self._log(
                f"{', '.join(hosts)}: no answer within {_ACKNOWLEDGE_SECONDS:g} s; the network there is cut, or the "
                "machine is down. Processes that still run there end when their collectives time out"
            )

    def _report_ranks(self, failed: Sequence[_SshSession]) -> int:
        first = first_failure([end for session in failed for end in session.ends])
        guilty = next(session for session in failed if first in session.ends)
        others = [
            other.job.host for other in self._sessions if other is not guilty and other.code != 0 and not other.cut_off
        ]
        if others:
            self._log(f"{', '.join(others)}: ended with the job")
        ranks = guilty.job.ranks
        self._log(
            explain_failure(guilty.ends, ranks=ranks, host=guilty.job.host, several_machines=True, debug=self._debug)
        )
        return exit_code(first)


def _lines(source: BinaryIO) -> Iterator[str]:
    """Yields lines as they come; a carriage return, as in progress bars, also ends a line."""
    rest = b""
    while chunk := os.read(source.fileno(), 1 << 16):
        *lines, rest = re.split(rb"\r\n|\n|\r", rest + chunk)
        yield from (line.decode(errors="replace") for line in lines)
    if rest:
        yield rest.decode(errors="replace")


def _lost(session: _SshSession) -> str:
    if session.code == 255 and not session.ready:
        return "ssh could not start anything there; its message is above"
    if not session.ready:
        return f"zeroaccel did not start there (exit code {session.code}); its message is above"
    return f"the connection was lost (exit code {session.code}), and with it the job"


FORWARDED_PREFIXES = (
    "CUDA_LAUNCH", "FI_", "GLOO_", "HF_", "KMP_", "MKL_", "NCCL_", "NUMBA_", "OMP_", "PYTHONPATH", "PYTORCH_",
    "TORCH_", "TOKENIZERS_", "TRANSFORMERS_", "UCX_", "WANDB_", "XDG_", "ZEROACCEL_",
)  # fmt: skip
"""Prefixes of the variables that are copied to the other machines."""

_NOT_FORWARDED = {
    "ZEROACCEL_SSH",
    "ZEROACCEL_CONFIG",
    "ZEROACCEL_HOSTFILE",
    "ZEROACCEL_LAUNCH_ID",
    "ZEROACCEL_MEMORY_FOLDER",
    "ZEROACCEL_RACK",
}
_HOST_SETTINGS = ("hostfile", "inclusion_filter", "exclusion_filter", "multinode_launcher")


def ssh_words(text: str) -> list[str]:
    """Returns the words of the ssh program, from ZEROACCEL_SSH; the system's ssh by default.

    Raises:
        ConfigError: quotes do not match.
    """
    try:
        return shlex.split(text) or ["ssh"]
    except ValueError as error:
        raise ConfigError(f"environment ZEROACCEL_SSH: {error}", got=text) from None


def plan_node_jobs(
    explicit: ExplicitSettings,
    program: Program,
    environ: Mapping[str, str],
    ssh: Sequence[str],
) -> list[NodeJob]:
    """Plans one job per machine of the hostfile.

    Args:
        explicit: all settings of the launch, `hostfile` among them.

    Raises:
        ConfigError: the hostfile or a filter is wrong, a machine is unknown, or counts do not fit.
    """
    settings = explicit.settings()
    assert settings.hostfile is not None, "a launch without a hostfile has no node jobs"
    hosts = select_hosts(
        read_hostfile(settings.hostfile, settings.where("hostfile")),
        settings.inclusion_filter,
        settings.exclusion_filter,
        settings.where,
    )
    for host in hosts:
        _check_known(host, f"{settings.where('hostfile')} {settings.hostfile}", ssh)
    num_local = _processes_each(settings, hosts)
    variables = {
        name: value
        for name, value in environ.items()
        if name.startswith(FORWARDED_PREFIXES) and name not in _NOT_FORWARDED and name != "PYTHONPATH"
    }
    return [
        NodeJob(
            host.name,
            {
                "folder": str(Path.cwd()),
                "environment": variables,
                "settings": _settings_of(explicit, hosts, number, num_local),
                "program": asdict(program),
            },
            range(number * num_local, (number + 1) * num_local),
        )
        for number, host in enumerate(hosts)
    ]


def describe_node_jobs(
    jobs: Sequence[NodeJob], ssh: Sequence[str], python_path: str | None, environ: Mapping[str, str]
) -> str:
    """Returns the text of a dry run: per machine its ssh command, and the processes if it were like this machine."""
    parts = []
    for job in jobs:
        order = job.order
        program = replace(Program.from_json(order["program"]), bf16_by="")
        settings = launch_settings({**order["settings"], "log_dir": None})
        plan = plan_launch(settings, program, {**environ, **order["environment"]}, here=False)
        reached = shlex.join(remote_command(ssh, job.host, python_path))
        parts.append(f"# on {job.host}, by: {reached}\n{plan.describe()}")
    return "\n\n".join(parts)


def _processes_each(settings: LaunchSettings, hosts: Sequence[Host]) -> int:
    slots = len(hosts[0].slots)
    if settings.num_machines not in (1, len(hosts)):
        expected = f"the {len(hosts)} machines that the hostfile and its filters give"
        about = settings.where("num_machines")
        raise ConfigError(about, expected=expected, got=settings.num_machines, fix="leave it out")
    if settings.num_processes is None:
        return slots
    where, got = settings.where("num_processes"), settings.num_processes
    each: int = settings.num_processes // len(hosts)
    rest = settings.num_processes % len(hosts)
    if rest:
        expected = f"a multiple of the {len(hosts)} machines of the hostfile"
        raise ConfigError(where, expected=expected, got=got, fix="or leave it out")
    if each > slots:
        expected = f"at most {slots * len(hosts)}, as the hostfile has slots={slots}"
        raise ConfigError(where, expected=expected, got=got, fix="or leave it out")
    return each


def _settings_of(explicit: ExplicitSettings, hosts: Sequence[Host], number: int, num_local: int) -> dict[str, Any]:
    settings = {name: value for name, value in explicit.values.items() if name not in _HOST_SETTINGS}
    host = hosts[number]
    settings["num_processes"] = num_local * len(hosts)
    settings["num_machines"] = len(hosts)
    if not settings.get("use_cpu") and not (host.all_slots and num_local == len(host.slots)):
        settings["gpu_ids"] = ",".join(map(str, host.slots[:num_local]))
    if len(hosts) == 1:
        settings.pop("machine_rank", None)
        return settings
    settings["machine_rank"] = number
    settings.setdefault("main_process_ip", hosts[0].address)
    settings.setdefault("main_process_port", DEFAULT_PORT)
    return settings


def _check_known(host: Host, hostfile: str, ssh: Sequence[str]) -> None:
    if is_known_host(host.address):
        return
    done = None
    if ssh[0] == "ssh":  # its config may have an alias for the machine
        done = subprocess.run([*ssh, "-G", "--", host.name], capture_output=True, text=True, check=False)
        names = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("hostname ")]
        if names and is_known_host(names[0]):
            return
    raise ConfigError(f"{hostfile}: unknown host {host.address}", fix="check the name, or use its address")


def is_only_this_machine(jobs: Sequence[NodeJob]) -> bool:
    """Returns True if the only machine is this one, so that ssh is not needed."""
    return len(jobs) == 1 and is_own_host(jobs[0].host.rpartition("@")[2])
