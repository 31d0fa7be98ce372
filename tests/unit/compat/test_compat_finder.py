"""The import finder of `zeroaccel.compat`: names that it serves, names that it refuses, and its removal."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch
from packaging.version import parse

from tests import time_limits
from tests.support.environment import ROOT
from tests.support.job import run_command
from tests.support.log_lines import log_lines
from zeroaccel import compat
from zeroaccel.compat import finder
from zeroaccel.compat.deepspeed_config import from_library, read
from zeroaccel.compat.finder import inherited_environment
from zeroaccel.compat.surface import ABSENT, SURFACE
from zeroaccel.config import load_config
from zeroaccel.errors import ConfigError, UsageError


@pytest.fixture
def facade(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("accelerate", "transformers"):  # as in a process that has not imported them yet
        monkeypatch.delitem(sys.modules, name, raising=False)
    compat.install()
    yield
    compat.uninstall()


@pytest.mark.usefixtures("facade")
@pytest.mark.parametrize("module", SURFACE)
def test_every_name_of_the_table_is_there(module: str) -> None:
    found = import_module(module)
    for name in SURFACE[module]:
        assert getattr(found, name) is not None
        assert name in dir(found)


@pytest.mark.usefixtures("facade")
def test_submodules_are_reached_as_attributes() -> None:
    import deepspeed  # type: ignore[import-not-found]

    assert "WarmupLR" in deepspeed.runtime.lr_schedules.VALID_LR_SCHEDULES
    assert deepspeed.runtime.engine.DeepSpeedEngine is deepspeed.DeepSpeedEngine
    assert deepspeed.comm.is_initialized() is torch.distributed.is_initialized()


@pytest.mark.usefixtures("facade")
def test_the_metadata_pass_the_version_checks_of_the_libraries() -> None:
    assert importlib.util.find_spec("deepspeed") is not None
    assert importlib.metadata.metadata("deepspeed")["Name"] == "deepspeed"
    assert parse("0.18.2") <= parse(importlib.metadata.version("deepspeed")) < parse("0.19.6")


@pytest.mark.usefixtures("facade")
@pytest.mark.parametrize(
    ("statement", "told"),
    [
        ("import deepspeed.autotuning", "zeroaccel estimate"),
        ("from deepspeed import autotuning", "zeroaccel estimate"),
        ("from deepspeed.ops.op_builder import RandomLTDBuilder", "no compiled operators"),
        ("from deepspeed.zero import TiledLinear", "tp splits them over ranks"),
        ("from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs", "`zeroaccel estimate`"),
        ("from deepspeed.utils.timer import SynchronizedWallClockTimer", "time.perf_counter()"),
        ("from deepspeed.runtime.lr_schedules import WARMUP_LR", "keys of scheduler.params"),
        ("from deepspeed.ops.op_builder import CPUAdamBuilder", "no compiled operators"),
        ("from deepspeed import zero_to_fp32", "deepspeed.utils.zero_to_fp32"),
        ("from deepspeed.comm import DeepSpeedEngine", "deepspeed.DeepSpeedEngine"),
        ("import deepspeed.runtime.tensor_parallel", "ParallelConfig"),
        ("import deepspeed; deepspeed.initialise", "deepspeed.initialize"),
        ("from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3", "initialize returns the optimizer"),
        ("import deepspeed.compression.compress", "torch.ao"),
        ("import deepspeed; deepspeed.moe.layer.MoE", "expert layers train unchanged"),
        ("import deepspeed; deepspeed.checkpointing.get_cuda_rng_tracker", "torch's random states"),
        ("from deepspeed.utils.groups import _get_expert_parallel_group", "expert parallel groups"),
        ("import deepspeed.nothing_like_this", "no supported library uses it"),
        ("import deepspeed; deepspeed.accelerator.get_accelerator().amp", "get_accelerator().amp"),
    ],
)
def test_missing_names_are_refused_with_the_nearest_alternative(statement: str, told: str) -> None:
    with pytest.raises((ImportError, AttributeError), match="zeroaccel provides deepspeed") as caught:
        exec(statement)
    assert told in str(caught.value)


@pytest.mark.usefixtures("facade")
def test_absent_names_are_not_on_the_table() -> None:
    """Existing modules may have a row, for the names that they lack."""
    names = {f"{module}.{name}" for module, names in SURFACE.items() for name in names}
    assert not names & set(ABSENT)


def test_nothing_stays_after_uninstall(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("accelerate", "transformers"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    before = list(sys.meta_path)
    compat.install()
    compat.install()
    import_module("deepspeed.comm")
    compat.uninstall()
    compat.uninstall()
    assert sys.meta_path == before
    assert not [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]
    assert importlib.util.find_spec("deepspeed") is None
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("deepspeed")


def test_a_real_one_is_shadowed_only_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deepspeed.py").write_text("__version__ = 'real'")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UsageError, match=r"one in .*deepspeed\.py.*--engine zeroaccel"):
        compat.install()
    compat.install(shadow=True)
    try:
        assert import_module("deepspeed").__version__ == compat.VERSION
        assert import_module("deepspeed").__git_hash__ == import_module("deepspeed").__git_branch__ == "unknown"
    finally:
        compat.uninstall()
    assert import_module("deepspeed").__version__ == "real"
    try:
        with pytest.raises(UsageError, match="a call before `import deepspeed`"):
            compat.install(shadow=True)
    finally:
        del sys.modules["deepspeed"]


def test_install_must_precede_the_libraries() -> None:
    code = "import accelerate\nimport zeroaccel.compat\nzeroaccel.compat.install()"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=time_limits.seconds(100), check=False
    )
    assert done.returncode == 1
    assert "expected a call before `import accelerate`" in done.stderr


def test_children_inherit_it_beside_their_own_sitecustomize(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('own', end=' ')")
    environ = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(tmp_path)}
    environ |= inherited_environment(environ)
    assert inherited_environment(environ) == {name: environ[name] for name in ("PYTHONPATH", "ZEROACCEL_COMPAT")}
    code = "import sys, deepspeed; print(deepspeed.__version__, 'torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environ,
        capture_output=True,
        text=True,
        timeout=time_limits.seconds(100),
        check=True,
    )
    assert done.stdout.split() == ["own", compat.VERSION, "False"]


def test_dicts_from_libraries_say_the_same_in_the_words_of_the_format() -> None:
    given = {
        "steps_per_print": float("inf"),
        "zero_optimization.reduce_bucket_size": 64,
        "zero_optimization.stage3_prefetch_bucket_size": 32,
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": 7},
    }
    kept = {**given, "zero_optimization": dict(given["zero_optimization"])}  # type: ignore[call-overload]
    assert from_library(given).tree == {
        "zero_optimization": {"stage": 3, "reduce_bucket_size": 64, "stage3_prefetch_bucket_size": 7}
    }
    assert given == kept


def test_a_dotted_key_whose_section_is_a_value_is_named() -> None:
    config = {"zero_optimization": True, "zero_optimization.reduce_bucket_size": 5.0}
    with pytest.raises(ConfigError, match=r"^zero_optimization.reduce_bucket_size: expected an object for its section"):
        from_library(config)


_OF_A_FILE = """
import copy, pickle, sys
from zeroaccel import compat
from zeroaccel.errors import ConfigError

