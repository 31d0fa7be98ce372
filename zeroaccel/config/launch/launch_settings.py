"""The settings of a launch: types, defaults, help, and the keys of the launch file; contradictions between settings.

A setting is a field of one of the sections below: its type, default and help. Its other names (flag, variables, JSON
path) are its row in `setting_table`. The sections are those of the file, whose keys are accelerate's; `launch_settings`
makes and checks one flat `LaunchSettings` of them. Nothing here looks at the machine: cores, ports, host names and the
script are checked in `zeroaccel.cli`.
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
    raise wrong("0 (none), 1 (stdout), 2 (stderr) or 3 (both), or one of them per local rank as in 0:3,1:2")


def _rendezvous_conf(value: object) -> object:
    if value in (None, ""):
        return {}
    if isinstance(value, Mapping) and all(type(number) is int and number > 0 for number in value.values()):
        return value
    raise wrong("settings with whole numbers above 0, as in join_timeout=60,read_timeout=30")


def _no(value: object) -> object:
    return "no" if value is False else value  # YAML reads a bare `no` as false


def _gpu_ids(value: object) -> object:
    text = str(value).replace(" ", "") if isinstance(value, (int, str)) and not isinstance(value, bool) else ""
    text = text.removesuffix(",")  # "0," is how one device is kept a list in accelerate's files
    names = text.split(",")
    if text == "all" or (text and all(re.fullmatch(r"\d+|(GPU|MIG)-[\w/-]+", name) for name in names)):
        if len(set(names)) == len(names):
            return text
        raise wrong("each device once")
    raise wrong('"all", or the numbers of devices as in 0,2')


def _class_names(value: object) -> object:
    names = value.split(",") if isinstance(value, str) else value
    if isinstance(names, (list, tuple)) and all(isinstance(name, str) and name.strip() for name in names):
        return tuple(name.strip() for name in names)
    raise wrong("names of classes, separated by commas")


_SSH = ("pdsh",)  # what reaches machines by a hostfile in accelerate's files
_BY_HAND = ("nossh",)


def _launcher(value: object) -> object:
    name = str(value).lower()
    if name in ("openmpi", "mpich", "impi", "mvapich", "slurm"):
        raise wrong('"ssh" or "standard"', "leave it out, and start `zeroaccel launch` under mpirun or srun")
    return "ssh" if name in _SSH else "standard" if name in _BY_HAND else name


_TYPES = ("DEEPSPEED", "MULTI_GPU", "MULTI_CPU", "NO")
_TRANSLATED = "pass --use_fsdp, which sets the stage that shards the same way"


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
    """Which processes there are, how they meet, what each gets, and where their output goes."""

    distributed_type: Kind | None = None
    """DEEPSPEED for the ZeRO engine, MULTI_GPU, MULTI_CPU or NO without it. [default: DEEPSPEED if ZeRO is set up]"""
    engine: EngineName | None = None
    """What `import deepspeed` gives the processes. [default: deepspeed where one is installed, else zeroaccel]"""
    num_processes: PositiveCount | None = None
    """Processes of the whole job; MIN:MAX on one machine. [default: one per accelerator; without any, 1 per machine]"""
    min_processes: PositiveCount | None = None
    """With max_restarts, processes that are enough to go on with after one was lost twice. [default: all of them]"""
    num_machines: PositiveCount = 1
    """Machines of the job; run the command on each, with its --machine_rank. MIN:MAX with c10d. [default: 1]"""
    min_machines: PositiveCount | None = None
    """With c10d, machines that are enough to begin, and to go on with when others are lost. [default: all of them]"""
    machine_rank: Count | None = None
    """The number of this machine, from 0. Machine 0 hosts the meeting point."""
    main_process_ip: Name | None = None
    """Address of machine 0, as the other machines reach it."""
    main_process_port: Port | None = None
    """Port on machine 0 for the meeting point. [default: a free one on one machine, 29500 on several]"""
    same_network: Flag = True
    """Accepted without effect: machines always meet at the address and port of machine 0."""
    rdzv_backend: Rendezvous | None = None
    """How machines meet: static (fixed ranks) or c10d. [default: c10d on one machine, static on several]"""
    rdzv_conf: RendezvousConf = Field(default_factory=dict)
    """Settings of the meeting, as KEY=VALUE,...: timeout (static), join_timeout, ... (c10d), in seconds."""
    max_restarts: Count = 0
    """Restarts of all processes after a failure. [default: 0]"""
    monitor_interval: PositiveNumber = 0.1
    """Seconds between two looks at the processes. [default: 0.1]"""
    shutdown_timeout: NonNegativeNumber = 30.0
    """Seconds that the processes have to end after Ctrl-C or SIGTERM; then they are killed. [default: 30]"""
    use_cpu: Flag = False
    """Hide the accelerators: the processes compute on the CPU and talk through gloo."""
    gpu_ids: GpuIds = "all"
    """Devices of this machine to use, as in 0,2. [default: all that CUDA_VISIBLE_DEVICES shows]"""
    num_cpu_threads_per_process: PositiveCount | None = None
    """OMP_NUM_THREADS of each process. [default: cores of the machine / processes on it]"""
    enable_cpu_affinity: Flag = False
    """Give each process cores of its own: a run of neighbouring ones."""
    numa_affinity: Flag = True
    """Bind each process to the cores of its GPU's NUMA node, and so its memory. [default: where there are several]"""
    expandable_segments: Flag = True
    """Ask torch for device memory in segments that grow. [default: on NVIDIA GPUs, unless the environment says]"""
    mixed_precision: Precision | None = None
    """Precision of the model: no (fp32), fp16 or bf16. [default: that of the JSON config, else no]"""
    role: Name = "rank"
    """Name of the processes in output and logs. [default: rank]"""
    log_dir: PathText | None = None
    """Folder that keeps the output and the error reports of every process."""
    tee: Streams = 0
    """Also write output to files: 1 stdout, 2 stderr, 3 both, or per local rank as in 0:3,1:2. Prefixes each line."""
    redirects: Streams = 0
    """Write output to files in --log_dir instead of the terminal; as for --tee."""
    log_line_prefix: LinePrefix = "auto"
    """Begin lines with [rank N]: auto (on a terminal, those of other ranks than 0), all or none. [default: auto]"""
    timeout: NonNegativeNumber | None = None
    """Seconds a collective may wait for the other processes, 0 for no limit. [default: 600]"""
    debug: Flag = False
    """Show every traceback in full, and the messages of torch's elastic agent."""


