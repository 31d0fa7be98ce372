"""The questions of `zeroaccel config`: those of the rows of `setting_table`, with conditions, defaults and checks.

The wizard, the flags, `--answers`, `--yes` and every check use these questions, so that they ask for and accept the
same answers. A row names its conditions, computed defaults and checks; the functions of these names are here. Nothing
here asks, prints, or imports torch or pydantic.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from zeroaccel.config.launch.setting import Ask, Choice, Setting
from zeroaccel.config.launch.setting_table import MESH_SIZES, ROWS

if TYPE_CHECKING:
    from zeroaccel.config.launch.resolution import JsonFacts

    from ..machine import Machine


AUTO = "auto"
"""The answer that leaves a number to the script."""

PLANNED = ("zero_stage", "offload_optimizer_device", "offload_param_device")
"""The settings that a plan of stage and offload decides."""

Kind = Literal["choice", "yes_no", "count", "number", "text", "names", "file", "folder"]
_KINDS: Mapping[str, Kind] = {"switch": "yes_no", "port": "count", "word": "text"}  # others have their own name
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


_Trouble = tuple[
    str, str
]  # what is wrong with an answer of the right form, and a remedy; two empty texts if nothing is


@dataclass(frozen=True)
class Question:
    """The question of one row."""

    row: Setting
    ask: Ask

    @property
    def key(self) -> str:
        """Name of the answer: that of the setting, but `use_deepspeed` for `use_zero`."""
        return self.row.question or self.row.name

    @property
    def kind(self) -> Kind:
        """Kind of answer."""
        return "choice" if self.choices else _KINDS.get(self.row.kind, self.row.kind)  # type: ignore[arg-type]

    @property
    def choices(self) -> tuple[Choice, ...]:
        """The possible answers; empty if there is no list of them."""
        return self.ask.choices or tuple(map(Choice, self.row.choices))

    @property
    def is_setting(self) -> bool:
        """True if the launch file has a setting of this name.

        The file stores `use_deepspeed` as distributed_type, and `use_parallelism_config` as mesh sizes above 1.
        """
        return bool(self.row.group)

    @property
    def flag(self) -> str:
        """The flag that answers it."""
        return f"--{self.key}"

    def default(self, state: WizardState) -> Any:
        """Returns the default answer, or None if there is none. With a gate, it is only proposed."""
        if self.ask.computed:
            return _COMPUTED[self.ask.computed](state)
        return self.choices[0].value if self.choices and self.ask.default is None else self.ask.default

    def why_not(self, state: WizardState) -> str:
        """Returns the first reason why the answer has no effect in this state; "" if it has one."""
        conditions = (_CONDITIONS[name] for name in self.ask.when.split())
        return next((otherwise for holds, otherwise in conditions if not holds(state, self.key)), "")

    def impossible(self, choice: Choice, state: WizardState) -> str:
        """Returns the reason why a choice cannot be made in this state; "" if it can be."""
        return _IMPOSSIBLE[choice.unless](state) if choice.unless else ""

    def check(self, answer: Any, state: WizardState) -> _Trouble:
        """Returns what is wrong with an answer of the right form, and a remedy; two empty texts if nothing is."""
        check = _CHECKS.get(self.ask.check or self.kind)
        return ("", "") if check is None else check(answer, state, self.key)


def _folder_check(folder: Any, state: WizardState, key: str) -> _Trouble:
    from ..machine import folder_trouble

    return folder_trouble(str(folder), state.needs.get(key, 0)), ""


def _file_check(path: Any, state: WizardState, key: str) -> _Trouble:
    from pathlib import Path

    if Path(path).is_file():
        return "", ""
    return (f"{path} is a folder" if Path(path).is_dir() else f"there is no file {path}"), "name an existing file"


def _json_check(path: Any, state: WizardState, key: str) -> _Trouble:
    from zeroaccel.config.launch.resolution import json_facts
    from zeroaccel.errors import ConfigError

    problem, fix = _file_check(path, state, key)
    if problem:
        return problem, fix
    try:
        json_facts(path)
    except ConfigError as error:
        return str(error), ""
    return "", ""


_HOST = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)(\.(?!-)[a-z0-9_-]{1,63}(?<!-))*\.?", re.IGNORECASE)


def _address(text: Any, state: WizardState, key: str) -> _Trouble:
    """Checks only the spelling: machine 0 may be unable to resolve the name that the other machines use for it."""
    word, fix = str(text).strip(), "give a host name or an address such as 10.0.0.1"
    if re.fullmatch(r"[\d.]+", word) or ":" in word:
        try:
            ipaddress.ip_address(word)
        except ValueError:
            return f"{word} is not an IP address", fix
        return "", ""
    return ("", "") if _HOST.fullmatch(word) and len(word) < 254 else (f"{word!r} is not a host name", fix)


def _port(port: Any, state: WizardState, key: str) -> _Trouble:
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


def _divisible(value: Any, state: WizardState, key: str) -> _Trouble:
    machines = state["num_machines"] or 1
    if value % machines:
        return f"{machines} machines cannot share {value} processes evenly", f"give a multiple of {machines} in total"
    return "", ""


def _divides_processes(value: Any, state: WizardState, key: str) -> _Trouble:
    if (state["num_processes"] or value) % value:
        return f"{value} does not divide {state['num_processes']} processes", "give the processes of one machine"
    return "", ""


def _mesh_check(size: Any, state: WizardState, key: str) -> _Trouble:
    from zeroaccel.config.parallel import ParallelConfig
    from zeroaccel.errors import UsageError

    sizes: dict[str, Any] = {name.removesuffix("_size"): state[name] or 1 for name in MESH_SIZES}
    sizes[key.removesuffix("_size")] = size
    try:
        ParallelConfig(**sizes).resolve(state["num_processes"] or 1)
    except UsageError as error:
        return str(error).removeprefix("ParallelConfig: "), ""
    return "", ""


def _rank_exists(value: Any, state: WizardState, key: str) -> _Trouble:
    last = state["num_machines"] - 1
    return ("", "") if value <= last else (f"the machines have ranks 0 to {last}", "give the rank of this machine")


def _steps(state: WizardState) -> int | str:
    stages: int = state["pp_size"] or 1
    return AUTO if stages == 1 else stages  # 1F1B needs one for each stage


_DECIDED = "the JSON config decides it (--deepspeed_config_file)"
_Condition = tuple[Callable[[WizardState, str], bool], str]
_BY_JSON = ("tp_size", "sp_size", "ep_size")


def _is_one(size: str, otherwise: str) -> _Condition:
    return lambda state, _: (state[size] or 1) == 1, f"{otherwise} (--{size})"


_CONDITIONS: Mapping[str, _Condition] = {
    "zero": (lambda s, _: bool(s["use_deepspeed"]), "it is a setting of ZeRO, which is off (--use_deepspeed)"),
    "several": (lambda s, _: (s["num_machines"] or 1) > 1, "there is one machine (--num_machines)"),
    "processes": (lambda s, _: (s["num_processes"] or 1) > 1, "there is one process (--num_processes)"),
    "open": (lambda s, key: s.leaves_open(key), _DECIDED),
    "open_mesh": (lambda s, _: s.json is None or not set(_BY_JSON) & set(s.json.decided), _DECIDED),
    "mesh": (
        lambda s, _: bool(s["use_parallelism_config"]),
        "parallelism other than data parallelism is off (--use_parallelism_config)",
    ),
    "whole_layers": _is_one("tp_size", "tensor-parallel layers cannot be quantized"),
    "own_experts": _is_one("tp_size", "tensor-parallel processes already share the experts"),
    "whole_experts": _is_one("ep_size", "expert-parallel layers cannot be quantized"),
    "each": (
        lambda s, _: s["multinode_launcher"] != "ssh",
        "ssh starts the job on all machines (--multinode_launcher)",
    ),
    "by_ssh": (
        lambda s, _: s["multinode_launcher"] == "ssh",
        "you run the command on each machine (--multinode_launcher)",
    ),
    "not_filtered": (lambda s, _: s["exclusion_filter"] is None, "there is an exclusion filter (--exclusion_filter)"),
    "params": (lambda s, _: s.stage == 3, "parameters are sharded at stage 3 only (--zero_stage)"),
    "states": (lambda s, _: s.stage >= 1, "optimizer states are sharded from stage 1 on (--zero_stage)"),
    "compiled": (lambda s, _: s["dynamo_backend"] not in (None, "no"), "torch.compile is off (--dynamo_backend)"),
    "on_params_disk": (
        lambda s, _: s["offload_param_device"] == "nvme",
        "the device of this offload is not nvme (--offload_param_device)",
    ),
    "on_states_disk": (
        lambda s, _: s["offload_optimizer_device"] == "nvme",
        "the device of this offload is not nvme (--offload_optimizer_device)",
    ),
}
"""Name in a row -> what holds in a state where the question applies, and the message if it does not hold."""

_IMPOSSIBLE: Mapping[str, Callable[[WizardState], str]] = {"no_bf16": _no_bf16, "no_disk": _no_disk}

_COMPUTED: Mapping[str, Callable[[WizardState], Any]] = {
    "no_devices": lambda state: not state.machine.devices,
    "processes": _processes,
    "precision": _precision,
    "disk": _disk,
    "processes_of_a_machine": lambda s: max(1, (s["num_processes"] or 1) // (s["num_machines"] or 1)),
    "steps": _steps,
}
"""Name in a row -> function that computes a default answer."""

_CHECKS: Mapping[str, Callable[[Any, WizardState, str], _Trouble]] = {
    "folder": _folder_check,
    "file": _file_check,
    "json": _json_check,
    "address": _address,
    "port": _port,
    "divisible": _divisible,
    "divides_processes": _divides_processes,
    "mesh": _mesh_check,
    "rank_exists": _rank_exists,
}
"""Name in a row, or kind of question -> function that checks an answer."""

QUESTIONS = tuple(Question(row, row.ask) for row in ROWS.values() if row.ask is not None)
"""The questions in the order in which they are asked; a condition reads only answers to earlier questions."""


def by_key(key: str) -> Question:
    """Returns the question about a setting."""
    return next(question for question in QUESTIONS if question.key == key)
