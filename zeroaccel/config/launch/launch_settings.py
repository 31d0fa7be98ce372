"""Launch settings: their types, defaults and help, the keys of the launch file, and checks for contradictions.

Each setting is a field of one of the sections below, which gives its type, default and help. `setting_table` lists its
other names (flag, variables, JSON path). The sections are those of the launch file, which uses accelerate's keys.
`launch_settings` combines them into one flat `LaunchSettings` and checks it. This module does not inspect the machine:
`zeroaccel.cli` checks cores, ports, host names and the script.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError

from zeroaccel.config.diagnostics import NOTHING, Problem, from_pydantic, hint
from zeroaccel.config.parallel import AXES, ParallelConfig
from zeroaccel.config.schema_zero import Device, FrozenFormat, Stage
from zeroaccel.config.section import (
    AlsoSpelled,
    ConfigSection,
    Count,
    Flag,
    FreeSection,
    Name,
    NonNegativeNumber,
    PathText,
    PositiveCount,
    PositiveNumber,
    Text,
    as_integer,
    checked,
    lowered,
    nested_section,
    spellings,
    wrong,
)
from zeroaccel.errors import ConfigError, UsageError, compose

Rendezvous = Literal["static", "c10d"]
DistributedType = Literal["NO", "MULTI_CPU", "MULTI_GPU", "DEEPSPEED"]


def _streams(value: object) -> object:
    choices = value.values() if isinstance(value, Mapping) else (value,)
    if all(type(choice) is int and 0 <= choice <= 3 for choice in choices) and (
        not isinstance(value, Mapping) or all(type(rank) is int and rank >= 0 for rank in value)
    ):
        return value
    raise wrong("0 (none), 1 (stdout), 2 (stderr) or 3 (both), or one of them per local rank such as 0:3,1:2")


def _rendezvous_conf(value: object) -> object:
    if value in (None, ""):
        return {}
    if isinstance(value, Mapping) and all(type(number) is int and number > 0 for number in value.values()):
        return value
    raise wrong("settings with whole numbers above 0, such as join_timeout=60,read_timeout=30")


def _no(value: object) -> object:
    return "no" if value is False else value  # YAML reads a bare `no` as false


def _gpu_ids(value: object) -> object:
    text = str(value).replace(" ", "") if isinstance(value, (int, str)) and not isinstance(value, bool) else ""
    text = text.removesuffix(",")  # accelerate's files write a list of one device as "0,"
    names = text.split(",")
    if text == "all" or (text and all(re.fullmatch(r"\d+|(GPU|MIG)-[\w/-]+", name) for name in names)):
        if len(set(names)) == len(names):
            return text
        raise wrong("each device once")
    raise wrong('"all", or device numbers such as 0,2')


def _class_names(value: object) -> object:
    names = value.split(",") if isinstance(value, str) else value
    if isinstance(names, (list, tuple)) and all(isinstance(name, str) and name.strip() for name in names):
        return tuple(name.strip() for name in names)
    raise wrong("class names separated by commas")


_SSH = ("pdsh",)  # accelerate's name for the launcher that reaches the machines of a hostfile
_BY_HAND = ("nossh",)


def _launcher(value: object) -> object:
    name = str(value).lower()
    if name in ("openmpi", "mpich", "impi", "mvapich", "slurm"):
        raise wrong('"ssh" or "standard"', "leave it out, and start `zeroaccel launch` under mpirun or srun")
    return "ssh" if name in _SSH else "standard" if name in _BY_HAND else name


_TYPES = ("DEEPSPEED", "MULTI_GPU", "MULTI_CPU", "NO")
_TRANSLATED = "pass --use_fsdp, which sets the equivalent ZeRO stage"


def _distributed_type(value: object) -> object:
    name = "NO" if value is False else str(value).upper()  # YAML reads a bare `NO` as false
    if name in _TYPES:
        return name
    raise wrong("DEEPSPEED, MULTI_GPU, MULTI_CPU or NO", _TRANSLATED if name == "FSDP" else "")


Port = Annotated[int, checked(lambda value: type(value) is int and 0 <= value <= 65535, "a port, 0 to 65535")]
Streams = Annotated[int | dict[int, int], BeforeValidator(_streams)]
RendezvousConf = Annotated[dict[str, int], BeforeValidator(_rendezvous_conf)]
Precision = Annotated[Literal["no", "fp16", "bf16"], BeforeValidator(lowered), BeforeValidator(_no)]
GpuIds = Annotated[str, BeforeValidator(_gpu_ids)]
ClassNames = Annotated[tuple[str, ...], BeforeValidator(_class_names)]
Launcher = Annotated[Literal["ssh", "standard"], BeforeValidator(_launcher)]
EngineName = Annotated[Literal["zeroaccel", "deepspeed"], BeforeValidator(lowered)]
LinePrefix = Annotated[Literal["auto", "all", "none"], BeforeValidator(lowered)]
Kind = Annotated[DistributedType, BeforeValidator(_distributed_type)]


class ProcessSettings(ConfigSection):
    """Settings of the processes: their number, rendezvous, resources and output."""

    distributed_type: Kind | None = None
    """DEEPSPEED for the ZeRO engine; MULTI_GPU, MULTI_CPU or NO without it. [default: DEEPSPEED if ZeRO is set up]"""
    engine: EngineName | None = None
    """Package that `import deepspeed` loads in the processes. [default: deepspeed if installed, else zeroaccel]"""
    num_processes: PositiveCount | None = None
    """Number of processes in the job; MIN:MAX on one machine. [default: one per accelerator, else 1 per machine]"""
    min_processes: PositiveCount | None = None
    """With max_restarts, fewest processes to continue with after one has failed twice. [default: all of them]"""
    num_machines: PositiveCount = 1
    """Number of machines; run the command on each, with its --machine_rank. MIN:MAX with c10d. [default: 1]"""
    min_machines: PositiveCount | None = None
    """With c10d, fewest machines to start with, and to continue with if others fail. [default: all of them]"""
    machine_rank: Count | None = None
    """Number of this machine, from 0. Machine 0 hosts the rendezvous."""
    main_process_ip: Name | None = None
    """Address at which the other machines reach machine 0."""
    main_process_port: Port | None = None
    """Port on machine 0 for the rendezvous. [default: a free port on one machine, 29500 on several]"""
    same_network: Flag = True
    """Accepted without effect: the rendezvous is always at the address and port of machine 0."""
    rdzv_backend: Rendezvous | None = None
    """Rendezvous backend: static (fixed ranks) or c10d. [default: c10d on one machine, static on several]"""
    rdzv_conf: RendezvousConf = Field(default_factory=dict)
    """Rendezvous settings as KEY=VALUE,...: timeout (static), join_timeout, ... (c10d), in seconds."""
    max_restarts: Count = 0
    """Maximum number of restarts of all processes after failures. [default: 0]"""
    monitor_interval: PositiveNumber = 0.1
    """Interval in seconds at which the launcher checks its processes. [default: 0.1]"""
    shutdown_timeout: NonNegativeNumber = 30.0
    """Seconds that the processes have to exit after Ctrl-C or SIGTERM before they are killed. [default: 30]"""
    use_cpu: Flag = False
    """Hide the accelerators: the processes compute on the CPU and communicate through gloo."""
    gpu_ids: GpuIds = "all"
    """Devices of this machine to use, such as 0,2. [default: all that CUDA_VISIBLE_DEVICES lists]"""
    num_cpu_threads_per_process: PositiveCount | None = None
    """OMP_NUM_THREADS of each process. [default: cores of the machine divided by its processes]"""
    enable_cpu_affinity: Flag = False
    """Bind each process to its own block of adjacent cores."""
    numa_affinity: Flag = True
    """Bind each process to the cores and memory of its GPU's NUMA node. [default: if there are several nodes]"""
    expandable_segments: Flag = True
    """Set expandable_segments in PyTorch's allocator. [default: on NVIDIA GPUs, unless the environment sets it]"""
    mixed_precision: Precision | None = None
    """Precision of the model: no (fp32), fp16 or bf16. [default: the JSON config's, else no]"""
    role: Name = "rank"
    """Name of the processes in output and logs. [default: rank]"""
    log_dir: PathText | None = None
    """Folder for the output and the error reports of every process."""
    tee: Streams = 0
    """Also write output to files: 1 stdout, 2 stderr, 3 both, or per local rank: 0:3,1:2. Prefixes each line."""
    redirects: Streams = 0
    """Write output to files in --log_dir instead of the terminal; same values as --tee."""
    log_line_prefix: LinePrefix = "auto"
    """Prefix lines with [rank N]: auto (on a terminal, all ranks except 0), all or none. [default: auto]"""
    timeout: NonNegativeNumber | None = None
    """Seconds that a collective may wait for the other processes; 0 for no limit. [default: 600]"""
    debug: Flag = False
    """Show full tracebacks and the messages of torch's elastic agent."""