class ZeroSettings(ConfigSection):
    """What is sharded and where it lives, for scripts that do not say it themselves; `deepspeed_config` in the file."""

    deepspeed_config_file: PathText | None = None
    """A config in DeepSpeed's JSON format. The settings below then only fill what it leaves "auto"."""
    zero_stage: Stage | None = None
    """0 shards nothing, 1 the optimizer states, 2 also the gradients, 3 also the parameters. [default: 2]"""
    offload_optimizer_device: Device | None = None
    """Where optimizer states live, from stage 1 on: none (on the device), cpu or nvme. [default: none]"""
    offload_param_device: Device | None = None
    """Where parameters live, at stage 3: none (on the device), cpu or nvme. [default: none]"""
    offload_optimizer_nvme_path: PathText | None = None
    """Folder for optimizer states on nvme. [default: the writable local disk with the most room]"""
    offload_param_nvme_path: PathText | None = None
    """Folder for parameters on nvme. [default: the writable local disk with the most room]"""
    gradient_accumulation_steps: PositiveCount | None = None
    """Micro-steps per optimizer step. [default: the script's]"""
    gradient_clipping: NonNegativeNumber | None = None
    """Largest global norm of the gradients; 0 does not clip. [default: the script's]"""
    zero3_init_flag: Flag | None = None
    """Shard the model while it is being built, at stage 3. [default: false]"""
    zero3_save_16bit_model: Flag | None = None
    """Let the whole model be gathered when it is saved, at stage 3. [default: false]"""
    deepspeed_moe_layer_cls_names: ClassNames | None = None
    """Classes of mixture-of-experts layers, separated by commas; they are gathered as a whole."""
    zero_hpz_partition_size: PositiveCount | None = None
    """At stage 3, processes that hold a second copy of the shards among them (ZeRO++ hpZ). [default: 1, none]"""
    zero_quantized_weights: Flag | None = None
    """At stage 3, gather parameters as 8-bit integers (ZeRO++ qwZ). [default: false]"""
    zero_quantized_gradients: Flag | None = None
    """At stage 3, reduce gradients between machines as 4-bit integers (ZeRO++ qgZ). [default: false]"""
    frozen_weights: FrozenFormat | None = None
    """Store frozen matrices, as of a base under adapters, as codes: int8, nf4 or mxfp4. [default: as they are]"""


