"""The process that runs the model for the tests: one per worker, because its torch has a device that others lack."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.cuda_model import guard_library

ROOT = Path(__file__).resolve().parents[2]


class ModelProcess:
    """Runs `python -m tests.cuda_model --serve`, starting it at the first request, and again after it has ended.

    Args:
        log: file for its other output.
        device: type of the devices.
    """

    def __init__(self, log: Path, device: str = "cuda") -> None:
        self._device = device
        self._process: subprocess.Popen[str] | None = None
        self._log = log
        self._outcomes: dict[tuple[str, str | None], SimpleNamespace] = {}

    def outcome(self, case: str, bug: str | None = None) -> SimpleNamespace:
        """Returns the outcome of one run, as `run.Outcome`; all tests share it."""
        if (case, bug) not in self._outcomes:
            self._outcomes[case, bug] = self._run(case, bug)
        return self._outcomes[case, bug]

    def part(self, name: str) -> SimpleNamespace:
        """Runs a part of `benchmarks/gpu`, as `gpu_parts.run_part` does."""
        return self._ask({"part": name})

    def deadlocks(self, order: str) -> list[str]:
        """Returns the deadlocks of two ranks at stage 3 with a change of `planted_bugs.ORDERS`."""
        found: list[str] = self._ask({"order": order}).deadlocks
        return found

    def _run(self, case: str, bug: str | None) -> SimpleNamespace:
        return self._ask({"case": case, "bug": bug})

    def _ask(self, request: dict[str, str | None]) -> SimpleNamespace:
        if self._process is None:
            command = [sys.executable, "-m", "tests.cuda_model", "--serve", "--device", self._device]
            with self._log.open("w") as log:
                self._process = subprocess.Popen(
                    command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
                )
        assert self._process.stdin is not None, "the process has a pipe"
        assert self._process.stdout is not None, "the process has a pipe"
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BaseException:  # a late answer must not be taken for the next one
            self.close()
            raise
        if not answer:
            self.close()
            raise AssertionError(f"the process of the model has ended:\n{self._log.read_text()[-5000:]}")
        return SimpleNamespace(**json.loads(answer))

    def close(self) -> None:
        """Ends the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


@pytest.fixture(scope="session")
def model_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelProcess]:
    """Skips the test with a reason if the model's library cannot be compiled."""
    if reason := guard_library.why_not():
        pytest.skip(reason)
    guard_library.compiled()
    process = ModelProcess(tmp_path_factory.mktemp("cuda-model") / "log")
    yield process
    process.close()


@pytest.fixture
def xpu_process(model_process: ModelProcess, tmp_path: Path) -> Iterator[ModelProcess]:
    """Runs the model on devices of the type "xpu"."""
    process = ModelProcess(tmp_path / "log", "xpu")
    yield process
    process.close()


@pytest.fixture
def outcome_of(model_process: ModelProcess) -> Callable[..., SimpleNamespace]:
    """Returns ``outcome_of(case, bug=None)``, which runs a case by name."""
    return model_process.outcome