class ZeroSettings(ConfigSection):
    """ZeRO settings for scripts that do not set them; `deepspeed_config` in the launch file."""

    deepspeed_config_file: PathText | None = None
    """Config in DeepSpeed's JSON format. The settings below then only fill keys that it omits or sets to "auto"."""
    zero_stage: Stage | None = None
    """ZeRO stage: 1 shards optimizer states, 2 also gradients, 3 also parameters; 0 shards nothing. [default: 2]"""
    offload_optimizer_device: Device | None = None
    """Storage of the optimizer states, from stage 1 on: none (the device), cpu or nvme. [default: none]"""
    offload_param_device: Device | None = None
    """Storage of the parameters, at stage 3: none (the device), cpu or nvme. [default: none]"""
    offload_optimizer_nvme_path: PathText | None = None
    """Folder for optimizer states on nvme. [default: on the writable local disk with the most free space]"""
    offload_param_nvme_path: PathText | None = None
    """Folder for parameters on nvme. [default: on the writable local disk with the most free space]"""
    gradient_accumulation_steps: PositiveCount | None = None
    """Number of micro-batches per optimizer step. [default: the script's]"""
    gradient_clipping: NonNegativeNumber | None = None
    """Maximum global norm of the gradients; 0 disables clipping. [default: the script's]"""
    zero3_init_flag: Flag | None = None
    """Shard parameters while the model is being built, at stage 3. [default: false]"""
    zero3_save_16bit_model: Flag | None = None
    """Gather the whole model when it is saved, at stage 3. [default: false]"""
    deepspeed_moe_layer_cls_names: ClassNames | None = None
    """Classes of mixture-of-experts layers, separated by commas; the engine gathers each layer as a whole."""
    zero_hpz_partition_size: PositiveCount | None = None
    """At stage 3, ranks per group that holds a second copy of all shards (ZeRO++ hpZ). [default: 1, no copy]"""
    zero_quantized_weights: Flag | None = None
    """At stage 3, gather parameters as 8-bit integers (ZeRO++ qwZ). [default: false]"""
    zero_quantized_gradients: Flag | None = None
    """At stage 3, reduce gradients between machines as 4-bit integers (ZeRO++ qgZ). [default: false]"""
    frozen_weights: FrozenFormat | None = None
    """Quantize frozen matrices, such as the base model under LoRA: int8, nf4 or mxfp4. [default: not quantized]"""


