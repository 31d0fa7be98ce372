"""One process of a job: runs the user's script as `python script.py` would, and reports how it ended.

`agent` starts it as `python runner.py [--local_rank_as=OPTION] [-m] NAME ARGUMENTS...`. It writes errors to the file
that torch's elastic agent names in TORCHELASTIC_ERROR_FILE, and not to the terminal: `failures` prints them after all
output, once for all processes. Without that file, for example if a user runs the command of a dry run, it prints errors
as usual.

Imports only the standard library, and nothing of zeroaccel: the script must find the interpreter as it expects it.
"""

from __future__ import annotations

import builtins
import ctypes
import faulthandler
import importlib.abc
import importlib.util
import io
import json
import os
import signal
import sys
import time
import traceback
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

FAULT_FILE = "fault.txt"
"""File in the folder of the error report to which a crash in native code writes the Python stack."""

_SIBLING_GRACE_SECONDS = 1.0  # for other ranks to report the same failure, before the launcher ends them
_PR_SET_PDEATHSIG = 1
_LOCAL_RANK_AS = "--local_rank_as="


class Reporter:
    """Reports how this process ended, in a file that the launcher reads.

    Args:
        path: path of the file; the other processes of this machine use the same name in sibling folders.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._process = os.getpid()
        self._error: BaseException | None = None
        self._reached = False  # true once our own hook has received the error
        if not faulthandler.is_enabled():
            self._faults = open(path.with_name(FAULT_FILE), "w")  # noqa: SIM115 - open until the process ends
            faulthandler.enable(self._faults)
        # The innermost hook: libraries install theirs around it, and most of them call the hook that they replace.
        sys.excepthook = self._on_exception

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if error is self._error and os.getpid() == self._process:
            self._reached = True
        else:
            sys.__excepthook__(kind, error, trace)

    def failed(self, error: BaseException) -> int:
        """Reports an uncaught exception. Returns the exit code."""
        if (errors := sys.modules.get("zeroaccel.errors")) is not None:  # only if the script has imported zeroaccel
            errors.cut_traceback(error)
        report = _report_of(error)
        code = int(report["exit_code"])
        if self._write(report):
            self._error = error
        try:
            sys.excepthook(type(error), error, error.__traceback__)
        except SystemExit as exit_:
            code = exit_.code if isinstance(exit_.code, int) else code
        except Exception:  # an error of the hook; print it, as the interpreter does
            traceback.print_exc()
        if self._error is not None:
            if not self._reached:  # another hook has printed the error in its own way
                self._write(report | {"printed": True})
            self._wait_for_siblings()
        return code

    def exited(self, exit_: SystemExit) -> int:
        """Reports a `sys.exit` that is not a success. Returns the exit code."""
        if isinstance(exit_.code, int) and hasattr(exit_, "headline"):  # a preempted run that has saved its state
            headline, code = str(exit_.headline), exit_.code
        elif isinstance(exit_.code, int):
            headline, code = f"sys.exit({exit_.code}) at {_place(exit_)}", exit_.code
        else:
            headline, code = f"{exit_.code} (sys.exit at {_place(exit_)})", 1
        if self._write(_report("exit", headline, "", code)):
            self._wait_for_siblings()
        else:
            print(headline, file=sys.stderr)
        return code

    def _write(self, report: dict[str, Any]) -> bool:
        """Writes the report in the form of torch's elastic agent, with ours inside. Returns True if it succeeds."""
        if os.getpid() != self._process:
            return False  # a fork of the rank, which is not a rank
        message = {
            "message": report["headline"],
            "extraInfo": {"py_callstack": report["traceback"], "timestamp": str(int(report["time"]))},
        }
        half = self._path.with_suffix(".half")
        try:
            half.write_text(json.dumps({"message": message, "zeroaccel": report}))
            half.replace(self._path)  # the agent cannot read a file that is only half written
        except OSError:
            return False
        return True

    def _wait_for_siblings(self) -> None:
        deadline = time.monotonic() + _SIBLING_GRACE_SECONDS
        expected = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        siblings = self._path.parent.parent
        while time.monotonic() < deadline and len(list(siblings.glob(f"*/{self._path.name}"))) < expected:
            time.sleep(0.02)


def _report(kind: str, headline: str, trace: str, code: int) -> dict[str, Any]:
    return {
        "kind": kind,
        "headline": headline,
        "traceback": trace,
        "exit_code": code,
        "time": time.time(),
        "pid": os.getpid(),
    }


