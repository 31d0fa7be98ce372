"""The questions of `zeroaccel config` as one table: words, kind, conditions, choices, defaults and checks.

The wizard, the flags, `--answers`, `--yes` and every check use this table, so that they ask for and accept the same
answers. A question is about one setting of a launch and has its name. The module has only data and functions of a
`WizardState`: nothing here asks, prints, or imports torch or pydantic.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from zeroaccel.config.launch.launch_json import JsonFacts

    from ..machine import Machine


AUTO = "auto"
"""The answer that leaves a number to the script."""

PLANNED = ("zero_stage", "offload_optimizer_device", "offload_param_device")
"""The settings that a plan of stage and offload decides."""
MESH_SIZES = ("tp_size", "sp_size", "pp_size", "ep_size")

Kind = Literal["choice", "yes_no", "count", "number", "text", "names", "file", "folder"]
FORMS: Mapping[Kind, tuple[str, str]] = {
    "yes_no": ("yes|no", "yes or no"),
    "count": ("N", "a whole number"),
    "number": ("NUMBER", "a number"),
    "text": ("TEXT", "text"),
    "names": ("NAME,...", "names separated by commas"),
    "file": ("PATH", "a path"),
    "folder": ("FOLDER", "a path"),
}
"""Kind of question -> placeholder of the answer in help, and its form in messages."""


@dataclass(frozen=True)
class WizardState:
    """The answers so far, the machine, and the JSON config if one is named, when a question comes up.

    Attributes:
        needs: setting -> bytes per machine that the memory plan puts in the folder of this setting.
    """

    answers: Mapping[str, Any]
    machine: Machine
    json: JsonFacts | None = None
    needs: Mapping[str, int] = field(default_factory=dict)

    def __getitem__(self, key: str) -> Any:
        return self.answers.get(key)

    @property
    def stage(self) -> int:
        """The stage of ZeRO, or 0 without ZeRO."""
        if not self["use_deepspeed"]:
            return 0
        if self.json is not None and self.json.stage is not None:
            return self.json.stage
        stage: int = 2 if self["zero_stage"] is None else self["zero_stage"]
        return stage

    @property
    def on_zero(self) -> bool:
        """True if the user can choose a plan of stage and offload: ZeRO is on, and no JSON config decides them."""
        return bool(self["use_deepspeed"]) and all(self.leaves_open(key) for key in PLANNED)

    def leaves_open(self, key: str) -> bool:
        """Returns True if the launch decides this setting, rather than the JSON config."""
        return self.json is None or key in self.json.open_keys


@dataclass(frozen=True)
class Choice:
    """One possible answer.

    Attributes:
        about: its meaning, in a few words.
        impossible: returns the reason why it cannot be chosen in a state, "" if it can be.
    """

    value: Any
    about: str = ""
    impossible: Callable[[WizardState], str] = lambda _: ""


@dataclass(frozen=True)
class Condition:
    """A condition for a question to apply, and the message if it does not hold."""

    holds: Callable[[WizardState], bool]
    otherwise: str


Check = Callable[[Any, WizardState], tuple[str, str]]


def _fine(answer: Any, state: WizardState) -> tuple[str, str]:
    return "", ""


@dataclass(frozen=True)
class Question:
    """One question, about the setting `key` of the launch file.

    Attributes:
        words: the question.
        default: returns the default answer, or None if there is none. With a gate, it is only proposed.
        gate: a question that is asked first; its default "no" leaves the setting out.
        check: returns what is wrong with an answer of the right form, and a remedy.
        least: smallest number that is accepted.
    """

    key: str
    words: str
    kind: Kind
    conditions: tuple[Condition, ...] = ()
    choices: tuple[Choice, ...] = ()
    default: Callable[[WizardState], Any] = lambda _: None
    gate: str = ""
    check: Check = _fine
    takes_auto: bool = False
    least: float = 0

    @property
    def is_setting(self) -> bool:
        """True if the launch file has a setting of this name.

        The file stores `use_deepspeed` as distributed_type, and `use_parallelism_config` as mesh sizes above 1.
        """
        return self.key not in ("use_deepspeed", "use_parallelism_config")

    @property
    def flag(self) -> str:
        """The flag that answers it."""
        return f"--{self.key}"

    def applies(self, state: WizardState) -> bool:
        """Returns True if the answer has an effect in this state."""
        return all(condition.holds(state) for condition in self.conditions)

    def why_not(self, state: WizardState) -> str:
        """Returns the first reason why the answer has no effect in this state."""
        return next(one.otherwise for one in self.conditions if not one.holds(state))


def _folder_check(key: str) -> Check:
    def check(folder: Any, state: WizardState) -> tuple[str, str]:
        from ..machine import folder_trouble

        return folder_trouble(str(folder), state.needs.get(key, 0)), ""

    return check


def _file_check(path: Any, _: WizardState) -> tuple[str, str]:
    from pathlib import Path

    if Path(path).is_file():
        return "", ""
    return (f"{path} is a folder" if Path(path).is_dir() else f"there is no file {path}"), "name an existing file"


def _json_check(path: Any, state: WizardState) -> tuple[str, str]:
    from zeroaccel.config.launch.launch_json import json_facts
    from zeroaccel.errors import ConfigError

    problem, fix = _file_check(path, state)
    if problem:
        return problem, fix
    try:
        json_facts(path)
    except ConfigError as error:
        return str(error), ""
    return "", ""


_HOST = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)(\.(?!-)[a-z0-9_-]{1,63}(?<!-))*\.?", re.IGNORECASE)


def _address(text: Any, _: WizardState) -> tuple[str, str]:
    """Checks only the spelling: machine 0 may be unable to resolve the name that the other machines use for it."""
    word, fix = str(text).strip(), "give a host name or an address such as 10.0.0.1"
    if re.fullmatch(r"[\d.]+", word) or ":" in word:
        try:
            ipaddress.ip_address(word)
        except ValueError:
            return f"{word} is not an IP address", fix
        return "", ""
    return ("", "") if _HOST.fullmatch(word) and len(word) < 254 else (f"{word!r} is not a host name", fix)


def _port(port: Any, _: WizardState) -> tuple[str, str]:
    return ("", "") if port < 2**16 else (f"{port} is not a port", "give at most 65535")


def _disk(state: WizardState) -> str | None:
    roomy = sorted(state.machine.disks, key=lambda disk: disk.free_nbytes)
    return roomy[-1].folder if roomy else None


def _no_disk(state: WizardState) -> str:
    return "" if state.machine.disks else "this machine has no local disk with enough free space"


def _no_bf16(state: WizardState) -> str:
    devices = () if state["use_cpu"] else state.machine.devices
    lacking = [device.name for device in devices if not device.has_bf16]
    return f"{lacking[0]} does not compute in bf16" if lacking else ""


def _precision(state: WizardState) -> str:
    if state["use_cpu"] or not state.machine.devices:
        return "no"
    return "fp16" if _no_bf16(state) else "bf16"


def _processes(state: WizardState) -> int:
    per_machine = 1 if state["use_cpu"] else len(state.machine.devices) or 1
    return per_machine * (state["num_machines"] or 1)


def _divisible(value: Any, state: WizardState) -> tuple[str, str]:
    machines = state["num_machines"] or 1
    if value % machines:
        return f"{machines} machines cannot share {value} processes evenly", f"give a multiple of {machines} in total"
    return "", ""


def _divides_processes(value: Any, state: WizardState) -> tuple[str, str]:
    if (state["num_processes"] or value) % value:
        return f"{value} does not divide {state['num_processes']} processes", "give the processes of one machine"
    return "", ""


def _mesh_check(axis: str) -> Check:
    def check(size: Any, state: WizardState) -> tuple[str, str]:
        from zeroaccel.config.parallel import ParallelConfig
        from zeroaccel.errors import UsageError

        sizes: dict[str, Any] = {other: state[f"{other}_size"] or 1 for other in ("tp", "sp", "pp", "ep")} | {
            axis: size
        }
        try:
            ParallelConfig(**sizes).resolve(state["num_processes"] or 1)
        except UsageError as error:
            return str(error).removeprefix("ParallelConfig: "), ""
        return "", ""

    return check


def _rank_exists(value: Any, state: WizardState) -> tuple[str, str]:
    last = state["num_machines"] - 1
    return ("", "") if value <= last else (f"the machines have ranks 0 to {last}", "give the rank of this machine")


def _undivided(size: str, otherwise: str) -> Condition:
    return Condition(lambda state: (state[size] or 1) == 1, f"{otherwise} (--{size})")


_ZERO = Condition(lambda s: bool(s["use_deepspeed"]), "it is a setting of ZeRO, which is off (--use_deepspeed)")
_SEVERAL = Condition(lambda s: (s["num_machines"] or 1) > 1, "there is one machine (--num_machines)")
_PROCESSES = Condition(lambda s: (s["num_processes"] or 1) > 1, "there is one process (--num_processes)")
_OPEN_MESH = Condition(
    lambda s: s.json is None or not {"tp_size", "sp_size", "ep_size"} & set(s.json.decided),
    "the JSON config decides it (--deepspeed_config_file)",
)
_MESH = Condition(
    lambda s: bool(s["use_parallelism_config"]),
    "parallelism other than data parallelism is off (--use_parallelism_config)",
)
_WHOLE_LAYERS = _undivided("tp_size", "tensor-parallel layers cannot be quantized")
_OWN_EXPERTS = _undivided("tp_size", "tensor-parallel processes already share the experts")
_WHOLE_EXPERTS = _undivided("ep_size", "expert-parallel layers cannot be quantized")
_EACH = Condition(
    lambda s: s["multinode_launcher"] != "ssh", "ssh starts the job on all machines (--multinode_launcher)"
)
_BY_SSH = Condition(
    lambda s: s["multinode_launcher"] == "ssh", "you run the command on each machine (--multinode_launcher)"
)
_NOT_FILTERED = Condition(lambda s: s["exclusion_filter"] is None, "there is an exclusion filter (--exclusion_filter)")
_PARAMS = Condition(lambda s: s.stage == 3, "parameters are sharded at stage 3 only (--zero_stage)")
_STATES = Condition(lambda s: s.stage >= 1, "optimizer states are sharded from stage 1 on (--zero_stage)")
_COMPILED = Condition(lambda s: s["dynamo_backend"] not in (None, "no"), "torch.compile is off (--dynamo_backend)")


def _open(key: str) -> Condition:
    return Condition(lambda s: s.leaves_open(key), "the JSON config decides it (--deepspeed_config_file)")


def _nvme(what: str) -> Condition:
    key = f"offload_{what}_device"
    return Condition(lambda s: s[key] == "nvme", f"the device of this offload is not nvme (--{key})")


def _yes_no(key: str, words: str, *conditions: Condition, default: bool = False) -> Question:
    return Question(key, words, "yes_no", conditions, default=lambda _: default)


def _choice(key: str, words: str, choices: Sequence[Choice], *conditions: Condition, gate: str = "") -> Question:
    """Makes a question with choices; the first one is the default."""
    return Question(key, words, "choice", conditions, tuple(choices), lambda _: choices[0].value, gate)


def _count(key: str, words: str, *conditions: Condition, default: Any, check: Check = _fine, **more: Any) -> Question:
    """Makes a question for a count of at least 1. default: a value, or a function that returns it."""
    value = default if callable(default) else lambda _: default
    return Question(key, words, "count", conditions, default=value, check=check, **{"least": 1, **more})


def _in_json(key: str, *conditions: Condition) -> tuple[Condition, ...]:
    """Returns the conditions of a ZeRO setting that the JSON config may decide."""
    return (_ZERO, _open(key), *conditions)


def _mesh_size(axis: str, words: str, *others: Condition) -> Question:
    return _count(f"{axis}_size", words, _PROCESSES, _MESH, *others, default=1, check=_mesh_check(axis))


def _tier(what: str, words: str, needs: Condition) -> Question:
    disk = Choice("nvme", "in files on a local disk", _no_disk)
    tiers = (Choice("none", "on the device"), Choice("cpu", "in host memory"), disk)
    return _choice(f"offload_{what}_device", words, tiers, *_in_json(f"offload_{what}_device", needs))


def _folder(what: str, words: str) -> Question:
    key = f"offload_{what}_nvme_path"
    return Question(key, words, "folder", (_ZERO, _nvme(what)), default=_disk, check=_folder_check(key))


def _quantized(what: str, words: str) -> Question:
    return _yes_no(
        f"zero_quantized_{what}", words, *_in_json(f"zero_quantized_{what}", _PARAMS, _SEVERAL, _WHOLE_LAYERS)
    )


def _steps(state: WizardState) -> int | str:
    stages: int = state["pp_size"] or 1
    return AUTO if stages == 1 else stages  # 1F1B needs one for each stage


_LAUNCHERS = (Choice("standard", "you run the command on each"), Choice("ssh", "from this one, by ssh and a hostfile"))

QUESTIONS: tuple[Question, ...] = (
    Question(
        "use_cpu",
        "Run on the CPU only (yes if there are no accelerators)?",
        "yes_no",
        default=lambda s: not s.machine.devices,
    ),
    _count("num_machines", "How many machines will you use?", default=1),
    _choice("multinode_launcher", "How is the job started on the other machines?", _LAUNCHERS, _SEVERAL),
    Question("hostfile", "Where is the hostfile?", "file", (_SEVERAL, _BY_SSH), check=_file_check),
    Question(
        "exclusion_filter",
        "Which hostfile entries are excluded (node1:3)?",
        "text",
        (_SEVERAL, _BY_SSH),
        gate="Exclude some machines or devices of the hostfile?",
    ),
    Question(
        "inclusion_filter",
        "Which hostfile entries are used (node1@node2:0,2)?",
        "text",
        (_SEVERAL, _BY_SSH, _NOT_FILTERED),
        gate="Use only some machines or devices of the hostfile?",
    ),
    _count(
        "machine_rank",
        "What is the rank of this machine, counted from 0?",
        _SEVERAL,
        _EACH,
        default=0,
        least=0,
        check=_rank_exists,
    ),
    Question("main_process_ip", "What is the network address of machine 0?", "text", (_SEVERAL,), check=_address),
    _count("main_process_port", "Which port of machine 0 is for the rendezvous?", _SEVERAL, default=29500, check=_port),
    _count("num_processes", "How many processes run in total?", default=_processes, check=_divisible),
    _yes_no("use_deepspeed", "Shard the training with ZeRO, as DeepSpeed does?", default=True),
    Question(
        "deepspeed_config_file",
        "Where is the JSON config?",
        "file",
        (_ZERO,),
        gate="Do you have a JSON config in DeepSpeed's format?",
        check=_json_check,
    ),
    Question(
        "mixed_precision",
        "Which precision?",
        "choice",
        (_open("mixed_precision"),),
        (Choice("no", "fp32"), Choice("fp16"), Choice("bf16", "", _no_bf16)),
        default=_precision,
    ),
    _yes_no("use_parallelism_config", "Use tensor, sequence, pipeline or expert parallelism?", _PROCESSES, _OPEN_MESH),
    _mesh_size("tp", "How many processes share each layer (tensor parallel)?"),
    _mesh_size("sp", "How many processes share each sequence (Ulysses)?"),
    _mesh_size("pp", "How many stages does the pipeline have?"),
    _mesh_size("ep", "Over how many processes are MoE experts divided?", _OWN_EXPERTS),
    Question(
        "zero_stage",
        "Which stage of ZeRO?",
        "choice",
        _in_json("zero_stage"),
        (
            Choice(0, "nothing is sharded"),
            Choice(1, "optimizer states"),
            Choice(2, "optimizer states and gradients"),
            Choice(3, "optimizer states, gradients and parameters"),
        ),
        default=lambda _: 2,
    ),
    _tier("optimizer", "Where are optimizer states stored?", _STATES),
    _tier("param", "Where are parameters stored between uses?", _PARAMS),
    _folder("param", "In which local folder are parameters stored?"),
    _folder("optimizer", "In which local folder are optimizer states stored?"),
    _count(
        "zero_hpz_partition_size",
        "How many processes share a second copy of weights?",
        *_in_json("zero_hpz_partition_size", _PARAMS, _SEVERAL),
        default=lambda s: max(1, (s["num_processes"] or 1) // (s["num_machines"] or 1)),
        gate="Keep a second copy of weights on each machine (ZeRO++ hpZ)?",
        check=_divides_processes,
    ),
    _quantized("weights", "Gather weights as 8-bit integers (ZeRO++ qwZ)?"),
    _quantized("gradients", "Reduce gradients between machines as 4-bit integers (ZeRO++ qgZ)?"),
    _count(
        "gradient_accumulation_steps",
        "How many gradient accumulation steps (or auto)?",
        *_in_json("gradient_accumulation_steps"),
        default=_steps,
        takes_auto=True,
    ),
    Question(
        "gradient_clipping",
        "To which maximum norm are gradients clipped?",
        "number",
        _in_json("gradient_clipping"),
        default=lambda _: 1.0,
        gate="Clip gradients?",
    ),
    _choice(
        "frozen_weights",
        "In which format are frozen weight matrices stored?",
        [Choice("nf4", "0.56 bytes per value"), Choice("mxfp4", "0.53 bytes"), Choice("int8", "1 byte")],
        *_in_json("frozen_weights", _WHOLE_LAYERS, _WHOLE_EXPERTS),
        gate="Train adapters on a frozen base model that is quantized?",
    ),
    _yes_no(
        "zero3_save_16bit_model",
        "Gather the whole model when it is saved?",
        *_in_json("zero3_save_16bit_model", _PARAMS),
    ),
    _yes_no(
        "zero3_init_flag", "Shard large models while they are being built (zero.Init)?", _ZERO, _PARAMS, default=True
    ),
    Question(
        "deepspeed_moe_layer_cls_names",
        "Which classes are mixture-of-experts layers (A,B)?",
        "names",
        _in_json("deepspeed_moe_layer_cls_names", _PARAMS),
        gate="Are there mixture-of-experts layers to gather as a whole?",
    ),
    _choice(
        "dynamo_backend",
        "Which backend does torch.compile use?",
        [Choice(name) for name in ("inductor", "eager", "aot_eager", "cudagraphs", "onnxrt", "tvm")],
        gate="Compile the model with torch.compile (dynamo)?",
    ),
    _choice(
        "dynamo_mode",
        "Which mode does torch.compile use?",
        [Choice(name) for name in ("default", "reduce-overhead", "max-autotune")],
        _COMPILED,
    ),
    _yes_no("dynamo_use_fullgraph", "Raise an error at a graph break?", _COMPILED),
    _yes_no("dynamo_use_dynamic", "Compile for changing shapes?", _COMPILED),
    _yes_no("dynamo_use_regional_compilation", "Compile repeated blocks rather than the whole model?", _COMPILED),
)
"""The questions in the order in which they are asked; a condition reads only answers to earlier questions."""


def by_key(key: str) -> Question:
    """Returns the question about a setting."""
    return next(question for question in QUESTIONS if question.key == key)
