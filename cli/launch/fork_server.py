"""A process that has run the first imports of the ranks' script; ranks are forks of it, so they start at once.

    python -u fork_server.py SOCKET [--local_rank_as=OPTION] [-m] NAME ARGUMENTS...

`forked_ranks` is the other end. The process runs the imports at the top of the script, up to the first line that is not
an import of `PRELOADED` or of Python's own modules: with the script's `sys.path`, in its order, before any other line
of the script. A fork continues as `runner` with these words and its own environment. Its parent becomes the launcher:
the process between them ends at once, and the launcher adopts orphans meanwhile.

Imports only the standard library and `runner`, which itself imports only the standard library.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import importlib.util
import json
import os
import random
import socket
import sys
import time
from pathlib import Path
from typing import Any

PRELOADED = frozenset(
    {"accelerate", "datasets", "einops", "evaluate", "huggingface_hub", "numpy", "packaging", "pandas", "peft"}
    | {"safetensors", "tokenizers", "torch", "torchvision", "tqdm", "transformers", "trl", "yaml", "zeroaccel"}
)
"""Packages whose import changes nothing outside the process."""

MOST_NBYTES = 150_000  # size limit of a request
_LOCAL_RANK_AS = "--local_rank_as="  # the same name is in `runner`
_RESTARTED_IN_FORKS = frozenset({"jemalloc_bg_thd"})  # threads that their library starts again


def first_imports(source: str) -> list[ast.Import | ast.ImportFrom]:
    """Returns the imports of `PRELOADED` at the beginning of a script.

    Example:
        >>> text = "import os, torch\\nimport torch.nn as nn\\nos.environ['A'] = ''\\nimport numpy"
        >>> [ast.unparse(line) for line in first_imports(text)]
        ['import os, torch', 'import torch.nn as nn']
    """
    found: list[ast.Import | ast.ImportFrom] = []
    for line in ast.parse(source).body:
        if isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant):
            continue  # the docstring
        if isinstance(line, ast.Import):
            names = {alias.name.partition(".")[0] for alias in line.names}
        elif isinstance(line, ast.ImportFrom) and line.module and not line.level:
            names = {line.module.partition(".")[0]}
        else:
            break
        if not names <= PRELOADED | sys.stdlib_module_names:
            break
        if names & PRELOADED:
            found.append(line)
    return found


def preload(words: list[str]) -> None:
    """Runs the first imports of the script. It ignores errors: the script repeats and reports them."""
    words = words[words[0].startswith(_LOCAL_RANK_AS) :]
    path = _source_of(words)
    sys.path[0] = os.getcwd() if words[0] == "-m" else os.path.dirname(os.path.realpath(words[0]))
    with contextlib.suppress(Exception):
        for line in first_imports(Path(path).read_text()):
            exec(compile(ast.Module([line], []), path, "exec", dont_inherit=True), {"__name__": "__preload__"})
    if "torch" in sys.modules:
        # Torch's optimizers import it when they are created, which takes as long as importing torch.
        importlib.import_module("torch._dynamo")
    if "zeroaccel.ops" in sys.modules:
        _load_kernels()


def _source_of(words: list[str]) -> str:
    if words[0] != "-m":
        return words[0]
    # Finding a submodule would import its packages, which only the ranks should do.
    spec = None if "." in words[1] else importlib.util.find_spec(words[1])
    return str(spec.origin) if spec is not None else os.devnull


def _load_kernels() -> None:
    """Runs the kernels of every step, as numba loads much code before the first one."""
    import torch

    from zeroaccel.ops import reductions

    numbers = torch.ones(2, 2)
    reductions.sum_ranks(torch.empty(2), numbers, 1.0)
    reductions.l2_norm([numbers])


def obstacle() -> str:
    """Returns the reason why forks of this process cannot replace new interpreters; "" if they can."""
    if not (process := os.fork()):  # some libraries end their threads before a fork
        os._exit(0)
    os.waitpid(process, 0)
    names = [Path(task.path, "comm").read_text().strip() for task in os.scandir("/proc/self/task")]
    lost = [name for name in names if name not in _RESTARTED_IN_FORKS][1:]
    if lost:
        return f"the imports of the script start threads ({', '.join(sorted(set(lost)))}), which forks do not have"
    return ""


def serve(control: socket.socket, launcher: int) -> None:
    """Forks a process for each request until the other end closes. Returns in the forks only."""
    while True:
        data, files, *_ = socket.recv_fds(control, MOST_NBYTES, 2)
        if not data:
            os._exit(0)
        reader, writer = os.pipe()
        if not (between := os.fork()):
            pid = os.getpid()
            if os.fork():
                os._exit(0)
            os.setsid()
            os.write(writer, str(os.getpid()).encode())
            control.close()
            os.close(reader)
            os.close(writer)
            _become(json.loads(data), files, pid, launcher)
            return
        os.close(writer)
        os.waitpid(between, 0)
        control.send(os.read(reader, 64))
        for file in (reader, *files):
            os.close(file)


def _become(environment: dict[str, str], files: list[int], between: int, launcher: int) -> None:
    """Gives this fork the state of a new process with this environment and these streams."""
    while os.getppid() == between:
        time.sleep(0.001)
    if os.getppid() != launcher:
        os._exit(1)
    for target, file in enumerate(files, start=1):
        os.dup2(file, target)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    random.seed()
    modules: dict[str, Any] = dict(sys.modules)
    if "numpy" in modules:
        modules["numpy"].random.seed()
    torch = modules.get("torch")
    if torch is not None and torch.cuda._is_in_bad_fork():  # an import has initialized CUDA, which forks cannot use
        program = str(Path(__file__).with_name("runner.py"))
        os.execv(sys.executable, [sys.executable, "-u", program, *sys.argv[2:]])


def main() -> int:
    """Serves requests, and in a fork runs the rank. Returns its exit code."""
    import runner  # type: ignore[import-not-found]  # from the folder of this program

    control = socket.socket(fileno=int(sys.argv[1]))
    launcher = os.getppid()
    runner.end_with_the_launcher()
    preload(sys.argv[2:])
    gc.collect()
    gc.freeze()  # so that a collection in a fork copies no pages
    control.send((obstacle() or "ready").encode())
    serve(control, launcher)
    del sys.argv[1]
    sys.modules.pop("runner")  # the script may have its own `runner`
    return int(runner.main())


if __name__ == "__main__":
    sys.exit(main())
