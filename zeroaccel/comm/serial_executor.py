"""Carries out what takes several messages one after another, beside the thread that computes.

A reduction in two hops has arithmetic between them. In host memory that runs in a thread of its own, job after job in
the order they were given, which is the same on all ranks; on an accelerator on a stream of its own. So a rank never has
to wait for one reduction before it can take part in the next, and the second hop overlaps with computation too.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import torch

__all__ = ["ExecutorJob", "SerialExecutor"]


class ExecutorJob:
    """A job that is under way; a `Work`."""

    def __init__(self, job: Callable[[], None]) -> None:
        self._job: Callable[[], None] | None = job
        self._error: BaseException | None = None
        self._done = threading.Event()
        self._event: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Blocks until the job is done, and raises what it raised; on CUDA, makes the current stream wait for it."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)

    def is_completed(self) -> bool:
        """Whether `wait` would not block."""
        return self._done.is_set() and (self._event is None or self._event.query())

    def run(self) -> None:
        """Does the job. For the courier."""
        assert self._job is not None, "a job is done once"
        job, self._job = self._job, None  # it holds tensors
        try:
            job()
        except BaseException as error:
            self._error = error
        finally:
            self._done.set()

    def run_on(self, stream: torch.cuda.Stream) -> None:
        """Queues the job on a stream, behind what the current one has been given. For the courier."""
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.run()
            self._event = torch.cuda.Event()
            self._event.record()


class SerialExecutor:
    """Does jobs in order. Its thread lives as long as there are any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[ExecutorJob] = deque()
        self._running = False
        self._stream: torch.cuda.Stream | None = None

    def send(self, job: Callable[[], None], device: torch.device) -> ExecutorJob:
        """Takes a job that works on tensors of `device`, which must stay as they are until it is done."""
        delivery = ExecutorJob(job)
        if device.type == "cuda":
            self._stream = self._stream or torch.cuda.Stream(device)
            delivery.run_on(self._stream)
            return delivery
        with self._lock:
            self._waiting.append(delivery)
            if not self._running:
                self._running = True
                threading.Thread(target=self._work, name="zeroaccel-courier", daemon=True).start()
        return delivery

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._running = False
                    return
                delivery = self._waiting.popleft()
            delivery.run()