class HostSettings(ConfigSection):
    """The other machines, where one of them starts the job on all; in `deepspeed_config` of the file."""

    hostfile: Annotated[PathText | None, AlsoSpelled("deepspeed_hostfile")] = None
    """File with a line per machine, as in: node1 slots=8. This launcher starts the job on all of them."""
    inclusion_filter: Annotated[Name | None, AlsoSpelled("include"), AlsoSpelled("deepspeed_inclusion_filter")] = None
    """Machines and devices of the hostfile to use, as in node1@node2:0,2."""
    exclusion_filter: Annotated[Name | None, AlsoSpelled("exclude"), AlsoSpelled("deepspeed_exclusion_filter")] = None
    """Machines and devices of the hostfile to leave out, as in node1:3."""
    multinode_launcher: Annotated[Launcher | None, AlsoSpelled("deepspeed_multinode_launcher")] = None
    """Transport to the other machines: ssh, or standard: you run the command on each. [default: ssh]"""


class DynamoSettings(ConfigSection):
    """Whether and how the model is compiled by torch.compile; `dynamo_config` in the file."""

    dynamo_backend: Annotated[Name, BeforeValidator(lowered), BeforeValidator(_no)] | None = None
    """Backend of torch.compile, as inductor; no compiles nothing. [default: no]"""
    dynamo_mode: Literal["default", "reduce-overhead", "max-autotune"] | None = None
    """What the compiler aims for: default, reduce-overhead or max-autotune."""
    dynamo_use_fullgraph: Flag = False
    """Make a graph break an error."""
    dynamo_use_dynamic: Flag = False
    """Compile for changing shapes."""
    dynamo_use_regional_compilation: Flag = False
    """Compile the repeated blocks, rather than the model as a whole."""


class ParallelSettings(ConfigSection):
    """How the processes share out the work beyond ZeRO; `parallelism_config` in the file."""

    dp_replicate_size: Annotated[PositiveCount | None, AlsoSpelled("parallelism_config_dp_replicate_size")] = None
    """Groups of processes that each hold one sharded model. [default: 1]"""
    dp_shard_size: Annotated[PositiveCount | None, AlsoSpelled("parallelism_config_dp_shard_size")] = None
    """Data-parallel processes in each of these groups. [default: what the other sizes leave; 1 says the same]"""
    pp_size: PositiveCount | None = None
    """Stages of a pipeline, each on processes of its own. [default: 1]"""
    sp_size: Annotated[PositiveCount | None, AlsoSpelled("parallelism_config_sp_size")] = None
    """Processes that share each sequence (Ulysses). [default: 1]"""
    tp_size: Annotated[PositiveCount | None, AlsoSpelled("parallelism_config_tp_size")] = None
    """Processes that share each layer (tensor parallelism). [default: 1]"""
    ep_size: PositiveCount | None = None
    """Processes that divide the experts of each layer; they see samples of their own. [default: 1]"""
    sp_seq_length: Annotated[PositiveCount | None, AlsoSpelled("parallelism_config_sp_seq_length")] = None
    """Tokens of every sequence, where all are as long; for scripts of accelerate, as lengths may vary here."""
    sp_seq_length_is_variable: Annotated[Flag | None, AlsoSpelled("parallelism_config_sp_seq_length_is_variable")] = (
        None
    )
    """Whether sequences differ in length; for scripts of accelerate, as they always may here."""
    sp_attn_implementation: Annotated[Name | None, AlsoSpelled("parallelism_config_sp_attn_implementation")] = None
    """Attention of the model, as sdpa; for scripts of accelerate, as the model's own is taken here."""


class DeepSpeedSection(ZeroSettings, HostSettings):
    """`deepspeed_config` of the launch file."""


