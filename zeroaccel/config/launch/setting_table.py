"""One row per launch setting: its names as a flag, in the environment, in the JSON config and in `Facts`.

The field in `launch_settings` gives the type, default and help of a setting. Both modules determine the flags and their
help (`zeroaccel.cli.launch.launch_flags`), the variables that the launcher reads and passes to ranks
(`launch_sources`), the comparison with a JSON config (`launch_json`) and the arguments of `ZeroPlugin`. This module
imports nothing, so that all of them can import it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Setting:
    """Names of a launch setting outside the launch file; its field gives the type, default and help.

    Attributes:
        name: name of the field in `LaunchSettings`.
        group: heading of its flag in `zeroaccel launch --help`.
        metavar: placeholder for its value in help; derived from its type by default.
        flag: its flag, if that is not "--" and the name.
        short: its flag in the `deepspeed` command or in torchrun.
        takes_value: True for a switch whose flag takes true or false, as in accelerate.
        variables: further variables that the launcher reads, after ZEROACCEL_ and the name.
        rank_variable: variable that passes it to ranks and to scripts for accelerate.
        json_path: dotted path of the same setting in the JSON config, in the schema's names.
        fact: field of `Facts` that it fills.
    """

    name: str
    group: str
    metavar: str = ""
    flag: str = ""
    short: str = ""
    takes_value: bool = False
    variables: tuple[str, ...] = ()
    rank_variable: str = ""
    json_path: str = ""
    fact: str = ""


_PROCESSES, _MACHINES, _COMPILATION, _OUTPUT = "Processes", "Machines", "Compilation", "Output and errors"
_TRAINING = "Precision and ZeRO, if the script does not set them"
_MESH = "Parallelism beyond ZeRO"
_ZERO = "zero_optimization"
_SIZES = "PARALLELISM_CONFIG"


def _zero(name: str, json_path: str, fact: str, metavar: str = "", ranks: str = "ACCELERATE_DEEPSPEED_") -> Setting:
    """Builds a ZeRO setting that the JSON config also has; with the metavar "bool" its flag takes true or false."""
    is_switch, variable = metavar == "bool", f"{ranks}{name.removeprefix('deepspeed_').upper()}"
    metavar = "" if is_switch else metavar
    return Setting(name, _TRAINING, metavar, "", "", is_switch, (), variable, json_path, fact)


SETTINGS: Mapping[str, Setting] = {
    setting.name: setting
    for setting in (
        Setting("num_processes", _PROCESSES, "N"),
        Setting("min_processes", _PROCESSES, "N"),
        Setting("use_cpu", _PROCESSES, flag="--cpu", rank_variable="ACCELERATE_USE_CPU"),
        Setting("gpu_ids", _PROCESSES, "IDS"),
        Setting("num_cpu_threads_per_process", _PROCESSES),
        Setting("enable_cpu_affinity", _PROCESSES),
        Setting("numa_affinity", _PROCESSES),
        Setting("expandable_segments", _PROCESSES),
        Setting("max_restarts", _PROCESSES),
        Setting("monitor_interval", _PROCESSES, "SECONDS"),
        Setting("shutdown_timeout", _PROCESSES, "SECONDS", variables=("TORCH_ELASTIC_SHUTDOWN_TIMEOUT",)),
        Setting("num_machines", _MACHINES),
        Setting("min_machines", _MACHINES),
        Setting("machine_rank", _MACHINES),
        Setting("main_process_ip", _MACHINES, "HOST"),
        Setting("main_process_port", _MACHINES, "PORT"),
        Setting("hostfile", _MACHINES, short="-H"),
        Setting("inclusion_filter", _MACHINES, "HOSTS", short="-i"),
        Setting("exclusion_filter", _MACHINES, "HOSTS", short="-e"),
        Setting("multinode_launcher", _MACHINES),
        Setting("rdzv_backend", _MACHINES),
        Setting("rdzv_conf", _MACHINES, "KEY=VALUE,..."),
        Setting("same_network", _MACHINES),
        Setting("engine", _TRAINING),
        Setting("mixed_precision", _TRAINING, rank_variable="ACCELERATE_MIXED_PRECISION", fact="precision"),
        Setting("distributed_type", _TRAINING),
        Setting("deepspeed_config_file", _TRAINING, rank_variable="ACCELERATE_DEEPSPEED_CONFIG_FILE"),
        _zero("zero_stage", f"{_ZERO}.stage", "stage"),
        _zero("offload_optimizer_device", f"{_ZERO}.offload_optimizer.device", "offload_optimizer_device"),
        _zero("offload_param_device", f"{_ZERO}.offload_param.device", "offload_param_device"),
        _zero("offload_optimizer_nvme_path", f"{_ZERO}.offload_optimizer.nvme_path", "offload_optimizer_path"),
        _zero("offload_param_nvme_path", f"{_ZERO}.offload_param.nvme_path", "offload_param_path"),
        _zero("gradient_accumulation_steps", "gradient_accumulation_steps", "accumulation", ranks="ACCELERATE_"),
        _zero("gradient_clipping", "gradient_clipping", "clipping", "NORM", ranks="ACCELERATE_"),
        Setting("zero3_init_flag", _TRAINING, takes_value=True, rank_variable="ACCELERATE_DEEPSPEED_ZERO3_INIT"),
        _zero("zero3_save_16bit_model", f"{_ZERO}.gather_16bit_weights_on_model_save", "save_16bit_weights", "bool"),
        _zero("deepspeed_moe_layer_cls_names", f"{_ZERO}.leaf_module.classes", "", "CLASS,..."),
        _zero("zero_hpz_partition_size", f"{_ZERO}.zero_hpz_partition_size", "hpz_partition_size", "N"),
        _zero("zero_quantized_weights", f"{_ZERO}.zero_quantized_weights", "quantized_weights", "bool"),
        _zero("zero_quantized_gradients", f"{_ZERO}.zero_quantized_gradients", "quantized_gradients", "bool"),
        _zero("frozen_weights", f"{_ZERO}.frozen_weights", "frozen_weights"),
        Setting("dp_replicate_size", _MESH, rank_variable=f"{_SIZES}_DP_REPLICATE_SIZE"),
        Setting("dp_shard_size", _MESH, rank_variable=f"{_SIZES}_DP_SHARD_SIZE"),
        Setting("pp_size", _MESH, rank_variable=f"{_SIZES}_PP_SIZE"),
        Setting("sp_size", _MESH, rank_variable=f"{_SIZES}_SP_SIZE"),
        Setting("tp_size", _MESH, rank_variable=f"{_SIZES}_TP_SIZE"),
        Setting("ep_size", _MESH, rank_variable=f"{_SIZES}_EP_SIZE"),
        Setting("sp_seq_length", _MESH, rank_variable=f"{_SIZES}_SP_SEQ_LENGTH"),
        Setting(
            "sp_seq_length_is_variable", _MESH, takes_value=True, rank_variable=f"{_SIZES}_SP_SEQ_LENGTH_IS_VARIABLE"
        ),
        Setting("sp_attn_implementation", _MESH, "NAME", rank_variable=f"{_SIZES}_SP_ATTN_IMPLEMENTATION"),
        Setting("dynamo_backend", _COMPILATION, "NAME", rank_variable="ACCELERATE_DYNAMO_BACKEND"),
        Setting("dynamo_mode", _COMPILATION, rank_variable="ACCELERATE_DYNAMO_MODE"),
        Setting("dynamo_use_fullgraph", _COMPILATION, rank_variable="ACCELERATE_DYNAMO_USE_FULLGRAPH"),
        Setting("dynamo_use_dynamic", _COMPILATION, rank_variable="ACCELERATE_DYNAMO_USE_DYNAMIC"),
        Setting(
            "dynamo_use_regional_compilation", _COMPILATION, rank_variable="ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"
        ),
        Setting("role", _OUTPUT, "NAME"),
        Setting("log_dir", _OUTPUT, "FOLDER"),
        Setting("tee", _OUTPUT, "STREAMS", short="-t"),
        Setting("redirects", _OUTPUT, "STREAMS", short="-r"),
        Setting("log_line_prefix", _OUTPUT),
        Setting("timeout", _OUTPUT, "SECONDS", variables=("ZEROACCEL_COLLECTIVE_TIMEOUT",)),
        Setting("debug", _OUTPUT, rank_variable="ACCELERATE_DEBUG_MODE"),
    )
}
"""Every setting, in the order of the flags in help."""
