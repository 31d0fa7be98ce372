"""What one rank of a pool runs: join the process group once, then answer calls until the parent goes away.

Started by `pool.py`, which passes it a `Setup`. torch is imported late, after the environment
and the fault handler are in place. There is no teardown: leaving a process group can wait for a peer that is gone.
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
    """How a rank is to work, apart from its environment."""

    socket: int  # file descriptor, inherited
    stacks: Path  # where to dump stacks when signalled
    join: bool  # whether to import torch and join the process group
    warning_filters: Sequence[str]  # as in pytest's configuration


@dataclass(frozen=True)
class Answer:
    """What a rank says of one call: a value, or the report of the exception that ended it."""

    value: Any = None
    failure: str = ""  # "ValueError: 3 is odd"; empty when the call returned
    details: str = ""  # the traceback, and the variables of the deepest frame that belongs to tests/


def main() -> None:
    """Serves calls with the `Setup` that comes pickled as hexadecimal text in ``sys.argv[1]``."""
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
    # A thread of its own, so that the end of the parent ends this rank even when it is inside a collective.
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
            # Plain pickle copies tensors; torch.multiprocessing would pass handles that die with this rank.
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


def _report(error: BaseException) -> Answer:
    summary = "".join(traceback.format_exception_only(error)).strip()
    # The first frames are this file's own.
    frames = error.__traceback__.tb_next if error.__traceback__ and error.__traceback__.tb_next else error.__traceback__
    details = "".join(traceback.format_exception(type(error), error, frames))
    return Answer(failure=summary, details=details + _variables(error))


def _variables(error: BaseException) -> str:
    """The variables of the deepest frame in tests/: asserts are not rewritten here, so they do not show operands."""
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
    """Applies filters written as ``action:message regex:category``, the first three fields of pytest's form."""
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
