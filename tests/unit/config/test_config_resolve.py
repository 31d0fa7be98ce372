"""Filling "auto" from facts: the value and source of every key, and the error if no fact fills it."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.refusals import message, refused
from zeroaccel.config import Fact, Facts, load_config, resolve
from zeroaccel.config.auto_values import RULES, _default
from zeroaccel.config.schema import Config
from zeroaccel.config.section import field_paths
from zeroaccel.errors import ConfigError

HIDDEN = Fact(512, "model.config.hidden_size")
AUTO_SIZES = {
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
}
MICRO, STEPS, TRAIN = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"


def _said(value: Any) -> Fact[Any]:
    return Fact(value, "code")


def _seen(value: Any) -> Fact[Any]:
    return Fact(value, "the loader", explicit=False)


def _nested(path: str, value: object) -> dict[str, Any]:
    for part in reversed(path.split(".")):
        value = {part: value}
    assert isinstance(value, dict)
    return value


def _at(tree: Any, path: str) -> Any:
    for part in path.split("."):
        tree = tree[part]
    return tree


def _message(tree: dict[str, Any], facts: Facts, **more: Any) -> str:
    said = message(ConfigError, resolve, tree, facts, **more)
    assert message(ConfigError, load_config, tree, facts=facts, **more) == said, "`load_config` has another message"
    return said


# -- values and sources

Z, OF_HIDDEN = "zero_optimization.", "hidden 512 from model.config.hidden_size"
CASES: list[tuple[str, Facts, Any, str]] = [
    (f"{Z}reduce_bucket_size", Facts(hidden_size=HIDDEN), 262144, f"hidden^2 = 262144, {OF_HIDDEN}"),
    (
        f"{Z}stage3_prefetch_bucket_size",
        Facts(hidden_size=HIDDEN),
        235929,
        f"int(0.9 * hidden^2) = 235929, {OF_HIDDEN}",
    ),
    (f"{Z}prefetch_bucket_size", Facts(hidden_size=Fact(7, "a")), 44, "int(0.9 * hidden^2) = 44, hidden 7 from a"),
    (f"{Z}stage3_param_persistence_threshold", Facts(hidden_size=HIDDEN), 5120, f"10 * hidden = 5120, {OF_HIDDEN}"),
    (f"{Z}stage", Facts(stage=_said(3)), 3, "code"),
    (f"{Z}offload_param.device", Facts(offload_param_device=_said("cpu")), "cpu", "code"),
    (f"{Z}offload_param.nvme_path", Facts(offload_param_path=_said("/n")), "/n", "code"),
    (f"{Z}offload_optimizer.device", Facts(offload_optimizer_device=_said("nvme")), "nvme", "code"),
    (f"{Z}offload_optimizer.nvme_path", Facts(offload_optimizer_path=_said("/n")), "/n", "code"),
    (f"{Z}stage3_gather_16bit_weights_on_model_save", Facts(save_16bit_weights=_said(True)), True, "code"),
    (f"{Z}zero_hpz_partition_size", Facts(hpz_partition_size=_said(2)), 2, "code"),
    (f"{Z}zero_quantized_weights", Facts(quantized_weights=_said(True)), True, "code"),
    (f"{Z}zero_quantized_gradients", Facts(quantized_gradients=_said(True)), True, "code"),
    (f"{Z}frozen_weights", Facts(frozen_weights=_said("nf4")), "nf4", "code"),
    ("peak_tflops", Facts(more={"peak_tflops": _said(989.0)}), 989.0, "code"),
    (MICRO, Facts(micro_batch_size=_said(4)), 4, "code"),
    (MICRO, Facts(micro_batch_size=_seen(4)), 4, "the loader"),
    (STEPS, Facts(accumulation=_said(3)), 3, "code"),
    (STEPS, Facts(), 1, "default"),
    ("gradient_clipping", Facts(clipping=_said(0.5)), 0.5, "code"),
    ("fp16.enabled", Facts(precision=_said("fp16")), True, "code"),
    ("fp16.enabled", Facts(precision=_said("fp32")), False, "code"),
    ("bf16.enabled", Facts(precision=_said("bf16")), True, "code"),
    ("bf16.enabled", Facts(precision=_said("fp16")), False, "code"),
    ("optimizer.params.lr", Facts(lr=_said(0.1)), 0.1, "code"),
    ("optimizer.params.weight_decay", Facts(weight_decay=_said(0.2)), 0.2, "code"),
    ("optimizer.params.betas", Facts(betas=_said((0.8, 0.9))), (0.8, 0.9), "code"),
    ("optimizer.params.eps", Facts(eps=_said(1e-7)), 1e-7, "code"),
    ("scheduler.params.warmup_max_lr", Facts(lr=_said(0.1)), 0.1, "code"),
    ("scheduler.params.warmup_num_steps", Facts(warmup_num_steps=_said(0)), 0, "code"),
    ("scheduler.params.total_num_steps", Facts(total_num_steps=_said(90)), 90, "code"),
]


@pytest.mark.parametrize(("path", "facts", "value", "source"), CASES)
def test_an_auto_takes_its_value_and_says_from_where(path: str, facts: Facts, value: Any, source: str) -> None:
    given = _nested(path, "auto")
    before = json.dumps(given)
    resolved = resolve(given, facts)
    assert _at(resolved.tree, path) == value
    assert resolved.sources[path] == source
    assert json.dumps(given) == before


def test_every_rule_has_a_case_and_names_a_key_that_exists() -> None:
    covered = {path.replace("stage3_", "") for path, *_ in CASES} | {TRAIN, "optimizer.type", "scheduler.type"}
    assert covered == {rule.path for rule in RULES}
    known = {".".join(path) for path in field_paths(Config)}
    assert {rule.path for rule in RULES if ".params." not in rule.path} <= known


def test_the_peak_of_a_schedule_is_the_optimizers_rate() -> None:
    tree = {
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": 5}},
    }
    resolved = resolve(tree, Facts(lr=_said(0.3)))
    assert resolved.tree["scheduler"]["params"] == {"warmup_max_lr": 0.3, "warmup_num_steps": 5}
    assert resolved.sources["scheduler.params.warmup_max_lr"] == "optimizer.params.lr = 0.3"
    assert resolved.sources["optimizer.params.lr"] == "code"


@pytest.mark.parametrize(
    ("given", "facts", "sizes"),
    [
        # (train, micro, accumulation), two ranks
        (("auto", "auto", "auto"), Facts(micro_batch_size=_seen(4), accumulation=_said(3)), (24, 4, 3)),
        (("auto", 4, 3), Facts(), (24, 4, 3)),
        (("auto", 4, None), Facts(), (8, 4, None)),
        ((24, "auto", "auto"), Facts(), (24, 12, 1)),
        ((24, "auto", 3), Facts(micro_batch_size=_seen(1)), (24, 4, 3)),  # a derived size precedes an observed one
        ((24, "auto", "auto"), Facts(accumulation=_said(3)), (24, 4, 3)),
        ((24, 4, "auto"), Facts(accumulation=Fact(1, "a default", explicit=False)), (24, 4, 3)),
        ((24, "auto", "auto"), Facts(micro_batch_size=_said(3)), (24, 3, 4)),
    ],
)
def test_the_batch_triangle(given: tuple[Any, ...], facts: Facts, sizes: tuple[Any, ...]) -> None:
    tree = {key: size for key, size in zip((TRAIN, MICRO, STEPS), given, strict=True) if size is not None}
    resolved = resolve(tree, replace(facts, world_size=Fact(2, "the process group"), training=True)).tree
    assert tuple(resolved.get(key) for key in (TRAIN, MICRO, STEPS)) == sizes


def test_the_formulas_of_batch_sizes_are_reported() -> None:
    ranks = Fact(2, "the process group")
    assert resolve({TRAIN: "auto", MICRO: 4, STEPS: 3}, Facts(world_size=ranks)).sources == {
        TRAIN: f"{MICRO} 4 * {STEPS} 3 * ranks 2"
    }
    assert resolve({TRAIN: 24, MICRO: "auto", STEPS: 3}, Facts(world_size=ranks)).sources == {
        MICRO: f"{TRAIN} 24 / ({STEPS} 3 * ranks 2)"
    }


# -- keys that no fact fills


@pytest.mark.parametrize(
    ("path", "value", "source"),
    [
        ("zero_optimization.reduce_bucket_size", 500_000_000, "default 500000000, no hidden size is known"),
        ("zero_optimization.stage3_prefetch_bucket_size", 50_000_000, "default 50000000, no hidden size is known"),
        ("zero_optimization.stage3_param_persistence_threshold", 100_000, "default 100000, no hidden size is known"),
        ("zero_optimization.stage", 0, "default 0"),
        ("zero_optimization.offload_param.device", "none", 'default "none"'),
        ("zero_optimization.stage3_gather_16bit_weights_on_model_save", False, "default false"),
        ("zero_optimization.sub_group_size", 1_000_000_000, "default 1000000000"),  # without a rule
        ("gradient_clipping", 0.0, "default 0.0, 0 disables clipping"),
        ("bf16.enabled", False, "default false, no precision is requested"),
    ],
)
def test_a_default_is_written_down_with_a_note(path: str, value: Any, source: str) -> None:
    resolved = resolve(_nested(path, "auto"), Facts())
    assert (_at(resolved.tree, path), resolved.sources[path]) == (value, source)
    assert _default(("zero_optimization", "overlap_comm")) is None  # null is not written into the tree


def test_a_default_that_cannot_be_written_is_left_out() -> None:
    tree = {
        "zero_optimization": {"overlap_comm": "auto"},
        "optimizer": {"type": "AdamW", "params": {"betas": "auto", "lr": 1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_min_lr": "auto"}},
        TRAIN: "auto",
        MICRO: 2,
    }
    resolved = resolve(tree, Facts(world_size=None))
    assert resolved.tree == {
        "zero_optimization": {},
        "optimizer": {"type": "AdamW", "params": {"lr": 1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1}},
        MICRO: 2,
    }
    assert resolved.sources["optimizer.params.betas"] == "default of AdamW"
    assert resolved.sources["scheduler.params.warmup_min_lr"] == "default of WarmupLR"
    assert resolved.sources[TRAIN] == f"default, {MICRO} * {STEPS} * ranks"


@pytest.mark.parametrize(
    ("path", "what", "argument", "of"),
    [
        ("optimizer.params.lr", "a number", "lr", "optimizer"),
        ("scheduler.params.warmup_num_steps", "a number of optimizer steps", "warmup_num_steps", "scheduler"),
        ("scheduler.params.total_num_steps", "a number of optimizer steps", "total_num_steps", "scheduler"),
    ],
)
def test_an_auto_without_a_sensible_default_is_an_error(path: str, what: str, argument: str, of: str) -> None:
    tree = _nested(path, "auto")
    tree[of]["type"] = "Any"
    fix = f"write {what}, or pass {argument} to the {of}'s placeholder"
    assert _message(tree, Facts()) == f'{path}: "auto", but no value for it is known; {fix}'


@pytest.mark.parametrize("section", ["optimizer", "scheduler"])
def test_a_type_cannot_be_auto(section: str) -> None:
    tree = {section: {"type": "auto"}}
    with pytest.raises(ConfigError, match=f'^{section}.type: "auto", but no value for it is known; name the '):
        resolve(tree, Facts())
    with pytest.raises(ConfigError, match=f'^{section}.type: missing or "auto"'):  # reported once
        load_config(tree, facts=Facts())


def test_a_micro_batch_size_is_needed_to_train_only() -> None:
    fix = "write a number, or pass a training loader that has a batch size"
    text = f'{MICRO}: "auto", but no value for it is known; {fix}'
    assert _message({MICRO: "auto"}, Facts(training=True)) == text
    assert _message({MICRO: "auto", "optimizer": {"type": "AdamW"}}, Facts()) == text
    assert resolve({MICRO: "auto", TRAIN: "auto"}, Facts()).tree == {}


def test_sizes_that_do_not_divide_are_left_to_the_check_of_all_four() -> None:
    facts = Facts(world_size=Fact(2, "the process group"), training=True)
    assert resolve({TRAIN: 25, MICRO: 4, STEPS: "auto"}, facts).tree == {TRAIN: 25, MICRO: 4}


# -- contradictions


def test_a_contradiction_names_both_places_and_both_fixes() -> None:
    facts = Facts(accumulation=Fact(2, "Accelerator(gradient_accumulation_steps=2)"))
    assert _message({STEPS: 4}, facts, sources={STEPS: "ds.json:3:5"}) == (
        f"ds.json:3:5: {STEPS}: 4 here, but 2 from Accelerator(gradient_accumulation_steps=2); "
        'write 2 or "auto" here, or 4 there'
    )


@pytest.mark.parametrize(
    ("path", "value", "facts", "text"),
    [
        ("fp16.enabled", True, Facts(precision=_said("fp32")), 'write false or "auto" here, or "fp16" there'),
        (
            "bf16.enabled",
            False,
            Facts(precision=_said("bf16")),
            'write true or "auto" here, or a precision other than "bf16" there',
        ),
        ("zero_optimization.stage", 2, Facts(stage=_said(3)), '2 here, but 3 from code; write 3 or "auto" here'),
        (
            "zero_optimization.offload_optimizer.device",
            "none",
            Facts(offload_optimizer_device=_said("cpu")),
            '"none" here, but "cpu" from code; write "cpu" or "auto" here, or "none" there',
        ),
        ("gradient_clipping", 1.0, Facts(clipping=_said(0.0)), 'write 0.0 or "auto" here, or 1.0 there'),
        (MICRO, 8, Facts(micro_batch_size=_said(4)), 'write 4 or "auto" here, or 8 there'),
    ],
)
def test_every_fact_that_was_written_can_be_contradicted(path: str, value: Any, facts: Facts, text: str) -> None:
    assert text in _message(_nested(path, value), facts)


def test_contradictions_and_mistakes_are_reported_together() -> None:
    tree = {STEPS: 4, "gradient_cliping": 1, "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}
    facts = Facts(accumulation=_said(2), training=True)
    said = _message(tree, facts)
    assert said.startswith("config: 3 settings are wrong")
    assert [line.strip().split(":")[0] for line in said.splitlines()[1:]] == [
        STEPS,
        "gradient_cliping",
        "optimizer.params.lr",
    ]


@pytest.mark.parametrize(
    ("path", "value", "facts"),
    [
        (STEPS, 4, Facts(accumulation=_said(4))),
        ("gradient_clipping", 1, Facts(clipping=_said(1.0))),
        ("zero_optimization.offload_param.device", "CPU", Facts(offload_param_device=_said("cpu"))),
        ("optimizer.params.betas", [0.8, 0.9], Facts(betas=_said((0.8, 0.9)))),
        (MICRO, 8, Facts(micro_batch_size=_seen(4))),  # an observed 4 does not contradict
        ("zero_optimization.reduce_bucket_size", 7, Facts(hidden_size=HIDDEN)),  # a formula does not contradict
    ],
)
def test_values_that_agree_or_were_only_observed_are_kept(path: str, value: Any, facts: Facts) -> None:
    resolved = resolve(_nested(path, value), facts)
    assert (_at(resolved.tree, path), resolved.sources) == (value, {})


def test_a_wrong_value_is_reported_once() -> None:
    with refused(ConfigError, "expected a whole number", lines=1):
        load_config({STEPS: "four"}, facts=Facts(accumulation=_said(4)))


# -- keys that are absent


def test_explicit_facts_fill_absent_keys() -> None:
    facts = Facts(accumulation=_said(4), precision=_said("bf16"), micro_batch_size=_seen(2), lr=_said(0.1))
    resolved = resolve({"bfloat16": {}, "optimizer": {"type": "SGD"}}, facts)
    assert resolved.tree == {
        "bf16": {"enabled": True},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        STEPS: 4,
        "fp16": {"enabled": False},
    }
    assert resolved.sources == dict.fromkeys((STEPS, "fp16.enabled", "bf16.enabled", "optimizer.params.lr"), "code")
    assert load_config({}, facts=facts).sources[STEPS] == "code"


def test_facts_add_no_optimizer_and_no_arguments_of_a_schedule() -> None:
    facts = Facts(lr=_said(0.1), total_num_steps=_said(9), warmup_num_steps=_said(1))
    assert resolve({}, facts).tree == {}
    kept = {"scheduler": {"type": "LRRangeTest", "params": {"lr_range_test_min_lr": 1}}}
    assert resolve(kept, facts).tree == kept


def test_a_whole_section_may_be_auto() -> None:
    tree = {"bf16": "auto", "zero_optimization": {"offload_optimizer": "auto"}, "scheduler": "auto", "fp16": "auto"}
    facts = Facts(precision=Fact("bf16", "code", explicit=False), total_num_steps=_said(5))
    resolved = resolve(tree, facts)
    assert resolved.tree == {
        "zero_optimization": {},
        "bf16": {"enabled": True},
        "fp16": {"enabled": False},
    }
    assert resolved.sources["bf16"] == "filled key by key"
    assert resolved.sources["scheduler"] == "default"


# -- spellings, and the resulting Config


def test_the_tree_keeps_its_spelling_and_todays_form_of_older_keys() -> None:
    tree = {
        "bfloat16": {"enabled": "auto"},
        "zero_optimization": {**AUTO_SIZES, "cpu_offload": True, "stage3_max_live_parameters": 9},
        "data_types": {"keep_in_fp32_modules": "auto"},
    }
    zero = resolve(tree, Facts(hidden_size=Fact(10, "x"))).tree
    assert zero == {
        "bf16": {"enabled": False},
        "zero_optimization": {
            "reduce_bucket_size": 100,
            "stage3_prefetch_bucket_size": 90,
            "stage3_param_persistence_threshold": 100,
            "offload_optimizer": {"device": "cpu"},
            "stage3_max_live_parameters": 9,
        },
        "data_types": {"keep_in_fp32_modules": "auto"},  # "auto" is this key's own value
    }


def test_dotted_keys_come_before_formulas() -> None:
    tree = {"zero_optimization": {"reduce_bucket_size": "auto"}, "zero_optimization.reduce_bucket_size": 3}
    assert resolve(tree, Facts(hidden_size=HIDDEN)).tree == {"zero_optimization": {"reduce_bucket_size": 3}}


def test_a_resolved_tree_loads_as_the_config_that_was_resolved_on_loading() -> None:
    tree = {"zero_optimization": dict(AUTO_SIZES), TRAIN: "auto", MICRO: 2, "gradient_clipping": "auto"}
    facts = Facts(hidden_size=HIDDEN, world_size=Fact(2, "the process group"))
    resolved = resolve(tree, facts)
    config = load_config(resolved.tree, sources=resolved.sources)
    assert config == load_config(tree, facts=facts)
    assert (config.unresolved, config.train_batch_size) == ((), 4)
    assert config.sources["zero_optimization.reduce_bucket_size"].startswith("hidden^2 = 262144")
    assert config.zero_optimization.param_persistence_threshold == 5120


def test_a_file_keeps_its_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{\n  "gradient_clipping": "auto",\n  "zero_optimization": {"reduce_bucket_size": "auto"}\n}')
    with caplog.at_level(logging.INFO):
        config = load_config(path, facts=Facts(hidden_size=HIDDEN))
    assert config.sources["zero_optimization.reduce_bucket_size"] == (
        f"{path}:3:25 (hidden^2 = 262144, hidden 512 from model.config.hidden_size)"
    )
    assert config.unresolved == ()
    assert config.raw["gradient_clipping"] == "auto"
    assert config.notes == (f'{path}:2:3: gradient_clipping: "auto" takes its default 0.0, 0 disables clipping',)


def test_places_are_handed_on_in_the_spelling_of_the_tree() -> None:
    sources = {"bfloat16.enabled": "a.json:1:1", MICRO: "b.json:2:2"}
    resolved = resolve({"bfloat16": {"enabled": "auto"}, MICRO: 3}, Facts(precision=_said("bf16")), sources=sources)
    assert resolved.sources == {
        "bf16.enabled": "a.json:1:1 (code)",
        MICRO: "b.json:2:2",
        "fp16.enabled": "code",
    }


def test_without_facts_loading_leaves_autos_open() -> None:
    assert load_config({MICRO: "auto"}).unresolved == (MICRO,)
