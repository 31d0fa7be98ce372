"""Threads, locks, events and queues of the host that run in turns, and report their ordering to the model.

One thread runs at a time. It runs until it waits for something; then the first other thread that can run does. A new
thread therefore starts as late as possible, and all runs are equal. No result depends on chance: the vector clocks find
accesses that only luck would order. The primitives that order two threads on a real machine also order their lanes:
start and join, setting an event and waiting for it, an item of a queue, the result of a future, release and acquisition
of a lock.

`install` puts these classes in the place of Python's in modules of the package that import `threading`, `queue` or
`ThreadPoolExecutor`.
"""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

from tests.cuda_model.replacements import Replacements
from tests.cuda_model.stream_model import Moment, StreamModel


class _Turn:
    """The condition that one thread waits for, and the semaphore that gives it its turn."""

    def __init__(self, lane: int) -> None:
        self.lane = lane
        self.baton = threading.Semaphore(0)
        self.ready: Callable[[], bool] = lambda: True


class Turns:
    """Decides which thread runs. Each new thread calls `enter` before its work: dispatch modes are per thread."""

    def __init__(self, model: StreamModel, enter: Callable[[], contextlib.AbstractContextManager[object]]) -> None:
        self.model = model
        self.enter = enter
        self.failures: list[BaseException] = []
        self._main = self._running = _Turn(model.thread)
        self._waiting: list[_Turn] = []

    def wait_until(self, ready: Callable[[], bool], what: str) -> None:
        """Lets other threads run until `ready`."""
        while not ready():
            own, own.ready = self._running, ready
            other = next((turn for turn in self._waiting if turn.ready()), None)
            if other is None:
                cause = self.failures[0] if self.failures else None
                raise RuntimeError(f"deadlock: {self.model.names[own.lane]} waits for {what}") from cause
            self._waiting.append(own)
            self._hand_over(other)
            own.baton.acquire()

    def finish(self) -> None:
        """Lets every thread run until it ends, or waits for an event that does not come."""
        own = self._running
        others_rest = lambda: not any(turn.ready() for turn in self._waiting if turn is not own)  # noqa: E731
        self.wait_until(others_rest, "the end of the other threads")

    def start(self, lane: int, work: Callable[[], None]) -> None:
        """Creates a thread that is ready to run."""
        turn = _Turn(lane)

        def run() -> None:
            turn.baton.acquire()
            try:
                with self.enter():
                    work()
            except BaseException as error:
                self.failures.append(error)
            finally:
                # The main thread has waited meanwhile, or this one had no turn.
                others = [other for other in self._waiting if other.ready()]
                self._hand_over(others[0] if others else self._main)

        threading.Thread(target=run, daemon=True).start()
        self._waiting.append(turn)

    def _hand_over(self, to: _Turn) -> None:
        if to in self._waiting:
            self._waiting.remove(to)
        self._running, self.model.thread = to, to.lane
        to.baton.release()


class _Ordered:
    """An object at which one thread leaves its moment, and from which another thread takes it."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._moment: Moment | None = None

    def _leave(self) -> None:
        model = self._turns.model
        own = model.moment(model.thread)
        if self._moment is None:
            self._moment = own
            return
        clock = {lane: max(own.clock.get(lane, 0), tick) for lane, tick in self._moment.clock.items()}
        self._moment = Moment({**own.clock, **clock}, max(own.seconds, self._moment.seconds))

    def _take(self) -> None:
        if self._moment is not None:
            self._turns.model.join(self._turns.model.thread, self._moment)


class _Lock(_Ordered):
    """`threading.Lock` and `RLock`. Threads switch only when they wait, so no lock is ever contended."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        self._take()
        return True

    def release(self) -> None:
        self._leave()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


class _Condition(_Lock):
    """`threading.Condition`."""

    _num_notified = 0

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        self._leave()
        self._turns.wait_until(lambda: bool(predicate()), "a condition")
        self._take()
        return predicate()

    def wait(self, timeout: float | None = None) -> bool:
        before = self._num_notified
        self._leave()
        self._turns.wait_until(lambda: self._num_notified > before, "a condition")
        self._take()
        return True

    def notify_all(self) -> None:
        self._leave()
        self._num_notified += 1

    notify = notify_all


class _Event(_Ordered):
    """`threading.Event`."""

    _is_set = False

    def set(self) -> None:
        self._leave()
        self._is_set = True

    def clear(self) -> None:
        self._is_set = False

    def is_set(self) -> bool:
        if self._is_set:
            self._take()
        return self._is_set

    def wait(self, timeout: float | None = None) -> bool:
        self._turns.wait_until(lambda: self._is_set, "an event")
        self._take()
        return True


