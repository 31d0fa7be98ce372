"""Set-up of all tests: pools of ranks, time limits that adapt to the machine, and skips of tests that need a GPU."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import pytest_timeout
import torch

from tests import time_limits
from tests.support.pool import Pool, Ranks
from tests.support.sweeps import Sweep

# A busy machine does not invalidate inputs or examples; `time_limits.py` decides when a test is too slow.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")


def slow_tests() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Reads `slow_tests.txt`: id prefixes of slow tests, and of tests whose crossed parameters are thinned out."""
    slow: list[str] = []
    crossed: list[str] = []
    test = ""
    for line in Path(__file__).with_name("slow_tests.txt").read_text().splitlines():
        if line.startswith("crossed "):
            crossed.append(line.removeprefix("crossed ") + "[")
        elif line.startswith("  "):
            slow.append(test + line[2:])
        elif line and not line.startswith("#"):
            test = line
            slow += [] if test.endswith("[") else [test]
    return tuple(slow), tuple(crossed)


def not_covering(items: list[pytest.Item]) -> list[pytest.Item]:
    """Returns one test's items that are not needed to cover each value of each of its parametrizations."""
    seen: set[tuple[int, str]] = set()
    rest = list(items)

    def unseen(item: pytest.Item) -> set[tuple[int, str]]:
        return set(enumerate(item.callspec._idlist)) - seen  # type: ignore[attr-defined]

    while rest and (new := unseen(best := max(rest, key=lambda item: len(unseen(item))))):
        seen |= new
        rest.remove(best)
    return rest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    slow, crossed = slow_tests()
    tables: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.nodeid.startswith(slow):
            item.add_marker(pytest.mark.slow)
        elif item.nodeid.startswith(crossed):
            tables.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for table in tables.values():
        for item in not_covering(table):
            item.add_marker(pytest.mark.slow)
    # First of all, kernels in single processes: in a new tree, every rank of a pool would compile those that it uses.
    items.sort(key=lambda item: not item.nodeid.startswith("tests/unit/ops/"))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    gc.freeze()  # The libraries and tests are permanent objects: garbage collection need not scan them again.


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("sweeps", "tests that draw many cases from a seed")
    group.addoption("--sweep-seed", type=int, default=0, help="start seed of the slow sweeps")
    group.addoption(
        "--sweep-count", type=int, default=0, help="number of cases that each slow sweep draws; 0: the sweep's default"
    )
    group.addoption("--sweep-report", default="", help="file to which each case appends a line of JSON")


@pytest.fixture
def sweep(pytestconfig: pytest.Config) -> Sweep:
    """Seed, count and report file of the slow sweeps, from the command line."""
    return Sweep(*(pytestconfig.getoption(name) for name in ("sweep_seed", "sweep_count", "sweep_report")))


def pytest_configure() -> None:
    torch.set_num_threads(1)  # Beside ranks, threads wait for each other's cores.
    # xdist workers and all processes that a test starts inherit it.
    os.environ.setdefault(time_limits.VARIABLE, f"{time_limits.measure():.1f}")


def pytest_report_header(config: pytest.Config) -> list[str]:
    return [
        f"time limits: x {os.environ[time_limits.VARIABLE]} (of a quiet machine's)",
        f"sweeps: --sweep-seed {config.getoption('sweep_seed')}",
    ]


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: pytest_timeout.Settings) -> bool | None:
    """Replaces pytest-timeout's own timer, which measures only the elapsed time."""
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


_pools: dict[int, Pool] = {}


@pytest.fixture(scope="session")
def ranks(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Returns ``ranks(world_size)``, the pool of that size; all tests of the session share it."""

    def of_size(world_size: int) -> Pool:
        if world_size not in _pools:
            _pools[world_size] = Pool(
                world_size, tmp_path_factory.mktemp(f"ranks{world_size}-"), pytestconfig.getini("filterwarnings")
            )
        return _pools[world_size]

    yield of_size
    for pool in _pools.values():
        pool.close()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is not None and nextitem.path != item.path:
        for pool in _pools.values():
            pool.rest()


@pytest.fixture(scope="module")
def ranks_without_libraries(ranks: Ranks) -> Iterator[None]:
    """Makes the ranks start without accelerate and transformers: `compat.install` must run before their import."""
    pools = [ranks(world_size) for world_size in (1, 2)]
    before = [pool.imports for pool in pools]
    for pool in pools:
        pool.close()
        pool.imports = ()
    yield
    for pool, imports in zip(pools, before, strict=True):
        pool.close()
        pool.imports = imports


@pytest.fixture
def own_job(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes this process a job that contains one rank and ends with the test."""
    from zeroaccel.comm.topology import destroy

    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    yield
    destroy()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
