"""What holds for every test: the pools of ranks, time limits that follow the machine, and what needs a GPU."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import pytest
import pytest_timeout

from tests import time_limits
from tests.multi.pool import Pool


def pytest_configure() -> None:
    # Processes of xdist, and whatever a test starts, inherit it.
    os.environ.setdefault(time_limits.VARIABLE, f"{time_limits.measure():.1f}")


def pytest_report_header() -> str:
    return f"time limits: x {os.environ[time_limits.VARIABLE]} (of a quiet machine's)"


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: pytest_timeout.Settings) -> bool | None:
    """In place of pytest-timeout's own timer, which knows the time only."""
    if settings.method != "signal":
        return None
    limit = time_limits.Limit(settings.timeout)

    def strike(number: int, frame: object) -> None:
        __tracebackhide__ = True
        if left := limit.left():
            signal.setitimer(signal.ITIMER_REAL, left)
        else:
            pytest_timeout.timeout_sigalrm(item, settings._replace(timeout=limit.total))

    def cancel() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    item.cancel_timeout = cancel  # type: ignore[attr-defined]
    signal.signal(signal.SIGALRM, strike)
    signal.setitimer(signal.ITIMER_REAL, limit.left())
    return True


@pytest.fixture(scope="session")
def ranks(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Pool]]:
    """``ranks(world_size)`` is the pool of that size, the same one in every test of the session."""
    pools: dict[int, Pool] = {}

    def of_size(world_size: int) -> Pool:
        if world_size not in pools:
            pools[world_size] = Pool(
                world_size, tmp_path_factory.mktemp(f"ranks{world_size}-"), pytestconfig.getini("filterwarnings")
            )
        return pools[world_size]

    yield of_size
    for pool in pools.values():
        pool.close()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For plain loops while ranks run: threads that wait for each other's processor take many times as long."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def own_job(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process is a job of its own, which ends with the test."""
    from zeroaccel.comm.topology import destroy

    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    yield
    destroy()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
