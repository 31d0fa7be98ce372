"""An Accelerator's settings from the launcher's variables, with a JSON that sets everything or is all "auto"."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.support.refusals import refused
from zeroaccel import Accelerator, DeepSpeedPlugin, DistributedType, ZeroPlugin
from zeroaccel.accelerate import zero_plugin as plugin_module
from zeroaccel.config.launch.launch_sources import LaunchedSettings, to_environment
from zeroaccel.errors import ConfigError

pytestmark = pytest.mark.usefixtures("own_job")
WIDTH = 8
EVERYTHING_AUTO: dict[str, Any] = {
    "fp16": {"enabled": "auto"},
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        **{"stage": "auto", "stage3_gather_16bit_weights_on_model_save": "auto", "reduce_bucket_size": "auto"},
        "offload_optimizer": {"device": "auto", "nvme_path": "auto"},
        "offload_param": {"device": "auto"},
        **{"stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"},
    },
    **dict.fromkeys(("gradient_clipping", "train_batch_size", "train_micro_batch_size_per_gpu"), "auto"),
    **{"gradient_accumulation_steps": "auto", "steps_per_print": 2000000},
}


def _launch(monkeypatch: pytest.MonkeyPatch, sources: dict[str, str] | None = None, **settings: Any) -> None:
    said = LaunchedSettings(use_zero=True, **settings)
    for name, value in to_environment(said, sources or {field: f"--{field}" for field in settings}).items():
        monkeypatch.setenv(name, value)


def _prepare(accelerator: Accelerator) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))
    loader = DataLoader(torch.randn(8, WIDTH), batch_size=4)  # type: ignore[arg-type]
    return accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), loader)[0]


def test_flags_fill_a_json_in_which_all_is_auto(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(EVERYTHING_AUTO, indent=2))
    (tmp_path / "nvme").mkdir()
    _launch(
        monkeypatch,
        mixed_precision="fp16",
        zero_stage=3,
        gradient_accumulation_steps=5,
        gradient_clipping=1.0,
        offload_param_device="cpu",
        offload_optimizer_device="nvme",
        offload_optimizer_nvme_path=str(tmp_path / "nvme"),
        zero3_save_16bit_model=True,
        deepspeed_config_file=str(file),
    )
    accelerator = Accelerator()
    assert accelerator.gradient_accumulation_steps == 5
    assert accelerator.mixed_precision == "fp16"
    assert accelerator.deepspeed_plugin is not None
    assert accelerator.deepspeed_plugin.zero_stage == 3
    early = accelerator.zero_config
    assert early["zero_optimization"]["offload_optimizer"] == {"device": "nvme", "nvme_path": str(tmp_path / "nvme")}
    assert (early["fp16"], early["bf16"], early["gradient_clipping"]) == ({"enabled": True}, {"enabled": False}, 1.0)
    assert early["train_batch_size"] == "auto"  # known once a loader is prepared
    assert f"{file}:9:5 (--zero_stage)" in str(accelerator.state)
    assert accelerator.deepspeed_plugin.is_auto("zero_optimization.stage")
    _prepare(accelerator)
    resolved, zero = accelerator.zero_config, accelerator.zero_config["zero_optimization"]
    assert [resolved[f"train_{size}"] for size in ("batch_size", "micro_batch_size_per_gpu")] == [20, 4]
    assert (resolved["gradient_accumulation_steps"], resolved["steps_per_print"], zero["stage"]) == (5, 2000000, 3)
    assert (zero["offload_param"], zero["reduce_bucket_size"]) == ({"device": "cpu"}, WIDTH * WIDTH)
    assert zero["stage3_gather_16bit_weights_on_model_save"] is True
    assert "auto" not in json.dumps(resolved)
    shown = str(accelerator.state)
    assert f"{file}:9:5 (--zero_stage)" in shown
    assert "(--mixed_precision)" in shown
    accelerator.free_memory()


def test_a_decided_json_and_a_cleaned_launch_are_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tree = {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": False},
        "gradient_clipping": 1.0,
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 10,
    }
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(tree, indent=2))
    sources = {
        "deepspeed_config_file": "launch.yaml:3:1",
        "zero3_init_flag": "launch.yaml:4:1",
        "mixed_precision": "default",
    }
    _launch(monkeypatch, sources, deepspeed_config_file=str(file), zero3_init_flag=False, mixed_precision="no")
    accelerator = Accelerator()
    assert accelerator.distributed_type == DistributedType.DEEPSPEED
    for shown in (str(accelerator.state), (_prepare(accelerator), str(accelerator.state))[1]):
        assert "Distributed environment: zeroaccel (distributed_type DEEPSPEED)  Backend: gloo" in shown
        assert "Num processes: 1\n" in shown
        assert "Mixed precision type: bf16" in shown
        assert f"{file}:10:3" in shown
    assert accelerator.gradient_accumulation_steps == 10
    assert accelerator.zero_config["train_batch_size"] == 40
    accelerator.free_memory()


@pytest.mark.parametrize(
    ("settings", "tree", "message"),
    [
        ({"zero_stage": 2}, {"zero_optimization": {"stage": 3}}, "stage: 3 here, but 2 from --zero_stage; write 2 or"),
        (
            {"mixed_precision": "no"},
            {"bf16": {"enabled": True}},
            "bf16.enabled: true here, but false from --mixed_prec",
        ),
        ({"gradient_clipping": 0.5}, {"gradient_clipping": 1.0}, "1.0 here, but 0.5 from --gradient_clipping"),
        ({"zero_stage": 7}, {"zero_optimization": {"stage": "auto"}}, "zero_optimization.stage: expected 0, 1, 2 or 3"),
        ({"offload_param_device": "gpu"}, {"zero_optimization": {"stage": 3}}, "offload_param.device: expected"),
    ],
)
def test_launch_and_json_that_disagree(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], tree: dict[str, Any], message: str
) -> None:
    _launch(monkeypatch, **settings)
    with refused(ConfigError, message):
        _prepare(Accelerator(zero_plugin=ZeroPlugin(tree)))


def test_code_and_launch_that_disagree(monkeypatch: pytest.MonkeyPatch) -> None:
    _launch(monkeypatch, zero_stage=3, mixed_precision="bf16", gradient_accumulation_steps=4)
    with refused(ConfigError, "zero_stage: 2 from ZeroPlugin(zero_stage=2), but 3 from --zero_stage; write"):
        ZeroPlugin(zero_stage=2)
    with refused(ConfigError, "mixed_precision: \"fp16\" from Accelerator(mixed_precision='fp16'), but"):
        Accelerator(mixed_precision="fp16")
    with refused(ConfigError, "gradient_accumulation_steps: 2 from Accelerator(gradient_accumulation_steps=2), but"):
        Accelerator(gradient_accumulation_steps=2)


def test_without_a_launcher_training_is_plain_data_parallelism() -> None:
    accelerator = Accelerator()
    assert accelerator.deepspeed_plugin is None
    assert accelerator.distributed_type == DistributedType.NO
    model = _prepare(accelerator)
    assert model.zero_config["zero_optimization"]["stage"] == 0
    assert accelerator.mixed_precision == "no"
    accelerator.free_memory()


def test_a_plugin_reads_every_form(tmp_path: Path) -> None:
    tree = {"zero_optimization": {"stage": 1}, "gradient_clipping": 0.25}
    text = json.dumps(tree)
    (tmp_path / "ds.json").write_text(text)
    forms: list[Any] = [tree, str(tmp_path / "ds.json"), text, base64.urlsafe_b64encode(text.encode()).decode()]
    for form in forms:
        plugin = DeepSpeedPlugin(hf_ds_config=form)
        assert plugin.deepspeed_config == tree
        assert plugin.deepspeed_config is not tree
        assert (plugin.zero_stage, plugin.gradient_clipping, plugin.gradient_accumulation_steps) == (1, 0.25, "auto")


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (ZeroPlugin, {"hf_ds_config": "missing.json"}, "ZeroPlugin(hf_ds_config): config file 'missing.json' does not"),
        (ZeroPlugin, {"hf_ds_config": 3}, "expected a dict, the path of a JSON file"),
        (ZeroPlugin, {"hf_ds_config": {"zero_optimization": {"stge": 1}}}, "zero_optimization.stge"),
        (ZeroPlugin, {"hf_ds_config": '{"fp16": {"enabled": true, "enabled": false}}'}, "given 2 times"),
        (ZeroPlugin, {"zero_stage": 7}, "ZeroPlugin(zero_stage): expected 0, 1, 2 or 3, got 7"),
        (ZeroPlugin, {"zero_stage": "2"}, "ZeroPlugin(zero_stage): expected 0, 1, 2 or 3, got '2'"),
        (ZeroPlugin, {"offload_param_device": "gpu"}, 'expected "none", "cpu" or "nvme", got \'gpu\''),
        (ZeroPlugin, {"gradient_accumulation_steps": 0}, "expected a whole number of at least 1, got 0"),
        (ZeroPlugin, {"gradient_clipping": -1}, "ZeroPlugin(gradient_clipping): expected a number of at least 0, got"),
        (ZeroPlugin, {"enable_msamp": True}, "8-bit training is not available"),
        (Accelerator, {"mixed_precision": "fp8"}, "8-bit training is not available; use bf16"),
        (Accelerator, {"mixed_precision": "half"}, 'expected "no", "fp16" or "bf16", got \'half\''),
        (Accelerator, {"gradient_accumulation_steps": 0}, "expected a whole number of at least 1"),
        (Accelerator, {"deepspeed_plugins": {"one": 3}}, "plugin 'one': expected a ZeroPlugin, got 'int'"),
        (Accelerator, {"deepspeed_plugins": {}}, "expected at least one plugin"),
        (Accelerator, dict.fromkeys(("deepspeed_plugin", "zero_plugin"), ZeroPlugin()), "expected one of them, got 2"),
    ],
)
def test_wrong_arguments_are_refused_by_name(make: Any, arguments: dict[str, Any], message: str) -> None:
    with refused(ConfigError, message):
        make(**arguments)


def test_every_setting_of_zero_in_a_launch_is_an_argument() -> None:
    plugin = ZeroPlugin(zero_stage=3, zero_quantized_weights=True, zero_hpz_partition_size=2)
    zero = plugin.deepspeed_config["zero_optimization"]
    assert (zero["zero_quantized_weights"], zero["zero_hpz_partition_size"]) == (True, 2)
    with pytest.raises(TypeError, match=r"'zero_quantised_weights'; did you mean 'zero_quantized_weights'\?"):
        ZeroPlugin(zero_quantised_weights=True)
    with refused(ConfigError, "ZeroPlugin(zero_hpz_partition_size): expected a whole number of at least 1, got 0"):
        ZeroPlugin(zero_hpz_partition_size=0)


def test_the_config_may_be_changed_until_prepare() -> None:
    plugin = ZeroPlugin({"zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": "auto"})
    accelerator = Accelerator(zero_plugin=plugin)
    plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 4
    plugin.hf_ds_config.config["gradient_clipping"] = 0.5
    assert plugin.hf_ds_config.get_value("zero_optimization.stage") == 1
    assert not plugin.is_auto("train_micro_batch_size_per_gpu")
    _prepare(accelerator)
    assert accelerator.zero_config["gradient_clipping"] == 0.5
    assert "plugin.deepspeed_config in code" in str(accelerator.state)
    accelerator.free_memory()


def test_classes_that_travel_whole() -> None:
    plugin = ZeroPlugin(zero_stage=3, transformer_moe_cls_names="Mixture, Other")
    assert plugin.get_value("zero_optimization.leaf_module.classes") == ["Mixture", "Other"]
    tree = {"zero_optimization": {"stage": 3, "leaf_module": {"classes": ["Third"]}}}
    with pytest.raises(ConfigError, match=r"leaf_module.classes: \['Third'\] here, but \['Mixture'\] from ZeroPlugin"):
        ZeroPlugin(tree, transformer_moe_cls_names="Mixture")


def test_the_reason_for_zero3_init_without_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    missing: set[str] = set()
    monkeypatch.setattr(plugin_module, "find_spec", lambda name: None if name in missing else object())
    assert plugin_module._why_not_registered() == "`import deepspeed` does not import zeroaccel here"
    missing.add("accelerate")
    assert plugin_module._why_not_registered() == "accelerate is missing"
    missing.add("transformers")
    assert plugin_module._why_not_registered() == ""
