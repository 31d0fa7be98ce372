"""Tables for the model to train: every mesh, and every stage and offload, compared with this machine.

`zeroaccel.estimate` computes the numbers; this module turns the chosen row into answers to the questions about the mesh
and ZeRO, and into the sizes that folders for offload must hold. With `--model`, it chooses without asking.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from zeroaccel.config.launch.setting_table import MESH_SIZES
from zeroaccel.errors import ConfigError, UsageError

from ..machine import Machine, gib
from ..progress import estimating, import_estimates, progress
from .answers import BACK, PlanAnswers
from .questions import PLANNED, WizardState, by_key

if TYPE_CHECKING:
    from zeroaccel.config.launch.resolution import JsonFacts
    from zeroaccel.estimate import Capacity, MeshRow, PlanRow, Workload

    from .prompts import Prompts


@dataclass(frozen=True)
class Model:
    """The model to train.

    Attributes:
        name: a number of parameters, the folder or config.json of a model, or module:function.
        sequence: tokens per sample.
        batch: samples per process and micro-step.
        checkpointing: true if the model recomputes activations.
    """

    name: str
    sequence: int = 2048
    batch: int = 1
    checkpointing: bool = False


def best_plan(model: Model, machine: Machine, answers: Mapping[str, Any]) -> PlanAnswers:
    """Returns the answers of the recommended plan.

    Raises:
        ConfigError: the model is unknown, or no plan fits.
    """
    with progress(f"estimating {model.name}"):
        import_estimates()
    workload, capacity = _question(model, machine, answers)
    rows = _rows(model, workload, capacity)
    chosen = next((row for row in rows if row.recommended), None)
    if chosen is not None:
        return _plan(chosen, workload)
    if workload.ranks > 1 and not _names_mesh(answers):
        best = _mesh_rows(model, workload, capacity)[0]
        if best.recommended and best.plan is not None:
            note = f"{model.name} fits only on a mesh: {best.workload.mesh_name}"
            return _plan(best.plan, best.workload, note=note)
    least = min(rows, key=lambda row: row.estimate.device.total + row.estimate.host.total)
    raise ConfigError(
        f"--model {model.name}: no plan fits this machine: {_why(least, workload, capacity)}",
        fix="use more processes, a smaller --batch or --sequence, or --checkpointing",
    )


def _names_mesh(answers: Mapping[str, Any]) -> bool:
    return bool({*MESH_SIZES, "use_parallelism_config"} & set(answers))


class PlanTable:
    """Asks for the model, the mesh and the memory plan; remembers the answers.

    Args:
        model: the model of --model; None asks for it.
        flags: answers by flags.

    Attributes:
        model: the model that was named last.
    """

    def __init__(self, prompts: Prompts, model: Model | None, machine: Machine, flags: Mapping[str, Any]) -> None:
        self._prompts, self._machine, self._flags = prompts, machine, flags
        self.model = model
        self._first = 0 if model is None else 3
        self._name, self._sequence, self._batch = "", "2048", "1"
        self._mesh: tuple[tuple[int, ...], int] | None = None
        self._plan: tuple[int, str, str] | None = None
        self._answered = False

    def __call__(self, state: WizardState, back: bool) -> Any:
        """Implements `Planner` of `answers.Walk`."""
        steps = [self._ask_name, self._ask_sequence, self._ask_batch, self._ask_mesh, self._ask_plan]
        if _processes(state) == 1 or _names_mesh(self._flags) or state["use_parallelism_config"] is not None:
            steps.remove(self._ask_mesh)
        # A user who comes back from a later question sees the last question here again, with the former choice.
        index, result = (len(steps) - 1 if self._answered else self._first), None
        self._answered = False
        while index < len(steps):
            result = steps[index](state, back or index > self._first)
            if result is BACK and index == self._first:
                return BACK
            if result is None:
                self.model = None
                return None
            index += -1 if result is BACK else 1
        self._answered = True
        return result

    # Each returns an answer or BACK; None ends without a plan.

    def _ask_name(self, _: WizardState, back: bool) -> Any:
        words = "What will you train (7b or a folder)? Empty to skip"
        while True:
            name = self._prompts.text(words, self._name, lambda _: "", back=back)
            if name in (BACK, ""):
                return name or None
            with progress(f"looking up {name}"):
                import_estimates()
                problem = _unknown(name)
            if not problem:
                self._name = name
                return name
            self._prompts.remark(problem)

    def _ask_sequence(self, _: WizardState, back: bool) -> Any:
        reply = self._prompts.text("How many tokens per sample?", self._sequence, _positive, back=back)
        self._sequence = self._sequence if reply is BACK else reply
        return reply

    def _ask_batch(self, _: WizardState, back: bool) -> Any:
        words = "How many samples per process and micro-step?"
        reply = self._prompts.text(words, self._batch, _positive, back=back)
        self._batch = self._batch if reply is BACK else reply
        self.model = Model(self._name, int(self._sequence), int(self._batch))
        return reply

    def _ask_mesh(self, state: WizardState, back: bool) -> Any:
        from .prompts import Option

        assert self.model is not None, "a mesh is asked for after the model"
        workload, capacity = _question(self.model, self._machine, state.answers)
        rows = [row for row in _mesh_rows(self.model, workload, capacity) if row.plan is not None]
        options = [
            Option(_mesh_title(row), row, _short(row.plan, row.workload, capacity), row.workload.mesh_name)
            for row in rows
            if row.plan is not None
        ]
        start = next((row for row in rows if _mesh_of(row.workload) == self._mesh and row.plan), None)
        start = start or next((row for row in rows if row.recommended), None)
        heading = f"{'mesh':<20}{'plan':<18}{'GiB':>7}{'sends, GB':>11}{'idle':>5}"
        footing = "per process: peak memory, traffic per step; equal samples per step"
        words = f"Which mesh of {workload.ranks} processes?"
        reply = self._prompts.choose(words, options, start, back=back, heading=heading, footing=footing)
        if reply is not BACK:
            self._mesh = _mesh_of(reply.workload)
        return reply

    def _ask_plan(self, state: WizardState, back: bool) -> Any:
        from .prompts import Option

        assert self.model is not None, "a plan is asked for after the model"
        workload, capacity = _question(self.model, self._machine, state.answers)
        asked_mesh = self._mesh is not None and _processes(state) > 1 and state["use_parallelism_config"] is None
        if asked_mesh and self._mesh is not None:
            sizes, ep = self._mesh
            workload = workload.on_mesh(*sizes, ep=ep)
        rows = _rows(self.model, workload, capacity)
        options = [
            Option(_plan_title(row, workload), row, _short(row, workload, capacity), row.estimate.name) for row in rows
        ]
        options.append(Option("no plan: ask me instead", _NO_PLAN))
        start = next((row for row in rows if _settings_of(row) == self._plan and row.fits is not False), None)
        start = start or next((row for row in rows if row.recommended), None)
        on = workload.mesh_name if asked_mesh else f"{workload.ranks} process{'es' if workload.ranks > 1 else ''}"
        heading = f"{'plan, GiB':<39}{'memory' if capacity.on_cpu else 'device':>9}{'host':>7}{'disk':>7}"
        reply = self._prompts.choose(
            f"Which plan, for {on} in {workload.precision}?",
            options,
            start,
            back=back,
            heading=heading,
            footing=_legend(workload, capacity),
        )
        if reply is BACK:
            return BACK
        if reply is _NO_PLAN:
            self._plan = None
            return PlanAnswers()
        self._plan = _settings_of(reply)
        return _plan(reply, workload)


_NO_PLAN = object()


def _unknown(name: str) -> str:
    """Returns the reason why a model cannot be estimated; "" if it can be."""
    from zeroaccel.estimate import subject  # imports torch, which takes seconds: only once a model is named

    try:
        subject(name)
    except (ConfigError, UsageError) as error:
        return str(error)
    return ""


def _processes(state: WizardState) -> int:
    processes: int = state["num_processes"] or by_key("num_processes").default(state)
    return processes


def _mesh_of(workload: Workload) -> tuple[tuple[int, ...], int]:
    return workload.sizes, workload.ep


def _settings_of(row: PlanRow) -> tuple[int, str, str]:
    return row.estimate.stage, row.estimate.offload_optimizer, row.estimate.offload_param


def memory_summary(model: Model, machine: Machine, answers: Mapping[str, Any], json: JsonFacts | None = None) -> str:
    """Returns one line about the memory that the final answers need.

    Args:
        json: the settings that a JSON config decides.
    """
    decided = {} if json is None else {key: value for key, value in json.decided.items() if value is not None}
    answers = {**decided, **answers}
    if "zero_stage" not in answers:
        return ""
    with estimating(model.name):
        from zeroaccel.estimate import check_capacity, estimate

        workload, capacity = _question(model, machine, answers)
        plan = (answers["zero_stage"], *(answers.get(name, "none") for name in PLANNED[1:]))
        planned = estimate(model.name, workload, [plan], on_cpu=capacity.on_cpu)[0]
    fits, short_of = check_capacity(planned, workload, capacity)
    words = {True: "which fits", False: f"which does not fit: {short_of}", None: "but the capacity is unknown"}[fits]
    mesh = f" as {workload.mesh_name}" if not workload.is_plain else ""
    return f"{model.name} takes {_sizes(planned, workload)}{mesh}, {words}"


def _positive(text: str) -> str:
    return "" if text.isdigit() and int(text) > 0 else "expected a whole number of at least 1"


def _question(model: Model, machine: Machine, answers: Mapping[str, Any]) -> tuple[Workload, Capacity]:
    """Returns the workload and the capacity to estimate, from the answers so far and the defaults of the others."""
    from zeroaccel.estimate import Capacity, Workload

    on_cpu = answers.get("use_cpu", not machine.devices)
    state = WizardState({"use_cpu": on_cpu, **answers}, machine)
    ranks = answers.get("num_processes") or by_key("num_processes").default(state)
    precision = answers.get("mixed_precision") or by_key("mixed_precision").default(state)
    steps = answers.get("gradient_accumulation_steps")
    sizes = [answers.get(f"{axis}_size") or 1 for axis in ("pp", "sp", "tp")]
    try:
        workload = Workload(
            ranks=ranks,
            ranks_per_machine=ranks // (answers.get("num_machines") or 1),
            precision="fp32" if precision == "no" else precision,
            batch=model.batch,
            sequence=model.sequence,
            accumulation=steps if isinstance(steps, int) else 1,
            checkpointing=model.checkpointing,
        ).on_mesh(*sizes, ep=answers.get("ep_size") or 1)
        if isinstance(steps, int):
            workload = replace(workload, accumulation=steps)
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


@functools.lru_cache(maxsize=8)  # for users who go back and return
def _rows(model: Model, workload: Workload, capacity: Capacity) -> list[PlanRow]:
    try:
        with estimating(model.name):
            from zeroaccel.estimate import plan_table

            return plan_table(model.name, workload, capacity)
    except ConfigError as error:
        raise ConfigError(str(error).replace("MODEL", "--model", 1)) from None


@functools.lru_cache(maxsize=8)
def _mesh_rows(model: Model, workload: Workload, capacity: Capacity) -> list[MeshRow]:
    with estimating(model.name) as line:
        from zeroaccel.estimate import mesh_table

        def show(candidate: Workload) -> None:
            line.doing = f"estimating {model.name} on {candidate.mesh_name}"

        return mesh_table(model.name, workload, capacity, on_row=show)


def _plan(row: PlanRow, workload: Workload, *, note: str = "") -> PlanAnswers:
    """Converts a row of the tables into answers to the questions in PLANNED and about the mesh."""
    planned = row.estimate
    chosen = planned.stage, planned.offload_optimizer, planned.offload_param
    answers: dict[str, Any] = dict(zip(PLANNED, chosen, strict=True))
    if workload.ranks > 1:
        answers["use_parallelism_config"] = not workload.is_plain
    if not workload.is_plain:
        answers |= {size: getattr(workload, size.removesuffix("_size")) for size in MESH_SIZES}
    needs = {
        "offload_optimizer_nvme_path": planned.disk.optimizer * workload.local_ranks,
        "offload_param_nvme_path": planned.disk.params * workload.local_ranks,
    }
    return PlanAnswers(answers, needs, note)


def _sizes(planned: Any, workload: Workload) -> str:
    """Returns the memory that a plan needs per process, on the host and on disk."""
    parts = [f"{gib(planned.device.total)} per process"]
    for memory, words in ((planned.host, "more in memory"), (planned.disk, "on disk")):
        if memory.total:
            parts.append(f"{gib(memory.total * workload.local_ranks)} {words}")
    return ", ".join(parts)


def _mesh_title(row: MeshRow) -> str:
    assert row.plan is not None, "a mesh that is shown has a plan"
    planned = row.plan.estimate
    offloads = {planned.offload_optimizer, planned.offload_param} != {"none"}
    name = f"stage {planned.stage}{' + offload' if offloads else ''}"
    sent, idle = (row.inside + row.across) / 1e9, f"{row.idle:.0%}" if row.idle else "-"
    columns = f"{row.workload.mesh_name:<20}{name:<18}{_in_gib(planned.device.total):>7}{sent:>11.2f}{idle:>5}"
    return columns + (_BEST if row.recommended else "")


def _plan_title(row: PlanRow, workload: Workload) -> str:
    planned, local = row.estimate, workload.local_ranks
    totals = planned.device.total, planned.host.total * local, planned.disk.total * local
    sizes = "{:>9}{:>7}{:>7}".format(*map(_in_gib, totals))
    return f"{planned.name.replace(' on ', ' '):<39}{sizes}" + (_BEST if row.recommended else "")


_BEST = "  best"


def _in_gib(nbytes: int) -> str:
    return gib(nbytes).removesuffix(" GiB") if nbytes else "-"


def _short(row: PlanRow, workload: Workload, capacity: Capacity) -> str:
    """Returns the memory that a plan lacks, for its row: "no: host 131 of 64 GiB"."""
    if row.fits is not False:
        return ""
    needed, there = _lack(row, workload, capacity)
    return f"no: {row.short_of} {_in_gib(needed)} of {_in_gib(there)} GiB"


def _legend(workload: Workload, capacity: Capacity) -> str:
    """Returns a line about the capacity that the numbers of a table must fit into."""
    rooms = {"device": capacity.device, "host": capacity.host, "disk": capacity.disk}
    there = ", ".join(f"{name} {_in_gib(room)}" for name, room in rooms.items() if room)
    return f"a tenth of {there} stays free; host, disk per machine" if there else "the capacity is not known"


def _why(row: PlanRow, workload: Workload, capacity: Capacity) -> str:
    """Returns a sentence about the memory that a plan lacks."""
    needed, there = _lack(row, workload, capacity)
    words = {"device": "on the device", "host": "in memory", "disk": "on disk"}[row.short_of]
    return f"{row.estimate.name} needs {gib(needed)} {words}; {gib(there)} exist, a tenth of which stays free"


def _lack(row: PlanRow, workload: Workload, capacity: Capacity) -> tuple[int, int]:
    """Returns the bytes that a plan needs of the memory that it lacks, and the bytes that exist."""
    planned, local = row.estimate, workload.local_ranks
    shared = planned.host.total + (planned.device.total if capacity.on_cpu else 0)
    needed = {"device": planned.device.total, "host": shared * local, "disk": planned.disk.total * local}[row.short_of]
    return needed, {"device": capacity.device, "host": capacity.host, "disk": capacity.disk}[row.short_of] or 0
