"""Runs DeepSpeed's own unit tests from its repository, with zeroaccel's facade as `deepspeed`, on CPU ranks over gloo.

    git clone https://github.com/deepspeedai/DeepSpeed && cd DeepSpeed && git checkout <commit>
    python tests/interop/suites/deepspeed_units.py run --source DeepSpeed --records records.jsonl [FILE ...]
    python tests/interop/suites/deepspeed_units.py table --records records.jsonl [--control control.jsonl]

`run` starts one pytest per file, with this module as a plugin, and writes a line per test; `table` formats them as
Markdown. `run --engine deepspeed` runs the same tests with DeepSpeed itself; the table then marks tests that fail on
this machine with DeepSpeed as well. The tests need pytest below 8.4, hjson and einops.

The plugin does not change the tests. It starts their ranks (the tests' own launcher ends the session if a rank
hangs, and waits for a rank whose peer has failed). For names that test modules import at their top and that
are not public behaviour, it supplies a placeholder; any use of one ends the test as "not ours", with the name.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from multiprocessing.connection import wait
from pathlib import Path
from types import ModuleType
from typing import Any

_ROOT = Path(__file__).resolve().parents[3]
_PLUGIN = Path(__file__).stem
_SOURCE, _RECORDS, _ENGINE = "FOREIGN_SOURCE", "FOREIGN_RECORDS", "FOREIGN_ENGINE"
_LIMIT_SECONDS = 120.0
_GRACE_SECONDS = 10.0  # for the other ranks, after one has failed

# Imported once, in the process from which all ranks fork.
_PRELOADED = {
    "zeroaccel": (
        "numba",
        "zeroaccel.compat.deepspeed_engine",
        "zeroaccel.compat.device_accelerator",
        "zeroaccel.ops.kernels",
        "zeroaccel.zero",
        "torch._dynamo",
    ),
    "deepspeed": ("deepspeed", "torch._dynamo"),
}

# Files that run by default: tests of public behaviour, in DeepSpeed's tests/unit.
FILES = (
    "runtime/test_ds_config_dict.py",
    "runtime/test_ds_config_model.py",
    "runtime/test_ds_initialize.py",
    "runtime/test_lr_schedulers.py",
    "runtime/test_data.py",
    "runtime/test_multi_output_model.py",
    "runtime/test_multiple_models.py",
    "runtime/test_mup_optimizers.py",
    "runtime/test_no_sync_ctxt.py",
    "runtime/test_precision_config_*.py",
    "runtime/test_runtime_utils.py",
    "runtime/test_autocast.py",
    "runtime/activation_checkpointing/*.py",
    "runtime/comm/*.py",
    "runtime/half_precision/test_*.py",
    "runtime/sparse_tensor/*.py",
    "runtime/utils/*.py",
    "runtime/zero/test_*.py",
    "v1/half_precision/*.py",
    "v1/zero/test_*.py",
    "v1/pin_memory/*.py",
    "v1/accelerator/*.py",
    "v1/test_engine_log_level.py",
    "checkpoint/test_*.py",
    "comm/*.py",
    "utils/*.py",
    "monitor/*.py",
    "ops/adam/*.py",
    "ops/adagrad/*.py",
    "ops/lion/*.py",
    "ops/muon/*.py",
    "ops/test_op_builder.py",
    "launcher/*.py",
    "profiling/flops_profiler/*.py",
)


# -- placeholders


class NotOurs(Exception):
    """A test used a placeholder."""


class _PlaceholderType(type):
    """Classes that can be imported, subclassed and queried for members, but not used."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise NotOurs(cls.__qualname__)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _placeholder(f"{cls.__qualname__}.{name}")

    def __iter__(cls) -> Any:
        raise NotOurs(cls.__qualname__)

    def __getitem__(cls, key: Any) -> Any:
        raise NotOurs(cls.__qualname__)


def _placeholder(name: str) -> Any:
    if name in _SUPPLIED:
        return _SUPPLIED[name]
    return _PlaceholderType(name, (), {"__module__": "deepspeed", "__qualname__": name})


class _PlaceholderModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _placeholder(f"{self.__name__}.{name}")


