"""accelerate's wrappers of engine and optimizer: a loop reads and changes gradients between backward and step."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from tests.multi.compat.facade_engines import CONFIG, loss_of, small_model, with_facade
from tests.support.pool import Ranks
from zeroaccel.logs import logger

pytestmark = [
    pytest.mark.usefixtures("ranks_without_libraries"),
    pytest.mark.skipif(find_spec("accelerate") is None, reason="needs accelerate"),
]


def _wrapped(stage: int, **more: Any) -> tuple[Any, Any, Any]:
    """Returns an engine, and accelerate's wrappers of the engine and of its optimizer."""
    import deepspeed  # type: ignore[import-not-found]
    from accelerate.utils.deepspeed import DeepSpeedEngineWrapper, DeepSpeedOptimizerWrapper

    config = {**CONFIG, "zero_optimization": {"stage": stage}, "gradient_clipping": 0.1, **more}
    engine, *_ = deepspeed.initialize(model=small_model(), config=config)
    optimizer = DeepSpeedOptimizerWrapper.__new__(DeepSpeedOptimizerWrapper)  # without accelerate's global state
    optimizer.optimizer = engine.optimizer
    return engine, DeepSpeedEngineWrapper(engine), optimizer


def _weights(engine: Any) -> list[list[float]]:
    from deepspeed.utils import safe_get_full_fp32_param

    return [safe_get_full_fp32_param(param).flatten().tolist() for param in engine.module.parameters()]


def _loops(stage: int, precision: dict[str, Any]) -> None:
    """Compares a loop that reads gradients to the bare engine, and to a loop that never calls the optimizer."""
    from deepspeed.utils import safe_get_full_grad, safe_set_full_grad

    bare, *_ = _wrapped(stage, **precision)
    engine, wrapper, optimizer = _wrapped(stage, **precision)
    other, without_step, _ = _wrapped(stage, **precision)
    for micro in range(6):
        last = micro % 2 == 1
        bare.backward(loss_of(bare))
        bare.step()
        before = _weights(engine)
        wrapper.backward(loss_of(engine), sync_gradients=last)
        without_step.backward(loss_of(other), sync_gradients=last)
        if last:
            found = [safe_get_full_grad(param) for param in engine.module.parameters()]
            total = torch.cat([gradient.flatten() for gradient in found]).norm().item()
            norm = bare.get_global_grad_norm()
            assert wrapper.get_global_grad_norm() == norm
            assert total == pytest.approx(norm, rel=1e-5)
            assert (_weights(engine), engine.global_steps) == (before, micro // 2)
        optimizer.step()
        assert engine.global_steps == bare.global_steps
        assert _weights(engine) == _weights(bare)
        assert engine.get_global_grad_norm() == bare.get_global_grad_norm()
    other.destroy()
    assert other.global_steps == 3
    trained = [param.detach().float().flatten().tolist() for param in other.module.parameters()]
    dtype = next(other.module.parameters()).dtype
    assert trained == [torch.tensor(weight).to(dtype).float().tolist() for weight in _weights(bare)]

    # A change after the norm was read is in the norm that clips.
    wrapper.backward(loss_of(engine), sync_gradients=True)
    first = wrapper.get_global_grad_norm()
    weight = engine.module[0].weight
    safe_set_full_grad(weight, 100 * safe_get_full_grad(weight))
    optimizer.step()
    assert engine.get_global_grad_norm() > 2 * first
    assert safe_get_full_grad(weight) is None
    bare.destroy()
    engine.destroy()


def _all_loops() -> list[str]:
    lines = _messages()
    for stage in (0, 1, 2, 3):
        _loops(stage, {})
    for precision in ({"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "initial_scale_power": 4}}):
        _loops(3, precision)
    return lines


def _messages() -> list[str]:
    from deepspeed.utils import safe_get_full_grad

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        engine, wrapper, optimizer = _wrapped(2)
        weight = engine.module[0].weight
        assert [safe_get_full_grad(weight) for _ in range(2)] == [None, None]
        wrapper.backward(loss_of(engine), sync_gradients=True)
        assert [param.grad for param in engine.module.parameters()] == [None] * 6
        torch.nn.utils.clip_grad_norm_(engine.module.parameters(), 1.0)
        engine.module.zero_grad()
        optimizer.step()
        wrapper.backward(loss_of(engine), sync_gradients=True)
        engine(torch.ones(2, 4))
        free = torch.nn.Parameter(torch.ones(2))
        assert free.grad is None
        free.grad = torch.ones(2)
        assert free.grad.tolist() == [1.0, 1.0]
        del free.grad
        assert free.grad is None
        engine.destroy()
    finally:
        logger.removeHandler(handler)
    return [line for line in lines if "expected" in line]


def test_a_loop_reads_and_changes_gradients_before_the_update(ranks: Ranks) -> None:
    """One test, since the facade is installed before a process imports accelerate."""
    early, plain, clipped, skipped = ranks(2).run(with_facade, _all_loops)[0]
    assert early.startswith("safe_get_full_grad: expected a call between the last backward of a step and its update")
    for line in (plain, clipped):
        assert "test_postponed_updates.py:" in line
        assert "safe_get_full_grad(param) on all ranks" in line
    assert plain != clipped
    assert skipped.startswith("accelerator.backward(loss): expected optimizer.step() next")
    assert "grad" not in vars(torch.nn.Parameter)
