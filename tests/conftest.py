"""Fixtures and marks that hold for every test: the pools of ranks, and what is skipped where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.multi.pool import Pool


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
    """For plain loops beside ranks: threads that wait for each other's processor take many times as long."""
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
