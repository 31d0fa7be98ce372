"""A job on the machines of a hostfile, started from this one over ssh: a `NodeJob` and a session for each.

`plan_node_jobs` works out what each machine runs; everything that can be checked from here is. `run_node_jobs` starts a
`node` per machine, sends "go" when all are ready, and stops all when one fails. The program that reaches a machine is
ssh, or ZEROACCEL_SSH: any command that takes `[-o option]... -- host command` and connects stdin, stdout and stderr.
Output is printed as it comes, each line behind the name of its machine.
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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

from zeroaccel.config.launch.launch_settings import LaunchSettings, launch_settings
from zeroaccel.config.launch.launch_sources import Given
from zeroaccel.errors import ConfigError

from ..machine import is_known_host, is_own_host
from .failures import RankEnd, Report, exit_code, first_failure, tell
from .hostfile import Host, read_hostfile, select_hosts
from .launch_plan import DEFAULT_PORT, Program, plan_launch
from .node import MODULE

__all__ = [
    "HANDED_ON",
    "Errand",
    "describe_errands",
    "is_only_this_machine",
    "plan_errands",
    "remote_command",
    "run_errands",
    "ssh_words",
]


_OPTIONS = ("BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=15")
_READY_SECONDS = 120.0  # python has to start there, from a file system that may be slow
_COMPANY_SECONDS = 3.0  # for machines that fail alike to say so, before the rest is stopped
_STOP_SECONDS = 30.0  # for an orderly end everywhere
_HEARD_SECONDS = 4.0  # for a machine to say that it has heard of the end; then it is cut off, and not waited for
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Errand:
    """One machine and its part of the job.

    Attributes:
        host: as ssh takes it.
        order: see `node.Order`; without the token.
        ranks: those it will start.
    """

    host: str
    order: Mapping[str, Any]
    ranks: range


@dataclass
class _Outing:
    """An errand under way.

    Attributes:
        ends: the ranks that failed there.
        error: why it did not get as far as having ranks, and the exit code for that.
        code: of the process that reached the machine; None while it runs.
        heard: it knows that the job is to stop.
        cut_off: it has not said so, and is not waited for.
    """

    errand: Errand
    process: subprocess.Popen[bytes]
    ready: bool = False
    ends: list[RankEnd] = field(default_factory=list)
    error: tuple[str, int] | None = None
    code: int | None = None
    heard: bool = False
    cut_off: bool = False

    def write(self, line: str) -> None:
        assert self.process.stdin is not None, "stdin is a pipe"
        with contextlib.suppress(OSError):  # it has ended; that is noticed elsewhere
            self.process.stdin.write(f"{line}\n".encode())
            self.process.stdin.flush()

    def hang_up(self) -> None:
        """Ends the connection, upon which the other side stops by itself."""
        assert self.process.stdin is not None, "stdin is a pipe"
        with contextlib.suppress(OSError):
            self.process.stdin.close()


def remote_command(ssh: Sequence[str], host: str, python_path: str | None) -> list[str]:
    """The words that start a `node` on a machine. What the shell over there sees holds a path or two, all quoted."""
    words = ["exec", "env", *([f"PYTHONPATH={python_path}"] if python_path else []), sys.executable, "-u", "-m", MODULE]
    options = [word for option in _OPTIONS for word in ("-o", option)]
    return [*ssh, *options, "--", host, shlex.join(words)]


def run_errands(
    errands: Sequence[Errand],
    ssh: Sequence[str],
    python_path: str | None,
    say: Callable[[str], None],
    *,
    debug: bool = False,
) -> int:
    """Starts the job on all machines and waits for its end. Returns the launcher's exit code.

    Args:
        ssh: the program that reaches a machine, with its own arguments.
        python_path: PYTHONPATH over there.
        debug: show tracebacks also of errors that were raised on purpose.

    Raises:
        ConfigError: there is no such program.
    """
    return _Job(say, debug=debug).run(errands, ssh, python_path)


class _Job:
    """All machines of one job. Threads read; everything is decided in the thread that calls `run`."""

    def __init__(self, say: Callable[[str], None], *, debug: bool) -> None:
        self._say = say
        self._debug = debug
        self._token = f"\x1e{secrets.token_hex(8)} "
        self._events: queue.SimpleQueue[tuple[_Outing | None, Any]] = queue.SimpleQueue()
        self._outings: list[_Outing] = []
        self._signal = 0
        self._stop_at: float | None = None  # when the rest is told to stop
        self._told_at = 0.0  # when the machines were told to stop
        self._give_up_at: float | None = None  # when it is no longer waited for

    def run(self, errands: Sequence[Errand], ssh: Sequence[str], python_path: str | None) -> int:
        before = {number: signal.signal(number, self._on_signal) for number in _STOP_SIGNALS}
        try:
            for errand in errands:
                self._outings.append(self._set_out(errand, ssh, python_path))
            self._wait()
        finally:
            for outing in self._outings:
                outing.hang_up()
                if outing.process.poll() is None:
                    outing.process.terminate()
            for number, handler in before.items():
                signal.signal(number, handler)
        return self._conclude()

    def _set_out(self, errand: Errand, ssh: Sequence[str], python_path: str | None) -> _Outing:
        command = remote_command(ssh, errand.host, python_path)
        pipe = subprocess.PIPE
        try:
            # In a session of its own: Ctrl-C comes here, and is passed on in words.
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
        except OSError as error:
            fix = "install it, or name another command in ZEROACCEL_SSH"
            raise ConfigError(f"{ssh[0]}: {(error.strerror or 'cannot be run').lower()}", fix=fix) from None
        outing = _Outing(errand, process)
        assert process.stdout is not None and process.stderr is not None, "both are pipes"
        readers = [
            threading.Thread(target=self._read, args=(outing, process.stdout, sys.stdout), daemon=True),
            threading.Thread(target=self._read, args=(outing, process.stderr, sys.stderr), daemon=True),
        ]
        for reader in readers:
            reader.start()
        threading.Thread(target=self._see_off, args=(outing, readers), daemon=True).start()
        outing.write(json.dumps({**errand.order, "token": self._token}))
        return outing

    def _read(self, outing: _Outing, source: BinaryIO, target: Any) -> None:
        with source:
            for line in _lines(source):
                said, mark, record = line.partition(self._token)
                if mark:
                    self._events.put((outing, json.loads(record)))
                if said or not mark:
                    target.write(f"[{outing.errand.host}] {said.rstrip()}\n")
                    target.flush()

    def _see_off(self, outing: _Outing, readers: Sequence[threading.Thread]) -> None:
        code = outing.process.wait()
        for reader in readers:
            reader.join(timeout=5.0)  # a process that was left behind may hold the pipe open
        self._events.put((outing, code))

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self._events.put((None, number))

    def _wait(self) -> None:
        ready_by = time.monotonic() + _READY_SECONDS
        while any(outing.code is None for outing in self._outings):
            with contextlib.suppress(queue.Empty):
                self._note(*self._events.get(timeout=0.2))
            now = time.monotonic()
            waiting = [o.errand.host for o in self._outings if not o.ready and o.code is None]
            if waiting and now > ready_by and self._stop_at is None:
                self._say(f"{', '.join(waiting)} did not answer within {_READY_SECONDS:g} s")
                self._stop_at = now
            if self._stop_at is not None and now >= self._stop_at and self._give_up_at is None:
                self._stop_all(signal.SIGTERM)
            if self._give_up_at is not None and (now > self._give_up_at or self._rest_is_cut_off(now)):
                return

    def _rest_is_cut_off(self, now: float) -> bool:
        """Whether only such machines are left that have not answered since they were told to stop."""
        left = [outing for outing in self._outings if outing.code is None]
        if self._signal or now < self._told_at + _HEARD_SECONDS or any(o.heard or not o.ready for o in left):
            return False
        for outing in left:
            outing.cut_off = True
        return bool(left)

    def _note(self, outing: _Outing | None, event: Any) -> None:
        if outing is None:
            self._note_signal(event)
        elif isinstance(event, int):
            outing.code = event
            if event and self._stop_at is None:
                self._stop_at = time.monotonic() + (_COMPANY_SECONDS if outing.ready else 0.0)
        elif "ready" in event:
            outing.ready = True
            for warning in event["warnings"]:
                self._say(f"{outing.errand.host}: {warning}")
            self._say(f"{outing.errand.host}: {event['ready']}")
            if all(one.ready for one in self._outings) and self._stop_at is None:
                for one in self._outings:
                    one.write("go")
        elif "stopping" in event:
            outing.heard = True
        elif "error" in event:
            outing.error = event["error"], event["exit_code"]
        else:
            outing.ends = [RankEnd(**{**one, "report": _report(one["report"])}) for one in event["ends"]]

    def _note_signal(self, number: int) -> None:
        if self._signal:
            for outing in self._outings:
                outing.hang_up()
                outing.process.kill()
            return
        self._signal = number
        self._say(f"{signal.Signals(number).name}: stopping all machines; once more leaves them to stop by themselves")
        self._stop_all(number)

    def _stop_all(self, number: int) -> None:
        self._give_up_at = time.monotonic() + _STOP_SECONDS
        self._told_at = time.monotonic()
        self._stop_at = self._stop_at or self._told_at
        for outing in self._outings:
            if outing.code is None:
                outing.write(f"stop {number}")
                if not all(one.ready for one in self._outings):
                    outing.hang_up()  # it waits to be told to go

    def _conclude(self) -> int:
        """Says what became of the job, the cause last. Returns the exit code."""
        if self._signal:
            running = [outing.errand.host for outing in self._outings if outing.code is None]
            self._say(
                f"{', '.join(running)} did not end in time"
                if running
                else f"stopped by {signal.Signals(self._signal).name}; all machines have ended"
            )
            return 128 + self._signal
        self._tell_cut_off()
        failed = [outing for outing in self._outings if outing.ends]
        if failed:
            return self._tell_ranks(failed)
        for outing in self._outings:
            if outing.error is not None:
                told = [o.errand.host for o in self._outings if o.error is not None and o.error[0] == outing.error[0]]
                self._say(f"{', '.join(told)}: {outing.error[0]}")
                return outing.error[1]
        lost = [outing for outing in self._outings if outing.code != 0]
        for outing in lost:
            if not outing.cut_off:
                self._say(f"{outing.errand.host}: {_lost(outing)}")
        return 1 if lost else 0

    def _tell_cut_off(self) -> None:
        if hosts := [outing.errand.host for outing in self._outings if outing.cut_off]:
            self._say(
                f"{', '.join(hosts)}: no answer within {_HEARD_SECONDS:g} s; the network there is cut, or the machine "
                "is down. What still runs there ends by itself when its ranks have waited for the limit"
            )

    def _tell_ranks(self, failed: Sequence[_Outing]) -> int:
        first = first_failure([end for outing in failed for end in outing.ends])
        guilty = next(outing for outing in failed if first in outing.ends)
        others = [o.errand.host for o in self._outings if o is not guilty and o.code != 0 and not o.cut_off]
        if others:
            self._say(f"{', '.join(others)}: ended with the job")
        ranks = guilty.errand.ranks
        self._say(tell(guilty.ends, ranks=ranks, host=guilty.errand.host, several_machines=True, debug=self._debug))
        return exit_code(first)


def _lines(source: BinaryIO) -> Iterator[str]:
    """Lines as they come; a carriage return, as of progress bars, ends one too."""
    rest = b""
    while chunk := os.read(source.fileno(), 1 << 16):
        *lines, rest = re.split(rb"\r\n|\n|\r", rest + chunk)
        yield from (line.decode(errors="replace") for line in lines)
    if rest:
        yield rest.decode(errors="replace")


def _report(data: Mapping[str, Any] | None) -> Report | None:
    return None if data is None else Report(**data)


def _lost(outing: _Outing) -> str:
    if outing.code == 255 and not outing.ready:
        return "ssh could not start anything there; what it said is above"
    if not outing.ready:
        return f"zeroaccel did not start there (exit code {outing.code}); what it said is above"
    return f"the connection was lost (exit code {outing.code}), and with it the job"


HANDED_ON = (
    "CUDA_LAUNCH", "FI_", "GLOO_", "HF_", "KMP_", "MKL_", "NCCL_", "NUMBA_", "OMP_", "PYTHONPATH", "PYTORCH_",
    "TORCH_", "TOKENIZERS_", "TRANSFORMERS_", "UCX_", "WANDB_", "XDG_", "ZEROACCEL_",
)  # fmt: skip
"""Beginnings of the variables that the other machines get as they are here."""

_OF_THIS_LAUNCHER = {"ZEROACCEL_SSH", "ZEROACCEL_CONFIG", "ZEROACCEL_HOSTFILE", "ZEROACCEL_LAUNCH_ID"}
_OF_THE_HOSTFILE = ("hostfile", "inclusion_filter", "exclusion_filter", "multinode_launcher")


def ssh_words(text: str) -> list[str]:
    """The program that reaches machines, from ZEROACCEL_SSH; the system's by default.

    Raises:
        ConfigError: quotes do not match.
    """
    try:
        return shlex.split(text) or ["ssh"]
    except ValueError as error:
        raise ConfigError(f"environment ZEROACCEL_SSH: {error}", got=text) from None


def plan_errands(
    given: Given,
    program: Program,
    told: Mapping[str, str],
    environ: Mapping[str, str],
    ssh: Sequence[str],
    bf16_by: str = "",
) -> list[Errand]:
    """One errand per machine of the hostfile.

    Args:
        given: all settings of the launch, `hostfile` among them.
        told: variables that tell the processes what the launch says about training.
        bf16_by: as for `plan_launch`.

    Raises:
        ConfigError: the hostfile or a filter is wrong, a machine is unknown, or counts do not fit.
    """
    settings = given.settings()
    assert settings.hostfile is not None, "a launch without a hostfile has no errands"
    hosts = select_hosts(read_hostfile(settings.hostfile), settings.inclusion_filter, settings.exclusion_filter)
    for host in hosts:
        _check_known(host, settings.hostfile, ssh)
    num_local = _processes_each(settings, hosts)
    variables = {
        name: value
        for name, value in environ.items()
        if name.startswith(HANDED_ON) and name not in _OF_THIS_LAUNCHER and name != "PYTHONPATH"
    }
    return [
        Errand(
            host.name,
            {
                "folder": str(Path.cwd()),
                "environment": variables,
                "settings": _settings_of(given, hosts, number, num_local),
                "program": asdict(program),
                "told": dict(told),
                "bf16_by": bf16_by,
            },
            range(number * num_local, (number + 1) * num_local),
        )
        for number, host in enumerate(hosts)
    ]


def describe_errands(
    errands: Sequence[Errand], ssh: Sequence[str], python_path: str | None, environ: Mapping[str, str]
) -> str:
    """The dry run: per machine how it is reached, and what it would start if it were like this one."""
    parts = []
    for errand in errands:
        order = errand.order
        program = Program(**{**order["program"], "arguments": tuple(order["program"]["arguments"])})
        settings = launch_settings({**order["settings"], "log_dir": None})
        plan = plan_launch(settings, program, {**environ, **order["environment"]}, order["told"], here=False)
        reached = shlex.join(remote_command(ssh, errand.host, python_path))
        parts.append(f"# on {errand.host}, by: {reached}\n{plan.describe()}")
    return "\n\n".join(parts)


def _processes_each(settings: LaunchSettings, hosts: Sequence[Host]) -> int:
    slots = len(hosts[0].slots)
    if settings.num_machines not in (1, len(hosts)):
        expected = f"the {len(hosts)} machines that the hostfile and its filters give"
        raise ConfigError("--num_machines", expected=expected, got=settings.num_machines, fix="leave it out")
    if settings.num_processes is None:
        return slots
    each, rest = divmod(settings.num_processes, len(hosts))
    if rest:
        expected = f"a multiple of the {len(hosts)} machines of the hostfile"
        raise ConfigError("--num_processes", expected=expected, got=settings.num_processes, fix="or leave it out")
    if each > slots:
        expected = f"at most {slots * len(hosts)}, as the hostfile has slots={slots}"
        raise ConfigError("--num_processes", expected=expected, got=settings.num_processes, fix="or leave it out")
    return each


def _settings_of(given: Given, hosts: Sequence[Host], number: int, num_local: int) -> dict[str, Any]:
    settings = {name: value for name, value in given.values.items() if name not in _OF_THE_HOSTFILE}
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
    if ssh[0] == "ssh":  # it may know the machine by a name of its own
        done = subprocess.run([*ssh, "-G", "--", host.name], capture_output=True, text=True, check=False)
        names = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("hostname ")]
        if names and is_known_host(names[0]):
            return
    raise ConfigError(f"--hostfile {hostfile}: unknown host {host.address}", fix="check the name, or use its address")


def is_only_this_machine(errands: Sequence[Errand]) -> bool:
    """Whether ssh is of no use: there is one machine, and it is the one this runs on."""
    return len(errands) == 1 and is_own_host(errands[0].host.rpartition("@")[2])
