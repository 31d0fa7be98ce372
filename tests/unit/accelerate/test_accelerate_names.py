"""Names, handlers and plugins of accelerate: each works with `Accelerator`, leaves a note, or is refused by name."""

from __future__ import annotations

import gc
import importlib
import inspect
import logging
import sys
import threading
import weakref
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroaccel
from tests.support.log_lines import log_lines
from zeroaccel import Accelerator, DistributedType, ZeroPlugin, logs, utils
from zeroaccel.accelerate import kwargs_handlers
from zeroaccel.accelerate.accelerator_arguments import AcceleratorArguments
from zeroaccel.accelerate.beside_accelerate import leave_accelerate
from zeroaccel.config.launch.launch_file import read_launch_file
from zeroaccel.errors import ConfigError, EngineStateError, UsageError
from zeroaccel.local_sgd import LocalSGD
from zeroaccel.logging import get_logger
from zeroaccel.state import AcceleratorState, GradientState, PartialState

accelerate = pytest.importorskip("accelerate")
theirs = importlib.import_module("accelerate.utils")


@pytest.fixture(autouse=True)
def _alone(own_job: None) -> Iterator[None]:
    logs._seen.clear()
    yield
    leave_accelerate()
    for state in (accelerate.state.AcceleratorState, accelerate.state.PartialState, accelerate.state.GradientState):
        state._reset_state()


@pytest.fixture
def notes() -> Iterator[list[str]]:
    with log_lines(logging.WARNING) as lines:
        yield lines


def _trained(accelerator: Accelerator) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    return accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


# -- names


def test_kinds_of_jobs_are_those_of_accelerate() -> None:
    ours, of_accelerate = (
        {kind.name: kind.value for kind in kinds} for kinds in (DistributedType, accelerate.DistributedType)
    )
    assert ours == {"MULTI_NEURON": "MULTI_NEURON", **of_accelerate}  # not in accelerate 1.10
    assert "FSDP" in DistributedType
    assert "MULTI_TOASTER" not in DistributedType
    assert DistributedType.FSDP == "FSDP" == accelerate.DistributedType.FSDP
    assert Accelerator(cpu=True).distributed_type in (DistributedType.NO, DistributedType.MULTI_GPU)


# Names that the example scripts of accelerate, diffusers, PEFT, TRL and transformers import from `accelerate.utils`.
IMPORTED = """
    AutocastKwargs DistributedDataParallelKwargs DDPCommunicationHookType DistributedType
    DummyOptim DummyScheduler DataLoaderConfiguration DeepSpeedPlugin
    GradientAccumulationPlugin InitProcessGroupKwargs ProfileKwargs ProjectConfiguration
    TorchDynamoPlugin broadcast_object_list clear_device_cache extract_model_from_parallel
    find_executable_batch_size gather gather_object is_bf16_available
    is_mlu_available is_npu_available is_peft_model is_schedulefree_available
    is_torch_version is_wandb_available is_xpu_available patch_environment
    reduce release_memory set_seed tqdm
    write_basic_config
"""
NOT_HERE = {
    "AORecipeKwargs": "mixed_precision",
    "FullyShardedDataParallelPlugin": "ZeroPlugin",
    "MegatronLMDummyScheduler": "ZeroPlugin",
    "ParallelismConfig": "ParallelConfig",
    "PrepareForLaunch": "notebook_launcher",
    "get_balanced_memory": "stage 3",
    "load_fsdp_model": "ZeroPlugin",
    "set_module_tensor_to_device": "stage 3",
}


def test_names_that_scripts_import_exist() -> None:
    for name in IMPORTED.split():
        assert getattr(utils, name) is getattr(utils, name), name
        assert hasattr(theirs, name) or name in ("clear_device_cache", "DummyOptim", "DummyScheduler"), name
    scope: dict[str, Any] = {}
    exec("from zeroaccel.utils.memory import clear_device_cache, release_memory", scope)
    exec("from zeroaccel.utils.dataclasses import DistributedType", scope)
    exec("from zeroaccel.launchers import notebook_launcher", scope)
    assert scope["DistributedType"] is DistributedType
    assert scope["notebook_launcher"] is zeroaccel.notebook_launcher
    assert set(utils.__all__) == set(utils._HOMES)
    ours = "DummyOptim DummyScheduler ZeroPlugin clear_device_cache get_active_deepspeed_plugin map_tensors"
    assert set(utils.__all__) <= {*dir(theirs), *ours.split(), "should_reduce_batch_size"}


