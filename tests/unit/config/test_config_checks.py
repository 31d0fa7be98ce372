"""Keys that are valid alone but not together, bounds of single keys, and the batch triangle."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.refusals import message, table
from zeroaccel.config import BatchSizes, load_config, solve_batch
from zeroaccel.errors import ConfigError


def _lines(tree: dict[str, Any]) -> list[str]:
    return [line.strip() for line in message(ConfigError, load_config, tree).split("\n")]


def _zero(**keys: Any) -> dict[str, Any]:
    return {"zero_optimization": keys}


CONTRADICTIONS = """
{"fp16": {"enabled": true}, "bf16": {"enabled": true}, "data_types": {"param_dtype": "bf16"}}
    fp16.enabled: fp16 and bf16 are both enabled; set one of fp16.enabled and bf16.enabled to false
{"bf16": {"enabled": true}, "data_types": {"param_dtype": "fp16"}}
    data_types.param_dtype: expected "bf16", the enabled precision, got 'fp16'; enable that precision instead, or
    remove the key
{"data_types": {"param_dtype": "bfloat16"}}
    data_types.param_dtype: expected "fp32", the enabled precision, got 'bf16'; enable that precision instead, or
    remove the key
{"bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp16"}}
    data_types.grad_accum_dtype: expected "fp32" or "bf16", the enabled precision, got 'fp16'
{"data_types": {"grad_accum_dtype": "bf16"}}
    data_types.grad_accum_dtype: expected "fp32", got 'bf16'
{"fp16": {"enabled": true, "loss_scale_window": 0}}
    fp16.loss_scale_window: expected a number above 0 while fp16.loss_scale is 0, got 0
{"fp16": {"enabled": true, "min_loss_scale": 0}}
    fp16.min_loss_scale: expected above 0 and at most the initial scale 2**16 = 65536, got 0.0
{"fp16": {"enabled": true, "initial_scale_power": 4, "min_loss_scale": 32}}
    fp16.min_loss_scale: expected above 0 and at most the initial scale 2**4 = 16, got 32.0
{"fp16": {"enabled": true, "initial_scale_power": 2000}}
    fp16.initial_scale_power: expected at most 127, the largest exponent of fp32, got 2000
{"gradient_clipping": 1.0, "zero_optimization": {"compute_grad_norm": false}}
    zero_optimization.compute_grad_norm: gradient_clipping 1.0 requires the norm; set compute_grad_norm to true or
    gradient_clipping to 0
{"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1.0}}}
    optimizer.params.max_grad_norm: clipping is not an argument of the optimizer; set gradient_clipping at the top
    level instead
{"zero_optimization": {"offload_optimizer": {"device": "cpu", "update_during": "next_step"}}}
    zero_optimization.offload_optimizer.update_during: "next_step" applies to updates on the host, but nothing is
    offloaded at stage 0; set zero_optimization.stage to 1, 2 or 3, or update_during to "step"
{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0, "update_during": "forward"}}}
    zero_optimization.offload_optimizer.update_during: "forward" applies to updates on the host, but
    offload_optimizer.ratio is 0: the device updates everything; set ratio above 0, or update_during to "step"
{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5, "device_budget": "4GB"}}}
    zero_optimization.offload_optimizer.device_budget: 4000000000, but ratio 0.5 also says what stays on the device;
    remove one of the two keys
{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}
    zero_optimization.offload_optimizer.nvme_path: missing, and device is "nvme"; set it to a folder on a local disk