class LaunchFile(ProcessSettings):
    """The launch file: accelerate's keys, and those settings of ours that it does not have."""

    compute_environment: Literal["LOCAL_MACHINE"] = "LOCAL_MACHINE"
    """Where the processes run: LOCAL_MACHINE."""
    main_training_function: Text = "main"
    """Accepted without effect: scripts are run as they are."""
    downcast_bf16: Annotated[Literal["no"], BeforeValidator(_no)] = "no"
    """A setting of TPUs: no."""
    tpu_env: Any = None
    """A setting of TPUs: empty."""
    tpu_use_cluster: Literal[False] = False
    """A setting of TPUs: false."""
    tpu_use_sudo: Literal[False] = False
    """A setting of TPUs: false."""
    deepspeed_config: DeepSpeedSection = DeepSpeedSection()
    """What is sharded and where it lives."""
    dynamo_config: DynamoSettings = DynamoSettings()
    """Whether and how the model is compiled."""
    fsdp_config: FreeSection = None
    """Settings of FSDP: read as the stage and offload that shard the same way, where distributed_type is FSDP."""
    megatron_lm_config: FreeSection = None
    """Settings of another engine."""
    parallelism_config: ParallelSettings = ParallelSettings()
    """How the processes share out the work beyond ZeRO."""
    fp8_config: FreeSection = None
    """8-bit training."""
    ipex_config: FreeSection = None
    """Settings of another library."""
    mpirun_config: FreeSection = None
    """How mpirun is called."""


SECTIONS = ("deepspeed_config", "dynamo_config", "parallelism_config")
"""Keys of the launch file that hold settings of their own."""

DEFAULT_STAGE = 2
"""The stage of a launch that asks for ZeRO without a stage, as in accelerate."""

_WAITS = ("join_timeout", "last_call_timeout", "close_timeout", "read_timeout", "heartbeat_timeout")
_RENDEZVOUS_KEYS: Mapping[Rendezvous, tuple[str, ...]] = {
    "static": ("timeout",),
    "c10d": (*_WAITS, "keep_alive_interval", "keep_alive_max_attempt"),
}


class LaunchSettings(ProcessSettings, ZeroSettings, HostSettings, DynamoSettings, ParallelSettings):
    """How a job is started. Made by `launch_settings`, which also checks the settings against each other."""

    @property
    def rendezvous(self) -> Rendezvous:
        """The rendezvous backend. An explicit port becomes MASTER_PORT with static rendezvous only."""
        if self.num_machines == 1 and not self.main_process_port:
            return "c10d"  # at a port that the agent finds; on one machine the ranks are fixed either way
        if self.rdzv_backend is None and (self.max_restarts or self.min_machines):
            return "c10d"  # static rendezvous does not restart the ranks of other machines
        return self.rdzv_backend or "static"

    @property
    def is_elastic(self) -> bool:
        """Whether the job may go on with fewer processes."""
        return self.min_machines is not None or self.min_processes is not None

    @property
    def machine(self) -> int:
        """The rank of this machine."""
        return self.machine_rank or 0

    @property
    def is_main_machine(self) -> bool:
        """Whether this machine hosts the rendezvous store."""
        return self.machine == 0

    @property
    def starts_hosts(self) -> bool:
        """Whether this launcher starts the job on all machines of a hostfile, rather than on this one."""
        return self.hostfile is not None and self.multinode_launcher != "standard"

    @property
    def uses_zero(self) -> bool:
        """Whether the launch asks for the ZeRO engine, by distributed_type or by any of its settings."""
        if self.distributed_type is not None:
            return self.distributed_type == "DEEPSPEED"
        return bool(self.zero_settings)

    @property
    def parallel(self) -> ParallelConfig:
        """The mesh that is asked for."""
        return ParallelConfig.from_sizes({axis: getattr(self, f"{axis}_size") for axis in (*AXES, "ep")})

    @property
    def zero_settings(self) -> dict[str, Any]:
        """The settings of ZeRO that were given."""
        return {name: value for name in ZeroSettings.model_fields if (value := getattr(self, name)) is not None}


