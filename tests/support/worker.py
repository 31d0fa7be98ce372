"""Main program of one rank of a pool: joins the process group once, then answers calls until the parent exits.

`pool.py` starts it and passes it a `Setup`. It imports torch late, after the environment
and the fault handler are set up. There is no teardown: leaving a process group can wait for a peer that has exited.
"""

from __future__ import annotations

import builtins
import faulthandler
import os
import pickle
import queue
import random
import reprlib
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.support.environment import ROOT

DUMP_SIGNAL = signal.SIGUSR1


@dataclass(frozen=True)
class Setup:
    """Settings of a rank, apart from its environment."""

    socket: int  # file descriptor, inherited
    stacks: Path  # path for the stacks, written on a signal
    join: bool  # True to import torch and join the process group
    warning_filters: Sequence[str]  # in the format of pytest's configuration


@dataclass(frozen=True)
class Answer:
    """Answer of a rank to one call: a value, or the report of the exception that ended it."""

    value: Any = None
    failure: str = ""  # such as "ValueError: 3 is odd"; empty if the call returned
    details: str = ""  # the traceback, and the variables of the deepest frame that belongs to tests/


def main() -> None:
    """Serves calls with the `Setup` that is pickled as hexadecimal text in ``sys.argv[1]``."""
    setup: Setup = pickle.loads(bytes.fromhex(sys.argv[1]))
    parent: Connection[bytes, bytes] = Connection(setup.socket)
    stacks = open(setup.stacks, "w")  # noqa: SIM115 - open for the life of the process, for the fault handler
    faulthandler.enable(stacks)
    faulthandler.register(DUMP_SIGNAL, stacks)
    calls: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(parent, calls), name="listener", daemon=True).start()
    try:
        if setup.join:
            _join_group()
    except BaseException as error:
        parent.send_bytes(pickle.dumps(_report(error)))
        raise
    parent.send_bytes(pickle.dumps(Answer()))
    while True:
        parent.send_bytes(_answer(calls.get(), setup))


def _listen(parent: Connection[bytes, bytes], calls: queue.SimpleQueue[bytes]) -> None:
    # In a thread, so that this rank ends with its parent even inside a collective.
    try:
        while True:
            calls.put(parent.recv_bytes())
    except (EOFError, OSError):
        os._exit(0)


def _join_group() -> None:
    import torch

    from zeroaccel.comm.topology import init_process_group

    torch.set_num_threads(1)
    init_process_group()


def _answer(call: bytes, setup: Setup) -> bytes:
    try:
        with warnings.catch_warnings():
            apply_warning_filters(setup.warning_filters)
            function, args, kwargs = pickle.loads(call)
            if setup.join:
                _seed()
                _forget_meshes()
            # Plain pickle copies tensors; torch.multiprocessing would send handles that end with this rank.
            return pickle.dumps(Answer(value=function(*args, **kwargs)))
    except BaseException as error:
        return pickle.dumps(_report(error))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _seed() -> None:
    import torch

    random.seed(0)
    torch.manual_seed(0)


def _forget_meshes() -> None:
    """Lets messages name ranks by numbers again, after a test that left an engine with a mesh."""
    from zeroaccel.comm import topology

    if topology._current is not None:
        names = topology._current[1].names
        while names.mesh is not None:
            names.forget(names.mesh)


def _report(error: BaseException) -> Answer:
    summary = "".join(traceback.format_exception_only(error)).strip()
    # The first frames belong to this file.
    frames = error.__traceback__.tb_next if error.__traceback__ and error.__traceback__.tb_next else error.__traceback__
    details = "".join(traceback.format_exception(type(error), error, frames))
    return Answer(failure=summary, details=details + _variables(error))


def _variables(error: BaseException) -> str:
    """Formats the variables of the deepest frame in tests/: pytest does not rewrite asserts here to show operands."""
    deepest = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_filename.startswith(f"{ROOT}/tests/") and frame.f_code.co_filename != __file__:
            deepest = frame
    if deepest is None:
        return ""
    shown = reprlib.Repr()
    shown.maxother = shown.maxstring = 200
    lines = [f"    {name} = {shown.repr(value)}" for name, value in deepest.f_locals.items()]
    return "\n".join([f"Variables of {deepest.f_code.co_name}:", *lines, ""]) if lines else ""


def apply_warning_filters(filters: Sequence[str]) -> None:
    """Applies filters written as ``action:message regex:category``, the first three fields of pytest's format."""
    for line in filters:
        action, message, category, *_ = [*line.split(":"), "", ""]
        warnings.filterwarnings(action, message, _category(category))  # type: ignore[arg-type]


def _category(name: str) -> type[Warning]:
    if not name:
        return Warning
    module, _, attribute = name.rpartition(".")
    owner = __import__(module, fromlist=[attribute]) if module else builtins
    category: type[Warning] = getattr(owner, attribute)
    return category
