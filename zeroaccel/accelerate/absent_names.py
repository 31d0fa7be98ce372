"""Names of accelerate that are not here, each with what does the same. Pure data, of which packages make errors.

`from zeroaccel import X`, with only the package's name changed, then says what to import or to write instead.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from dis import opmap
from types import ModuleType
from typing import Any

_BIG_MODELS = (
    "accelerate's own works beside zeroaccel; to run or train a model that does not fit, prepare it at stage 3, built "
    "inside zeroaccel.zero.Init()"
)
_TRACKERS = 'Accelerator(log_with="mlflow") and the like, or an instance of GeneralTracker'
_OTHER_DEVICES = "an Accelerator computes on CUDA devices and CPUs"
_ZERO = "ZeroPlugin(zero_stage=3) shards parameters, gradients and optimizer states"
_MEGATRON = "models are split by ZeRO; `zeroaccel estimate` tells which stage fits"
_NO_FP8 = '8-bit training is not available; use mixed_precision="bf16"'
_PREPARED = "Accelerator.prepare returns the prepared object"
_MESH = "pass parallelism_config=ParallelConfig(tp=N, sp=N, dp_replicate=N) to Accelerator; zeroaccel has the class"
_STAGES = "Accelerator(parallelism_config=ParallelConfig(pp=N)) prepares the stages of a pipeline, with eval_batch()"
_LAUNCH = "`zeroaccel launch` starts processes, zeroaccel.notebook_launcher from a notebook"
_QUANTIZED = "transformers' quantization_config loads a quantised base, and PEFT's adapters train over it"
_CONVERT = "`zeroaccel zero-to-fp32` and `zeroaccel checkpoint` make weights of a checkpoint"


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
    **_rows("an optimizer is never replaced by another class", "map_pytorch_optim_to_deepspeed"),
    **_rows(_LAUNCH, "PrepareForLaunch prepare_deepspeed_cmd_env prepare_multi_gpu_env prepare_tpu"),
    **_rows(_LAUNCH, "prepare_simple_launcher_cmd_env prepare_sagemager_args_inputs"),
    **_rows(_QUANTIZED, "BnbQuantizationConfig load_and_quantize_model has_4bit_bnb_layers"),
    **_rows(_OTHER_DEVICES, "SageMakerDistributedType ComputeEnvironment install_xla"),
    **_rows("the loss scale is the engine's: engine.loss_scale", "get_grad_scaler"),
    **_rows("accelerator.autocast() is one", "get_mixed_precision_context_manager"),
    **_rows(_TRACKERS, "AimTracker CometMLTracker MLflowTracker ClearMLTracker DVCLiveTracker SwanLabTracker"),
    **_rows(_TRACKERS, "TrackioTracker"),
    **_rows("accelerate's own scripts have data of their own; write a DataLoader", "mocked_dataloaders"),
}
"""Name of accelerate -> what does the same here."""

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
"""Module of accelerate -> what does the same here."""


def absence(name: str, module: str, names: Iterable[str]) -> str | None:
    """Why `module` has no `name`; None where accelerate has none either.

    Args:
        names: that it has.
    """
    if name in ABSENT:
        return f"{module} has no {name}, which is accelerate's: {ABSENT[name]}"
    similar = get_close_matches(name, list(names), n=1, cutoff=0.8)
    return f"{module} has no {name}; the nearest that it has is {similar[0]}" if similar else None


class AbsentModule(ModuleType):
    """A module of accelerate that is not here: each of its names that `zeroaccel` lacks says what to use instead."""

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
        # torch's inductor asks every loaded module for names; what is no import has to see an AttributeError.
        is_import = frame.f_code.co_code[frame.f_lasti] == opmap["IMPORT_FROM"]
        said = f"{self.__name__} is not here, nor is its {name}: {ABSENT.get(name, self._reason)}"
        raise (ImportError if is_import else AttributeError)(said)
