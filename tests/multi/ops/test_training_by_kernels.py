"""Whole training runs by the CUDA kernels, compiled for the host: updates, norm, decisions, codes keep their bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import zeroaccel
from tests.cuda_model.replacements import Replacements
from tests.support.pool import Ranks
from tests.support.training import ADAMW, Run, Toy, config, differences, train
from tests.unit.ops.kernels_on_host import HostRunner, host_kernels
from zeroaccel.engine import Engine
from zeroaccel.ops.cupy_kernels import KernelError
from zeroaccel.ops.device_kernels import kernels_for
from zeroaccel.ops.reductions import max_abs_into, square_sums_into
from zeroaccel.ops.shard_step import Hyperparameters, ShardOptimizer

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": ADAMW,
    "SGD": {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9, "nesterov": True}},
    "Lion": {"type": "Lion", "params": {"lr": 1e-3, "weight_decay": 0.1}},
    "Adagrad": {"type": "Adagrad", "params": {"lr": 1e-2}},
    "RMSprop": {"type": "RMSprop", "params": {"lr": 1e-3, "momentum": 0.9, "centered": True}},
    "bf16 moments": {"type": "AdamW", "params": {"lr": 1e-2, "moments_dtype": "bf16"}},
    "int8 moments": {"type": "AdamW", "params": {"lr": 1e-2, "moments_dtype": "int8"}},
}
OF_TENSORS: dict[str, dict[str, Any]] = {
    "Lamb": {"type": "Lamb", "params": {"lr": 1e-2}},
    "Muon": {"type": "Muon", "params": {"lr": 1e-2}},
}


@contextmanager
def by_kernels() -> Iterator[HostRunner]:
    """Replaces an accelerator's kernels by these within the context; yields the runner of launches."""
    kernels, replacements = host_kernels(), Replacements()

    def step_shard(
        self: ShardOptimizer, group: Hyperparameters, param: Tensor, grad: Tensor, *, grad_scale: Any, out: Any
    ) -> None:
        control = grad_scale if isinstance(grad_scale, Tensor) else None
        self._note_state(param)
        buffers, coefficients = self._advance(group, param)
        factor = 1.0 if control is not None else grad_scale
        scalars = [v if isinstance(v, np.uint32) else np.float32(v) for v in (factor, *coefficients)]
        with torch.no_grad():
            kernels.update(self.kernel_name(), [param, *buffers], grad.contiguous(), out, control, scalars)

    replacements.everywhere(kernels_for, lambda device: kernels)
    replacements.everywhere(max_abs_into, kernels.max_abs_into)
    replacements.everywhere(square_sums_into, kernels.square_sums_into)
    replacements.set(ShardOptimizer, "step_shard", step_shard)
    try:
        assert isinstance(kernels._runner, HostRunner)
        yield kernels._runner
    finally:
        replacements.undo()


def _on_device(engine: Engine) -> None:
    assert engine._boundary is not None
    engine._boundary._checks_on_device = True


def _both(settings: Mapping[str, Any], steps: int = 4) -> tuple[list[str], Run, set[str]]:
    """Trains by the host's loops and by the kernels; returns the differences, the latter run, and its kernels."""
    wanted = train(settings, steps)
    with by_kernels() as runner:
        found = train(settings, steps, before=_on_device)
    return differences(found, wanted), found, set(runner.launched)


BOUNDARY = {"max_abs", "write_facts", "largest_of_facts", "square_sums", "finalize"}


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_training_has_the_bits_of_the_host(own_job: None, precision: str, optimizer: str) -> None:
    settings = config(2, precision, optimizer=OPTIMIZERS[optimizer], gradient_clipping=0.5)
    found, _, launched = _both(settings)
    assert found == []
    assert launched >= BOUNDARY
    assert len(launched) == len(BOUNDARY) + 1


@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, *OF_TENSORS])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_kernels_are_loaded_before_the_first_step(own_job: None, optimizer: str, accumulation: int) -> None:
    rule = {**OPTIMIZERS, **OF_TENSORS}[optimizer]
    loaded: set[tuple[str, tuple[object, ...]]] = set()
    with by_kernels() as runner:

        def before(engine: Engine) -> None:
            _on_device(engine)
            loaded.update(runner.compiled)

        train(config(2, "bf16", accumulation, optimizer=rule, gradient_clipping=0.5), 2, before=before)
    assert {name for name, constants in runner.compiled if constants} >= {"max_abs", "square_sums"}
    assert {kind for kind in runner.compiled - loaded if kind[1]} == set()


def test_a_kernel_that_does_not_load_leaves_no_state(own_job: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise KernelError("no space left")

    engine, *_ = zeroaccel.initialize(Toy(), config=config(2))
    optimizer = engine.sharded_optimizer
    assert optimizer is not None
    monkeypatch.setattr(ShardOptimizer, "_update_on_cpu", fail)
    with pytest.raises(KernelError, match="no space left"):
        optimizer._update_apart(torch.device("cpu"), 0, torch.float32, torch.float32)
    assert engine.optimizer.state_dict()["state"] == {}
    engine.destroy()


def test_overflows_are_skipped_by_the_kernels(own_job: None) -> None:
    settings = config(1, "fp16", fp16={"enabled": True, "initial_scale_power": 20, "hysteresis": 1})
    found, run, _ = _both(settings, 12)
    assert found == []
    assert 0 < run.skipped < 12


def _sharded(stage: int) -> tuple[list[str], set[str]]:
    found, _, launched = _both(config(stage, "bf16", gradient_clipping=0.5))
    return found, launched


def test_ranks_have_the_bits_of_the_host(ranks: Ranks) -> None:
    for found, launched in ranks(2).run(_sharded, 3):
        assert found == []
        assert launched >= BOUNDARY | {"adam"}


def _in_codes(settings: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Trains twice with quantized communication; returns the differences, and the kernels of a step of the second."""
    wanted = train(settings, 4)
    with by_kernels() as runner:
        found = train(settings, 4)
    return differences(found, wanted), runner.launched


def test_codes_between_ranks_have_the_bits_of_the_host(ranks: Ranks) -> None:
    """Four ranks as two nodes of two: gradients in 4 bits over two hops, weights in 8 bits."""
    changes = {"zero_quantized_gradients": True, "zero_quantized_weights": True, "zeropp": {"node_size": 2}}
    for found, launched in ranks(4).run(_in_codes, config(3, "bf16", **changes)):
        assert found == []
        assert {"encode", "decode", "sum_codes"} <= set(launched)