"""


@pytest.mark.parametrize(("text", "said"), table(CONTRADICTIONS))
def test_contradictions(text: str, said: str) -> None:
    assert message(ConfigError, load_config, json.loads(text)) == said


@pytest.mark.parametrize(("key", "value"), [("ratio", 0.5), ("device_budget", 1)])
def test_residual_masters_leave_no_share_on_the_device(key: str, value: object) -> None:
    precision = {"bf16": {"enabled": True}, "data_types": {"master_weights": "residual"}}
    tree = {**precision, **_zero(stage=2, offload_optimizer={"device": "cpu", key: value})}
    assert message(ConfigError, load_config, tree) == (
        f'zero_optimization.offload_optimizer.{key}: data_types.master_weights "residual": the host joins weights and '
        'residuals, so no share stays on the device; remove the key, or set master_weights to "fp32"'
    )


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
        _zero(stage=2, offload_optimizer={"device": "cpu", "ratio": 0}),
        _zero(stage=2, offload_optimizer={"device": "cpu", "ratio": 1, "device_budget": "1.5 GiB"}),
        _zero(stage=2, offload_optimizer={"device": "nvme", "nvme_path": "/x", "ratio": 0.5}),
    ],
)
def test_no_contradictions(tree: dict[str, Any]) -> None:
    load_config(tree)


def test_one_mistake_is_reported_once() -> None:
    """An invalid stage is not also reported as one that does not match the offload."""
    said = message(ConfigError, load_config, _zero(stage=4, offload_optimizer={"device": "cpu"}))
    assert said == "zero_optimization.stage: expected 0, 1, 2 or 3, got 4"


@pytest.mark.parametrize(
    ("tree", "line"),
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
        ({"optimizer": {}}, 'optimizer.type: missing or "auto"; set it, or remove the section'),
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
        *(
            (
                _zero(offload_optimizer={"device_budget": wrong}),
                "zero_optimization.offload_optimizer.device_budget: expected a number of bytes of at least 0, or "
                f'a size such as "4GB" or "512MiB", got {wrong!r}',
            )
            for wrong in (-1, "4 pounds", True, "GB", 1.5, "-4GB", None)
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
def test_golden_messages_of_single_keys(tree: dict[str, Any], line: str) -> None:
    assert line in _lines(tree)


NAMES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def _tree(*sizes: int | str | None) -> dict[str, Any]:
    return {name: size for name, size in zip(NAMES, sizes, strict=True) if size is not None}


@pytest.mark.parametrize(
    ("given", "solved"),
    [
        ((24, 4, 2), (24, 4, 2)),
        ((24, 4, None), (24, 4, 2)),
        ((24, None, 2), (24, 4, 2)),
        ((None, 4, 2), (24, 4, 2)),
        ((24, None, None), (24, 8, 1)),
        ((None, 4, None), (12, 4, 1)),
        ((24, "auto", "auto"), (24, 8, 1)),
        (("auto", 4, "auto"), (12, 4, 1)),
    ],
)
def test_missing_batch_sizes_are_derived(given: tuple[Any, ...], solved: tuple[int, int, int]) -> None:
    assert solve_batch(load_config(_tree(*given)), world_size=3) == BatchSizes(*solved)


WRONG = """
[32, 4, 3]
    train_batch_size: 32 is not 4 * 3 * 2 = 24 (train_batch_size 32, train_micro_batch_size_per_gpu 4,
    gradient_accumulation_steps 3, ranks 2); set train_batch_size to 24, or remove one of the three
[30, 4, null]
    train_batch_size: 30 is not a multiple of 4 * 2 = 8 (train_batch_size 30, train_micro_batch_size_per_gpu 4,
    gradient_accumulation_steps not given, ranks 2); set train_batch_size to 24 or 32
[3, null, 4]
    train_batch_size: 3 is not a multiple of 4 * 2 = 8 (train_batch_size 3, train_micro_batch_size_per_gpu not given,
    gradient_accumulation_steps 4, ranks 2); set train_batch_size to 8
[5, null, null]
    train_batch_size: 5 is not a multiple of 1 * 2 = 2 (train_batch_size 5, train_micro_batch_size_per_gpu not given,
    gradient_accumulation_steps not given, ranks 2); set train_batch_size to 4 or 6
[null, null, 4]
    batch sizes: neither train_batch_size nor train_micro_batch_size_per_gpu is given (train_batch_size not given,
    train_micro_batch_size_per_gpu not given, gradient_accumulation_steps 4, ranks 2); set
    train_micro_batch_size_per_gpu
"""


@pytest.mark.parametrize(("sizes", "said"), table(WRONG))
def test_sizes_that_do_not_fit_are_reported_with_all_four_numbers(sizes: str, said: str) -> None:
    assert message(ConfigError, solve_batch, load_config(_tree(*json.loads(sizes))), world_size=2) == said


def test_the_message_has_the_place_in_the_file() -> None:
    config = load_config('{\n  "train_batch_size": 5\n}')
    with pytest.raises(ConfigError, match=r"^<json>:2:3: train_batch_size: 5 is not a multiple"):
        solve_batch(config, world_size=2)


def test_a_data_parallel_size_must_be_the_number_of_ranks() -> None:
    config = load_config({"train_batch_size": 4, "data_parallel_size": 4})
    assert solve_batch(config, world_size=4) == BatchSizes(4, 1, 1)
    said = "data_parallel_size: expected 2 ranks, got 4; remove the key, or start that many processes"
    assert message(ConfigError, solve_batch, config, world_size=2) == said
