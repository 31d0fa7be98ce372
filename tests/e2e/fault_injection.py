"""Jobs that train until a test injects a fault, and the time that each of their processes lives after it.

The faults are a rank stopped by SIGSTOP, and a disconnected cable between two machines. The machines are
network namespaces with a switch between them, which requires root. Used by `test_fault_injection.py` and by
`benchmarks/fault_injection.py`.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Literal

import psutil

from tests import time_limits
from tests.support.environment import ROOT, free_port, outside_any_job, rank_environment
from tests.support.processes import Process, start

Starter = Literal["ranks", "torchrun", "launch"]
"""Each rank by itself, torchrun, or `zeroaccel launch`."""

SCRIPT = ROOT / "tests" / "e2e" / "endless_training.py"
MACHINE = ROOT / "tests" / "e2e" / "inside_machine.py"
_LOOK_SECONDS = 0.02
_numbers = count()  # network namespaces made by this process


@dataclass(frozen=True)
class Network:
    """Two machines, "a" and "b", and the command that runs programs on them."""

    name: str

    def address(self, machine: str) -> str:
        return {"a": "10.231.77.1", "b": "10.231.77.2"}[machine]

    def inside(self, machine: str) -> list[str]:
        """Returns the words after `python` that run a program on a machine, with a host name of its own."""
        return [str(MACHINE), f"{self.name}{machine}", f"machine-{machine}"]

    def cut(self) -> None:
        """Disconnects the cable of "b" from the switch."""
        _ip("-n", f"{self.name}s", "link", "set", "to-b", "down")

    def mend(self) -> None:
        """Reconnects it."""
        _ip("-n", f"{self.name}s", "link", "set", "to-b", "up")


@dataclass(frozen=True)
class Aftermath:
    """Result of a job after the fault.

    Attributes:
        seconds: time from the fault to the end of each process: "launcher", "launcher b", "rank 0".
            Infinite for a process that had to be killed.
        said: output of each process that was started here.
        codes: exit code of each of these processes.
    """

    seconds: Mapping[str, float]
    said: Mapping[str, str]
    codes: Mapping[str, int]

    @property
    def last(self) -> float:
        """Seconds until the last process ended."""
        return max(self.seconds.values())


@dataclass
class Job:
    """A job whose ranks have taken a few steps together.

    Attributes:
        started: the processes that were started here.
        ranks: the processes of all ranks, by rank.
    """

    folder: Path
    started: dict[str, Process] = field(default_factory=dict)
    ranks: dict[int, psutil.Process] = field(default_factory=dict)

    def stop(self, rank: int) -> None:
        """Sends SIGSTOP, as Ctrl-Z, a debugger or a batch system does."""
        self.ranks[rank].send_signal(signal.SIGSTOP)

    def after(self, fault: Callable[[], None], patience: float) -> Aftermath:
        """Injects the fault and waits at most `patience` seconds for the end of all the job's processes."""
        ended: dict[str, float] = {}
        alive = {f"rank {rank}": process for rank, process in self.ranks.items()}
        alive |= {name: psutil.Process(popen.pid) for name, popen in self.started.items()}
        fault()
        start = time.monotonic()
        while alive and time.monotonic() - start < patience:
            for popen in self.started.values():
                popen.poll()
            for name in [name for name, process in alive.items() if _is_over(process)]:
                ended[name] = time.monotonic() - start
                del alive[name]
            time.sleep(_LOOK_SECONDS)
        self.kill()
        said = {name: (self.folder / f"{name}.txt").read_text(errors="replace") for name in self.started}
        codes = {name: popen.wait() for name, popen in self.started.items()}
        return Aftermath(ended | dict.fromkeys(alive, float("inf")), said, codes)

    def kill(self) -> None:
        running = (process for process in self.started.values() if process.poll() is None)
        processes: list[Process | psutil.Process] = [*self.ranks.values(), *running]
        for process in processes:
            with suppress(psutil.NoSuchProcess, ProcessLookupError):
                process.kill()


