"""The plan of a launch on this machine, made before anything starts: ranks, environment, command.

The dry run prints the plan and `agent` runs it, so the two cannot differ. This module finds every mistake of a launch
on this machine. `local_rank_option` reads the script's source, without running it, to find out if it declares
--local_rank, which the `deepspeed` command and torch's older launcher pass as an argument. Imports torch only to count
accelerators.
"""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from zeroaccel.comm.environment import usable_cores
from zeroaccel.config.diagnostics import near_names
from zeroaccel.config.launch.launch_settings import LaunchSettings
from zeroaccel.errors import ConfigError

from ..machine import (
    Device,
    allocator_variable,
    devices,
    divide_cores,
    is_known_host,
    is_own_host,
    neighbouring_cores,
    node_cores,
    own_address_towards,
    port_trouble,
    untried_versions,
)

ProgramKind = Literal["script", "module", "executable"]

LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 29500  # torchrun's, for several machines
FREE_PORT = 0
CORES = "ZEROACCEL_CPU_CORES"  # the same name is in `runner`, which imports nothing
LOCAL_RANK_AS = "--local_rank_as="  # also in `runner`


@dataclass(frozen=True)
class Program:
    """The program that every process runs.

    Attributes:
        name: a path for a script, a dotted name for a module, a path or a command for an executable.
        local_rank_option: the option that passes the local rank, such as "--local_rank"; "" passes none.
        environment: variables of the processes with the settings of training.
        bf16_by: the source that asks for bf16, as the start of a message; "" if there is none.
    """

    name: str
    arguments: tuple[str, ...] = ()
    kind: ProgramKind = "script"
    local_rank_option: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    bf16_by: str = ""

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Program:
        """Returns the program from the JSON of its `asdict`."""
        return cls(**{**data, "arguments": tuple(data["arguments"])})

    def command(self) -> tuple[str, ...]:
        """Returns the words of the command; `runner` runs scripts and modules and reports how they end."""
        if self.kind == "executable":
            return (self.name, *self.arguments)
        # The path of runner: `-m zeroaccel.cli.launch.runner` would search zeroaccel in the working directory first.
        runner = str(Path(__file__).with_name("runner.py"))
        flag = ("-m",) if self.kind == "module" else ()
        rank = (f"{LOCAL_RANK_AS}{self.local_rank_option}",) if self.local_rank_option else ()
        return (sys.executable, "-u", runner, *rank, *flag, self.name, *self.arguments)


@dataclass(frozen=True)
class LaunchPlan:
    """One machine's part of a job.

    Attributes:
        command: words of the command of each process.
        num_local: processes on this machine.
        device: "cuda" or "cpu".
        environment: variables that every process here gets on top of the launcher's own.
        host, port: address of the rendezvous; port 0 is a free one, chosen at the start.
        address: address at which the other machines reach this one.
        headline: one line about the processes that start.
        warnings: one line each, for settings that are allowed but seldom intended.
        cores: per process the cores it is bound to, such as "0,1"; empty without binding.
        program: the user's program; `command` runs it.
    """

    settings: LaunchSettings
    command: tuple[str, ...]
    num_local: int
    device: str
    environment: Mapping[str, str]
    host: str
    port: int
    address: str
    headline: str
    warnings: tuple[str, ...] = ()
    cores: tuple[str, ...] = ()
    program: Program = Program("")

    @property
    def world_size(self) -> int:
        machines: int = self.settings.num_machines
        return self.num_local * machines

    def rank_environment(self, local_rank: int) -> dict[str, str]:
        """Returns the variables of a process on top of the launcher's; "<...>" for values that the start decides."""
        settings = self.settings
        is_static = settings.rendezvous == "static"
        ranks_are_known = is_static or settings.num_machines == 1
        return {
            "RANK": str(settings.machine * self.num_local + local_rank) if ranks_are_known else "<order of arrival>",
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": f"<at most {self.world_size}>" if settings.is_elastic else str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.num_local),
            "MASTER_ADDR": self.host if ranks_are_known else "<machine of rank 0>",
            "MASTER_PORT": str(self.port) if is_static and self.port != FREE_PORT else "<free port>",
            **self.additions(local_rank),
        }

    def additions(self, local_rank: int) -> dict[str, str]:
        """Returns the variables of one process on top of those of the launcher and torch."""
        cores = {CORES: self.cores[local_rank]} if self.cores else {}
        # LOCAL_SIZE is the `deepspeed` command's name for LOCAL_WORLD_SIZE, which scripts written for it read.
        return {**self.environment, "LOCAL_SIZE": str(self.num_local), **cores}

    def describe(self) -> str:
        """Returns the text of a dry run: the environment and the command of each process, as a shell accepts them."""
        lines = [f"# {self.headline}"]
        for local_rank in range(self.num_local):
            variables = [f"{name}={shlex.quote(value)}" for name, value in self.rank_environment(local_rank).items()]
            lines += [f"# process {local_rank} of {self.num_local}", " ".join([*variables, shlex.join(self.command)])]
        return "\n".join(lines)


