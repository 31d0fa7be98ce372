"""The opening question, what will be trained, and the table it turns on: every stage and offload against this machine.

The numbers are those of `zeroaccel.estimate`; here they become answers to the first questions of ZeRO, and the folder
sizes that later answers are held to. With a flag, `--model`, the same happens without asking.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zeroaccel.errors import ConfigError, UsageError

from ..machine import Machine, gib
from ..progress import progress
from .answers import BACK
from .questions import WizardState, by_key

if TYPE_CHECKING:
    from zeroaccel.estimate import Capacity, PlanRow, Workload

    from .prompts import Prompts


PLANNED = ("zero_stage", "offload_optimizer_device", "offload_param_device")
"""The settings that a plan answers."""


@dataclass(frozen=True)
class Model:
    """What will be trained.

    Attributes:
        name: a number of parameters, the folder or config.json of a model, or module:function.
        sequence: tokens per sample.
        batch: samples per process and micro-step.
        checkpointing: activations are recomputed.
    """

    name: str
    sequence: int = 2048
    batch: int = 1
    checkpointing: bool = False


@dataclass(frozen=True)
class Plan:
    """One line of the table, or none.

    Attributes:
        model: None where the table was skipped.
        answers: what it means for the questions in PLANNED.
        needs: as in `WizardState`.
    """

    model: Model | None = None
    answers: Mapping[str, Any] | None = None
    needs: Mapping[str, int] | None = None


def best_plan(model: Model, machine: Machine, answers: Mapping[str, Any]) -> Plan:
    """The recommended plan.

    Raises:
        ConfigError: the model cannot be found, or no plan fits.
    """
    workload, capacity = _question(model, machine, answers)
    rows = _rows(model, workload, capacity)
    chosen = next((row for row in rows if row.recommended), None)
    if chosen is None:
        least = min(rows, key=lambda row: row.estimate.device.total + row.estimate.host.total)
        raise ConfigError(
            f"--model {model.name}: no plan fits this machine: {_why(least, workload, capacity)}",
            fix="more processes, a smaller --batch or --sequence, or --checkpointing take less",
        )
    return _plan(model, chosen, workload)


def ask_plan(prompts: Prompts, model: Model | None, machine: Machine, answers: Mapping[str, Any]) -> Plan:
    """Asks what will be trained and which line of the table it shall be.

    Args:
        model: that of --model; None asks.
        answers: answers by flags; those in PLANNED, or a JSON config, leave nothing to plan.
    """
    if {*PLANNED, "deepspeed_config_file"} & set(answers) or answers.get("use_deepspeed") is False:
        return Plan(model)
    chosen = model
    while True:
        if model is None:
            chosen = _ask_model(prompts)
            if chosen is None:
                return Plan()
        assert chosen is not None, "a flag or the person has said it"
        plan = _choose(prompts, chosen, machine, answers, back=model is None)
        if plan is not None:
            return plan


def memory_summary(model: Model, machine: Machine, answers: Mapping[str, Any]) -> str:
    """What the final answers take, in one line."""
    from zeroaccel.estimate import check_capacity, estimate

    if "deepspeed_config_file" in answers or "zero_stage" not in answers:
        return ""
    workload, capacity = _question(model, machine, answers)
    plan = (answers["zero_stage"], *(answers.get(name, "none") for name in PLANNED[1:]))
    with progress(f"estimating {model.name}"):
        one = estimate(model.name, workload, [plan], on_cpu=capacity.on_cpu)[0]
    fits, short_of = check_capacity(one, workload, capacity)
    words = {True: "which fits", False: f"which does not fit: {short_of}", None: "of unknown room"}[fits]
    return f"{model.name} takes {_sizes(one, workload)}, {words}"


def _ask_model(prompts: Prompts) -> Model | None:
    def known(text: str) -> str:
        if not text:
            return ""
        from zeroaccel.estimate import subject  # imports torch, which takes seconds: not before a model is named

        try:
            subject(text)
        except (ConfigError, UsageError) as error:
            return str(error)
        return ""

    words = "What will you train? 7b, a model's folder or config.json, module:function; nothing skips"
    name = prompts.text(words, "", known, back=False)
    if not name:
        return None
    sequence = prompts.text("How many tokens per sample?", "2048", _positive, back=True)
    if sequence is BACK:
        return _ask_model(prompts)
    batch = prompts.text("How many samples per process and micro-step?", "1", _positive, back=True)
    if batch is BACK:
        return _ask_model(prompts)
    return Model(name, int(sequence), int(batch))


def _positive(text: str) -> str:
    return "" if text.isdigit() and int(text) > 0 else "expected a whole number of at least 1"


def _choose(prompts: Prompts, model: Model, machine: Machine, answers: Mapping[str, Any], *, back: bool) -> Plan | None:
    """The line that is chosen; None to go back."""
    from .prompts import Option

    workload, capacity = _question(model, machine, answers)
    rows = _rows(model, workload, capacity)
    options = [
        Option(
            f"{row.estimate.name}: {_sizes(row.estimate, workload)}" + (" (recommended)" if row.recommended else ""),
            row,
            _why(row, workload, capacity) if row.fits is False else "",
        )
        for row in rows
    ]
    options.append(Option("none of these: ask me", None))
    start = next((row for row in rows if row.recommended), None)
    words = f"Which plan, for {workload.ranks} processes in {workload.precision}?"
    reply = prompts.choose(words, options, start, back=back)
    if reply is BACK:
        return None
    return Plan(model) if reply is None else _plan(model, reply, workload)


def _question(model: Model, machine: Machine, answers: Mapping[str, Any]) -> tuple[Workload, Capacity]:
    """What is to be estimated, from the answers that are there and the defaults of the others."""
    from zeroaccel.estimate import Capacity, Workload

    on_cpu = answers.get("use_cpu", not machine.devices)
    state = WizardState({"use_cpu": on_cpu, **answers}, machine)
    ranks = answers.get("num_processes") or by_key("num_processes").default(state)
    precision = answers.get("mixed_precision") or by_key("mixed_precision").default(state)
    steps = answers.get("gradient_accumulation_steps", 1)
    try:
        workload = Workload(
            ranks=ranks,
            ranks_per_machine=ranks // (answers.get("num_machines") or 1),
            precision="fp32" if precision == "no" else precision,
            batch=model.batch,
            sequence=model.sequence,
            accumulation=steps if isinstance(steps, int) else 1,
            checkpointing=model.checkpointing,
        )
    except UsageError as error:
        raise ConfigError(str(error).replace("Workload.", "--")) from None
    devices = () if on_cpu else machine.devices
    disks = [disk.free_nbytes for disk in machine.disks]
    return workload, Capacity(
        device=min((device.memory_nbytes for device in devices), default=None),
        host=machine.memory_nbytes or None,
        disk=max(disks, default=0),
        on_cpu=bool(on_cpu),
    )


@functools.lru_cache(maxsize=8)  # of a user who goes back and forth
def _rows(model: Model, workload: Workload, capacity: Capacity) -> list[PlanRow]:
    try:
        with progress(f"estimating {model.name}"):
            from zeroaccel.estimate import plan_table

            return plan_table(model.name, workload, capacity)
    except ConfigError as error:
        raise ConfigError(str(error).replace("MODEL", "--model", 1)) from None


def _plan(model: Model, row: PlanRow, workload: Workload) -> Plan:
    one = row.estimate
    answers = dict(zip(PLANNED, (one.stage, one.offload_optimizer, one.offload_param), strict=True))
    needs = {
        "offload_optimizer_nvme_path": one.disk.optimizer * workload.local_ranks,
        "offload_param_nvme_path": one.disk.params * workload.local_ranks,
    }
    return Plan(model, answers, needs)


def _sizes(one: Any, workload: Workload) -> str:
    """What a machine and a device hold under a plan."""
    parts = [f"{gib(one.device.total)} per process"]
    for memory, words in ((one.host, "more in memory"), (one.disk, "on disk")):
        if memory.total:
            parts.append(f"{gib(memory.total * workload.local_ranks)} {words}")
    return ", ".join(parts)


def _why(row: PlanRow, workload: Workload, capacity: Capacity) -> str:
    """Why a plan does not fit."""
    one, local = row.estimate, workload.local_ranks
    shared = one.host.total + (one.device.total if capacity.on_cpu else 0)
    needed = {"device": one.device.total, "host": shared * local, "disk": one.disk.total * local}[row.short_of]
    there = {"device": capacity.device, "host": capacity.host, "disk": capacity.disk}[row.short_of] or 0
    words = {"device": "on the device", "host": "in memory", "disk": "on disk"}[row.short_of]
    return f"{one.name} needs {gib(needed)} {words}, of {gib(there)}, of which a tenth stays free"