class _Queue:
    """`queue.SimpleQueue` and `Queue`."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._items: deque[tuple[Any, Moment]] = deque()

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        model = self._turns.model
        self._items.append((item, model.moment(model.thread)))

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        self._turns.wait_until(lambda: bool(self._items), "an item of a queue")
        item, moment = self._items.popleft()
        self._turns.model.join(self._turns.model.thread, moment)
        return item

    def empty(self) -> bool:
        return not self._items

    def qsize(self) -> int:
        return len(self._items)


class _Thread(_Ordered):
    """`threading.Thread`."""

    def __init__(
        self,
        turns: Turns,
        target: Callable[..., object] | None = None,
        name: str | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        daemon: bool | None = None,
    ) -> None:
        super().__init__(turns)
        self.name, self.daemon = name or "a thread", daemon
        self._work = target or (lambda: None)
        self._args, self._kwargs = args, kwargs or {}
        self._is_alive = False

    def start(self) -> None:
        self._is_alive = True
        self._turns.start(self._turns.model.add_thread(f"thread {self.name}"), self._run)

    def _run(self) -> None:
        try:
            self._work(*self._args, **self._kwargs)
        finally:
            self._leave()
            self._is_alive = False

    def is_alive(self) -> bool:
        return self._is_alive

    def join(self, timeout: float | None = None) -> None:
        self._turns.wait_until(lambda: not self._is_alive, f"the end of thread {self.name}")
        self._take()


class _Result(Future[Any]):
    """The future of a call in another thread."""

    def __init__(self, turns: Turns) -> None:
        super().__init__()
        self._turns, self._end = turns, _Ordered(turns)

    def run(self, function: Callable[[], Any]) -> None:
        """Runs the call in the thread, unless it was cancelled before."""
        if not self.set_running_or_notify_cancel():
            return
        try:
            result = function()
        except BaseException as error:
            self._turns.failures.append(error)
            self._end._leave()
            self.set_exception(error)
        else:
            self._end._leave()
            self.set_result(result)

    def result(self, timeout: float | None = None) -> Any:
        self._wait()
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._wait()
        return super().exception(0)

    def _wait(self) -> None:
        self._turns.wait_until(super().done, "the result of a thread")
        self._end._take()


class _Executor:
    """`ThreadPoolExecutor` with one thread, as in the package's own executors of one worker."""

    def __init__(
        self,
        turns: Turns,
        max_workers: int | None = None,
        thread_name_prefix: str = "",
        *,
        initializer: Callable[[], object] = lambda: None,
    ) -> None:
        self._initializer = initializer
        self._turns = turns
        self._calls = _Queue(turns)
        self._thread = _Thread(turns, self._serve, thread_name_prefix or "of an executor")
        self._thread.start()

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> _Result:
        result = _Result(self._turns)
        self._calls.put((result, lambda: function(*args, **kwargs)))
        return result

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._calls.put(None)
        if wait:
            self._thread.join()

    def _serve(self) -> None:
        self._initializer()
        while (call := self._calls.get()) is not None:
            result, function = call
            result.run(function)


def thread_classes(turns: Turns) -> tuple[SimpleNamespace, SimpleNamespace, Callable[..., Any]]:
    """Returns replacements for the modules `threading` and `queue`, and for `ThreadPoolExecutor`."""

    def bound(kind: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: kind(turns, *args, **kwargs)

    for_threading = SimpleNamespace(
        Lock=bound(_Lock),
        RLock=bound(_Lock),
        Condition=bound(_Condition),
        Event=bound(_Event),
        Thread=bound(_Thread),
        current_thread=threading.current_thread,
        main_thread=threading.main_thread,
        get_ident=threading.get_ident,
        local=threading.local,
    )
    for_queue = SimpleNamespace(SimpleQueue=bound(_Queue), Queue=bound(_Queue))
    return for_threading, for_queue, bound(_Executor)


def install(turns: Turns, replacements: Replacements, packages: tuple[str, ...]) -> None:
    """Replaces Python's threads in the modules of these packages that use them."""
    for_threading, for_queue, executor = thread_classes(turns)
    stand_ins: dict[int, object] = {
        id(threading): for_threading,
        id(queue): for_queue,
        id(ThreadPoolExecutor): executor,
        **{
            id(getattr(threading, name)): getattr(for_threading, name)
            for name in ("Condition", "Event", "Lock", "Thread")
        },
        id(queue.SimpleQueue): for_queue.SimpleQueue,
        id(queue.Queue): for_queue.Queue,
    }
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith(packages):
            for name, value in list(vars(module).items()):
                if id(value) in stand_ins:
                    replacements.set(module, name, stand_ins[id(value)])