class HostSettings(ConfigSection):
    """Settings for starting the job on all machines of a hostfile; `deepspeed_config` in the launch file."""

    hostfile: Annotated[PathText | None, AlsoSpelled("deepspeed_hostfile")] = None
    """File with one line per machine, such as: node1 slots=8. This launcher starts the job on all of them."""
    inclusion_filter: Annotated[Name | None, AlsoSpelled("include"), AlsoSpelled("deepspeed_inclusion_filter")] = None
    """Machines and devices of the hostfile to use, such as node1@node2:0,2."""
    exclusion_filter: Annotated[Name | None, AlsoSpelled("exclude"), AlsoSpelled("deepspeed_exclusion_filter")] = None
    """Machines and devices of the hostfile to exclude, such as node1:3."""
    multinode_launcher: Annotated[Launcher | None, AlsoSpelled("deepspeed_multinode_launcher")] = None
    """Transport to the other machines: ssh, or standard (you run the command on each). [default: ssh]"""


class DynamoSettings(ConfigSection):
    """Settings of torch.compile; `dynamo_config` in the launch file."""

    dynamo_backend: Annotated[Name, BeforeValidator(lowered), BeforeValidator(_no)] | None = None
    """Backend of torch.compile, such as inductor; no disables compilation. [default: no]"""
    dynamo_mode: Literal["default", "reduce-overhead", "max-autotune"] | None = None
    """Mode of torch.compile: default, reduce-overhead or max-autotune."""
    dynamo_use_fullgraph: Flag = False
    """Raise an error at a graph break."""
    dynamo_use_dynamic: Flag = False
    """Compile for dynamic shapes."""
    dynamo_use_regional_compilation: Flag = False
    """Compile the repeated blocks instead of the whole model."""


