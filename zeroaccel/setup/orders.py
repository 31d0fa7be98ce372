"""What commands of this library order a script to do that they run: `zeroaccel trace` and `zeroaccel verify`.

An order is an environment variable that only its command sets; without one nothing here does anything.
"""

from __future__ import annotations

from zeroaccel.config import Config
from zeroaccel.telemetry.verification import Verification
from zeroaccel.zero.engine_base import EngineBase
from zeroaccel.zero.step_trace import record_if_asked


def ordered_config(config: Config) -> Config:
    """The config with the keys that an order replaces."""
    order = Verification.ordered()
    if order is None or not order.zero:
        return config
    return config.model_copy(update={"zero_optimization": config.zero_optimization.model_copy(update=dict(order.zero))})


def follow_orders(engine: EngineBase) -> None:
    """Has a new engine recorded, if an order asks for it. (all ranks)"""
    if (order := Verification.ordered()) is not None:
        parts, plan = engine.traced_parts(), engine.settings.plan
        stage = sum((plan.optimizer, plan.grads, plan.params))
        accumulation = engine.settings.accumulation
        order.record(engine, parts.report, parts.collectives.job.rank, stage=stage, accumulation=accumulation)
    record_if_asked(engine)
