"""Keys that DeepSpeed ignores: each one's answer out of three, with the key's position."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.log_lines import log_lines
from tests.support.refusals import refused
from zeroaccel.config import load_config, tier_plan
from zeroaccel.config.support import KEYS, Kind
from zeroaccel.errors import ConfigError
from zeroaccel.logs import without_notes
from zeroaccel.zero.layout import FlatLayout, FlatRange
from zeroaccel.zero.storage.swapped_masters import cut_sub_groups


@pytest.fixture
def warned() -> Iterator[list[str]]:
    """The warnings in the log."""
    with log_lines(logging.WARNING) as lines:
        yield lines


NOTED = [
    ('{"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}', "offload_param.device: parameters are"),
    ('{"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}', "offload_optimizer.device: optimizer states"),
    ('{"zero_optimization": {"stage": 1, "zero_quantized_gradients": true}}', "zero_quantized_gradients: parameters"),
    ('{"activation_checkpointing": {"cpu_checkpointing": true}}', "cpu_checkpointing: affects only calls"),
    (
        '{"activation_checkpointing": {"contiguous_memory_optimization": true}}',
        "optimization: the engine stores inputs",
    ),
    ('{"flops_profiler": {"enabled": true}}', "flops_profiler.enabled: the engine has no profiler"),
    ('{"comms_logger": {"enabled": true}}', "comms_logger.enabled: the engine keeps no log of"),
    ('{"hybrid_engine": {"enabled": true}}', "hybrid_engine.enabled: the training engine also generates"),
    ('{"checkpoint": {"use_node_local_storage": true}}', "checkpoint.use_node_local_storage: every rank writes"),
    ('{"data_efficiency": {"enabled": true}}', "data_efficiency.enabled: neither data_sampling nor data_routing"),
    ('{"eigenvalue": {"enabled": true}}', "eigenvalue: zeroaccel computes no curvature"),
    ('{"nebula": {"enabled": true}}', "nebula: not available; checkpoint.async_save"),
    ('{"my_experiment": {"seed": 1}}', "my_experiment: unknown key, which changes nothing"),
    ('{"fp16": {"enabled": false, "whatever": 1}}', "fp16.whatever: unknown key, which changes nothing"),
]


@pytest.mark.parametrize(("text", "note"), NOTED)
def test_requested_settings_without_effect_warn_once(text: str, note: str, warned: list[str]) -> None:
    config = load_config(text)
    lines = [line for line in config.notes if note in line]
    assert len(lines) == 1
    assert lines[0].startswith("<json>:1:")
    load_config(text)
    assert [line for line in warned if note in line] in (lines, [])  # another test may have logged it in this process


QUIET = [
    ({"bf16": {"enabled": True, "loss_scale": 0, "hysteresis": 2}}, "bf16.hysteresis: bf16 needs no loss scale"),
    ({"fp16": {"enabled": True, "opt_level": "O2"}}, "fp16.opt_level: zeroaccel does not use Apex"),
    ({"opt_level": "O1"}, "opt_level: zeroaccel does not use Apex"),
    ({"zero_allow_untested_optimizer": 1}, "zero_allow_untested_optimizer: an optimizer of unknown class steps on"),
    ({"activation_checkpointing": {"partition_activations": True}}, "stay whole without such a group"),
    ({"_comment": "x", "zero_optimization": {"_why": "y"}}, "zero_optimization._why: taken for a comment"),
]


@pytest.mark.parametrize(("tree", "note"), QUIET)
def test_keys_that_are_not_needed_leave_a_note_without_a_warning(
    tree: dict[str, Any], note: str, warned: list[str]
) -> None:
    assert any(note in line for line in load_config(tree).notes)
    assert warned == []


@pytest.mark.parametrize(
    "tree",
    [
        {"tensor_parallel": {"autotp_size": 1}},
        {"tensor_parallel": {"tp": {"tp_size": 1}}},
        {"zero_optimization": {"stage": 3, "sub_group_size": 0}},
        {"amp": {"enabled": "auto", "opt_level": "O1"}},
        {"amp": {"enabled": False, "opt_level": "O1"}},
        {"amp": False},
        {"amp": None},
        {"elasticity": {}},
        {"elasticity": {"enabled": False, "max_train_batch_size": 2000}},
        {"compression_training": {"weight_quantization": {"shared_parameters": {"enabled": False}}}},
        {"compression_training": {"enabled": False}},
        {"progressive_layer_drop": {"enabled": False, "theta": 0.5}},
        {"sparse_attention": {"enabled": False, "mode": "fixed"}},
        {"data_efficiency": {"enabled": False}},
        {"flops_profiler": {"enabled": False}, "comms_logger": {"enabled": False}, "hybrid_engine": {"enabled": False}},
        {"zero_optimization": {"stage": "auto", "offload_param": {"device": "cpu"}}},
        {"bf16": {"enabled": "auto"}, "torch_autocast": {"enabled": True}},
        {"bf16": {"enabled": True}, "torch_autocast": {"enabled": True}},
    ],
)
def test_keys_that_are_off_or_undecided_leave_no_note(tree: dict[str, Any]) -> None:
    assert load_config(tree).notes == ()


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"optimizer": {"type": "OneBitAdam"}}, "optimizer.type: zeroaccel does not have the 1-bit communication of"),
        ({"optimizer": {"type": "ZeroOneAdam"}}, "use Adam; zero_quantized_gradients"),
        ({"compression_training": {"weight_quantization": {"shared_parameters": {"enabled": True}}}}, "compress the"),
        (
            {"data_efficiency": {"enabled": True, "data_routing": {"enabled": True}}},
            "use a sampler that selects them",
        ),
        ({"progressive_layer_drop": {"enabled": True}}, "set layerdrop"),
        ({"sparse_attention": {"mode": "fixed"}}, "use torch.nn.attention.flex_attention"),
        ({"torch_autocast": {"enabled": True, "dtype": "fp32"}}, 'torch_autocast.dtype: expected "bfloat16" or'),
        (
            {"bf16": {"enabled": True}, "torch_autocast": {"enabled": True, "dtype": "fp16"}},
            'torch_autocast.dtype: expected "bf16", the enabled precision of the parameters',
        ),
        (
            {"torch_autocast": {"enabled": True}, "zero_optimization": {"zero_quantized_weights": True}},
            "torch_autocast.enabled: weights cannot be gathered in quantized form under",
        ),
        ({"overlap_comm": True}, 'unknown key; did you mean "zero_optimization.overlap_comm"?'),
        (
            {"optimizer": {"type": "Adam", "torch_adam": True}},
            'optimizer.torch_adam: unknown key; did you mean "params',
        ),
        (
            {"device": "cpu"},
            '"zero_optimization.offload_param.device" or "zero_optimization.offload_optimizer.device"?',
        ),
    ],
)
def test_keys_that_would_change_training_are_refused(tree: dict[str, Any], message: str) -> None:
    with refused(ConfigError, message):
        load_config(tree)


@pytest.mark.parametrize(
    ("tree", "strict", "standard", "lenient"),
    [
        ({"wibble": 1}, False, True, True),
        ({"gradient_clippin": 1}, False, False, True),
        ({"overlap_comm": True}, False, False, True),
        ({"aio": {"wibble": 1}}, False, True, True),
        ({"aio": {"blocksize": 1}}, False, False, True),
        ({"zero_optimization": {"wibble": 1}}, False, False, False),  # as in DeepSpeed
        ({"zero_optimization": {"offload_param": {"Device": "cpu"}}}, False, False, False),
        ({"_wibble": 1}, True, True, True),
    ],
)
def test_unknown_keys_by_how_strict_one_is(tree: dict[str, Any], strict: bool, standard: bool, lenient: bool) -> None:
    for unknown_keys, fine in (("strict", strict), ("standard", standard), ("lenient", lenient)):
        if fine:
            assert len(load_config(tree, unknown_keys=unknown_keys).notes) == 1  # type: ignore[arg-type]
        else:
            with pytest.raises(ConfigError, match="unknown key"):
                load_config(tree, unknown_keys=unknown_keys)  # type: ignore[arg-type]


def test_unsharded_tensors_are_not_offloaded() -> None:
    cpu = {"device": "cpu"}
    for stage, found in (
        (0, ("device", "device")),
        (1, ("device", "host")),
        (2, ("device", "host")),
        (3, ("host",) * 2),
    ):
        zero = {"stage": stage, "offload_param": cpu, "offload_optimizer": cpu}
        plan = tier_plan(load_config({"zero_optimization": zero}))
        assert (plan.param, plan.optimizer) == found


def test_every_refusal_has_a_remedy() -> None:
    """Features of older DeepSpeed releases are refused with the nearest alternative."""
    for name in ("compression_training", "data_efficiency", "progressive_layer_drop", "sparse_attention", "elasticity"):
        assert KEYS[name].kind is Kind.REFUSED
        assert KEYS[name].fix


def test_one_parameter_per_sub_group() -> None:
    layout = FlatLayout.build([("a", (100,)), ("b", (3, 5)), ("c", (70,))], world_size=2)
    starts = {slot.start for slot in layout.slots}
    for rank in range(2):
        shard = layout.shard(rank)
        found = cut_sub_groups("k", layout.group_runs([0, 0, 0], rank), [{}], 1 << 20, starts=starts)
        padded = [layout.padded(index) & shard for index in range(3)]
        assert [group.range for group in found] == [part for part in padded if part]
    limited = cut_sub_groups("k", [(FlatRange(0, 256), 0)], [{}], 64, starts={0, 96})
    ends = [(group.range.start, group.range.end) for group in limited]
    assert ends == [(0, 64), (64, 96), (96, 160), (160, 224), (224, 256)]


def test_the_command_line_leaves_notes_to_the_ranks(warned: list[str]) -> None:
    with without_notes():
        assert load_config({"only_for_this_test": 1}).notes
    assert warned == []
    load_config({"only_for_this_test": 1})
    assert warned == ["only_for_this_test: unknown key, which changes nothing"]