class ParallelSettings(ConfigSection):
    """Sizes of the mesh axes; `parallelism_config` in the launch file."""

    dp_replicate_size: Annotated[PositiveCount | None, AlsoSpelled("parallelism_config_dp_replicate_size")] = None
    """Number of groups of processes that each hold one sharded model. [default: 1]"""
    dp_shard_size: Annotated[PositiveCount | None, AlsoSpelled("parallelism_config_dp_shard_size")] = None
    """Data-parallel processes per group; with one group, 1 means the default. [default: processes / other sizes]"""
    pp_size: PositiveCount | None = None
    """Number of pipeline stages, each on its own processes. [default: 1]"""
    sp_size: Annotated[PositiveCount | None, AlsoSpelled("parallelism_config_sp_size")] = None
    """Number of processes that share each sequence (Ulysses sequence parallelism). [default: 1]"""
    tp_size: Annotated[PositiveCount | None, AlsoSpelled("parallelism_config_tp_size")] = None
    """Number of processes that share each layer (tensor parallelism). [default: 1]"""
    ep_size: PositiveCount | None = None
    """Number of processes that divide the experts of each layer; each has its own samples. [default: 1]"""
    sp_seq_length: Annotated[PositiveCount | None, AlsoSpelled("parallelism_config_sp_seq_length")] = None
    """Tokens per sequence if all are equally long. Only accelerate reads it; zeroaccel takes any lengths."""
    sp_seq_length_is_variable: Annotated[Flag | None, AlsoSpelled("parallelism_config_sp_seq_length_is_variable")] = (
        None
    )
    """True if sequences differ in length. Only accelerate reads it; zeroaccel takes any lengths."""
    sp_attn_implementation: Annotated[Name | None, AlsoSpelled("parallelism_config_sp_attn_implementation")] = None
    """Attention implementation, such as sdpa. Only accelerate reads it; zeroaccel uses the model's own."""


class DeepSpeedSection(ZeroSettings, HostSettings):
    """`deepspeed_config` of the launch file."""


class LaunchFile(ProcessSettings):
    """The launch file: accelerate's keys and zeroaccel's additional settings."""

    compute_environment: Literal["LOCAL_MACHINE"] = "LOCAL_MACHINE"
    """Environment of the processes: LOCAL_MACHINE."""
    main_training_function: Text = "main"
    """Accepted without effect: the launcher runs scripts as they are."""
    downcast_bf16: Annotated[Literal["no"], BeforeValidator(_no)] = "no"
    """A setting of TPUs: no."""
    tpu_env: Any = None
    """A setting of TPUs: empty."""
    tpu_use_cluster: Literal[False] = False
    """A setting of TPUs: false."""
    tpu_use_sudo: Literal[False] = False
    """A setting of TPUs: false."""
    deepspeed_config: DeepSpeedSection = DeepSpeedSection()
    """Settings of ZeRO and of the hostfile."""
    dynamo_config: DynamoSettings = DynamoSettings()
    """Settings of torch.compile."""
    fsdp_config: FreeSection = None
    """Settings of FSDP: if distributed_type is FSDP, translated to the equivalent ZeRO stage and offload."""
    megatron_lm_config: FreeSection = None
    """Settings of Megatron-LM, which is another engine."""
    parallelism_config: ParallelSettings = ParallelSettings()
    """Sizes of the mesh axes."""
    fp8_config: FreeSection = None
    """Settings of 8-bit training."""
    ipex_config: FreeSection = None
    """Settings of Intel Extension for PyTorch."""
    mpirun_config: FreeSection = None
    """Settings of mpirun."""