@pytest.mark.parametrize("name", NOT_HERE)
def test_missing_names_are_refused_with_an_alternative(name: str) -> None:
    with pytest.raises(ImportError, match=f"accelerate's {name}: .*{NOT_HERE[name]}"):
        exec(f"from zeroaccel.utils import {name}")


def test_names_of_the_root_and_of_modules_that_are_not_there() -> None:
    theirs_here = {name for name, value in vars(accelerate).items() if callable(value)} - {"is_rich_available"}
    missing = {name for name in theirs_here if not name.startswith("_")} - set(zeroaccel.__all__)
    assert "init_empty_weights" in missing
    for name in sorted(missing):
        with pytest.raises(ImportError, match=f"does not have accelerate's {name}: "):
            exec(f"from zeroaccel import {name}")
    with pytest.raises(ImportError, match=r"does not have zeroaccel\.big_modeling\.init_empty_weights: .*zero\.Init"):
        exec("from zeroaccel.big_modeling import init_empty_weights")
    with pytest.raises(ImportError, match="most similar name is gather_object"):
        exec("from zeroaccel.utils import gather_objects")
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = utils.nonsense  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["checkpoint", "rollout", "zero"])
def test_packages_are_attributes_as_deepspeeds_are(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is imported on first access."""
    package = importlib.import_module(f"zeroaccel.{name}")
    monkeypatch.delattr(zeroaccel, name)
    assert getattr(zeroaccel, name) is package


def test_questions_for_packages_and_devices() -> None:
    assert utils.is_transformers_available() == theirs.is_transformers_available()
    assert bool(utils.is_wandb_available()) == bool(theirs.is_wandb_available())
    assert not utils.is_npu_available()
    assert not utils.is_xpu_available(check_device=True)
    assert utils.is_torch_version(">=", "2.6")
    assert not utils.is_torch_version("<", "2.6")
    assert utils.compare_versions("numpy", ">=", "1.26")
    assert utils.str_to_bool("Yes") == 1


def test_helpers_that_need_no_engine_are_accelerates_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert utils.convert_bytes is theirs.convert_bytes
    assert utils.is_transformers_available is theirs.is_transformers_available
    monkeypatch.setitem(sys.modules, "accelerate.utils", None)
    monkeypatch.delitem(vars(utils), "convert_bytes")
    with pytest.raises(ImportError, match=r"utils.convert_bytes comes from accelerate: pip install accelerate"):
        _ = utils.convert_bytes


def test_find_executable_batch_size_as_accelerate() -> None:
    def sizes(decorate: Any, message: str, **arguments: Any) -> list[int]:
        tried: list[int] = []

        @decorate(starting_batch_size=10, **arguments)
        def train(batch_size: int, limit: int) -> int:
            tried.append(batch_size)
            if batch_size > limit:
                raise RuntimeError(message)
            return batch_size

        assert train(8) == tried[-1]
        with pytest.raises(TypeError, match=r"first (argument|parameter)"):
            train(8, 8)
        return tried

    memory = "CUDA out of memory. Tried to allocate 2 GiB"
    assert sizes(utils.find_executable_batch_size, memory) == sizes(theirs.find_executable_batch_size, memory)
    with pytest.raises(RuntimeError, match="shape"):
        sizes(utils.find_executable_batch_size, "shape")

    @utils.find_executable_batch_size(starting_batch_size=2)
    def never(batch_size: int) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    with pytest.raises(RuntimeError, match="out of memory even with a batch size of 1"):
        never()


def test_a_basic_config_is_a_launch_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "deep" / "launch.yaml"
    assert utils.write_basic_config("bf16", path) == path
    settings = read_launch_file(path).values
    assert (settings["mixed_precision"], settings["num_processes"]) == ("bf16", max(1, torch.cuda.device_count()))
    assert utils.write_basic_config(save_location=path) is False
    assert "exists and was kept" in capsys.readouterr().out


def test_calls_on_data_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = {"x": torch.ones(2), "y": [torch.ones(3)]}
    moved = utils.send_to_device(batch, "meta", skip_keys="x")
    assert (moved["x"].device.type, moved["y"][0].device.type) == ("cpu", "meta")
    assert utils.convert_to_fp32({"h": torch.ones(1).half(), "i": torch.ones(1).long()})["h"].dtype is torch.float32
    assert utils.recursively_apply(lambda t, n: t + n, batch, 2)["y"][0].tolist() == [3.0] * 3
    with pytest.raises(TypeError, match="Unsupported types"):
        utils.recursively_apply(lambda t: t, {"a": "text"}, error_on_other_type=True)
    utils.save({"a": torch.ones(2)}, tmp_path / "a.safetensors", safe_serialization=True)
    utils.wait_for_everyone()
    assert (tmp_path / "a.safetensors").exists()
    assert list(utils.tqdm([1, 2], disable=True)) == [1, 2]
    monkeypatch.setenv("STAYS", "1")
    with utils.patch_environment(stays=2, added="x"):
        assert (utils.get_int_from_env(["NONE", "STAYS"], 7), utils.parse_choice_from_env("ADDED")) == (2, "x")
    assert (utils.get_int_from_env(["STAYS"], 7), utils.parse_flag_from_env("ADDED")) == (1, False)
    with utils.clear_environment():
        assert utils.get_int_from_env(["STAYS"], 7) == 7
    assert utils.parse_flag_from_env("STAYS")


def test_states_without_arguments_are_the_newest() -> None:
    AcceleratorState._newest = None
    assert not zeroaccel.state.is_initialized()
    with pytest.raises(EngineStateError, match="create Accelerator"):
        AcceleratorState()
    accelerator = Accelerator(zero_plugin=ZeroPlugin(zero_stage=2), gradient_accumulation_steps=3)
    assert zeroaccel.state.is_initialized()
    assert AcceleratorState().deepspeed_plugin is accelerator.deepspeed_plugin
    assert AcceleratorState().num_processes == PartialState().num_processes == 1
    assert AcceleratorState().fork_launched is False
    assert GradientState().num_steps == 3
    accelerator.gradient_state.sync_gradients = False
    assert not GradientState().sync_gradients
    assert (AcceleratorState().fsdp_plugin, AcceleratorState().parallelism_config) == (None, None)


def test_repeated_trainings_leave_nothing() -> None:
    """Three in one process, as in a search; an accelerator that is deleted takes its engine along."""
    threads, left = set(threading.enumerate()), []
    for _ in range(3):
        accelerator = Accelerator(cpu=True, zero_plugin=ZeroPlugin(zero_stage=2))
        model = torch.nn.Linear(4, 1)
        engine, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        accelerator.backward(engine(torch.ones(2, 4)).sum())
        optimizer.step()
        assert [item.engine for item in AcceleratorState().prepared] == [engine]
        left += [weakref.ref(each) for each in (accelerator, model, engine, engine.sharded_optimizer)]
        del accelerator, model, engine, optimizer
        gc.collect()
        assert [type(each()) for each in left if each() is not None] == []
        assert set(threading.enumerate()) <= threads
        assert AcceleratorState().prepared == []
        assert AcceleratorState().deepspeed_plugin is not None


# -- loggers


def test_loggers_begin_with_the_rank(caplog: pytest.LogCaptureFixture) -> None:
    logger = get_logger("a.script", log_level="INFO")
    with caplog.at_level("INFO"):
        logger.info("hello %s", "there")
        logger.info("all", main_process_only=False)
        logger.info("in turn", in_order=True)
        logger.debug("unseen")
        for _ in range(3):
            logger.warning_once("once")
    assert [record.getMessage() for record in caplog.records] == [
        "[RANK 0] hello there",
        "[RANK 0] all",
        "[RANK 0] in turn",
        "[RANK 0] once",
    ]
    assert {record.filename for record in caplog.records} == {Path(__file__).name}


def test_loggers_of_accelerate_work_beside(caplog: pytest.LogCaptureFixture) -> None:
    importlib.import_module("accelerate.logging")
    logger = accelerate.logging.get_logger("another.script")
    with pytest.raises(RuntimeError, match="You must initialize"):
        logger.info("too early")
    Accelerator()
    with caplog.at_level("INFO"):
        logger.info("in time")
    said = [record.getMessage().removeprefix("[RANK 0] ") for record in caplog.records]  # 1.10 writes no rank
    assert said == ["in time"]


def test_unwrapping_of_accelerate_takes_engines_off() -> None:
    before = theirs.extract_model_from_parallel
    accelerator = Accelerator(zero_plugin=ZeroPlugin(zero_stage=3))
    model = nn.Linear(4, 2)
    engine = accelerator.prepare(model)
    assert theirs.extract_model_from_parallel(engine) is model
    assert utils.extract_model_from_parallel(engine) is model
    assert theirs.extract_model_from_parallel(nn.DataParallel(model)) is model
    assert utils.extract_model_from_parallel(nn.DataParallel(model)) is model
    outer = nn.Sequential(nn.DataParallel(model))
    assert utils.extract_model_from_parallel(outer, recursive=True)[0] is model
    assert not utils.is_peft_model(engine)
    leave_accelerate()
    assert theirs.extract_model_from_parallel is before


# -- handlers


@pytest.mark.parametrize("home", [kwargs_handlers, theirs], ids=["ours", "accelerate's"])
def test_handlers_of_either_library(home: Any, notes: list[str]) -> None:
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="bf16",
        kwargs_handlers=[
            home.AutocastKwargs(enabled=False),
            home.DistributedDataParallelKwargs(find_unused_parameters=True, bucket_cap_mb=10),
            home.InitProcessGroupKwargs(timeout=timedelta(seconds=77)),
            home.ProfileKwargs(activities=["cpu"]),
        ],
    )
    assert [note.removeprefix("note on ").split(": ")[0] for note in notes] == [
        "DistributedDataParallelKwargs(find_unused_parameters=True)",
        "DistributedDataParallelKwargs(bucket_cap_mb=10)",
    ]
    with accelerator.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32
    with accelerator.autocast(home.AutocastKwargs()):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.bfloat16
    with accelerator.profile() as profiler:
        torch.ones(8, 8) @ torch.ones(8, 8)
    assert "aten::mm" in {event.key for event in profiler.key_averages()}
    with accelerator.profile(home.ProfileKwargs(activities=["cpu"], with_flops=True)):
        pass


def test_the_timeout_is_that_of_the_job() -> None:
    seen: list[Any] = []
    original = zeroaccel.accelerate.accelerator_state.init_process_group  # type: ignore[attr-defined]

    def watch(*args: Any, **kwargs: Any) -> Any:
        seen.append(args[1])
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zeroaccel.accelerate.accelerator_state.init_process_group", watch)
        Accelerator(kwargs_handlers=[theirs.InitProcessGroupKwargs(timeout=timedelta(seconds=77))])
    assert seen == [timedelta(seconds=77)]


@pytest.mark.parametrize("home", [kwargs_handlers, theirs], ids=["ours", "accelerate's"])
def test_the_loss_scale_of_plain_data_parallelism(home: Any, notes: list[str]) -> None:
    handler = home.GradScalerKwargs(init_scale=1024.0, growth_interval=7)
    accelerator = Accelerator(mixed_precision="fp16", cpu=True, kwargs_handlers=[handler])
    engine, _ = _trained(accelerator)
    assert engine.loss_scale.value == 1024.0
    assert accelerator.zero_config["fp16"]["loss_scale_window"] == 7
    assert "GradScalerKwargs" in str(accelerator.state)
    accelerator.free_memory()
    assert not notes
    accelerator = Accelerator(zero_plugin=ZeroPlugin(zero_stage=1), mixed_precision="fp16", kwargs_handlers=[handler])
    assert "fp16 section of the config" in notes[0]
    with pytest.raises(ConfigError, match=r"init_scale\): expected a power of two, got 1000"):
        Accelerator(mixed_precision="fp16", kwargs_handlers=[home.GradScalerKwargs(init_scale=1000.0)])
    with pytest.raises(ConfigError, match="growth_factor"):
        Accelerator(mixed_precision="fp16", kwargs_handlers=[home.GradScalerKwargs(growth_factor=4.0)])


@pytest.mark.parametrize("home", [kwargs_handlers, theirs], ids=["ours", "accelerate's"])
def test_a_hook_that_compresses_gradients(home: Any) -> None:
    kinds = home.DDPCommunicationHookType
    accelerator = Accelerator(kwargs_handlers=[home.DistributedDataParallelKwargs(comm_hook=kinds.BF16)])
    _trained(accelerator)
    assert accelerator.zero_config["communication_data_type"] == "bf16"
    accelerator.free_memory()
    with pytest.raises(UsageError, match=r"comm_hook.*got \('power_sgd'"):
        Accelerator(kwargs_handlers=[home.DistributedDataParallelKwargs(comm_hook=kinds.POWER_SGD)])


def test_handlers_that_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="got 'FP8RecipeKwargs'; leave it out: 8-bit training is not available"):
        Accelerator(kwargs_handlers=[type("FP8RecipeKwargs", (), {})()])
    with pytest.raises(UsageError, match="one handler of a kind, got 'two ProfileKwargs'"):
        Accelerator(kwargs_handlers=[theirs.ProfileKwargs(), zeroaccel.ProfileKwargs()])
    with pytest.raises(UsageError, match="expected handlers among AutocastKwargs"):
        Accelerator(kwargs_handlers=[object()])


def test_to_kwargs_has_values_that_differ_from_the_defaults() -> None:
    ours = kwargs_handlers.DistributedDataParallelKwargs(static_graph=True)
    assert (
        ours.to_kwargs()
        == theirs.DistributedDataParallelKwargs(static_graph=True).to_kwargs()
        == {"static_graph": True}
    )


# -- plugins


def test_settings_of_accelerates_own_classes(tmp_path: Path) -> None:
    accelerator = Accelerator(
        dataloader_config=theirs.DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True, data_seed=3),
        project_config=theirs.ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, iteration=4),
        gradient_accumulation_plugin=theirs.GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False),
        dynamo_plugin=theirs.TorchDynamoPlugin(backend="eager", fullgraph=True),
        log_with=theirs.LoggerType.TENSORBOARD,
        mixed_precision=theirs.PrecisionType.BF16,
        rng_types=[theirs.RNGType.TORCH, "generator"],
    )
    assert (accelerator.split_batches, accelerator.use_seedable_sampler) == (True, True)
    assert (accelerator.project_dir, accelerator.save_iteration) == (str(tmp_path), 4)
    assert (accelerator.gradient_accumulation_steps, accelerator.gradient_state.sync_with_dataloader) == (2, False)
    compilation = accelerator._preparation._rules.compilation
    assert compilation is not None
    assert (compilation.backend, compilation.mode, compilation.fullgraph) == ("eager", None, True)
    assert accelerator.mixed_precision == "bf16"
    assert accelerator.rng_types == ["torch"]
    for refused, words in (
        ({"split_batches": True, "dataloader_config": theirs.DataLoaderConfiguration()}, "one of them"),
        ({"rng_types": ["xla"]}, "types among generator"),
        ({"dynamo_backend": "eager", "dynamo_plugin": theirs.TorchDynamoPlugin()}, "one of them"),
        ({"dataloader_config": object()}, "a DataLoaderConfiguration"),
    ):
        with pytest.raises(UsageError, match=words):
            Accelerator(**refused)
    assert Accelerator(split_batches=True).split_batches


@pytest.mark.parametrize("config", [None, {"zero_optimization": {"stage": 3}, "gradient_accumulation_steps": "auto"}])
def test_accelerates_plugin_for_deepspeed(config: dict[str, Any] | None) -> None:
    settings: dict[str, Any] = {"zero_stage": 3} if config is None else {"hf_ds_config": config}
    accelerator = Accelerator(
        deepspeed_plugin=theirs.DeepSpeedPlugin(gradient_accumulation_steps=2, zero3_init_flag=False, **settings)
    )
    assert isinstance(accelerator.deepspeed_plugin, ZeroPlugin)
    assert accelerator.distributed_type == "DEEPSPEED"
    assert (accelerator.deepspeed_plugin.zero_stage, accelerator.gradient_accumulation_steps) == (3, 2)
    accelerator.prepare_data_loader(torch.utils.data.DataLoader(torch.ones(4), batch_size=2))  # type: ignore[arg-type]
    model = nn.Linear(4, 1)
    loader = torch.utils.data.DataLoader(torch.ones(4, 4), batch_size=2)  # type: ignore[arg-type]
    engine, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    for batch in loader:
        with accelerator.accumulate(engine):
            accelerator.backward(engine(batch).mean())
            optimizer.step()
            optimizer.zero_grad()
    assert engine.global_steps == 1


@pytest.mark.parametrize(
    ("strategy", "stage"), [("FULL_SHARD", 3), ("SHARD_GRAD_OP", 2), ("NO_SHARD", 0)], ids=lambda value: str(value)
)
def test_accelerates_plugin_for_fsdp(strategy: str, stage: int, notes: list[str]) -> None:
    accelerator = Accelerator(fsdp_plugin=theirs.FullyShardedDataParallelPlugin(sharding_strategy=strategy))
    assert accelerator.deepspeed_plugin is not None
    assert accelerator.deepspeed_plugin.zero_stage == stage
    assert not any("FullyShardedDataParallelPlugin: no effect" in line for line in notes)
    assert any(f"zero_stage={stage}" in line for line in notes)


def test_strategies_of_fsdp_with_replicas_and_other_parallelism() -> None:
    plugin = theirs.FullyShardedDataParallelPlugin(sharding_strategy="HYBRID_SHARD")
    with pytest.raises(ConfigError, match=r"got 'HYBRID_SHARD'; to shard within groups .*mics_shard_size"):
        Accelerator(fsdp_plugin=plugin)
    offloaded = theirs.FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=True, cpu_offload=True)
    converted = Accelerator(fsdp_plugin=offloaded).deepspeed_plugin
    assert converted is not None
    assert (converted.zero_stage, converted.offload_param_device) == (3, "cpu")
    with pytest.raises(UsageError, match=r"Accelerator\(torch_tp_plugin\)"):
        Accelerator(torch_tp_plugin=theirs.TorchTensorParallelPlugin(tp_size=2))
    both = type("ParallelismConfig", (), {"sp_size": 2, "cp_size": 2})()
    with pytest.raises(UsageError, match=r"expected cp_size or sp_size, .* got 'cp_size=2 and sp_size=2'"):
        Accelerator(parallelism_config=both)
    Accelerator(parallelism_config=type("ParallelismConfig", (), {"tp_size": 1, "cp_size": 1})())


# -- public members of accelerate's Accelerator


AXES = ("context_parallel", "data_parallel", "data_parallel_shard", "pipeline_parallel", "tensor_parallel")
MEMBERS: dict[str, Any] = {
    **{f"{axis}_rank": 0 for axis in AXES},
    **dict.fromkeys(("fp8_backend", "parallelism_config", "torch_device_mesh")),
    **dict.fromkeys(("is_composable_parallelism_enabled", "is_fsdp2", "native_amp", "use_stateful_dataloader"), False),
    "should_save_model": True,
}


def test_the_arguments_as_data_are_those_of_the_constructor() -> None:
    constructor = list(inspect.signature(Accelerator).parameters.values())
    data = inspect.signature(AcceleratorArguments).parameters.values()
    assert [(p.name, p.default, p.annotation) for p in data] == [(p.name, p.default, p.annotation) for p in constructor]


def test_every_member_and_argument_of_accelerates_accelerator_is_there(notes: list[str], tmp_path: Path) -> None:
    other = accelerate.Accelerator
    names = [name for name in dir(other) if not name.startswith("_")]
    assert [name for name in names if not hasattr(Accelerator, name)] == []
    assert list(inspect.signature(Accelerator).parameters)[:21] == list(inspect.signature(other).parameters)
    accelerator = Accelerator()
    assert {name: getattr(accelerator, name) for name in MEMBERS} == MEMBERS
    with accelerator.maybe_context_parallel(buffers=[torch.ones(1)], buffer_seq_dims=[0]):
        pass
    assert accelerator.deepspeed_ulysses_dl_adapter([1], None) == [1]
    assert not accelerator.verify_device_map(nn.Linear(1, 1))
    with pytest.raises(UsageError, match="use a stateless optimizer"):
        accelerator.lomo_backward(torch.ones(1), 0.1)
    _trained(accelerator)
    accelerator.save_state(tmp_path / "state", tag="ignored")
    accelerator.load_state(tmp_path / "state", load_kwargs={"weights_only": True}, load_module_strict=True)
    assert [note.removeprefix("note on ").split(": ")[0] for note in notes] == [
        "save_state(tag=...)",
        "load_state(weights_only=...)",
        "load_state(load_module_strict=...)",
    ]
    with pytest.raises(UsageError, match="exclude_frozen_parameters"):
        accelerator.save_state(tmp_path / "other", exclude_frozen_parameters=True)


def test_local_sgd_on_one_process_is_ordinary_training() -> None:
    accelerator = Accelerator()
    model, optimizer = _trained(accelerator)
    with LocalSGD(accelerator, model, local_sgd_steps=2) as local_sgd:
        accelerator.backward(model(torch.ones(1, 4)).sum())
        optimizer.step()
        local_sgd.step()
    assert (local_sgd.num_steps, model.global_steps) == (1, 1)
