"""A process that imports torch and the package once, and then starts Python programs as forks of itself.

    python -m tests.support.fork_server SOCKET [MODULE ...]

`processes.start` is the client. A request contains the parts of a command: words, environment, folder, files. The
fork sets up the state that a new interpreter would have: signals, streams, `sys.path`, `__main__`. Its own `subprocess`
forks as well, except in ranks, so the ranks of a launcher start as cheaply. `needs_interpreter` detects commands
that a fork cannot run, and a fork differs from an interpreter in these points:

- all forks have the same hash seed;
- /proc shows the command line and the first environment of this process;
- modules of the package and of torch are imported already, and some of numba and pandas;
- the end of a fork does not free modules: it ends threads, runs exit handlers, flushes streams, and exits.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import io
import linecache
import os
import pickle
import random
import runpy
import select
import signal
import site
import socket
import subprocess
import sys
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

MOST_BYTES = 150_000  # limit for the bytes of a request

_PRELOADED = (
    "torch",
    "torch._dynamo",
    "torch.distributed.elastic.multiprocessing",
    "torch.distributed.launcher.api",
    "torch.distributed.checkpoint.hf_storage",
    "torch.distributed.pipelining",
    "torch.utils.data",
    "zeroaccel.initialization",
    "zeroaccel.inference",
    "zeroaccel.accelerate",
    "zeroaccel.checkpoint",
    "zeroaccel.comm.pipeline_group",
    "zeroaccel.compat",
    "zeroaccel.cli.main",
    "numpy.ma",
    "jinja2",
    "PIL.Image",
)
_PRELOADED_WITH_A_THREAD = ("pandas", "pyarrow.compute", "pyarrow.dataset")  # jemalloc starts its thread in forks
# The interpreter reads these at its start, or torch when it is imported; the prefixes of other variables are harmless.
_READ_AT_START = (
    "PYTHON",
    "TORCH",
    "PYTORCH",
    "LD_",
    "OMP_",
    "MKL_",
    "KMP_",
    "OPENBLAS_",
    "MALLOC_",
    "GLIBC_",
    "NUMBA_",
)
_READ_LATER = ("TORCHELASTIC_", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "TORCH_NCCL_ASYNC_ERROR_HANDLING")
_IMITATED = ("PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "OMP_NUM_THREADS")


@dataclass(frozen=True)
class Request:
    """A request to start one program.

    Attributes:
        words: its command line, with the interpreter first.
        files: the descriptors that the program has for the sent files; stdin, stdout and stderr are 0 to 2.
        cores: the cores on which it may run.
        session: True if it leads a session of its own.
    """

    words: Sequence[str]
    environment: Mapping[str, str]
    folder: str
    files: Sequence[int]
    cores: Sequence[int]
    session: bool


def needs_interpreter(
    words: Sequence[str], environment: Mapping[str, str], folder: str, server: Mapping[str, str]
) -> bool:
    """Returns True if a command can run only in a new interpreter.

    Args:
        server: the environment in which the server was started.
    """
    program = _program(words) if sys.platform == "linux" and words[0] == sys.executable else None
    if program is not None and program[0].endswith("/launch/fork_server.py"):
        return True  # which counts its threads, and torch's pool has one in a fork
    if program is None or not (program[0] in ("-c", "-m") or os.path.isfile(os.path.join(folder, program[0]))):
        return True
    names = {name for name in {*environment, *server} if name.startswith(_READ_AT_START)}
    return any(
        environment.get(name) != server.get(name)
        for name in names
        if name not in _IMITATED and not name.startswith(_READ_LATER)
    )


def _program(words: Sequence[str]) -> list[str] | None:
    """Returns the words after the interpreter's own options; None if a fork cannot imitate an option."""
    rest = list(words[1:])
    while rest and rest[0] == "-u":
        del rest[0]
    return rest if rest and (rest[0] in ("-c", "-m") or not rest[0].startswith("-")) else None


def main() -> None:
    """Serves requests until the client closes the socket."""
    control = socket.socket(fileno=int(sys.argv[1]))
    origin = _preload([*_PRELOADED, *sys.argv[2:]])
    _fork_in_subprocess(origin)
    reader, writer = os.pipe2(os.O_NONBLOCK)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    reports: dict[int, int] = {}  # pipe of each process that reports its end
    control.send(b"ready")
    while True:
        waited: list[Any] = [control, reader]
        for ready in select.select(waited, [], [])[0]:
            if ready is reader:
                os.read(reader, 4096)
            elif not _serve(control, origin, reports):
                return
        while reports and (ended := os.waitpid(-1, os.WNOHANG))[0]:
            _tell(reports.pop(ended[0]), os.waitstatus_to_exitcode(ended[1]))