compat.install()
import deepspeed
from accelerate.utils.deepspeed import HfDeepSpeedConfig

source = HfDeepSpeedConfig(sys.argv[1])
assert source.is_zero2() and type(pickle.loads(pickle.dumps(source.config))) is dict
source.config["train_batch_size"] = -4  # as transformers fills in "auto"
source.config["steps_per_print"] = float("inf")
for config in (source.config, copy.deepcopy(source.config)):
    try:
        deepspeed.DeepSpeedConfig(config)
    except ConfigError as error:
        print(error)
HfDeepSpeedConfig({"bf16": {"enabled": True}})
try:
    HfDeepSpeedConfig(sys.argv[1] + "n")
except ConfigError as error:
    print(error)
"""


def test_configs_that_accelerate_reads_from_a_file_keep_its_places(tmp_path: Path) -> None:
    package = tmp_path / "accelerate" / "utils"
    package.mkdir(parents=True)
    (tmp_path / "accelerate" / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "deepspeed.py").write_text(
        "import copy\n\n\nclass HfDeepSpeedConfig:\n    def __init__(self, config_file_or_dict):\n"
        "        assert isinstance(config_file_or_dict, dict)\n"
        "        self.config = copy.deepcopy(config_file_or_dict)\n\n"
        "    def is_zero2(self):\n        return self.config['zero_optimization']['stage'] == 2\n"
    )
    file, script = tmp_path / "ds.json", tmp_path / "script.py"
    file.write_text(
        '{\n  // sizes\n  "train_batch_size": "auto",\n  "gradient_acumulation_steps": 4,\n'
        '  "zero_optimization": {"stage": 2, "reduce_bucket_sise": 5}\n}\n'
    )
    script.write_text(_OF_A_FILE)
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    run = run_command([sys.executable, script, file], env=environment, fresh=True)
    lines = [
        f"{file}: 2 settings are wrong",
        f'  {file}:3:3 ("auto", which the program filled in): train_batch_size: expected a number above 0, got -4',
        f'  {file}:5:37: zero_optimization.reduce_bucket_sise: unknown key; did you mean "reduce_bucket_size"?',
    ]
    missing = f"config file '{file}n' does not exist"
    assert [line.partition(" (working")[0] for line in run.stdout.splitlines()] == [*lines, *lines, missing], run.stderr


def test_a_file_read_by_accelerate_names_the_place_of_a_near_miss(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{\n  "gradient_acumulation_steps": 4\n}\n')
    config = load_config(from_library(read(str(file))), unknown_keys="lenient")
    assert config.notes == (
        f"{file}:2:3: gradient_acumulation_steps: unknown key, which changes nothing; "
        'did you mean "gradient_accumulation_steps"?',
    )
    assert read({"fp16": {}}) == {"fp16": {}}


_QUANTIZED = """
import sys
from types import SimpleNamespace
from zeroaccel import compat
from zeroaccel.zero.access import deferred_init