class _PlaceholderLoader(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _PlaceholderModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def _imports_at_top() -> bool:
    """Returns True if the import in progress is at the top level of a test file."""
    tests = os.path.join(os.environ[_SOURCE], "tests")
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(tests):
            return frame.f_code.co_name == "<module>"
        frame = frame.f_back  # type: ignore[assignment]
    return False


class _PlaceholderFinder:
    """Precedes the facade's finder, which rejects modules that it does not have."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        from zeroaccel.compat.surface import SURFACE

        if not fullname.startswith("deepspeed.") or fullname in SURFACE:
            return None
        if not any(name.startswith(f"{fullname}.") for name in _SUPPLIED) and not _imports_at_top():
            return None
        parent, _, name = fullname.rpartition(".")
        if name in SURFACE.get(parent, {}):
            return None
        return ModuleSpec(fullname, _PlaceholderLoader(), is_package=True)


def _torch_is_within(min_version: Any = None, max_version: Any = None) -> bool:
    import torch
    from packaging.version import Version

    version = Version(torch.__version__)
    below = min_version is not None and Version(str(min_version)) > version
    return not below and not (max_version is not None and Version(str(max_version)) < version)


def _one_group(group: Any) -> list[Any]:
    return [group]  # models without experts


_SCHEDULE_KEYS = "CYCLE_MIN_LR CYCLE_MAX_LR CYCLE_FIRST_STEP_SIZE CYCLE_FIRST_STAIR_COUNT CYCLE_SECOND_STAIR_COUNT "
_SCHEDULE_KEYS += "CYCLE_SECOND_STEP_SIZE CYCLE_MIN_MOM CYCLE_MAX_MOM LR_RANGE_TEST_MIN_LR LR_RANGE_TEST_STEP_RATE "
_SCHEDULE_KEYS += "LR_RANGE_TEST_STEP_SIZE LR_RANGE_TEST_STAIRCASE WARMUP_MIN_LR WARMUP_MAX_LR WARMUP_MIN_RATIO "
_SCHEDULE_KEYS += "WARMUP_NUM_STEPS WARMUP_TYPE COS_MIN_RATIO DECAY_LR_RATE DECAY_MOM_RATE DECAY_STEP_SIZE "
_SCHEDULE_KEYS += "TOTAL_NUM_STEPS"
_SCHEDULE_CONSTANTS = {
    **{name: name.lower() for name in _SCHEDULE_KEYS.split()},
    "LR_RANGE_TEST": "LRRangeTest",
    "ONE_CYCLE": "OneCycle",
    "WARMUP_COSINE_LR": "WarmupCosineLR",
    "WARMUP_DECAY_LR": "WarmupDecayLR",
    "WARMUP_LR": "WarmupLR",
    "WARMUP_LOG_RATE": "log",
    "WARMUP_LINEAR_RATE": "linear",
}

# Functions that the tests call to decide whether they can run, and constants for their configs. The versions of CUDA
# and NCCL enable the tests of bf16, which the CPU supports.
_SUPPLIED: dict[str, Any] = {
    "deepspeed.git_version_info.torch_info": {"version": "2.6", "cuda_version": "12.4", "nccl_version": "2.20"},
    "deepspeed.moe.utils.split_params_into_different_moe_groups_for_optimizer": _one_group,
    "deepspeed.runtime.config.ADAM_OPTIMIZER": "adam",
    "deepspeed.runtime.swap_tensor.MIN_SWAPPABLE_BYTES": 1 << 20,
    "deepspeed.utils.torch.required_torch_version": _torch_is_within,
    "deepspeed.ops.__compatible_ops__": defaultdict(lambda: True),  # tests skip themselves without an operator
    **{f"deepspeed.runtime.lr_schedules.{name}": value for name, value in _SCHEDULE_CONSTANTS.items()},
}


def _supply_placeholders() -> None:
    from zeroaccel.compat.finder import FacadeModule

    own = FacadeModule.__getattr__

    def member(module: FacadeModule, name: str) -> Any:
        try:
            return own(module, name)
        except (AttributeError, ModuleNotFoundError):
            full_name = f"{module.__name__}.{name}"
            if full_name not in _SUPPLIED and (name.startswith("__") or not _imports_at_top()):
                raise
            return _placeholder(full_name)

    FacadeModule.__getattr__ = member  # type: ignore[method-assign]
    sys.meta_path.insert(0, _PlaceholderFinder())  # type: ignore[arg-type]


# -- ranks


def _agreed(flag: bool, op: Any = all) -> bool:
    import torch

    flags = [flag] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(flags, flag)
    return bool(op(flags))


def _without_indices_of_cuda() -> None:
    """Drops `device_ids`, which DistributedDataParallel, the reference of the tests, does not accept on a CPU."""
    from torch.nn.parallel import DistributedDataParallel

    own = DistributedDataParallel.__init__

    def init(self: Any, module: Any, device_ids: Any = None, output_device: Any = None, **others: Any) -> None:
        own(self, module, **others)

    DistributedDataParallel.__init__ = init  # type: ignore[method-assign]


def _run_rank(case: Any, rank: int, size: int, port: Any, init_method: str, out: Any) -> None:
    """Main function of a rank's process: runs the tests' own `_dist_run` and sends its result to `out`."""
    from deepspeed.accelerator import get_accelerator

    case.non_daemonic_procs = False  # so that a skip is returned
    # The tests pass this to torch as a device; on a CPU an index is not a device, in DeepSpeed or zeroaccel. And gloo
    # does not gather the 0-dim tensor with which their ranks agree on the result of a comparison.
    get_accelerator().current_device = lambda: "cpu"
    sys.modules["unit.common"].reduce_boolean_flags = _agreed  # type: ignore[attr-defined]
    _without_indices_of_cuda()
    try:
        skipped = case._dist_run(rank, size, port, init_method)
        out.send(("passed", skipped or "", ""))
        case._dist_destroy()
    except BaseException as error:
        kind = "not ours" if isinstance(error, NotOurs) else "failed"
        out.send((kind, f"{type(error).__name__}: {error}", traceback.format_exc()))
        os._exit(1)  # peers may wait for this rank in a collective, and an orderly exit would wait for them
    finally:
        out.close()


def _launch(case: Any, size: int, init_method: str) -> None:
    """Runs a distributed test on `size` ranks and raises its failure or skip; replaces the tests' launchers."""
    import pytest
    from unit.common import get_master_port

    context = mp.get_context("forkserver")
    port = get_master_port()
    ranks = {}
    for rank in range(size):
        inlet, outlet = context.Pipe(duplex=False)
        process = context.Process(target=_run_rank, args=(case, rank, size, port, init_method, outlet))
        process.start()
        outlet.close()
        ranks[inlet] = rank, process
    ends: dict[int, tuple[str, str, str]] = {}
    deadline = time.monotonic() + _LIMIT_SECONDS
    waiting = dict(ranks)
    while waiting and (left := deadline - time.monotonic()) > 0:
        for inlet in wait(list(waiting), timeout=left):
            rank, process = waiting.pop(inlet)
            try:
                ends[rank] = inlet.recv()
            except EOFError:
                process.join(_GRACE_SECONDS)
                ends[rank] = "failed", f"rank {rank} ended with code {process.exitcode}", ""
            if ends[rank][0] != "passed":
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
    for _rank, process in ranks.values():
        process.join(_GRACE_SECONDS if not waiting and all(end[0] == "passed" for end in ends.values()) else 0)
        if process.is_alive():
            process.kill()
            process.join()
    failures = [(kind, rank, reason, trace) for rank, (kind, reason, trace) in ends.items() if kind != "passed"]
    for kind, rank, reason, trace in sorted(failures, key=lambda failure: failure[0] != "not ours"):
        if kind == "not ours":
            raise NotOurs(reason.partition(": ")[2])
        pytest.fail(f"rank {rank}: {reason}\n{trace}", pytrace=False)
    if waiting:
        pytest.fail(f"hung: ranks {sorted(rank for rank, _ in waiting.values())} after {_LIMIT_SECONDS:.0f} s", False)
    skips = {reason for _, reason, _ in ends.values() if reason}
    if skips:
        pytest.skip(skips.pop())


# -- the plugin


def pytest_configure(config: Any) -> None:
    if _SOURCE not in os.environ:
        return
    mp.set_forkserver_preload([_PLUGIN, *_PRELOADED.get(os.environ[_ENGINE], ()), "unit.common", "unit.simple_model"])


def pytest_collectstart(collector: Any) -> None:
    common = sys.modules.get("unit.common")
    if common is not None:
        common.DistributedExec._launch_daemonic_procs = _launch
        common.DistributedExec._launch_non_daemonic_procs = _launch


def pytest_runtest_setup(item: Any) -> None:
    pytest_collectstart(item)


def pytest_runtest_makereport(item: Any, call: Any) -> None:
    """Records the result of each phase in `FOREIGN_RECORDS`."""
    import pytest

    outcome, reason, detail = "passed", "", ""
    if call.excinfo is not None:
        error = call.excinfo.value
        outcome = "failed"
        if isinstance(error, pytest.skip.Exception):
            outcome = "skipped"
        elif isinstance(error, NotOurs):
            outcome = "not ours"
        detail = str(call.excinfo.getrepr(style="short")) if outcome == "failed" else ""
        text = str(error) if isinstance(error, pytest.fail.Exception) else f"{type(error).__name__}: {error}"
        detail = str(error) if isinstance(error, pytest.fail.Exception) else detail
        reason = text.strip().split("\nTraceback ")[0][:600]
    if call.when != "call" and outcome == "passed":
        return
    _note(item.nodeid, outcome, reason, detail, call.duration)


def pytest_collectreport(report: Any) -> None:
    if report.failed:
        _note(report.nodeid, "failed", str(report.longrepr).strip().splitlines()[-1][:600], str(report.longrepr), 0.0)


def _note(test: str, outcome: str, reason: str, detail: str, seconds: float) -> None:
    record = {
        "test": test,
        "outcome": outcome,
        "reason": reason,
        "seconds": round(seconds, 2),
        "detail": detail[-6000:],
    }
    with open(os.environ[_RECORDS], "a", encoding="utf-8") as records:
        records.write(json.dumps(record) + "\n")


if _SOURCE in os.environ and os.environ.get(_ENGINE) == "zeroaccel":
    _supply_placeholders()


# -- the commands


def _files(source: Path, patterns: Sequence[str]) -> Iterator[str]:
    units = source / "tests" / "unit"
    for pattern in patterns:
        if "::" in pattern:
            yield pattern
            continue
        found = sorted(str(path.relative_to(units)) for path in units.glob(pattern))
        if not found:
            raise SystemExit(f"{units}: no file {pattern}")
        yield from found


def _run(arguments: argparse.Namespace) -> None:
    source = arguments.source.resolve()
    paths = [str(Path(__file__).parent), str(source / "tests")]
    environment = {
        **os.environ,
        _SOURCE: str(source),
        _RECORDS: str(arguments.records.resolve()),
        _ENGINE: arguments.engine,
        "OMP_NUM_THREADS": "1",
        "LOCAL_SIZE": "4",  # `device_count` returns it on a CPU: the number of ranks that a test may request
        "DS_ACCELERATOR": "cpu",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if arguments.engine == "zeroaccel":
        sys.path.insert(0, str(_ROOT))
        from zeroaccel.compat.finder import inherited_environment

        paths.append(str(_ROOT))
        environment.update(inherited_environment({"PYTHONPATH": os.pathsep.join(paths)}))
        commands = Path(tempfile.mkdtemp())  # contains the `deepspeed` command
        install = [sys.executable, "-m", "zeroaccel.cli", "compat", "install", str(commands)]
        subprocess.run(install, env=environment, check=True, stdout=subprocess.DEVNULL)
        environment["PATH"] = f"{commands / 'bin'}{os.pathsep}{environment['PATH']}"
    else:  # its operators are compiled at their first use
        environment["PYTHONPATH"] = os.pathsep.join([*paths, str(source)])
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        _PLUGIN,
        "-q",
        "--no-header",
        "-p",
        "no:cacheprovider",
        "-o",
        "addopts=",
    ]
    command += [f"--timeout={2 * _LIMIT_SECONDS:.0f}", "--tb=no", "--continue-on-collection-errors"]
    command += [f"unit/{file}" for file in _files(source, arguments.files or FILES)]
    if arguments.select:
        command += ["-k", arguments.select]
    sys.exit(subprocess.run(command, cwd=source / "tests", env=environment, check=False).returncode)


# -- the table

# Pattern of "test | message" -> reason why a test does not pass here. "not ours": the behaviour is not public.
_PRIVATE = "not ours: a private member or function"
_SUMS = "compared with DDP in bf16: gradients are summed in fp32, and masters start with the bits of the model"
RULES: tuple[tuple[str, str], ...] = (
    (r"_configure_train_batch_size|_mixed_precision_dtypes|_assert_valid_mixed|_cast_module_mixed", _PRIVATE),
    (r"_orig_torch_empty|print_rank_0|ds_secondary_tensor|cast_to_byte_tensor", _PRIVATE),
    (
        r"_get_optimizer_ckpt_name|ds_summary|averaged_gradients|nccl_start_alignment|fp16_groups|ds_persist|sparse_tensor_module_names",
        _PRIVATE,
    ),
    (r"call_to_str|count_used_parameters_in_backward|_parse_hostfile|parse_resource_filter", _PRIVATE),
    (r"max_lrs|min_lrs|get_lr_ratio|warmup_num_steps|'warmup_type'|step_ratio|_external_params", _PRIVATE),
    (r"idempotent_on_already_injected|linear_direct_init|ZeRORuntimeException|'latest_checkpoint'", _PRIVATE),
    (
        r"type object 'DeepSpeedEngine' has no attribute",
        _PRIVATE + ": called with a replacement for an engine",
    ),
    (r"UnwrapModel::test ", _PRIVATE + ": its list of hooks; zeroaccel has no hooks to remove"),
    (r"PicklingError: Can't pickle|test_get_autocast_decorators", _PRIVATE),
    (r"_create_expert_and_data_parallel", "not ours: expert parallelism"),
    (r"comet_ml", "not ours: comet_ml is not installed"),
    (r"test_monitor.*monitor_config", "not ours: classes of single monitors; MonitorMaster accepts monitor_config now"),
    (
        r"cuda_accelerator|test_accelerator.py|No module named 'mup'|No module named 'cpuinfo'",
        "not ours: the file needs DeepSpeed's sources, or a package that is not installed",
    ),
    (
        r"FusedAdam|TestConfigOptimizer|TestClientOptimizer|TestAdamConfigs|TestLionConfigs",
        "checks the class of an optimizer made from the config, which is torch's or zeroaccel's own here",
    ),
    (
        r"isinstance\(.*(DeepSpeedZeroOptimizer|FP16_Unfused)|isinstance\(engine.optimizer, |TestBf16ZeRO0Unfused",
        "not ours: checks the class of a wrapper around the optimizer; zeroaccel has no wrapper",
    ),
    (r"grad_accum_dtype: expected", "gradients are summed in fp32 or in the precision; others are refused by name"),
    (
        r"Invalid gradient_allreduce_op|not supported with ZenFlow|no_sync_ctxt.*(engine_step|reentry)",
        "refused as there, in other words",
    ),
    (
        r"rejects_zero3|rejects_deepcompile|test_no_sync_ctxt.*DID NOT RAISE|IncorectAllgatherBucketSize|AllowUntested"
        r"|test_no_grad_input_error|gpu_error",
        "refused there, and works here",
    ),
    (r"eigenvalue|compression_training", "config sections that are refused by name"),
    (r"(bf|fp)16_master_weights_and_grads", "master weights of 16 bits are refused by name"),
    (r"preserves_tensor_lr", "each group gets its own tensor (docs/deepspeed_names.md)"),
    (r"unknown_warmup_type", "an unknown warmup_type is refused by name; DeepSpeed treats it as log"),
    (
        r"leaf_module_(default|custom|string)",
        "lists of a section are tuples, and the default classes need not be named",
    ),
    (
        r"go back to be 0-sized|test_subclass_param|scatter_halftype",
        "on one rank zero.Init does not shard parameters, and keeps their dtype (docs/deepspeed_names.md)",
    ),
    (
        r"SynchronizedWallClockTimer|TiledLinear|estimate_zero\d|op_builder|add_tuning_arguments|WARMUP_|ONE_CYCLE",
        "refused by name, with its replacement: no library imports it",
    ),
    (r"MiCS_Init|engine.flops_profiler", "named with its replacement in docs/deepspeed_names.md"),
    (r"late_submodule_attach|requires_grad=False, while", "changes of trained weights after initialize are refused"),
    (
        r"TestZero3InitForParent|TestParamPartitioningSkipInit",
        "not ours: the number of a parameter's elements on a rank; zeroaccel shards units, not parameters",
    ),
    (r"nvme_path: expected a folder", "nvme_path must exist (docs/offload.md)"),
    (r"same tag on all ranks", "different tags on the ranks are refused for any value of checkpoint.tag_validation"),
    (r"invalid tensor size at index 0", "not ours: the test gathers a 0-dim tensor, which gloo does not support"),
    (
        r"Muon ZeRO-. gradient .* differs",
        "OPEN: for Muon in fp16 at loss scale 1, sum and mean of gradients differ by 1e-4"
        " at step 2, the tolerance of the test; AdamW in fp32 agrees",
    ),
    (r"TestNVMeCheckpointing.*hung", "OPEN: does not end in 120 s on the loaded machine; not examined"),
    (r"byte_cast_cpu_tensor", _PRIVATE),
    (
        r"_backward_epilogue|leaf_parameters|loss_scale_config|ZeROOptimizer|_set_fp32_optimizer_param|UNIVERSAL_CHECKPOINT_INFO",
        _PRIVATE,
    ),
    (r"TestMultipleModels.*misses the loss scale", _PRIVATE + ": ends a backward with engine._backward_epilogue"),
    (r"without_scale_fp16.*misses the loss scale", "refused as there, but by the backward itself, not by a later call"),
    (r"accumulated_grads_in_cpu|zero3_linear_wrap|is_external_param|count_used_parameters", _PRIVATE),
    (r"stayed gathered", "parameters are gathered and released by units, which may outlast the parameter's own use"),
    (r"the last backward failed", "engine.reset() is required after a failed backward (docs/training.md)"),
    (r"torch_autocast.enabled: autocast by the engine", "autocast by the engine is refused by name"),
    (r"TestZero0DirectBackward", "refused there, and works here"),
    (r"test_stage2_flatten_on_gpu", "not ours: log lines, flat buffers"),
    (r"not '_PlaceholderType'", "not ours: a private constant"),
    (r"Torch not compiled with CUDA", "not ours: makes tensors on CUDA"),
    (r"user_backward.*(Gradients differ|mismatch at after)", _SUMS),
    (r"scalar tensor|not supported with pipeline parallelism", "refused as there, in other words"),
    (r"Unmanaged.*Validation.*DID NOT RAISE", "refused there, and works here"),
    (r"sparse_tensor.*updates the parameters in param_groups", "an optimizer around SparseAdam is refused by name"),
    (
        r"plain data .*OffloadDeviceEnum|attribute 'log_level'|test_user_args.*such file|test_bash_string_args",
        "OPEN: repaired, or found by the harness now; not run again",
    ),
    (r"deepspeed.moe.utils: |DeepSpeedZeroOptimizer_Stage3: ", "not ours: imports a private function inside the test"),
    (r"has an attribute '_config'|engine\._config is|'types.SimpleNamespace' object has no", _PRIVATE),
    (r"test_zero_fragments.*-True", "a frozen parameter's values are returned, not None (docs/deepspeed_names.md)"),
    (r"a parameter of another engine", "a second engine of one model is refused (docs/deepspeed_names.md)"),
    (r"gradients of an unfinished accumulation", "save inside an accumulation is refused (docs/deepspeed_names.md)"),
    (r"PARTITION_ACTIVATIONS|hook_attribute_delegation", _PRIVATE),
    (r"none_dp_world_size", "not ours: prints a profile with sequence parallelism"),
    (r"test_adagrad.*sparse|sparse_coo", "sparse gradients of an optimizer without an engine are refused by name"),
    (r"couldn't find them in the cached files", "not ours: loads a model and a text from the hub"),
    (r"single_partition_of_fp32_groups|grad_partitions_flat_buffer", _PRIVATE),
    (r"(step|rollback)_subgroup'", "not ours: SuperOffload's calls of its optimizer; super_offload is refused by name"),
    (r"fp32_optimizer_states: expected True", "optimizer states of 16 bits are refused by name"),
    (r"expected float32 \(the master weights\)", "host optimizers update fp32 masters; 16-bit masters are refused"),
    (r"device_ids and output_device", "not ours: the test gives DistributedDataParallel CUDA indices"),
    (r"num_plus_parser", "like the command, it ends the process with code 2, while DeepSpeed raises ValueError"),
    (r"clipping_defaults_to_one", "no clipping unless the config sets it (docs/deepspeed_names.md)"),
    (r"DeepSpeedCPUAdagrad|test_cpu_lion_gpu", "same as in DeepSpeed on a machine with CUDA"),
)


def _read(paths: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """Returns the last result of each test; a failure in one phase takes precedence over success in another."""
    ends: dict[str, dict[str, Any]] = {}
    for path in paths:
        seen: dict[str, dict[str, Any]] = {}
        for line in path.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            test = record["test"].removeprefix("unit/")
            if test not in seen or seen[test]["outcome"] == "passed":
                seen[test] = record
        ends.update(seen)
    return ends


def _why(test: str, record: dict[str, Any], control: dict[str, dict[str, Any]]) -> tuple[str, str]:
    """Returns (column of the table, reason) of a test that did not pass."""
    message = " ".join(str(record["reason"]).split())
    if record["outcome"] == "skipped":
        return "skipped there", message.removeprefix("Skipped: ").partition(" at /")[0][:140]
    if record["outcome"] == "not ours":
        return "not ours", f"uses `{message.removeprefix('NotOurs: ')[:120]}`"
    if control.get(test, {}).get("outcome") == "failed":
        return "fails there too", " ".join(str(control[test]["reason"]).split())[:140]
    for pattern, reason in RULES:
        if re.search(pattern, f"{test} | {message} | {record['detail'][-900:]}"):
            return (
                ("not ours", reason.removeprefix("not ours: ")) if reason.startswith("not ours") else ("failed", reason)
            )
    return "failed", f"OPEN: {message[:240]}"


def _table(arguments: argparse.Namespace) -> None:
    ends, control = _read(arguments.records), _read(arguments.control or [])
    columns = ("passed", "failed", "fails there too", "skipped there", "not ours")
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    ends = {test: end for test, end in ends.items() if "::" in test or not any(t.startswith(f"{test}::") for t in ends)}
    reasons: dict[str, dict[tuple[str, str], list[str]]] = defaultdict(lambda: defaultdict(list))
    for test, record in ends.items():
        file, _, name = test.partition("::")
        if record["outcome"] == "passed":
            counts[file]["passed"] += 1
            continue
        column, reason = _why(test, record, control)
        counts[file][column] += 1
        reasons[file][column, reason].append(name or "(the file)")
    print(f"| file | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
    for file in sorted(counts):
        print(f"| `{file}` | {' | '.join(str(counts[file][column]) for column in columns)} |")
    total = sum(counts.values(), Counter())
    print(f"| all | {' | '.join(str(total[column]) for column in columns)} |\n")
    for column in columns[1:]:
        print(f"## {column[0].upper()}{column[1:]}\n\n| file | tests | reason |\n|---|---|---|")
        for file in sorted(reasons):
            for (kind, reason), names in reasons[file].items():
                if kind == column:
                    print(f"| `{file}` | {_grouped(names)} | {reason.replace('|', '/')} |")
        print()


def _grouped(names: Sequence[str]) -> str:
    """Formats names of tests, each once, with the number of its parameter sets."""
    counts = Counter(name.partition("[")[0].removesuffix("::test") for name in names)
    return ", ".join(f"`{name}`" + (f" ({count})" if count > 1 else "") for name, count in counts.items())


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    run = commands.add_parser("run")
    run.add_argument("--source", type=Path, required=True, help="DeepSpeed's repository")
    run.add_argument("--records", type=Path, required=True, help="file that gets a line of JSON per test")
    run.add_argument("--engine", choices=("zeroaccel", "deepspeed"), default="zeroaccel")
    run.add_argument("--select", help="pytest's -k")
    run.add_argument("files", nargs="*", help="files below tests/unit; patterns are allowed")
    run.set_defaults(call=_run)
    table = commands.add_parser("table")
    table.add_argument("--records", type=Path, nargs="+", required=True, help="records of runs; later ones override")
    table.add_argument("--control", type=Path, nargs="+", help="records of runs with DeepSpeed itself")
    table.set_defaults(call=_table)
    arguments = parser.parse_args()
    arguments.call(arguments)


if __name__ == "__main__":
    main()