def _is_over(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@contextmanager
def starting(
    folder: Path,
    starter: Starter,
    ranks: int,
    limit: float,
    *,
    net: Network | None = None,
    flags: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    patience: float = 90.0,
) -> Iterator[Job]:
    """Yields a running job; its processes are killed at the end.

    Args:
        folder: an empty folder for the output of its processes.
        ranks: number of ranks in total; with a network, half of them on each machine.
        limit: seconds that a collective may wait.
        flags: flags of the launcher.
        patience: seconds that the start may take on a quiet machine.
    """
    pids = folder / "pids"
    pids.mkdir()
    port = free_port()
    job = Job(folder)
    own = {"ZEROACCEL_COLLECTIVE_TIMEOUT": f"{limit:g}", "OMP_NUM_THREADS": "1", **(env or {})}
    try:
        for name, prefix, words, variables in _commands(starter, ranks, port, net, [str(SCRIPT), str(pids)], flags):
            with open(folder / f"{name}.txt", "wb") as output:
                command = [sys.executable, *prefix, *words]
                job.started[name] = start(command, variables | own, ROOT, stdout=output, stderr=output)
        wait = time_limits.Limit(patience)
        while len(files := [file for file in pids.iterdir() if file.name.isdigit()]) < ranks:
            if wait.is_over() or any(popen.poll() is not None for popen in job.started.values()):
                said = "\n".join((folder / f"{name}.txt").read_text() for name in job.started)
                raise AssertionError(f"the job did not start: {said}")
            time.sleep(0.05)
        job.ranks = {int(file.name): psutil.Process(int(file.read_text())) for file in files}
        yield job
    finally:
        _kill_all(job)


_Command = tuple[str, list[str], list[str], dict[str, str]]


def _commands(
    starter: Starter, ranks: int, port: int, net: Network | None, script: list[str], flags: Sequence[str]
) -> Iterator[_Command]:
    """Returns (name, command before the words after python, those words, environment) of each process of the job."""
    outside = outside_any_job() | ({"GLOO_SOCKET_IFNAME": "eth0"} if net else {})
    address = net.address("a") if net else "127.0.0.1"
    machines = ["a", "b"] if net else [""]
    each = ranks // len(machines)
    for number, machine in enumerate(machines):
        prefix = net.inside(machine) if net else []
        name = f"launcher {machine}".strip()
        if starter == "ranks":
            for rank in range(number * each, (number + 1) * each):
                variables = rank_environment(rank, ranks, port) | {"MASTER_ADDR": address}
                variables |= {"LOCAL_RANK": str(rank % each), "LOCAL_WORLD_SIZE": str(each)}
                variables |= {"GLOO_SOCKET_IFNAME": "eth0"} if net else {}
                yield f"rank {rank}", prefix, script, variables
        elif starter == "torchrun":
            words = ["-m", "torch.distributed.run", "--nnodes", str(len(machines)), "--node_rank", str(number)]
            words += ["--nproc_per_node", str(each), "--master_addr", address, "--master_port", str(port)]
            yield name, prefix, [*words, *flags, *script], outside
        else:
            words = ["-m", "zeroaccel.cli", "launch", "--cpu", "--num_processes", str(ranks)]
            words += ["--main_process_port", str(port)]
            if net:
                words += ["--num_machines", "2", "--machine_rank", str(number), "--main_process_ip", address]
            yield name, prefix, [*words, *flags, *script], outside


def _kill_all(job: Job) -> None:
    for popen in job.started.values():
        if popen.poll() is None:
            for child in psutil.Process(popen.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    child.kill()
    job.kill()
    for popen in job.started.values():
        popen.wait()


def namespaces_missing() -> str:
    """Returns the reason why no network namespaces can be made here; empty if they can."""
    if shutil.which("ip") is None:
        return "iproute2 is not installed"
    try:
        with network():
            return ""
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)}: {error.stderr.strip()}"


@contextmanager
def network() -> Iterator[Network]:
    """Makes two machines with a switch between them; removes them at the end.

    Raises:
        CalledProcessError: this process cannot make namespaces, bridges or pairs of interfaces.
    """
    net = Network(f"za{os.getpid()}-{next(_numbers)}")
    made: list[str] = []
    try:
        for machine in ("s", "a", "b"):
            _ip("netns", "add", f"{net.name}{machine}")
            made.append(machine)
        switch = f"{net.name}s"
        _ip("-n", switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", switch, "link", "set", "switch", "up")
        for machine in ("a", "b"):
            inside = f"{net.name}{machine}"
            port = f"to-{machine}"
            _ip("link", "add", port, "netns", switch, "type", "veth", "peer", "name", "eth0", "netns", inside)
            _ip("-n", switch, "link", "set", port, "master", "switch", "up")
            _ip("-n", inside, "addr", "add", f"{net.address(machine)}/24", "dev", "eth0")
            _ip("-n", inside, "link", "set", "lo", "up")
            _ip("-n", inside, "link", "set", "eth0", "up")
        yield net
    finally:
        for machine in made:
            _ip("netns", "del", f"{net.name}{machine}")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