def plan_launch(
    settings: LaunchSettings,
    program: Program,
    environ: Mapping[str, str],
    *,
    here: bool = True,
    is_dry: bool = False,
) -> LaunchPlan:
    """Plans the processes of this machine.

    Args:
        environ: the launcher's environment.
        here: False for another machine like this one, whose ports and folders cannot be checked.
        is_dry: the plan is only printed, so unknown machines cause a warning instead of an error.

    Raises:
        ConfigError: the program does not exist, the port is taken, the address is unknown, counts do not fit, or an
            accelerator has no bf16.
    """
    # A mistake that would stop every rank is one message here, rather than the same traceback from each rank.
    about_program = _check_program(program, environ, is_dry=is_dry)
    host, port, about_host = _meeting_point(settings, here=here, is_dry=is_dry)
    _check_log_dir(settings)
    visible = () if settings.use_cpu else devices()
    num_devices = _num_devices(settings, environ, len(visible))
    if program.bf16_by and (without := [device.name for device in visible if not device.has_bf16]):
        raise ConfigError(f"{program.bf16_by}: {without[0]} has no bf16", fix="use fp16")

    # One rank per accelerator; on CPU a single one, since more of them only share its cores.
    num_processes = settings.num_processes
    chosen = 1 if settings.use_cpu or settings.gpu_ids == "all" else len(settings.gpu_ids.split(","))
    wanted = num_devices or chosen
    num_local = wanted if num_processes is None else num_processes // settings.num_machines
    _check_local_ranks(settings, num_local)
    threads, about_threads = _threads(num_local, settings.num_cpu_threads_per_process, environ)
    device_memory = _device_memory(environ) if num_devices and settings.expandable_segments else {}
    cores, about_cores = _cores(settings, program, num_local, visible, environ)
    about = [_about_processes(settings, num_local, num_devices), about_threads]
    about += [f"{name}={value} (--no_expandable_segments leaves it out)" for name, value in device_memory.items()]
    return LaunchPlan(
        settings=settings,
        command=program.command(),
        num_local=num_local,
        device="cuda" if num_devices else "cpu",
        environment={**_environment(settings, threads), **device_memory, **program.environment},
        host=host,
        port=port,
        address="" if is_dry and not is_known_host(host) else _own_address(settings, host),
        headline=", ".join([*about, *about_cores]),
        warnings=(
            *about_program,
            *about_host,
            *(line for line, _ in untried_versions()),
            *_warnings(settings, num_local, num_devices),
        ),
        cores=cores,
        program=program,
    )