SECTIONS = ("deepspeed_config", "dynamo_config", "parallelism_config")
"""Keys of the launch file that hold sections of settings."""

DEFAULT_STAGE = 2
"""ZeRO stage of a launch that requests ZeRO without a stage, as in accelerate."""

_WAITS = ("join_timeout", "last_call_timeout", "close_timeout", "read_timeout", "heartbeat_timeout")
_RENDEZVOUS_KEYS: Mapping[Rendezvous, tuple[str, ...]] = {
    "static": ("timeout",),
    "c10d": (*_WAITS, "keep_alive_interval", "keep_alive_max_attempt"),
}


class LaunchSettings(ProcessSettings, ZeroSettings, HostSettings, DynamoSettings, ParallelSettings):
    """All settings of a launch. `launch_settings` creates it and checks the settings against each other."""

    @property
    def rendezvous(self) -> Rendezvous:
        """Rendezvous backend. An explicit port becomes MASTER_PORT with static rendezvous only."""
        if self.num_machines == 1 and not self.main_process_port:
            return "c10d"  # at a port that the agent chooses; on one machine the ranks are fixed with either backend
        if self.rdzv_backend is None and (self.max_restarts or self.min_machines):
            return "c10d"  # static rendezvous does not restart the ranks of other machines
        return self.rdzv_backend or "static"

    @property
    def is_elastic(self) -> bool:
        """True if the job may continue with fewer processes."""
        return self.min_machines is not None or self.min_processes is not None

    @property
    def machine(self) -> int:
        """Rank of this machine."""
        return self.machine_rank or 0

    @property
    def is_main_machine(self) -> bool:
        """True if this machine hosts the rendezvous store."""
        return self.machine == 0

    @property
    def starts_hosts(self) -> bool:
        """True if this launcher starts the job on all machines of a hostfile, rather than only on this one."""
        return self.hostfile is not None and self.multinode_launcher != "standard"

    @property
    def uses_zero(self) -> bool:
        """True if the launch requests the ZeRO engine, by distributed_type or by any setting of ZeRO."""
        if self.distributed_type is not None:
            return self.distributed_type == "DEEPSPEED"
        return bool(self.zero_settings)

    @property
    def parallel(self) -> ParallelConfig:
        """Mesh with the requested sizes."""
        return ParallelConfig.from_sizes({axis: getattr(self, f"{axis}_size") for axis in (*AXES, "ep")})

    @property
    def zero_settings(self) -> dict[str, Any]:
        """Settings of ZeRO that the launch sets."""
        return {name: value for name in ZeroSettings.model_fields if (value := getattr(self, name)) is not None}


def file_path(name: str) -> tuple[str, ...]:
    """Returns the keys of a setting in the launch file, as accelerate spells them."""
    for section in SECTIONS:
        nested = nested_section(LaunchFile.model_fields[section])
        if nested is not None and name in nested.model_fields:
            others = [mark.name for mark in spellings(nested.model_fields[name])]
            prefixes = ("deepspeed_", "parallelism_config_")
            return section, next((other for other in others if other.startswith(prefixes)), name)
    return (name,)


def launch_settings(values: Mapping[str, Any], address: Callable[[str], str] = str) -> LaunchSettings:
    """Checks settings one by one and against each other.

    Args:
        values: setting -> value, without settings that were not given.
        address: setting -> its name at the place where the user set it, such as "--num_processes".

    Raises:
        ConfigError: settings are wrong; the message lists all of them, one per line.

    Example:
        >>> settings = launch_settings({"num_processes": 8, "zero_stage": 3})
        >>> settings.uses_zero, settings.rendezvous
        (True, 'c10d')
    """
    settings = typed_settings(values, address)
    if problems := list(_contradictions(settings)):
        raise wrong_settings(problems, address)
    return settings


