"""Names of accelerate that zeroaccel lacks, each with its replacement. Pure data, from which packages build errors.

If a script changes only the package's name, the error of `from zeroaccel import X` names what to write instead.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from dis import opmap
from types import ModuleType
from typing import Any

_BIG_MODELS = (
    "import it from accelerate, or, to run or train a model that does not fit, build the model inside "
    "zeroaccel.zero.Init() and prepare it at stage 3"
)
_TRACKERS = 'pass the tracker\'s name, such as Accelerator(log_with="mlflow"), or an instance of GeneralTracker'
_OTHER_DEVICES = "an Accelerator supports CUDA devices and CPUs"
_ZERO = "ZeroPlugin(zero_stage=3) shards parameters, gradients and optimizer states"
_MEGATRON = "use ZeroPlugin(zero_stage=N) to shard models; `zeroaccel estimate` shows which stage fits"
_NO_FP8 = '8-bit training is not available; use mixed_precision="bf16"'
_PREPARED = "Accelerator.prepare returns the prepared object"
_MESH = "pass zeroaccel.ParallelConfig(tp=N, sp=N, dp_replicate=N) to Accelerator as parallelism_config"
_STAGES = "Accelerator(parallelism_config=ParallelConfig(pp=N)) prepares the stages of a pipeline, with eval_batch()"
_LAUNCH = "use `zeroaccel launch` to start processes, or zeroaccel.notebook_launcher in a notebook"
_QUANTIZED = "load a quantized base model with transformers' quantization_config, and train PEFT adapters on it"
_CONVERT = "use `zeroaccel zero-to-fp32` or `zeroaccel checkpoint` to extract weights from a checkpoint"


def _rows(reason: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), reason)


ABSENT: Mapping[str, str] = {
    **_rows(
        _BIG_MODELS,
        "cpu_offload cpu_offload_with_hook disk_offload dispatch_model init_empty_weights init_on_device "
        "load_checkpoint_and_dispatch load_checkpoint_in_model infer_auto_device_map get_balanced_memory "
        "get_max_memory check_device_map compute_module_sizes get_max_layer_size load_offloaded_weights "
        "set_module_tensor_to_device named_module_tensors align_module_device has_offloaded_params "
        "OffloadedWeightsLoader PrefixedDataset "
        "offload_state_dict offload_weight load_offloaded_weight save_offload_index extract_submodules_state_dict "
        "calculate_maximum_sizes AlignDevicesHook CpuOffload ModelHook SequentialHook UserCpuOffloadHook "
        "add_hook_to_module remove_hook_from_module remove_hook_from_submodules attach_align_device_hook",
    ),
    **_rows(_STAGES, "prepare_pippy"),
    **_rows(_ZERO, "FullyShardedDataParallelPlugin save_fsdp_model load_fsdp_model save_fsdp_optimizer"),
    **_rows(_ZERO, "load_fsdp_optimizer enable_fsdp_ram_efficient_loading disable_fsdp_ram_efficient_loading"),
    **_rows(_CONVERT, "merge_fsdp_weights"),
    **_rows(_MEGATRON, "MegatronLMPlugin MegatronLMDummyScheduler MegatronLMDummyDataLoader MegatronEngine"),
    **_rows(_MEGATRON, "AbstractTrainStep BertTrainStep GPTTrainStep T5TrainStep"),
    **_rows(_MESH, "TorchTensorParallelPlugin TorchTensorParallelConfig TorchContextParallelConfig"),
    **_rows(_MESH, "ParallelismConfig DeepSpeedSequenceParallelConfig"),
    **_rows(_NO_FP8, "AORecipeKwargs FP8RecipeKwargs MSAMPRecipeKwargs TERecipeKwargs convert_model has_ao_layers"),
    **_rows(
        _NO_FP8, "convert_model_to_fp8_ao has_transformer_engine_layers apply_fp8_autowrap contextual_fp8_autocast"
    ),
    **_rows(_NO_FP8, "filter_first_and_last_linear_layers"),
    **_rows(_PREPARED, "AcceleratedOptimizer AcceleratedScheduler DeepSpeedEngineWrapper DeepSpeedOptimizerWrapper"),
    **_rows(_PREPARED, "DeepSpeedSchedulerWrapper DataLoaderShard DataLoaderDispatcher"),
    **_rows("ZeroPlugin(config) reads the config", "HfDeepSpeedConfig"),
    **_rows("the engine keeps the class of an optimizer", "map_pytorch_optim_to_deepspeed"),
    **_rows(_LAUNCH, "PrepareForLaunch prepare_deepspeed_cmd_env prepare_multi_gpu_env prepare_tpu"),
    **_rows(_LAUNCH, "prepare_simple_launcher_cmd_env prepare_sagemager_args_inputs"),
    **_rows(_QUANTIZED, "BnbQuantizationConfig load_and_quantize_model has_4bit_bnb_layers"),
    **_rows(_OTHER_DEVICES, "SageMakerDistributedType ComputeEnvironment install_xla"),
    **_rows("read the loss scale from engine.loss_scale", "get_grad_scaler"),
    **_rows("call accelerator.autocast() instead", "get_mixed_precision_context_manager"),
    **_rows(_TRACKERS, "AimTracker CometMLTracker MLflowTracker ClearMLTracker DVCLiveTracker SwanLabTracker"),
    **_rows(_TRACKERS, "TrackioTracker"),
    **_rows("it is for accelerate's own scripts; create a DataLoader", "mocked_dataloaders"),
}
"""Name of accelerate -> its replacement here."""

ABSENT_MODULES: Mapping[str, str] = {
    "big_modeling": _BIG_MODELS,
    "hooks": _BIG_MODELS,
    "inference": _STAGES,
    "launchers": "import notebook_launcher and debug_launcher from zeroaccel",
    "optimizer": _PREPARED,
    "parallelism_config": _MESH,
    "scheduler": _PREPARED,
    "test_utils": "it is for accelerate's own tests",
}
"""Module of accelerate -> its replacement here."""


def absence(name: str, module: str, names: Iterable[str]) -> str | None:
    """Returns why `module` has no `name`; None if accelerate has no such name and `names` has none like it.

    Args:
        names: names that the module has.
    """
    if name in ABSENT:
        return f"{module} does not have accelerate's {name}: {ABSENT[name]}"
    similar = get_close_matches(name, list(names), n=1, cutoff=0.8)
    return f"{module} has no {name}; the most similar name is {similar[0]}" if similar else None


class AbsentModule(ModuleType):
    """A module of accelerate that zeroaccel lacks: importing a name returns zeroaccel's, or raises with a remedy."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self._reason = reason

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        root = sys.modules[__name__.partition(".")[0]]
        if name in root.__all__:
            return getattr(root, name)
        frame = sys._getframe(1)
        # torch's inductor looks names up in every loaded module, and expects AttributeError outside imports.
        is_import = frame.f_code.co_code[frame.f_lasti] == opmap["IMPORT_FROM"]
        said = f"zeroaccel does not have {self.__name__}.{name}: {ABSENT.get(name, self._reason)}"
        raise (ImportError if is_import else AttributeError)(said)