def file_path(name: str) -> tuple[str, ...]:
    """The keys of a setting in the launch file, as accelerate spells them."""
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
        values: setting -> value, of those that were given.
        address: setting -> what it is called where it was given, "--num_processes" for one.

    Raises:
        ConfigError: some are wrong; all of them are listed, one line each.

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
    """The same, each setting checked by itself only: for the part of a launch that a file shows.

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
    """Settings without effect, given the others -> why. What a JSON config says is not known here.

    Args:
        values: setting -> value, of those that were given; they need not be right.
    """
    stage = as_integer(values.get("zero_stage", DEFAULT_STAGE))
    if stage is None or values.get("deepspeed_config_file") is not None:
        return {}
    about_stage = f"the stage is {stage}" + ("" if "zero_stage" in values else ", as none is given")
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
    """One error with all problems, each under the name and place its setting was given by."""
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
        return  # as many as there are devices: `plan_launch` knows, and every rank checks
    mesh = settings.parallel
    try:
        mesh.resolve(settings.num_processes)
    except UsageError:
        names = [f"{axis}_size" for axis in (*AXES, "ep") if getattr(settings, f"{axis}_size") is not None]
        yield Problem((names[-1],), text=mesh.misfit(settings.num_processes), fix=_FITTING)


_FITTING = "change num_processes, or the sizes"


def _problems_of_elasticity(settings: LaunchSettings) -> Iterator[Problem]:
    if settings.max_restarts and settings.num_machines > 1 and settings.rendezvous == "static":
        text = "the static rendezvous does not tell other machines of a restart"
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
        text = "machines come and go with the c10d rendezvous only"
        yield Problem(("min_machines",), text=text, fix="set rdzv_backend to c10d, or leave it out")


def _problems_of_fewer_processes(settings: LaunchSettings, least: int) -> Iterator[Problem]:
    name = ("min_processes",)
    if settings.num_machines > 1:
        text = "several machines keep their numbers of processes"
        yield Problem(name, text=text, fix="say --num_machines MIN:MAX")
    elif settings.num_processes is None or least > settings.num_processes:
        most = "num_processes" if settings.num_processes is None else f"num_processes ({settings.num_processes})"
        yield Problem(name, expected=f"at most {most}", got=least)
    elif settings.max_restarts < 2:
        text = "a process is left out after two attempts that have lost it"
        yield Problem(name, text=text, fix="set max_restarts to 2 or more")


def _problems_between_machines(settings: LaunchSettings) -> Iterator[Problem]:
    machines = settings.num_machines
    if settings.starts_hosts:
        yield from _problem_of_division(settings)
        return  # `ssh` gives each machine its rank and the address of machine 0
    arrives = settings.rendezvous == "c10d"  # then the numbers are given out in some order
    is_spare = settings.min_machines is not None and arrives  # a number above the others
    if (settings.machine_rank is None and not arrives) or ((settings.machine_rank or 0) >= machines and not is_spare):
        got = NOTHING if settings.machine_rank is None else settings.machine_rank
        fix = "or give a hostfile, and the job is started on all machines from here" if got is NOTHING else ""
        yield Problem(("machine_rank",), expected=f"the number of this machine, 0 to {machines - 1}", got=got, fix=fix)
    if settings.main_process_ip is None:
        yield Problem(("main_process_ip",), expected="the address of machine 0", fix="give it on every machine")
    if settings.main_process_port == 0:
        fix = "choose one that is free on machine 0, and give it on every machine"
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
            fix=f"it counts the processes of all machines together: {counts}",
        )


def _problems_of_zero(settings: LaunchSettings) -> Iterator[Problem]:
    explicit = settings.zero_settings
    if explicit and not settings.uses_zero:
        names = ", ".join(explicit)
        fix = f"set distributed_type to DEEPSPEED, or leave out {names}"
        yield Problem(("distributed_type",), text=f"{settings.distributed_type} does without ZeRO", fix=fix)
    if settings.inclusion_filter is not None and settings.exclusion_filter is not None:
        yield Problem(("exclusion_filter",), text="given beside an inclusion filter", fix="keep one of the two")
    for name in ("inclusion_filter", "exclusion_filter"):
        if getattr(settings, name) is not None and settings.hostfile is None:
            yield Problem((name,), text="it filters a hostfile, and none is set", fix="set hostfile too")
    if settings.deepspeed_config_file is not None:
        return  # it may set the stage; `load_config` checks the merged settings
    idle = idle_settings(settings.model_dump(exclude_none=True))
    for kind in ("optimizer", "param"):
        device, path = f"offload_{kind}_device", f"offload_{kind}_nvme_path"
        if getattr(settings, device) == "nvme" and device not in idle and getattr(settings, path) is None:
            yield Problem(
                (path,), text=f'missing, and offload_{kind}_device is "nvme"', fix="give a folder on a local disk"
            )
