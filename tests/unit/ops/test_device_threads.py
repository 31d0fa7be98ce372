"""Threads start on the device of their work."""

from __future__ import annotations

import threading

import pytest
import torch

from zeroaccel.ops.device_threads import CPU, executor, start_thread


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """(thread, event) in order: the device that the thread selects, and its work."""
    seen: list[tuple[str, str]] = []
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: seen.append((threading.current_thread().name, str(device)))
    )
    return seen


def test_a_thread_selects_its_device_before_it_works(events: list[tuple[str, str]]) -> None:
    device = torch.device("cuda", 3)
    start_thread(lambda: events.append(("", "work")), "copy", device).join()
    assert events == [("copy", "cuda:3"), ("", "work")]


def test_each_thread_of_an_executor_does(events: list[tuple[str, str]]) -> None:
    both = threading.Barrier(2)
    with executor(2, "update", torch.device("cuda", 3)) as pool:
        list(pool.map(lambda _: both.wait(), range(2)))
    assert sorted(events) == [("update_0", "cuda:3"), ("update_1", "cuda:3")]


def test_work_on_the_host_selects_none(events: list[tuple[str, str]]) -> None:
    start_thread(lambda: None, "copy", CPU).join()
    assert events == []