def _cores(
    settings: LaunchSettings, program: Program, num_local: int, visible: Sequence[Device], environ: Mapping[str, str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the cores of each process, and their part of the headline."""
    if not settings.enable_cpu_affinity:
        of_nodes = _cores_of_nodes(settings, num_local, visible, environ) if program.kind != "executable" else ()
        words = "bound to the cores and memory of their GPUs' NUMA nodes (--no_numa_affinity turns this off)"
        return of_nodes, (words,) if of_nodes else ()
    if program.kind == "executable":
        raise ConfigError(
            f"{settings.where('enable_cpu_affinity')}: programs of --no_python cannot be bound",
            fix="leave out one of the two",
        )
    return divide_cores(neighbouring_cores(), num_local), ()


def _cores_of_nodes(
    settings: LaunchSettings, num_local: int, visible: Sequence[Device], environ: Mapping[str, str]
) -> tuple[str, ...]:
    """Returns per process the cores of its GPU's NUMA node, or nothing unless all are known."""
    ids = [*map(str, range(len(visible)))] if settings.gpu_ids == "all" else settings.gpu_ids.split(",")
    of_node = [visible[int(name)] for name in ids[:num_local] if name.isdigit() and int(name) < len(visible)]
    # With CUDA_VISIBLE_DEVICES, the numbers of --gpu_ids may name devices that this process does not see.
    is_hidden = settings.gpu_ids != "all" and "CUDA_VISIBLE_DEVICES" in environ
    if not settings.numa_affinity or settings.use_cpu or is_hidden or len(of_node) < num_local:
        return ()
    cores = [node_cores(device.pci) for device in of_node]
    return tuple(",".join(map(str, each)) for each in cores) if all(cores) else ()


def _check_program(program: Program, environ: Mapping[str, str], *, is_dry: bool) -> tuple[str, ...]:
    """Checks that the program exists. Returns warnings for a dry run, as a module may be on other machines only."""
    if program.kind == "executable":
        if shutil.which(program.name, path=environ.get("PATH")) is None:
            raise ConfigError(f"{program.name}: no such command, or not executable", fix="give its path")
    elif program.kind == "module":
        return _check_module(program.name, is_dry=is_dry)
    else:
        _check_script(Path(program.name))
    return ()


def _check_script(path: Path) -> None:
    if path.is_file():
        if not os.access(path, os.R_OK):
            raise ConfigError(f"{path}: the script cannot be read", fix="change its permissions")
        return
    if path.is_dir():
        raise ConfigError(f"{path}: expected a script, got a folder", fix="name a file in it, or use --module")
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: there is no folder {path.parent}")
    names = [entry.name for entry in path.parent.iterdir() if entry.is_file()]
    near = [str(path.parent / name) for name in near_names(path.name, names, 3)]
    raise ConfigError(
        f"{path}: there is no such script in {path.parent.resolve()}",
        fix=f"did you mean {' or '.join(near)}?" if near else "",
    )


def _check_module(name: str, *, is_dry: bool) -> tuple[str, ...]:
    # Finding a submodule would import its packages, which only the processes should do.
    top = name.partition(".")[0]
    if importlib.machinery.PathFinder.find_spec(top, [os.getcwd()]) or (top and importlib.util.find_spec(top)):
        return ()
    text = f"--module {name}: there is no module {top!r} in this folder or among the installed ones"
    is_script = name.endswith(".py") or "/" in name
    if is_dry and not is_script:
        return (text,)
    raise ConfigError(text, fix="give a script without --module" if is_script else "")


def _meeting_point(settings: LaunchSettings, *, here: bool, is_dry: bool = False) -> tuple[str, int, tuple[str, ...]]:
    """Returns host and port, checked if this machine listens there, and warnings about them."""
    several, about_ip = settings.num_machines > 1, settings.where("main_process_ip")
    host = settings.main_process_ip or LOOPBACK
    notes: tuple[str, ...] = ()
    port = settings.main_process_port
    if port is None:
        port = DEFAULT_PORT if several else FREE_PORT
    if several and not is_known_host(host):
        if not is_dry:
            raise ConfigError(about_ip, expected="an address or the name of a known host", got=host)
        notes = (f"{about_ip} {host}: this machine does not know this host, so the launch would fail",)
    elif not several and not is_own_host(host):
        text = f"{about_ip} {host}: does nothing on one machine; set --num_machines if there are more"
        notes, host = (text,), LOOPBACK
    listens = here and settings.is_main_machine and (settings.machine_rank is not None or not several)
    if listens and port != FREE_PORT and (trouble := port_trouble(port)):
        otherwise = "the same on every machine" if several else "or leave it out for a free one"
        about_port = settings.where("main_process_port")
        raise ConfigError(f"{about_port} {port}: {trouble}", fix=f"choose another, {otherwise}")
    return host, port, notes


def _own_address(settings: LaunchSettings, host: str) -> str:
    try:
        return own_address_towards(host)
    except OSError as error:
        where = settings.where("main_process_ip")
        raise ConfigError(f"{where} {host}: {error.strerror or error}", fix="check the network") from None


def _check_log_dir(settings: LaunchSettings) -> None:
    if settings.log_dir is None:
        return
    path = Path(settings.log_dir)
    existing = next(place for place in (path, *path.absolute().parents) if place.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        problem = "is not writable" if existing.is_dir() else "is a file"
        raise ConfigError(f"{settings.where('log_dir')} {path}: {existing} {problem}", fix="choose another folder")


def _check_local_ranks(settings: LaunchSettings, num_local: int) -> None:
    for name, streams in (("tee", settings.tee), ("redirects", settings.redirects)):
        if isinstance(streams, dict) and (beyond := [rank for rank in streams if rank >= num_local]):
            raise ConfigError(settings.where(name), expected=f"local ranks 0 to {num_local - 1}", got=beyond[0])


def _num_devices(settings: LaunchSettings, environ: Mapping[str, str], num_visible: int) -> int:
    """Returns the number of accelerators that the processes of this machine will see."""
    if settings.use_cpu or settings.gpu_ids == "all":
        return num_visible
    ids = settings.gpu_ids.split(",")
    if not num_visible:
        return 0
    # If some devices are hidden, numbers may exceed those visible here; CUDA resolves names of devices.
    hidden = "CUDA_VISIBLE_DEVICES" in environ
    if not hidden and any(name.isdigit() and int(name) >= num_visible for name in ids):
        there = f"devices 0 to {num_visible - 1}"
        where, fix = settings.where("gpu_ids"), "or leave it out for all"
        raise ConfigError(where, expected=there, got=settings.gpu_ids, fix=fix)
    return len(ids)


def _threads(num_local: int, requested: int | None, environ: Mapping[str, str]) -> tuple[str | None, str]:
    """Returns OMP_NUM_THREADS, or None if the user has set it, and its part of the headline.

    Unlike torchrun's, the default is not 1, which on CPU would leave all cores but one per process idle.
    """
    if requested is not None:
        return str(requested), f"{_count(requested, 'thread')} each"
    cores = usable_cores()
    fair = max(1, cores // num_local)
    in_environment = environ.get("OMP_NUM_THREADS")
    if in_environment is None:
        return str(fair), f"{_count(fair, 'thread')} each"
    about = f"OMP_NUM_THREADS={in_environment}"
    if in_environment != str(fair):
        about += f" from the environment ({_count(cores, 'core')} / {_count(num_local, 'process')} would be {fair})"
    return None, about


def _environment(settings: LaunchSettings, threads: str | None) -> dict[str, str]:
    environment: dict[str, str] = {}
    if threads is not None:
        environment["OMP_NUM_THREADS"] = threads
    if settings.use_cpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    elif settings.gpu_ids != "all":
        environment["CUDA_VISIBLE_DEVICES"] = settings.gpu_ids
    if settings.timeout is not None:
        environment["ZEROACCEL_COLLECTIVE_TIMEOUT"] = f"{settings.timeout:g}"
    if settings.debug:
        environment["ZEROACCEL_DEBUG"] = "1"
    return environment


def _device_memory(environ: Mapping[str, str]) -> dict[str, str]:
    """Turns on expandable segments: in fixed ones, units of different sizes leave gaps that fit no other unit."""
    variable = allocator_variable()
    is_set = any(name in environ for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))  # if only to ""
    return {variable: "expandable_segments:True"} if variable and not is_set else {}


def _about_processes(settings: LaunchSettings, num_local: int, devices: int) -> str:
    text = f"{_count(num_local, 'process')} on {'cuda' if devices else 'cpu'}"
    if settings.num_machines > 1:
        world_size = num_local * settings.num_machines
        place = "of" if settings.machine < settings.num_machines else "beyond the"
        text = f"machine {settings.machine} {place} {settings.num_machines}: {num_local} of {world_size} processes on "
        text += "cuda" if devices else "cpu"
    if settings.num_processes is None:
        why = "one per accelerator" if devices else "no accelerator here"
        text += f" ({why}; --num_processes N to choose)"
    return text


_CROWD = 4  # processes per core from which on a start is worth a warning


def _warnings(settings: LaunchSettings, num_local: int, devices: int) -> tuple[str, ...]:
    if settings.gpu_ids != "all" and not devices and not settings.use_cpu:
        about = f"{settings.where('gpu_ids')} {settings.gpu_ids}"
        return (f"{about}: {_count(num_local, 'process')} on the CPU, as there is no accelerator",)
    if not devices and num_local > _CROWD * (cores := usable_cores()):
        return (
            f"{_count(num_local, 'process')} share {_count(cores, 'core')}: they import torch in turn, so the first "
            f"output takes long; use --num_processes {cores}",
        )
    if not 0 < devices < num_local:
        return ()
    return (
        f"{num_local} processes share {_count(devices, 'accelerator')}, which the engine refuses; "
        f"use --num_processes {devices} per machine, or --cpu",
    )


def _count(number: int, noun: str) -> str:
    plural = noun + ("es" if noun.endswith("s") else "s")
    return f"{number} {noun if number == 1 else plural}"


_SPELLINGS = ("--local_rank", "--local-rank")
_DECLARING = ("add_argument", "option")
_MAX_FILES = 60  # number of a script's own modules to search; one of the first declares the option
_MAX_NBYTES = 2_000_000


def local_rank_option(script: Path) -> str | None:
    """Returns the option as the script spells it, "--local_rank" or "--local-rank"; None if it declares none.

    Args:
        script: a file of Python source; a file with syntax errors declares nothing.
    """
    folder = script.resolve().parent
    waiting, seen = [script.resolve()], set[Path]()
    while waiting and len(seen) < _MAX_FILES:
        path = waiting.pop(0)
        if path in seen:
            continue
        seen.add(path)
        tree = _parsed(path)
        if tree is None:
            continue
        if spelled := _declared(tree):
            return spelled
        waiting += _imported(tree, path, folder)
    return None


def _parsed(path: Path) -> ast.Module | None:
    try:
        if path.stat().st_size > _MAX_NBYTES:
            return None
        return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _declared(tree: ast.Module) -> str | None:
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call):
            continue
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        if name in _DECLARING:
            for argument in call.args:
                if isinstance(argument, ast.Constant) and argument.value in _SPELLINGS:
                    return str(argument.value)
        if name == "Fire" and call.args and isinstance(call.args[0], ast.Name):
            function = functions.get(call.args[0].id)
            if function is not None and _takes_local_rank(function):
                return _SPELLINGS[0]
    return None


def _takes_local_rank(function: ast.FunctionDef) -> bool:
    arguments = function.args
    return any(argument.arg == "local_rank" for argument in (*arguments.args, *arguments.kwonlyargs))


def _imported(tree: ast.Module, path: Path, folder: Path) -> Iterator[Path]:
    """Yields the files in the script's folder that a module imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _files(folder, alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = folder if not node.level else path.parents[min(node.level, len(path.parents)) - 1]
            yield from _files(base, node.module or "")
            for alias in node.names:
                yield from _files(base, f"{node.module}.{alias.name}" if node.module else alias.name)


def _files(folder: Path, name: str) -> Iterator[Path]:
    if not name or name.startswith("."):
        return
    place = folder.joinpath(*name.split("."))
    for path in (place.with_name(f"{place.name}.py"), place / "__init__.py"):
        if path.is_file():
            yield path