def _report_of(error: BaseException) -> dict[str, Any]:
    rendered = traceback.TracebackException.from_exception(error)
    headline = "".join(rendered.format_exception_only()).strip()
    trace = "".join(rendered.format())
    if isinstance(error, KeyboardInterrupt):
        return _report("interrupt", headline, trace, 128 + signal.SIGINT)
    # No import: a script that does not use zeroaccel cannot have raised one of its errors.
    ours = getattr(sys.modules.get("zeroaccel.errors"), "ZeroAccelError", None)
    if ours is not None and isinstance(error, ours):
        return _report("on_purpose", f"{type(error).__name__}: {error}", trace, int(getattr(error, "exit_code", 1)))
    return _report("exception", headline, trace, 1)


def _place(exit_: SystemExit) -> str:
    """Returns "file:line in function" of the innermost frame that is not in the standard library."""
    frames = traceback.extract_tb(exit_.__traceback__)
    library = os.path.dirname(os.__file__) + os.sep
    frame = next((frame for frame in reversed(frames) if not frame.filename.startswith(library)), frames[-1])
    return f"{frame.filename}:{frame.lineno} in {frame.name}"


def _load_script(path: str) -> tuple[ModuleType, CodeType]:
    """Returns the module and the code of `python path`."""
    sys.argv[0] = path
    absolute = os.path.abspath(path)
    _set_first_on_path(os.path.dirname(os.path.realpath(path)))
    with io.open_code(absolute) as file:
        source = file.read()
    module = ModuleType("__main__")
    vars(module).update(__file__=absolute, __cached__=None, __loader__=SourceFileLoader("__main__", absolute))
    return module, compile(source, absolute, "exec", dont_inherit=True)


def _load_module(name: str) -> tuple[ModuleType, CodeType]:
    """Returns the module and the code of `python -m name`. Imports the packages above it."""
    sys.argv[0] = "-m"
    _set_first_on_path(os.getcwd())
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        name = f"{name}.__main__"
        spec = importlib.util.find_spec(name)
    loader = spec.loader if spec is not None else None
    code = loader.get_code(name) if isinstance(loader, importlib.abc.InspectLoader) else None
    if spec is None or code is None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    sys.argv[0] = spec.origin or name
    module = ModuleType("__main__")
    vars(module).update(
        __file__=spec.origin, __cached__=spec.cached, __loader__=loader, __spec__=spec, __package__=spec.parent
    )
    return module, code


def _set_first_on_path(folder: str) -> None:
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = folder  # in place of this file's own folder


def _run(arguments: list[str]) -> None:
    ranked = arguments[0].startswith(_LOCAL_RANK_AS)
    option = arguments[0].removeprefix(_LOCAL_RANK_AS) if ranked else ""
    arguments = arguments[ranked:]
    is_module = arguments[0] == "-m"
    sys.argv = arguments[1:] if is_module else arguments
    if option:
        # First, like the `deepspeed` command: the user's own option comes later and overrides it.
        sys.argv.insert(1, f"{option}={os.environ.get('LOCAL_RANK', '0')}")
    module, code = _load_module(sys.argv[0]) if is_module else _load_script(sys.argv[0])
    vars(module)["__builtins__"] = builtins
    if "__annotations__" in globals():  # in some releases `__main__` has them
        vars(module)["__annotations__"] = {}
    # Permanently, and not only during the run: threads and exit handlers later pickle and import by this name.
    sys.modules["__main__"] = module
    exec(code, vars(module))


def _without_own_frames(error: BaseException) -> BaseException:
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return error.with_traceback(trace)


def end_with_the_launcher() -> None:
    """Asks the kernel to end this process if the launcher is killed, and so cannot end its processes."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def main() -> int:
    """Runs the script of the command line. Returns the exit code, or raises if there is no launcher to report to."""
    end_with_the_launcher()
    if cores := os.environ.get("ZEROACCEL_CPU_CORES"):
        os.sched_setaffinity(0, map(int, cores.split(",")))
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    reporter = Reporter(Path(path)) if path else None
    try:
        _run(sys.argv[1:])
    except SystemExit as exit_:
        if reporter is None:
            raise
        if exit_.code not in (None, 0):
            return reporter.exited(exit_)
    except BaseException as error:
        _without_own_frames(error)
        if reporter is None:
            raise
        return reporter.failed(error)
    preempted = _preempted()
    return reporter.exited(preempted) if reporter is not None and preempted is not None else 0


def _preempted() -> SystemExit | None:
    """Returns Preempted if a library saved the state on a signal, but let the script continue to its end."""
    notice = getattr(sys.modules.get("zeroaccel.comm.stop_notice"), "stop_notice", None)
    saved = getattr(notice, "saved", "")
    end = getattr(sys.modules.get("zeroaccel.errors"), "Preempted", None)
    return end(saved) if saved and end is not None else None


if __name__ == "__main__":
    sys.exit(main())
