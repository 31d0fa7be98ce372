"""Copies of reduced gradients to host memory that end as late as a device allows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroaccel
from zeroaccel.comm.collectives import Work
from zeroaccel.comm.topology import destroy
from zeroaccel.ops import reductions

_LIMIT = 2  # gradients on the device besides the newest one, as in `grad_reducer.py`
_LAYERS = 6


class LateCopy:
    """A copy whose host memory is NaN until the host waits for it; `on_device` is True while its source exists."""

    def __init__(self, copies: LateCopies, source: Tensor) -> None:
        self._copies = copies
        self._values = source.clone()
        self._host = torch.full_like(source, math.nan if source.is_floating_point() else -1)
        self.on_device = True
        self.is_source_ready = self.is_copied = False

    def wait_for_source(self) -> None:
        return None

    def drop_source(self) -> None:
        self.on_device = False

    def wait(self) -> Tensor:
        self._copies.single_waits += 1
        self._host.copy_(self._values)
        return self.landed()

    def landed(self) -> Tensor:
        self.on_device = False
        return self._host

    def land(self) -> None:
        self._host.copy_(self._values)


class LateCopies:
    """A `CopyStream` for a simulated device.

    Attributes:
        finishes, single_waits: number of waits for all copies, and for a single one.
        most_on_device: largest number of sources on the device at a time.
    """

    pinned = True

    def __init__(self) -> None:
        self.finishes = self.single_waits = self.most_on_device = 0
        self._copies: list[LateCopy] = []

    def to_host(self, source: Tensor, work: Work, examine: Callable[[Tensor], None] = lambda source: None) -> LateCopy:
        work.wait()
        examine(source)
        self._copies.append(LateCopy(self, source))
        waiting = [copy for copy in self._copies if copy.on_device and copy._values.itemsize < 8]  # facts have 8 bytes
        self.most_on_device = max(self.most_on_device, len(waiting))
        return self._copies[-1]

    def join(self) -> None:
        return None

    def finish(self) -> None:
        self.finishes += 1
        for copy in self._copies:
            copy.land()
        self._copies.clear()


_CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
}


@pytest.fixture(autouse=True)
def _no_groups_left() -> Iterator[None]:
    yield
    destroy()


def _train(copies: LateCopies | None, *, precision: str, accumulation: int, **offload: Any) -> list[Tensor]:
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(_LAYERS)))
    precisions = {"bf16": {"enabled": True, "check_grad_overflow": False}} if precision == "bf16" else {}
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", **offload}},
        **precisions,
    }
    engine, *_ = zeroaccel.initialize(model=model, config=config)
    engine.grad_reducer._copies = copies
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    for step in range(3 * accumulation):
        batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).to(dtype)
        engine.backward(engine(batch).square().mean())
        engine.step()
    trained = [param.detach().clone() for param in model.parameters()]
    engine.destroy()
    return trained


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_host_waits_once_per_backward_and_reads_reduced_gradients(precision: str, accumulation: int) -> None:
    reference = _train(None, precision=precision, accumulation=accumulation)
    copies = LateCopies()
    trained = _train(copies, precision=precision, accumulation=accumulation)
    assert all(torch.equal(one, other) for one, other in zip(trained, reference, strict=True))
    assert copies.finishes == 3 * accumulation
    assert copies.single_waits == 0


def test_the_device_sums_squares_before_gradients_leave_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device the boundary reads no gradient, but after a jump of the exponent it does; the norms are equal."""
    passes: list[str] = []
    launch = reductions.launch

    def counted(kernel: str, *arguments: Any, **how: Any) -> Any:
        passes.append(kernel)
        return launch(kernel, *arguments, **how)

    monkeypatch.setattr(reductions, "launch", counted)
    found = []
    for copies in (None, LateCopies()):
        engine = zeroaccel.initialize(nn.Linear(8, 8), config={**_CONFIG, "gradient_clipping": 1.0})[0]
        with torch.no_grad():
            engine.module.weight.fill_(0.5)
        engine.grad_reducer._copies = copies
        norms, counts = [], []
        for factor in (1.0, 2.0, 1.0, 2.0**-5):
            engine.backward(engine(torch.ones(4, 8)).sum() * factor)
            passes.clear()
            engine.step()
            norms.append(engine.get_global_grad_norm())
            counts.append(passes.copy())
        engine.destroy()
        found.append(norms)
    assert found[0] == found[1]
    assert counts[1:] == [[], [], ["square_sums"]]


def test_few_gradients_wait_on_the_device() -> None:
    copies = LateCopies()
    _train(copies, precision="bf16", accumulation=1)
    assert 1 < copies.most_on_device <= _LIMIT + 1
