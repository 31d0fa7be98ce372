"""Functions and small classes of DeepSpeed's modules that need no engine."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroaccel
from tests.support.job import run_command
from zeroaccel import activations
from zeroaccel.comm.topology import destroy
from zeroaccel.compat import activation_checkpointing
from zeroaccel.compat.deepspeed_calls import (
    MonitorMaster,
    OnDevice,
    RepeatingLoader,
    StepThroughput,
    check_expert_marks,
    clip_grad_norm_,
    has_moe_layers,
    instrument_w_nvtx,
    is_moe_param,
    is_moe_param_group,
    log_dist_once,
    note_expert_groups,
    recursive_getattr,
    recursive_setattr,
    see_memory_usage,
    set_log_level_from_string,
    set_random_seed,
    split_params_into_different_moe_groups_for_optimizer,
)
from zeroaccel.compat.deepspeed_config import (
    DeepSpeedConfig,
    DeepSpeedZeroConfig,
    DeepSpeedZeroOffloadOptimizerConfig,
    OffloadStateTypeEnum,
    ZeroStageEnum,
    compute_elastic_config,
)
from zeroaccel.compat.device_accelerator import DeviceFacts, get_accelerator, set_accelerator
from zeroaccel.compat.flops_profiler import OperationProfiler, duration_to_string, get_model_profile, params_to_string
from zeroaccel.compat.surface import SURFACE
from zeroaccel.config.schema_zero import OffloadParam
from zeroaccel.errors import ConfigError, EngineStateError, UsageError


class _Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.rest = nn.Linear(8, 16), nn.Sequential(nn.ReLU(), nn.Linear(16, 4, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.rest(self.first(x))
        return out


# -- operations


def test_operations_of_a_forward_are_counted() -> None:
    flops = 2 * 3 * (8 * 16 + 16 * 4)
    counted = get_model_profile(_Blocks(), (3, 8), print_profile=False, as_string=False)
    assert counted == (flops, flops // 2, 8 * 16 + 16 + 16 * 4)
    inner = get_model_profile(_Blocks(), (3, 8), print_profile=False, as_string=False, ignore_modules=[nn.Sequential])
    assert inner[0] == 2 * 3 * 8 * 16
    named = get_model_profile(_Blocks(), kwargs={"x": torch.ones(3, 8)}, print_profile=False)
    assert named == ("1.15 K", "576 MACs", "208")
    with pytest.raises(UsageError, match="input_shape, args or kwargs"):
        get_model_profile(_Blocks())


def test_a_profile_of_steps(tmp_path: Path) -> None:
    model = _Blocks()
    profiler = OperationProfiler(model, recompute_fwd_factor=1.0)
    assert profiler.get_total_flops() == 0
    profiler.start_profile()
    with pytest.raises(EngineStateError, match="stopped"):
        profiler.start_profile()
    model(torch.ones(3, 8))
    profiler.reset_profile()
    model(torch.ones(1, 8))
    profiler.stop_profile()
    assert profiler.get_total_macs() == 2 * (8 * 16 + 16 * 4)
    assert 0 < float(profiler.get_total_duration()) < 100
    path = tmp_path / "out" / "profile.txt"
    profiler.print_model_profile(profile_step=4, module_depth=1, top_modules=2, output_file=str(path))
    text = path.read_text()
    assert "step 4" in text
    assert "_Blocks.first: 128 MACs" in text
    assert "_Blocks.rest.1" not in text  # of depth 2
    profiler.end_profile()
    profiler.print_model_profile(output_file=str(tmp_path / "nothing.txt"))
    assert not (tmp_path / "nothing.txt").exists()


def test_numbers_are_shown_with_units() -> None:
    assert [params_to_string(n) for n in (12, 1500, 2e6, 3e9)] == ["12", "1.5 K", "2 M", "3 B"]
    assert [duration_to_string(s) for s in (2.0, 0.0125, 3e-6)] == ["2 s", "12.5 ms", "3 us"]


# -- memory


def test_memory_is_printed_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    see_memory_usage("before")
    assert capsys.readouterr().out == ""
    see_memory_usage("after the forward", force=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "after the forward"
    assert float(lines[1].split()[1]) > 0
    assert "CPU Virtual Memory:  used" in lines[2]


# -- data, tensors


def test_throughput_counts_from_the_start_step() -> None:
    lines: list[str] = []
    timer = StepThroughput(None, batch_size=6, start_step=2, steps_per_output=2, logging_fn=lines.append)
    timer.stop(global_step=True)
    assert timer.global_step_count == 0
    for _ in range(4):
        timer.start()
        timer.stop(global_step=True)
    assert timer.avg_samples_per_sec() == pytest.approx(6 * 3 / timer.total_elapsed_time)
    assert [line.partition("global_step=")[2][0] for line in lines] == ["2", "4"]


def test_a_loader_without_an_end() -> None:
    loader = torch.utils.data.DataLoader([1, 2, 3], batch_size=2)  # type: ignore[arg-type]
    batches = RepeatingLoader(loader)
    assert [next(batches).tolist() for _ in range(4)] == [[1, 2], [3], [1, 2], [3]]
    assert len(batches) == 2
    assert iter(batches) is batches


def test_models_on_a_device_in_a_dtype() -> None:
    with OnDevice(dtype=torch.float16, device="meta"):
        model = _Blocks()
    assert {(param.dtype, param.device.type) for param in model.parameters()} == {(torch.float16, "meta")}
    with OnDevice(dtype=torch.bfloat16, device="cpu"):
        layer = nn.Linear(2, 2)
        counts = torch.zeros(2, dtype=torch.long)
    assert (layer.weight.dtype, counts.dtype) == (torch.bfloat16, torch.long)
    with OnDevice(dtype=torch.bfloat16, enabled=False):
        assert torch.ones(1).dtype is torch.float32
    assert torch.ones(1).dtype is torch.float32


def test_seeds_norms_levels_and_ranges() -> None:
    set_random_seed(5)
    first = torch.rand(2)
    set_random_seed(5)
    assert torch.equal(first, torch.rand(2))
    param = nn.Parameter(torch.zeros(2))
    param.grad = torch.tensor([3.0, 4.0])
    assert clip_grad_norm_([param], 1.0).item() == 5.0
    assert param.grad.norm().item() == pytest.approx(1.0, abs=1e-5)
    with pytest.raises(UsageError, match="mpu"):
        clip_grad_norm_([param], 1.0, mpu=object())
    before = zeroaccel.logs.logger.level
    set_log_level_from_string("error")
    assert zeroaccel.logs.logger.level == 40
    zeroaccel.logs.logger.setLevel(before)
    log_dist_once("once", ranks=[0])
    assert instrument_w_nvtx(first.sum)() == first.sum()


# -- configs


def test_a_config_with_deepspeeds_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(
            {
                "train_batch_size": 8,
                "train_micro_batch_size_per_gpu": 2,
                "bf16": {"enabled": True},
                "optimizer": {"type": "Adam", "params": {"lr": 0.5}},
                "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
            }
        )
    )
    config = DeepSpeedConfig(str(path))
    assert (config.gradient_accumulation_steps, config.world_size, config.zero_enabled) == (4, 1, True)
    assert (config.optimizer_name, config.optimizer_params["lr"], config.scheduler_name) == ("Adam", 0.5, None)
    assert (config.bfloat16_enabled, config.fp16_enabled, config.loss_scale) == (True, False, 0.0)
    assert config.zero_config.offload_optimizer.device == "cpu"
    assert config.zero_optimization_stage == ZeroStageEnum.gradients
    assert config.steps_per_print is None
    config.print_user_config()
    assert json.loads(capsys.readouterr().out)["train_batch_size"] == 8
    with pytest.raises(AttributeError, match=r"DeepSpeedConfig\.elasticity_enabled: zeroaccel provides"):
        config.elasticity_enabled  # noqa: B018 - the access itself raises
    for wrong in ({"train_batch_size": 3, "train_micro_batch_size_per_gpu": 2}, {"zero_optimization": {"stage": 9}}):
        with pytest.raises(ConfigError):
            DeepSpeedConfig(wrong)


def test_sections_and_enumerations_of_configs() -> None:
    class OwnConfig(DeepSpeedZeroConfig):
        own: int = 3

    assert (OwnConfig(stage=2).own, DeepSpeedZeroConfig().stage) == (3, 0)
    assert [DeepSpeedZeroConfig(stage=stage).overlap_comm for stage in range(4)] == [False, False, False, True]
    assert DeepSpeedZeroConfig(stage=3, overlap_comm=False).overlap_comm is False
    older: dict[str, Any] = {"stage3_max_live_parameters": 5, "cpu_offload_param": True, "offload_optimizer": {}}
    config = DeepSpeedZeroConfig(**older, stage3_gather_fp16_weights_on_model_save=True)
    assert (config.max_live_parameters, config.gather_16bit_weights_on_model_save) == (5, True)
    assert isinstance(config.offload_param, OffloadParam)
    assert config.offload_param.device == "cpu"
    assert isinstance(config.offload_optimizer, DeepSpeedZeroOffloadOptimizerConfig)
    with pytest.raises(ValueError, match="stage3_max_life_parameters: unknown key, did you mean"):
        DeepSpeedZeroConfig(stage3_max_life_parameters=5)  # type: ignore[call-arg]
    pipelines = [{}, {"pipeline_read": True}, {"pipeline_write": True}]
    assert [DeepSpeedZeroOffloadOptimizerConfig(**keys).pipeline for keys in pipelines] == [False, True, True]
    assert OffloadStateTypeEnum("hp_params") is OffloadStateTypeEnum.hp_params
    assert list(map(int, ZeroStageEnum)) == [0, 1, 2, 3]


# -- recomputation


@pytest.fixture
def _restored() -> Iterator[None]:
    yield
    activations.reset()
    activation_checkpointing._section = None


@pytest.mark.usefixtures("_restored")
def test_recomputation_is_configured_by_deepspeeds_call() -> None:
    assert not activation_checkpointing.is_configured()
    with pytest.raises(UsageError, match="configure"):
        activation_checkpointing.set_num_layers(3)
    activation_checkpointing.configure(
        None,
        {"train_batch_size": 1, "activation_checkpointing": {"cpu_checkpointing": False}},
        partition_activations=True,  # no effect without a model-parallel group
        checkpoint_in_cpu=True,
        profile=False,
    )
    assert activation_checkpointing.is_configured()
    section = activations._current.section
    assert (section.cpu_checkpointing, section.partition_activations) == (True, False)
    activation_checkpointing.set_num_layers(4)
    assert activations._current.section.number_checkpoints == 4
    assert activations._current.section.cpu_checkpointing
    layer, x = nn.Linear(3, 3), torch.ones(2, 3, requires_grad=True)
    activation_checkpointing.checkpoint(layer, x).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, layer.weight.sum(0).expand(2, 3))
    before = activations._current
    activation_checkpointing.checkpoint(layer, x)  # a forward without a backward
    activation_checkpointing.reset()
    assert activations._current is not before
    assert activations._current.section.number_checkpoints == 4


# -- the device


@pytest.mark.skipif(torch.cuda.is_available(), reason="the answers of a machine without CUDA")
def test_the_device_of_a_machine_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
    device = get_accelerator()
    state = device.get_rng_state()
    first = torch.rand(1)
    device.set_rng_state(state)
    assert torch.equal(first, torch.rand(1))
    device.manual_seed(3)
    assert device.initial_seed() == 3
    device.manual_seed_all(4)
    assert device.random().initial_seed() == 4
    assert device.default_generator(0) is torch.default_generator
    assert device.supported_dtypes() == [torch.float32, torch.float16, torch.bfloat16]
    tensor = torch.ones(2)
    assert device.pin_memory(tensor) is tensor
    assert not device.is_pinned(tensor)
    assert device.on_accelerator(tensor)
    with device.stream(device.Stream()), device.current_stream() as stream:
        stream.synchronize()
    assert device.Event is None
    device.range_push("range")
    device.range_pop()
    assert device.lazy_call(lambda: 5) == 5
    used = device.memory_stats()["allocated_bytes.all.current"]
    assert 0 < used < device.total_memory()
    assert 0 < device.available_memory() < device.total_memory()
    assert device.max_memory_reserved() >= device.memory_reserved() > 0
    assert device.memory_cached() > 0
    device.reset_max_memory_allocated()
    assert device.is_synchronized_device()
    assert device.visible_devices_envs() == ["CUDA_VISIBLE_DEVICES"]
    variables: dict[str, str] = {}
    device.set_visible_devices_envs(variables, [1, 2])
    assert variables == {"CUDA_VISIBLE_DEVICES": "1,2"}
    assert (device._name, device.device_count()) == ("cpu", 1)
    monkeypatch.setenv("LOCAL_SIZE", "3")
    assert device.device_count() == 3
    with pytest.raises(AttributeError, match=r"get_accelerator\(\)\.create_op_builder: zeroaccel provides"):
        device.create_op_builder("UtilsBuilder")


def test_another_accelerator_can_be_set() -> None:
    own, before = DeviceFacts(), get_accelerator()
    try:
        set_accelerator(own)
        assert get_accelerator() is own
        with pytest.raises(UsageError, match="set_accelerator"):
            set_accelerator(object())
    finally:
        set_accelerator(before)


def test_events_of_a_script_go_to_the_monitors(tmp_path: Path) -> None:
    section = {"enabled": True, "output_path": str(tmp_path), "job_name": "run"}
    monitor = MonitorMaster({"train_batch_size": 1, "csv_monitor": section})
    assert monitor.enabled
    monitor.write_events([("Train/loss", 0.5, 32)])
    (path,) = tmp_path.rglob("*.csv")
    assert "32,0.5" in path.read_text().replace(" ", "")
    assert not MonitorMaster(None).enabled
    config = DeepSpeedConfig({"train_batch_size": 1, "csv_monitor": {**section, "job_name": "other"}})
    MonitorMaster(config.monitor_config).write_events([("Train/loss", 0.25, 64)])
    assert "64,0.25" in next((tmp_path / "other").rglob("*.csv")).read_text().replace(" ", "")
    assert config.monitor_config.csv_monitor.job_name == "other"
    MonitorMaster({"train_batch_size": 1}).write_events([("Train/loss", 0.5, 32)])


# -- scripts


def test_modules_run_as_scripts(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    config = {"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.5}}}
    engine, *_ = zeroaccel.initialize(model, config=config)
    engine.save_checkpoint(tmp_path / "saved")
    engine.destroy()
    program = (sys.executable, "-m", "zeroaccel.compat", "-m")
    done = run_command([*program, "deepspeed.utils.zero_to_fp32", "saved", "whole"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    weights = torch.load(tmp_path / "whole" / "pytorch_model.bin", weights_only=True)
    assert torch.equal(weights["weight"], model.weight)
    done = run_command(
        [*program, "deepspeed.utils.zero_to_torch", "saved", "half", "--dtype", "bfloat16"], cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    weights = torch.load(tmp_path / "half" / "pytorch_model.bin", weights_only=True)
    assert torch.equal(weights["weight"], model.weight.bfloat16())
    arguments = ("--input_folder", "saved/global_step0", "--output_folder", "saved/universal")
    done = run_command([*program, "deepspeed.checkpoint.ds_to_universal", *arguments], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    engine, *_ = zeroaccel.initialize(nn.Linear(2, 2), config=config)
    assert engine.load_checkpoint(tmp_path / "saved", tag="universal")[0] == str(tmp_path / "saved" / "universal")
    assert torch.equal(engine.module.weight, model.weight)
    engine.destroy()
    destroy()
    failed = run_command([*program, "deepspeed.utils.zero_to_fp32", "absent", "whole"], cwd=tmp_path)
    assert failed.returncode == 1
    assert failed.stderr.startswith("deepspeed.utils.zero_to_fp32: absent")


def test_submodules_are_replaced_by_dotted_names() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 3)))
    assert recursive_getattr(model, "1.0.weight") is model[1][0].weight
    other = nn.Linear(2, 3)
    recursive_setattr(model, "1.0", other)
    recursive_setattr(model, "0", other)
    assert model[1][0] is other
    assert model[0] is other


def test_param_groups_are_not_divided_by_experts() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    group = {"params": model.parameters(), "name": "all", "lr": 0.5}
    assert split_params_into_different_moe_groups_for_optimizer(group) == [
        {"params": list(model.parameters()), "name": "all", "lr": 0.5}
    ]
    halves = [{"params": list(part.parameters())} for part in model]
    assert split_params_into_different_moe_groups_for_optimizer(halves, max_group_size=1) == halves
    assert has_moe_layers(model) == (False, 0)
    assert not is_moe_param(model[0].weight)
    assert not is_moe_param_group(halves[0])
    model[1].weight.allreduce = False  # type: ignore[assignment]
    assert is_moe_param(model[1].weight)
    with pytest.raises(UsageError, match="group 1: expected parameters whose gradients all ranks reduce"):
        split_params_into_different_moe_groups_for_optimizer(halves)
    with pytest.raises(UsageError, match=r"deepspeed.initialize: parameter 1.weight: expected a parameter"):
        check_expert_marks(model)


def test_a_param_group_marked_as_experts_is_noted(caplog: pytest.LogCaptureFixture) -> None:
    groups = [{"params": nn.Linear(2, 2).parameters(), "moe": True}]
    with caplog.at_level(logging.INFO, logger="zeroaccel"):
        note_expert_groups(torch.optim.SGD(groups, lr=0.1))
    assert "param group: moe has no effect" in caplog.text


# -- batch sizes for many numbers of ranks: the results of DeepSpeed 0.19.6


@pytest.mark.parametrize(
    ("section", "ranks", "expected"),
    [
        ({"max_train_batch_size": 10000, "micro_batch_sizes": [8, 12, 16, 17], "version": 0.1}, 48, (8640, 12)),
        ({"max_train_batch_size": 100, "micro_batch_sizes": [2, 4], "version": 0.1}, 12, (96, 4)),
        ({"max_train_batch_size": 100, "micro_batch_sizes": [3, 5], "num_gpus_per_node": 2}, 4, (72, 3)),
        ({"max_train_batch_size": 118, "micro_batch_sizes": [4], "min_gpus": 8}, 7, (112, 4)),
    ],
)
def test_a_batch_size_suits_many_numbers_of_ranks(section: dict[str, Any], ranks: int, expected: Any) -> None:
    config = {"elasticity": {"enabled": True, **section}}
    batch, counts, micro = compute_elastic_config(config, "0.18.0", ranks)
    assert (batch, micro) == expected
    assert ranks in counts
    assert batch % (micro * ranks) == 0
    assert compute_elastic_config(config | {"elasticity": {**config["elasticity"], "version": 0.1}}, "0.18.0")[0] > 0


@pytest.mark.parametrize(("ranks", "micro_steps"), [(1, 4), (2, 2), (4, 1)])
def test_ms_swift_computes_its_accumulation(ranks: int, micro_steps: int) -> None:
    """The calls of its elastic callback, with the section that it adds itself."""
    added = {"enabled": True, "max_train_batch_size": 8, "micro_batch_sizes": [2], "min_gpus": 1, "max_gpus": 4}
    section = {**added, "ignore_non_elastic_batch_info": True, "min_time": 20, "version": 0.1}
    version = SURFACE["deepspeed.git_version_info"]["version"]
    assert version == "zeroaccel.compat.finder:VERSION"
    config = {"elasticity": section}
    batch, _, micro = compute_elastic_config(config, target_deepspeed_version=version, world_size=ranks)
    assert (micro, batch // (micro * ranks)) == (2, micro_steps)


def test_a_number_of_ranks_that_the_batch_does_not_suit_is_named() -> None:
    section = {"enabled": True, "max_train_batch_size": 100, "micro_batch_sizes": [2, 4], "version": 0.1}
    with pytest.raises(AssertionError, match="which share the batch of 96, got '7 ranks'"):
        compute_elastic_config({"elasticity": section}, "0.18.0", 7)
    with pytest.raises(ConfigError, match='"micro_batch_sizes" of at most this size'):
        compute_elastic_config({"elasticity": {"enabled": True}}, "0.18.0")
