"""Keys that are valid alone and wrong together, and bounds of single keys."""

from __future__ import annotations

from typing import Any

import pytest

from zeroaccel.config import load_config
from zeroaccel.errors import ConfigError


def _message(tree: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(tree)
    return str(caught.value)


def _lines(tree: dict[str, Any]) -> list[str]:
    return [line.strip() for line in _message(tree).split("\n")]


def _zero(**keys: Any) -> dict[str, Any]:
    return {"zero_optimization": keys}


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (
            {"fp16": {"enabled": True}, "bf16": {"enabled": True}, "data_types": {"param_dtype": "bf16"}},
            "fp16.enabled: fp16 and bf16 are both enabled; set one of fp16.enabled and bf16.enabled to false",
        ),
        (
            {"bf16": {"enabled": True}, "data_types": {"param_dtype": "fp16"}},
            "data_types.param_dtype: expected \"bf16\", the enabled precision, got 'fp16'; "
            "enable that precision instead, or remove the key",
        ),
        (
            {"data_types": {"param_dtype": "bfloat16"}},
            "data_types.param_dtype: expected \"fp32\", the enabled precision, got 'bf16'; "
            "enable that precision instead, or remove the key",
        ),
        (
            {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp16"}},
            'data_types.grad_accum_dtype: expected "fp32" or "bf16", the enabled precision, got \'fp16\'',
        ),
        (
            {"data_types": {"grad_accum_dtype": "bf16"}},
            "data_types.grad_accum_dtype: expected \"fp32\", got 'bf16'",
        ),
        (
            {"fp16": {"enabled": True, "loss_scale_window": 0}},
            "fp16.loss_scale_window: expected a number above 0 while fp16.loss_scale is 0, got 0",
        ),
        (
            {"fp16": {"enabled": True, "min_loss_scale": 0}},
            "fp16.min_loss_scale: expected above 0 and at most the initial scale 2**16 = 65536, got 0.0",
        ),
        (
            {"fp16": {"enabled": True, "initial_scale_power": 4, "min_loss_scale": 32}},
            "fp16.min_loss_scale: expected above 0 and at most the initial scale 2**4 = 16, got 32.0",
        ),
        (
            {"fp16": {"enabled": True, "initial_scale_power": 2000}},
            "fp16.initial_scale_power: expected at most 127, as fp32 holds no larger factor, got 2000",
        ),
        (
            {"gradient_clipping": 1.0, **_zero(compute_grad_norm=False)},
            "zero_optimization.compute_grad_norm: gradient_clipping 1.0 needs the norm; "
            "set compute_grad_norm to true or gradient_clipping to 0",
        ),
        (
            {"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1.0}}},
            "optimizer.params.max_grad_norm: clipping is not an argument of the optimizer; "
            "set gradient_clipping at the top level instead",
        ),
    ],
)
def test_contradictions(tree: dict[str, Any], message: str) -> None:
    assert _message(tree) == message


@pytest.mark.parametrize(
    ("tree", "line"),
    [
        (
            _zero(offload_optimizer={"device": "cpu", "update_during": "next_step"}),
            'zero_optimization.offload_optimizer.update_during: "next_step" is about updates on the host, and nothing '
            'is offloaded at stage 0; set zero_optimization.stage to 1, 2 or 3, or update_during to "step"',
        ),
        (
            _zero(stage=3, offload_optimizer={"device": "nvme"}),
            'zero_optimization.offload_optimizer.nvme_path: missing, and device is "nvme"; '
            "give a folder on a local disk",
        ),
    ],
)
def test_offload_must_fit_the_stage(tree: dict[str, Any], line: str) -> None:
    assert line in _lines(tree)


@pytest.mark.parametrize(
    "tree",
    [
        {"fp16": {"enabled": True, "loss_scale": 128, "loss_scale_window": 0, "min_loss_scale": 0}},
        {"fp16": {"loss_scale_window": 0}},
        {"fp16": {"enabled": True}, "data_types": {"param_dtype": "fp16", "grad_accum_dtype": "fp16"}},
        {"fp16": {"enabled": True}, "bf16": {"enabled": "auto"}},
        {"gradient_clipping": 0, **_zero(compute_grad_norm=False)},
        _zero(stage=2, offload_param={"device": "none", "nvme_path": None}),
        _zero(stage=2, offload_param={"device": "nvme"}),
        _zero(offload_optimizer={"device": "nvme"}, stage=0),
        _zero(stage=2, offload_optimizer={"device": "cpu", "ratio": 0.5}),
    ],
)
def test_no_contradictions(tree: dict[str, Any]) -> None:
    load_config(tree)


def test_one_mistake_is_reported_once() -> None:
    """A stage that is wrong must not also be reported as one that does not fit the offload."""
    message = _message(_zero(stage=4, offload_optimizer={"device": "cpu"}))
    assert message == "zero_optimization.stage: expected 0, 1, 2 or 3, got 4"


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (_zero(stage=4), "zero_optimization.stage: expected 0, 1, 2 or 3, got 4"),
        (_zero(stage="three"), "zero_optimization.stage: expected 0, 1, 2 or 3, got 'three'"),
        (_zero(stage=True), "zero_optimization.stage: expected 0, 1, 2 or 3, got True"),
        ({"zero_optimization": 3}, "zero_optimization: expected an object, got 3"),
        ({"fp16": None}, "fp16: expected an object, got None"),
        ({"gradient_clipping": -1}, "gradient_clipping: expected a number of at least 0, got -1.0"),
        ({"gradient_clipping": float("inf")}, "gradient_clipping: expected a finite number, got inf"),
        ({"gradient_clipping": "one"}, "gradient_clipping: expected a finite number, got 'one'"),
        ({"train_batch_size": "8.5"}, "train_batch_size: expected a whole number, got '8.5'"),
        ({"gradient_predivide_factor": 0}, "gradient_predivide_factor: expected a number above 0, got 0.0"),
        ({"train_batch_size": 0}, "train_batch_size: expected a number above 0, got 0"),
        ({"dump_state": "maybe"}, "dump_state: expected true or false, got 'maybe'"),
        ({"communication_data_type": "fp8"}, 'communication_data_type: expected "fp32", "fp16" or "bf16", got \'fp8\''),
        ({"gradient_allreduce_op": "avg"}, "gradient_allreduce_op: expected 'mean' or 'sum', got 'avg'"),
        ({"fp16": {"loss_scale": True}}, "fp16.loss_scale: expected a finite number, got True"),
        ({"fp16": {"loss_scale": -1}}, "fp16.loss_scale: expected a number of at least 0, got -1.0"),
        ({"optimizer": {}}, 'optimizer.type: missing or "auto"; give it, or remove the section'),
        ({"optimizer": {"type": ""}}, "optimizer.type: expected a non-empty string, got ''"),
        ({"optimizer": {"type": "A", "params": [1]}}, "optimizer.params: expected an object, got [1]"),
        (
            {"optimizer": {"type": "AdamW", "kind": "flat"}},
            "optimizer.kind: expected 'elementwise', 'per_tensor' or 'coupled', got 'flat'",
        ),
        ({"scheduler": {"type": 3}}, "scheduler.type: expected a non-empty string, got 3"),
        (
            _zero(offload_optimizer={"ratio": 1.5}),
            "zero_optimization.offload_optimizer.ratio: expected a number of at most 1, got 1.5",
        ),
        (
            {"zero_optimization": {"zenflow": {"topk_ratio": 1}}},
            "zero_optimization.zenflow.topk_ratio: expected a number below 1, got 1.0",
        ),
        (
            {"zero_optimization": {"zenflow": {"update_interval": 0}}},
            'zero_optimization.zenflow.update_interval: expected "auto" or a number of steps of at least 1, got 0',
        ),
        ({"log_level": "loud"}, "log_level: expected 'debug', 'info', 'warning', 'error' or 'critical', got 'loud'"),
        ({"tensorboard": {"output_path": 3}}, "tensorboard.output_path: expected a string, got 3"),
        ({"tensorboard": {"job_name": ""}}, "tensorboard.job_name: expected a non-empty string, got ''"),
        ({"aio": {"queue_depth": 0}}, "aio.queue_depth: expected a number above 0, got 0"),
        (
            _zero(leaf_module={"names": [1]}),
            "zero_optimization.leaf_module.names: expected a list of strings, got [1]",
        ),
        (
            {"data_types": {"keep_in_fp32_modules": "all"}},
            "data_types.keep_in_fp32_modules: expected \"auto\" or a list of module names, got 'all'",
        ),
        (_zero(offload_param={"nvme_path": ""}), "zero_optimization.offload_param.nvme_path: expected a path, got ''"),
        ({"amp": 3}, "amp: expected an object, got 3"),
    ],
)
def test_golden_messages_of_single_keys(tree: dict[str, Any], message: str) -> None:
    assert message in _lines(tree)