def typed_settings(values: Mapping[str, Any], address: Callable[[str], str] = str) -> LaunchSettings:
    """Checks each setting by itself, but not against the others, for example those of a launch file alone.

    Raises:
        ConfigError: as for `launch_settings`.
    """
    names = LaunchSettings.model_fields
    unknown = [
        Problem((name,), text="no such setting", fix=hint(name, names, "remove it"))
        for name in values
        if name not in names
    ]
    if unknown:
        raise wrong_settings(unknown, address)
    try:
        return LaunchSettings(**values)
    except ValidationError as error:
        raise wrong_settings([from_pydantic(entry) for entry in error.errors(include_url=False)], address) from None


def idle_settings(values: Mapping[str, Any]) -> dict[str, str]:
    """Returns settings that have no effect together with the others -> the reason. Does not read the JSON config.

    Args:
        values: setting -> value, without settings that were not given; the values may be invalid.
    """
    stage = as_integer(values.get("zero_stage", DEFAULT_STAGE))
    if stage is None or values.get("deepspeed_config_file") is not None:
        return {}
    about_stage = f"the stage is {stage}" + ("" if "zero_stage" in values else ", the default")
    idle: dict[str, str] = {}
    if 0 <= stage < 3:
        zeropp = ("zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_gradients")
        what = f"parameters are sharded at stage 3 only, and {about_stage}"
        idle = {name: what for name in zeropp if values.get(name) not in (None, False, 1)}
    for kind, least, what in (
        ("param", 3, f"parameters are sharded at stage 3 only, and {about_stage}"),
        ("optimizer", 1, f"optimizer states are sharded from stage 1 on, and {about_stage}"),
    ):
        names = [f"offload_{kind}_device", f"offload_{kind}_nvme_path"]
        if 0 <= stage < least and str(values.get(names[0])).lower() in ("cpu", "nvme"):
            idle |= {name: what for name in names if name in values}
    return idle


def wrong_settings(problems: list[Problem], address: Callable[[str], str]) -> ConfigError:
    """Combines problems into one error that names each setting by the place where the user set it."""
    lines = []
    for problem in problems:
        where = address(str(problem.path[0])) + (f": {problem.text}" if problem.text else "")
        got = {} if problem.got is NOTHING else {"got": problem.got}
        lines.append(compose(where, expected=problem.expected, fix=problem.fix, **got))
    return ConfigError(lines[0] if len(lines) == 1 else "\n  ".join([f"{len(lines)} settings are wrong", *lines]))


def _contradictions(settings: LaunchSettings) -> Iterator[Problem]:
    yield from _problems_of_elasticity(settings)
    if settings.num_machines > 1:
        yield from _problems_between_machines(settings)
    elif settings.machine_rank and not settings.starts_hosts:
        yield Problem(
            ("machine_rank",), expected="0 on one machine", got=settings.machine_rank, fix="set num_machines too"
        )
    if settings.redirects and settings.log_dir is None:
        yield Problem(("redirects",), text="the output would be lost", fix="set log_dir to the folder that keeps it")
    keys = _RENDEZVOUS_KEYS[settings.rendezvous]
    for name in settings.rdzv_conf:
        if name not in keys:
            expected = f"settings of the {settings.rendezvous} rendezvous ({', '.join(keys)})"
            yield Problem(("rdzv_conf",), expected=expected, got=name)
    yield from _problems_of_zero(settings)
    yield from _problems_of_axes(settings)


def _problems_of_axes(settings: LaunchSettings) -> Iterator[Problem]:
    if settings.num_processes is None:
        return  # one process per device: `plan_launch` knows their number, and every rank checks it
    mesh = settings.parallel
    try:
        mesh.resolve(settings.num_processes)
    except UsageError:
        names = [f"{axis}_size" for axis in (*AXES, "ep") if getattr(settings, f"{axis}_size") is not None]
        yield Problem((names[-1],), text=mesh.misfit(settings.num_processes), fix=_FITTING)


_FITTING = "change num_processes, or the sizes"


def _problems_of_elasticity(settings: LaunchSettings) -> Iterator[Problem]:
    if settings.max_restarts and settings.num_machines > 1 and settings.rendezvous == "static":
        text = "the static rendezvous does not inform other machines about a restart"
        yield Problem(("rdzv_backend",), text=text, fix="set it to c10d, or max_restarts to 0")
    if settings.min_processes is not None:
        yield from _problems_of_fewer_processes(settings, settings.min_processes)
    least = settings.min_machines
    if least is None:
        return
    if least > settings.num_machines:
        expected = f"at most num_machines ({settings.num_machines})"
        yield Problem(("min_machines",), expected=expected, got=least)
    elif settings.rendezvous != "c10d":
        text = "only the c10d rendezvous lets machines join and leave"
        yield Problem(("min_machines",), text=text, fix="set rdzv_backend to c10d, or leave it out")