compat.install()
from transformers.modeling_utils import PreTrainedModel
config, is_stage_3 = {"zero_optimization": {"stage": 3}}, [True]
sys.modules["transformers.integrations.deepspeed"] = SimpleNamespace(
    is_deepspeed_zero3_enabled=lambda: is_stage_3[0], deepspeed_config=lambda: config
)
of_library = {"quant_method": "bitsandbytes"}
print(
    PreTrainedModel.from_pretrained("a", quantization_config=of_library),
    PreTrainedModel.from_pretrained("a", config=SimpleNamespace(quantization_config=SimpleNamespace(**of_library))),
    PreTrainedModel.from_pretrained("a", quantization_config={"quant_method": "gptq"}),
    PreTrainedModel.from_pretrained("a", config=SimpleNamespace()),
)
is_stage_3[0] = False
print(PreTrainedModel.from_pretrained("a", quantization_config=of_library))
is_stage_3[0] = True
compat.uninstall()
print(PreTrainedModel.from_pretrained("a", quantization_config=of_library))
"""


def test_quantized_bases_of_transformers_are_loaded_within_zero_init(tmp_path: Path) -> None:
    package = tmp_path / "transformers"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "modeling_utils.py").write_text(
        "from zeroaccel.zero.access import deferred_init\n\n\nclass PreTrainedModel:\n    @classmethod\n"
        "    def from_pretrained(cls, path, **kwargs):\n        return len(deferred_init._ACTIVE)\n"
    )
    script = tmp_path / "script.py"
    script.write_text(_QUANTIZED)
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    run = run_command([sys.executable, script], env=environment, fresh=True)
    assert run.stdout.split() == ["1", "1", "0", "0", "0", "0"], run.stderr


@pytest.mark.parametrize(("version", "named"), [("1.14.0", ["part.Kind.gone", "part.Lost.call"]), ("1.15.2", None)])
def test_a_part_of_a_library_that_moved_is_named_and_the_others_are_replaced(
    version: str, named: list[str] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "part.py").write_text("class Kind:\n    def call(self):\n        return 1\n")
    rows = [
        ("Kind", "gone", None),
        ("Lost", "call", None),
        ("", "newer", None),
        ("Kind", "call", lambda old: lambda _: 2),
    ]
    monkeypatch.setitem(finder._PATCHED, "part", rows)  # type: ignore[arg-type]
    monkeypatch.setitem(finder._NOT_BEFORE, "newer", "1.15")
    monkeypatch.setattr(finder, "version", lambda library: version)
    module = ModuleType("part")
    with log_lines() as lines:
        finder._PatchingLoader("part", str(tmp_path / "part.py")).exec_module(module)
    assert module.Kind().call() == 2
    found = [line.split("expected ")[1].split(",")[0] for line in lines]
    assert found == (named or ["part.Kind.gone", "part.Lost.call", "part.newer"])
    assert all(line.startswith(f"part {version}: ") and "docs/releases.md" in line for line in lines)