def _serve(control: socket.socket, origin: _Origin, reports: dict[int, int]) -> bool:
    """Starts the program of one request. Returns False at the end of the connection."""
    data, files, *_ = socket.recv_fds(control, MOST_BYTES, 16)
    if not data:
        return False
    request: Request = pickle.loads(data)
    report, *files = files
    if not (process := os.fork()):
        _become(request, dict(zip(request.files, files, strict=True)), origin)
    reports[process] = report
    _tell(report, process, last=False)
    for file in files:
        os.close(file)
    return True


def _tell(report: int, number: int, last: bool = True) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(report, f"{number}\n".encode())
    if last:
        os.close(report)


# ---- The start ----


@dataclass(frozen=True)
class _Origin:
    """State of a new interpreter, recorded before any program runs."""

    environment: Mapping[str, str]
    path: Sequence[str]  # without the script's folder and PYTHONPATH
    exits: Sequence[tuple[Callable[..., object], tuple[Any, ...], dict[str, Any]]]  # handlers of `atexit`
    finalizers: frozenset[Any]  # finalizers of `weakref`


def _preload(names: Sequence[str]) -> _Origin:
    """Imports the modules that programs need, in one thread; modules that are not installed are left out."""
    environment = dict(os.environ)
    own = {os.path.abspath(entry) for entry in environment.get("PYTHONPATH", "").split(os.pathsep)}
    path = [entry for entry in sys.path[1:] if os.path.abspath(entry) not in own]
    exits: list[tuple[Callable[..., object], tuple[Any, ...], dict[str, Any]]] = []
    register = atexit.register

    def record(function: Callable[..., object], *args: Any, **kwargs: Any) -> Callable[..., object]:
        exits.append((function, args, kwargs))
        return register(function, *args, **kwargs)

    atexit.register = record  # type: ignore[assignment]
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # forks would not have the thread
    _import(names)
    _load_kernels()
    if (threads := len(os.listdir("/proc/self/task"))) != 1:
        raise RuntimeError(f"importing {names} has started {threads - 1} threads, which forks would lack")
    _import(_PRELOADED_WITH_A_THREAD)
    atexit.register = register
    gc.collect()
    gc.freeze()  # so that garbage collection in a fork does not copy pages
    registry: Mapping[Any, Any] = weakref.finalize._registry  # type: ignore[attr-defined]
    return _Origin(environment, path, exits, frozenset(registry))


def _import(names: Sequence[str]) -> None:
    for name in names:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)


def _load_kernels() -> None:
    """Runs the kernels that every step uses: at the first one, numba imports for half a second."""
    import torch

    from zeroaccel.ops import reductions

    numbers = torch.ones(2, 2)
    reductions.sum_ranks(torch.empty(2), numbers, 1.0)
    reductions.l2_norm([numbers])


# ---- In the fork ----

_replaced: list[Any] = []  # streams of the process that forked: kept, so that nothing flushes them twice


def _set_files(files: dict[int, int]) -> None:
    """Moves the open files to their descriptors and closes all others."""
    # First above all requested descriptors, so that none overwrites another.
    high = max(*files, *files.values(), 63) + 1
    for target, source in files.items():
        os.dup2(source, high + target)
    for target in files:
        os.dup2(high + target, target)
    wanted = sorted(files)
    for low, top in zip([-1, *wanted], [*wanted, os.sysconf("SC_OPEN_MAX")], strict=True):
        if low + 1 < top:  # an empty range before descriptor 0 would mean all descriptors
            os.closerange(low + 1, top)


def _become(request: Request, files: dict[int, int], origin: _Origin) -> NoReturn:
    """Turns this fork into the process that a command line would have started, and ends it.

    Args:
        files: the program's descriptors, and the corresponding descriptors in this process.
    """
    code = 1
    try:
        os.chdir(request.folder)
        if request.session:
            os.setsid()
        os.sched_setaffinity(0, request.cores)
        _set_files(files)
        _forget(origin)
        os.environ.clear()
        os.environ.update(request.environment)
        rest = _program(request.words)
        assert rest is not None, "else the command would not have come here"
        options = request.words[1 : len(request.words) - len(rest)]
        _open_streams("-u" in options or bool(request.environment.get("PYTHONUNBUFFERED")))
        _seed(request)
        sys.orig_argv = list(request.words)
        sys.dont_write_bytecode = bool(request.environment.get("PYTHONDONTWRITEBYTECODE"))
        code = _run(rest, request.environment, origin)
    except BaseException:
        traceback.print_exc()
    _end(code)


def _end(code: int) -> NoReturn:
    """Ends as an interpreter does, but without freeing modules, which would take longer than most programs."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    ctypes.pythonapi.fflush(None)
    os._exit(code)


def _forget(origin: _Origin) -> None:
    """Removes state that belongs to the process that forked."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.disable()
    atexit._clear()
    for function, args, kwargs in origin.exits:
        atexit.register(function, *args, **kwargs)
    registry: Mapping[Any, Any] = weakref.finalize._registry  # type: ignore[attr-defined]
    for finalizer in set(registry) - origin.finalizers:
        finalizer.detach()
    sys.excepthook = sys.__excepthook__
    threading.excepthook = threading.__excepthook__
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]