def _problems_of_fewer_processes(settings: LaunchSettings, least: int) -> Iterator[Problem]:
    name = ("min_processes",)
    if settings.num_machines > 1:
        text = "the number of processes per machine is fixed on several machines"
        yield Problem(name, text=text, fix="pass --num_machines MIN:MAX instead")
    elif settings.num_processes is None or least > settings.num_processes:
        most = "num_processes" if settings.num_processes is None else f"num_processes ({settings.num_processes})"
        yield Problem(name, expected=f"at most {most}", got=least)
    elif settings.max_restarts < 2:
        text = "the launcher excludes a process only after two failed attempts"
        yield Problem(name, text=text, fix="set max_restarts to 2 or more")


def _problems_between_machines(settings: LaunchSettings) -> Iterator[Problem]:
    machines = settings.num_machines
    if settings.starts_hosts:
        yield from _problem_of_division(settings)
        return  # `ssh` passes each machine its rank and the address of machine 0
    arrives = settings.rendezvous == "c10d"  # c10d assigns the numbers in any order
    is_spare = settings.min_machines is not None and arrives  # a machine that waits may have a number above the others
    if (settings.machine_rank is None and not arrives) or ((settings.machine_rank or 0) >= machines and not is_spare):
        got = NOTHING if settings.machine_rank is None else settings.machine_rank
        fix = "or set hostfile, and this launcher starts the job on all machines" if got is NOTHING else ""
        yield Problem(("machine_rank",), expected=f"the number of this machine, 0 to {machines - 1}", got=got, fix=fix)
    if settings.main_process_ip is None:
        yield Problem(("main_process_ip",), expected="the address of machine 0", fix="set it on every machine")
    if settings.main_process_port == 0:
        fix = "choose a port that is free on machine 0, and set it on every machine"
        yield Problem(("main_process_port",), expected="a port that all machines know", got=0, fix=fix)
    yield from _problem_of_division(settings)


def _problem_of_division(settings: LaunchSettings) -> Iterator[Problem]:
    machines = settings.num_machines
    if settings.num_processes and settings.num_processes % machines:
        per_machine = settings.num_processes // machines
        counts = " or ".join(str(count * machines) for count in (per_machine, per_machine + 1) if count)
        yield Problem(
            ("num_processes",),
            expected=f"a multiple of num_machines ({machines})",
            got=settings.num_processes,
            fix=f"it is the total number of processes on all machines: set {counts}",
        )


def _problems_of_zero(settings: LaunchSettings) -> Iterator[Problem]:
    explicit = settings.zero_settings
    if explicit and not settings.uses_zero:
        names = ", ".join(explicit)
        fix = f"set distributed_type to DEEPSPEED, or leave out {names}"
        yield Problem(("distributed_type",), text=f"{settings.distributed_type} does not use ZeRO", fix=fix)
    if settings.inclusion_filter is not None and settings.exclusion_filter is not None:
        yield Problem(("exclusion_filter",), text="given together with an inclusion filter", fix="keep one of the two")
    for name in ("inclusion_filter", "exclusion_filter"):
        if getattr(settings, name) is not None and settings.hostfile is None:
            yield Problem((name,), text="it filters a hostfile, and hostfile is not set", fix="set hostfile too")
    if settings.deepspeed_config_file is not None:
        return  # it may set the stage; `load_config` checks the merged settings
    idle = idle_settings(settings.model_dump(exclude_none=True))
    for kind in ("optimizer", "param"):
        device, path = f"offload_{kind}_device", f"offload_{kind}_nvme_path"
        if getattr(settings, device) == "nvme" and device not in idle and getattr(settings, path) is None:
            yield Problem(
                (path,), text=f'missing, and offload_{kind}_device is "nvme"', fix="set it to a folder on a local disk"
            )
