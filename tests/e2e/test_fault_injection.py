"""After SIGSTOP of a rank or a network cut, every process of the job ends within 15 s of the limit, with a reason.

The jobs spend their time starting and waiting, so they run a few at a time, before the first test reads its result.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests import time_limits
from tests.e2e.fault_injection import Aftermath, Starter, namespaces_missing, network, starting
from tests.support.job import side_by_side

LIMIT = round(time_limits.seconds(2.0), 1)
PROMISE = 15.0  # seconds from the limit to the end of every process
WAITED = rf"rank \d has waited [\d.]+ s \(the limit is {LIMIT:g} s\) for (gather|reduce|control) #\d+ \w+"


@dataclass(frozen=True)
class Scenario:
    """A job and its fault: SIGSTOP of a rank, or a disconnected cable if `stopped` is None."""

    starter: Starter
    ranks: int
    stopped: int | None = None
    machines: int = 1
    flags: tuple[str, ...] = ()
    handles_sigterm: bool = False
    is_slow: bool = True

    def run(self, folder: Path) -> Aftermath:
        with ExitStack() as stack:
            net = stack.enter_context(network()) if self.machines > 1 else None
            env = {"TRAINING_KEEPS_ON": "1"} if self.handles_sigterm else {}
            job = stack.enter_context(
                starting(folder, self.starter, self.ranks, LIMIT, net=net, flags=self.flags, env=env)
            )

            def fault() -> None:
                if self.stopped is not None:
                    job.stop(self.stopped)
                elif net is not None:
                    net.cut()

            return job.after(fault, LIMIT + time_limits.seconds(PROMISE) + 1.0)


SCENARIOS = {
    "launch": Scenario("launch", 3, stopped=0, is_slow=False),
    "launch_cut": Scenario("launch", 2, machines=2, is_slow=False),
    "ranks": Scenario("ranks", 3, stopped=0),
    "torchrun": Scenario("torchrun", 2, stopped=1),
    "torchrun_handler": Scenario("torchrun", 2, stopped=1, handles_sigterm=True),
    "launch_handler": Scenario("launch", 2, stopped=1, handles_sigterm=True),
    "launch_alone": Scenario("launch", 2, stopped=1, machines=2),
    "ranks_cut": Scenario("ranks", 4, machines=2),
    "torchrun_cut": Scenario("torchrun", 2, machines=2),
    "c10d_cut": Scenario("launch", 2, machines=2, flags=("--rdzv_backend", "c10d")),
}


@cache
def _no_network() -> str:
    return namespaces_missing()


Ended = Callable[[str], Aftermath]


@pytest.fixture(scope="module")
def ended(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ended]:
    """Returns ``ended(name)``, the result of that job; it asserts that all processes have ended in time."""

    def run(name: str) -> Aftermath | None:
        scenario = SCENARIOS[name]
        return None if scenario.machines > 1 and _no_network() else scenario.run(tmp_path_factory.mktemp(name))

    with side_by_side(request, "name", run) as outcome:

        def result_of(name: str) -> Aftermath:
            aftermath = outcome(name)
            if aftermath is None:
                pytest.skip(f"needs network namespaces: {_no_network()}")
            assert aftermath.last < LIMIT + time_limits.seconds(PROMISE), (aftermath.seconds, aftermath.said)
            return aftermath

        yield result_of


def _of(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=[pytest.mark.slow] if SCENARIOS[name].is_slow else []) for name in names]
    )


@_of("launch", "launch_handler")
def test_a_stopped_rank_of_the_launcher(ended: Ended, name: str) -> None:
    aftermath = ended(name)
    stopped = SCENARIOS[name].stopped
    said = aftermath.said["launcher"]
    assert re.search(WAITED, said), said
    assert said.count("[zeroaccel E]") == 1
    assert re.search(rf"rank {stopped}: no answer; its process \(pid \d+\) is stopped", said)
    assert f"Rank {stopped} was stopped by a signal" in said
    if SCENARIOS[name].handles_sigterm:  # it runs again then, and its own watchdog ends it
        assert "on all 2 ranks: CollectiveTimeoutError (exit code 75)" in said
    else:
        assert said.endswith(f"rank {stopped}: stopped by the launcher\n")
    assert aftermath.codes["launcher"] == 75


@_of("torchrun", "torchrun_handler")
def test_a_stopped_rank_of_torchrun(ended: Ended, name: str) -> None:
    aftermath = ended(name)
    said = aftermath.said["launcher"]
    assert re.search(WAITED, said), said
    assert re.search(r"rank 1: no answer; its process \(pid \d+\) is stopped", said)
    assert aftermath.codes["launcher"] == 1


@_of("ranks")
def test_the_rank_that_keeps_the_store_is_stopped(ended: Ended, name: str) -> None:
    aftermath = ended(name)
    assert aftermath.codes["rank 0"] == -15  # its neighbours resumed and ended it
    for rank in (1, 2):
        said = aftermath.said[f"rank {rank}"]
        assert aftermath.codes[f"rank {rank}"] == 75, said
        assert re.search(r"rank 0: no answer; its process \(pid \d+\) is stopped", said), said
        assert re.search(r"The rendezvous store at 127.0.0.1:\d+ has not answered for \d+ s", said)
        assert "Rank 0 was stopped by a signal" in said


@_of("launch_alone")
def test_a_stopped_rank_that_is_alone_on_its_machine(ended: Ended, name: str) -> None:
    aftermath = ended(name)
    assert aftermath.codes == {"launcher a": 75, "launcher b": 128 + 15}
    assert "rank 1: no answer; machine-b cannot be reached, or its process is gone" in aftermath.said["launcher a"]
    assert re.search(r"the process \d+ has been stopped \(SIGSTOP\) for \d+ s", aftermath.said["launcher b"])


@_of("launch_cut", "torchrun_cut", "c10d_cut")
def test_a_cable_between_two_launchers_is_pulled(ended: Ended, name: str) -> None:
    aftermath = ended(name)
    near, far = aftermath.said["launcher a"], aftermath.said["launcher b"]
    assert re.search(WAITED, near), near
    assert "rank 1: no answer; machine-b cannot be reached" in near
    assert "Or the network to machine-b is cut." in near
    assert re.search(WAITED, far), far
    assert "rank 0: not heard from" in far
    assert re.search(r"The rendezvous store at 10.231.77.1:\d+ has not answered for \d+ s", far)
    assert "or the network between the machines is cut" in far
    code = 1 if name == "torchrun_cut" else 75
    assert aftermath.codes == {"launcher a": code, "launcher b": code}


@_of("ranks_cut")
def test_a_cable_between_ranks_is_pulled(ended: Ended, name: str) -> None:
    aftermath = ended(name)
    assert set(aftermath.codes.values()) == {75}
    assert aftermath.said["rank 0"].count("[zeroaccel E]") == 1
    assert "ranks 2-3: no answer; machine-b cannot be reached" in aftermath.said["rank 0"]
    for rank in (2, 3):
        assert re.search(r"The rendezvous store at 10.231.77.1:\d+ has not answered", aftermath.said[f"rank {rank}"])


@pytest.mark.slow
def test_a_store_that_was_only_slow_is_used_again(tmp_path: Path) -> None:
    # The launcher runs the store. Ranks get no answer for longer than they wait for one, and training goes on.
    with starting(tmp_path, "launch", 2, LIMIT) as job:
        launcher = job.started["launcher"]
        launcher.send_signal(signal.SIGSTOP)
        time.sleep(6.0)
        launcher.send_signal(signal.SIGCONT)
        time.sleep(time_limits.seconds(2.0))  # until the ranks ask again
        assert launcher.poll() is None
        aftermath = job.after(lambda: job.stop(1), LIMIT + time_limits.seconds(PROMISE))
    said = aftermath.said["launcher"]
    assert said.count("[zeroaccel E]") == 1, said
    assert "has not answered" not in said
    assert aftermath.codes["launcher"] == 75