def _open_streams(unbuffered: bool) -> None:
    _replaced.extend((sys.stdin, sys.stdout, sys.stderr, sys.__stdin__, sys.__stdout__, sys.__stderr__))
    streams: dict[str, Any] = {"stdin": open(0, closefd=False)}  # noqa: SIM115 - for the life of the process
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        raw: Any = io.FileIO(descriptor, "w", closefd=False)
        raw.name = f"<{name}>"
        is_error = name == "stderr"
        streams[name] = io.TextIOWrapper(
            raw if unbuffered else io.BufferedWriter(raw),
            errors="backslashreplace" if is_error else None,
            line_buffering=not unbuffered and (is_error or raw.isatty()),
            write_through=unbuffered,
        )
    for name, stream in streams.items():
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _seed(request: Request) -> None:
    """Seeds the random generators anew, and sets the number of threads that the environment requests."""
    import numpy
    import torch

    random.seed()
    numpy.random.seed()
    asked = request.environment.get("OMP_NUM_THREADS", "")
    torch.set_num_threads(int(asked) if asked.isdecimal() else len(request.cores))


def _run(rest: list[str], environment: Mapping[str, str], origin: _Origin) -> int:
    """Runs the program as `__main__`. Returns its exit code."""
    kind = rest.pop(0) if rest[0] in ("-c", "-m") else "script"
    name = rest[0]
    first = {"-c": "", "-m": os.getcwd()}.get(kind, os.path.dirname(os.path.realpath(name)))
    asked = [os.path.abspath(entry) for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:] = [first, *dict.fromkeys(asked), *origin.path]
    sys.path_importer_cache.clear()
    if any(os.path.exists(os.path.join(entry, "sitecustomize.py")) for entry in asked):
        sys.modules.pop("sitecustomize", None)
        site.execsitecustomize()
    sys.argv = ["-c" if kind == "-c" else name, *rest[1:]]
    module = sys.modules["__main__"] = ModuleType("__main__")
    vars(module)["__builtins__"] = builtins
    try:
        if kind == "-m":
            runpy._run_module_as_main(name)  # type: ignore[attr-defined]
        elif kind == "-c":
            if sys.version_info >= (3, 13):  # tracebacks show its lines
                linecache.cache["<string>"] = (len(name), None, name.splitlines(keepends=True), "<string>")
            exec(compile(name, "<string>", "exec", dont_inherit=True), vars(module))
        else:
            path = os.path.abspath(name)
            vars(module).update(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))
            exec(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), vars(module))
    except SystemExit as exit_:
        return _exit_code(exit_)
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        try:
            sys.excepthook(type(error), error.with_traceback(trace), trace)
        except SystemExit as exit_:
            return _exit_code(exit_)
        if isinstance(error, KeyboardInterrupt):
            atexit._run_exitfuncs()
            sys.stdout.flush()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        return 1
    return 0


def _exit_code(exit_: SystemExit) -> int:
    if exit_.code is None or isinstance(exit_.code, int):
        return int(exit_.code or 0) & 0xFF
    print(exit_.code, file=sys.stderr)
    return 1


def _fork_in_subprocess(origin: _Origin) -> None:
    """Makes `subprocess` in the forks fork if a fork can replace the new interpreter."""
    if not hasattr(subprocess, "_fork_exec"):  # Python 3.10: programs of programs are new interpreters there
        return
    execute = subprocess._fork_exec

    def fork_exec(*arguments: Any) -> int:
        words, executables, closes_others, passed, folder, variables = arguments[:6]
        stdin, _, _, stdout, _, stderr, _, error_pipe, restores_signals, new_session = arguments[6:16]
        is_plain = closes_others and restores_signals and all(value in (None, -1) for value in arguments[16:22])
        environment = dict(os.environ) if variables is None else dict(map(_variable, variables))
        folder = os.getcwd() if folder is None else os.fsdecode(folder)
        words = [os.fsdecode(word) for word in words]
        # A fork of a rank would lack the threads of gloo and of an engine, and its end waits for them.
        is_plain = is_plain and os.fsdecode(executables[0]) == sys.executable and "RANK" not in os.environ
        if not is_plain or needs_interpreter(words, environment, folder, origin.environment):
            return int(execute(*arguments))
        files = {file: file for file in passed if file != error_pipe}
        files |= {target: target if file == -1 else file for target, file in enumerate((stdin, stdout, stderr))}
        request = Request(words, environment, folder, list(files), sorted(os.sched_getaffinity(0)), new_session)
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns if there are threads
            process = os.fork()
        if not process:
            _become(request, files, origin)
        return process

    subprocess._fork_exec = fork_exec
    # Python 3.13 would start most programs without `_fork_exec`.
    subprocess._USE_POSIX_SPAWN = False  # type: ignore[misc]


def _variable(entry: bytes) -> tuple[str, str]:
    name, _, value = os.fsdecode(entry).partition("=")
    return name, value


if __name__ == "__main__":
    main()
