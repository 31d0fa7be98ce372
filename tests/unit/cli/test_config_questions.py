"""The questionnaire without a terminal: wizard and flags share one table, and keys that do not apply are left out."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.refusals import message
from zeroaccel.cli.config.answers import BACK, InvalidAnswer, PlanAnswers, Walk, accept, complete, parse
from zeroaccel.cli.config.config_file import answers_of, checked, command_line, render, start_lines
from zeroaccel.cli.config.memory_plan import Model, PlanTable, best_plan
from zeroaccel.cli.config.prompts import Option
from zeroaccel.cli.config.questions import AUTO, QUESTIONS, Question, WizardState, by_key
from zeroaccel.cli.machine import Device, Disk, Machine
from zeroaccel.config.launch.launch_settings import LaunchSettings
from zeroaccel.config.section import as_text
from zeroaccel.errors import ConfigError

OLD_DEVICE = Device("Old", 2**34, has_bf16=False)
NEW_DEVICE = Device("New", 2**36, has_bf16=True)


def _machine(folder: Path, *devices: Device) -> Machine:
    return Machine(devices, 2**36, 8, (Disk(str(folder), "ext4", 2**40),), torch="2.13.0")


class Scripted:
    """Answers from a table, or with the proposal, and records the questions."""

    def __init__(self, answers: Mapping[str, Any] | None = None, backs: Mapping[str, int] | None = None) -> None:
        self.answers, self.backs = dict(answers or {}), dict(backs or {})
        self.asked: list[str] = []
        self.remarks: list[str] = []

    def value(self, question: Question, proposal: Any, situation: WizardState, *, back: bool) -> Any:
        self.asked.append(question.key)
        if self.backs.get(question.key, 0):
            assert back
            self.backs[question.key] -= 1
            return BACK
        answer = self.answers.get(question.key, proposal)
        answer = answer.pop(0) if isinstance(answer, list) else answer
        assert answer is not None, question.key
        accept(question, answer, situation)
        return answer

    def yes_no(self, words: str, proposal: bool, *, back: bool) -> Any:
        key = next(question.key for question in QUESTIONS if question.ask.gate == words)
        self.asked.append(f"{key}?")
        return key in self.answers or proposal

    def remark(self, words: str) -> None:
        self.remarks.append(words)


def _walk(machine: Machine, asker: Scripted, given: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
    walk = Walk(machine, given or {}, {})
    assert walk.run(asker)
    return walk.result().answers


def test_every_question_is_about_a_setting_and_reads_only_earlier_ones() -> None:
    earlier: set[str] = set()

    class Watched(dict[str, Any]):
        def get(self, key: str, default: Any = None) -> Any:
            assert key in earlier, f"the question reads {key} before it is asked"
            return super().get(key, default)

    for question in QUESTIONS:
        assert question.key in LaunchSettings.model_fields or not question.is_setting
        for answers in ({}, {"use_deepspeed": True, "num_machines": 2, "zero_stage": 3}):
            situation = WizardState(
                Watched({key: value for key, value in answers.items() if key in earlier}), Machine()
            )
            if not question.why_not(situation):
                question.default(situation)
            else:
                assert question.why_not(situation)
        earlier.add(question.key)


def test_only_questions_that_apply_are_asked(tmp_path: Path) -> None:
    asker = Scripted({"zero_stage": 2})
    _walk(_machine(tmp_path), asker)
    assert " ".join(asker.asked) == (
        "use_cpu num_machines num_processes use_deepspeed deepspeed_config_file? mixed_precision zero_stage "
        "offload_optimizer_device gradient_accumulation_steps gradient_clipping? frozen_weights? dynamo_backend?"
    )
    asker = Scripted({"zero_stage": 0, "use_deepspeed": False})
    _walk(_machine(tmp_path), asker)
    assert not {"zero_stage", "offload_optimizer_device"} & set(asker.asked)


def test_a_json_config_leaves_only_its_autos_to_be_asked(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
    path.write_text(json.dumps({**config, "gradient_clipping": "auto"}))
    asker = Scripted({"deepspeed_config_file": str(path), "gradient_clipping": 0.5})
    answers = _walk(_machine(tmp_path), asker)
    asked = asker.asked[asker.asked.index("deepspeed_config_file") + 1 :]
    assert asked == ["gradient_clipping?", "gradient_clipping", "zero3_init_flag", "dynamo_backend?"]
    assert asker.remarks == [f"{path} decides zero_stage 3, mixed_precision bf16; these questions are skipped"]
    checked(render(answers), "zeroaccel.yaml")  # a launch finds no setting given twice


def _random_answer(question: Question, situation: WizardState, chance: random.Random, folder: Path) -> Any:
    if question.kind == "choice":
        return chance.choice([one.value for one in question.choices if not question.impossible(one, situation)])
    if question.kind == "yes_no":
        return chance.random() < 0.5
    if question.ask.takes_auto and chance.random() < 0.5:
        return AUTO
    if question.key == "num_processes":
        return chance.randint(1, 3) * (situation["num_machines"] or 1)
    if question.key.removesuffix("_size") in ("tp", "sp", "pp", "ep") or question.key == "zero_hpz_partition_size":
        return 1
    if question.key == "machine_rank":
        return chance.randrange(situation["num_machines"])
    if question.kind == "count":
        return chance.randint(1, 4)
    if question.kind == "number":
        return chance.choice([0.0, 0.5, 1.0, 1e-3])
    if question.kind == "folder":
        return str(folder)
    if question.kind == "file":
        return str(folder / ("ds.json" if question.key == "deepspeed_config_file" else "hostfile"))
    return chance.choice(["node1", "10.0.0.1"] if question.key == "main_process_ip" else ["node1", "Block,Layer"])


@pytest.mark.parametrize("seed", range(40))
def test_wizard_flags_and_the_file_itself_make_the_same_bytes(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    zero = {"stage": chance.choice([1, 3, "auto"])}
    (tmp_path / "ds.json").write_text(json.dumps({"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}))
    (tmp_path / "hostfile").write_text("node1 slots=2\n")
    machine = _machine(tmp_path, *chance.choice([(), (NEW_DEVICE,), (OLD_DEVICE, OLD_DEVICE)]))

    class Guessing(Scripted):
        def value(self, question: Question, proposal: Any, situation: WizardState, *, back: bool) -> Any:
            if back and chance.random() < 0.1:
                return BACK
            answer = _random_answer(question, situation, chance, tmp_path)
            accept(question, answer, situation)
            return answer

        def yes_no(self, words: str, proposal: bool, *, back: bool) -> Any:
            return BACK if back and chance.random() < 0.1 else chance.random() < 0.5

    answers = _walk(machine, Guessing())
    text = render(answers)
    file = checked(text, "zeroaccel.yaml")
    # from flags
    again = {key: parse(by_key(key), as_text(value)) for key, value in answers.items()}
    assert render(complete(again, machine).answers) == text
    # the printed command has every flag
    words = command_line(answers, {}, Path("zeroaccel.yaml"))
    assert all(by_key(key).flag in words for key in answers)
    # from the file, as an update without changes
    former, extras = answers_of(file)
    assert extras == {}
    assert render(complete({}, machine, former=former).answers) == text


def test_back_changes_an_answer_and_drops_dependent_answers(tmp_path: Path) -> None:
    script = {"zero_stage": [3, 2], "offload_param_device": "nvme", "offload_optimizer_device": ["cpu", "cpu"]}
    # Goes back from the folder, through the devices, to the stage.
    asker = Scripted(script, {"offload_param_nvme_path": 1, "offload_param_device": 1, "offload_optimizer_device": 1})

    def value(question: Question, proposal: Any, situation: WizardState, *, back: bool) -> Any:
        if question.key in ("offload_param_device", "offload_optimizer_device") and asker.asked.count(question.key) < 1:
            asker.asked.append(question.key)
            answers: Any = asker.answers[question.key]
            return answers.pop(0) if isinstance(answers, list) else answers
        return Scripted.value(asker, question, proposal, situation, back=back)

    asker.value = value  # type: ignore[method-assign]
    answers = _walk(_machine(tmp_path), asker)
    assert asker.asked.count("zero_stage") == 2
    assert (answers["zero_stage"], answers["offload_optimizer_device"]) == (2, "cpu")
    assert not {"offload_param_device", "offload_param_nvme_path", "zero3_init_flag"} & set(answers)


def test_back_from_the_first_question_is_reported_and_flags_are_not_asked(tmp_path: Path) -> None:
    asker = Scripted(backs={"use_cpu": 1})
    walk = Walk(_machine(tmp_path), {}, {})
    assert not walk.run(asker, back=True)
    assert walk.run(asker)
    asker = Scripted()
    answers = _walk(_machine(tmp_path), asker, {"zero_stage": 3, "gradient_clipping": 0.5})
    assert not {"zero_stage", "gradient_clipping?", "gradient_clipping"} & set(asker.asked)
    assert (answers["zero_stage"], answers["gradient_clipping"]) == (3, 0.5)


def test_a_model_without_a_fitting_plan_is_refused_with_its_needs() -> None:
    said = message(ConfigError, best_plan, Model("1m", 64), Machine(memory_nbytes=2**20), {})
    assert said.startswith("--model 1m: no plan fits this machine: stage ")
    assert "GiB in memory; 0.0 GiB exist, a tenth of which stays free; use more processes" in said


def test_questions_that_a_plan_answers_are_skipped(tmp_path: Path) -> None:
    plan = {"zero_stage": 3, "offload_optimizer_device": "nvme", "offload_param_device": "none"}
    needs = {"offload_optimizer_nvme_path": 2**60}
    asker = Scripted()
    walk = Walk(_machine(tmp_path), {}, {}, lambda *_: PlanAnswers(plan, needs))
    with pytest.raises(InvalidAnswer, match="GiB are needed"):  # the plan's needs apply to the folder
        walk.run(asker)
    assert "zero_stage" not in asker.asked
    assert asker.asked[-1] == "offload_optimizer_nvme_path"
    asker = Scripted({"use_deepspeed": False})
    walk = Walk(_machine(tmp_path), {}, {}, lambda *_: PlanAnswers(plan, needs))
    assert walk.run(asker)
    assert not set(plan) & set(walk.result().answers)


@pytest.mark.parametrize(
    ("devices", "given", "precision", "processes"),
    [
        ((), {}, "no", 1),
        ((NEW_DEVICE, NEW_DEVICE), {}, "bf16", 2),
        ((OLD_DEVICE,), {}, "fp16", 1),
        ((NEW_DEVICE, NEW_DEVICE), {"use_cpu": True}, "no", 1),
        ((NEW_DEVICE,) * 4, {"num_machines": 2, "main_process_ip": "a"}, "bf16", 8),
    ],
)
def test_defaults_are_those_of_the_machine(
    devices: tuple[Device, ...], given: dict[str, Any], precision: str, processes: int, tmp_path: Path
) -> None:
    answers = complete(given, _machine(tmp_path, *devices)).answers
    assert (answers["mixed_precision"], answers["num_processes"]) == (precision, processes)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"offload_param_device": "cpu"},
            "--offload_param_device: it does not apply: parameters are sharded at stage 3",
        ),
        ({"zero_stage": 0, "offload_optimizer_device": "cpu"}, "it does not apply: optimizer states are sharded from"),
        (
            {"use_deepspeed": False, "zero_stage": 2},
            "--zero_stage: it does not apply: it is a setting of ZeRO, which is",
        ),
        ({"main_process_ip": "a"}, "--main_process_ip: it does not apply: there is one machine (--num_machines)"),
        ({"mixed_precision": "bf16"}, "--mixed_precision: bf16: Old does not compute in bf16; choose another"),
        ({"num_machines": 0}, "--num_machines: expected a number of at least 1, got 0"),
        ({"num_machines": 2, "main_process_ip": "a", "machine_rank": 2}, "the machines have ranks 0 to 1"),
        ({"num_machines": 2, "main_process_ip": "a", "num_processes": 3}, "2 machines cannot share 3 processes"),
        ({"gradient_clipping": -1.0}, "--gradient_clipping: expected a number of at least 0, got -1"),
        ({"gradient_clipping": float("nan")}, "--gradient_clipping: expected a number of at least 0, got nan"),
        ({"deepspeed_config_file": "nowhere.json"}, "--deepspeed_config_file: there is no file nowhere.json"),
        (
            {"offload_optimizer_device": "nvme", "offload_optimizer_nvme_path": "/nowhere"},
            "--offload_optimizer_nvme_path: expected a folder on a local disk, got '/nowhere, which does not exist'",
        ),
    ],
)
def test_an_answer_that_cannot_be_taken(given: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        complete(given, _machine(tmp_path, OLD_DEVICE))


def test_nvme_needs_a_disk_with_room_for_the_plan(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nvme: this machine has no local disk with enough"):
        complete({"offload_optimizer_device": "nvme"}, Machine())
    nvme = {"offload_optimizer_device": "nvme", "offload_optimizer_nvme_path": str(tmp_path)}
    with pytest.raises(ConfigError, match=r"GiB free, but 1073741824 GiB are needed; name a folder with more space"):
        complete(nvme, _machine(tmp_path), needs={"offload_optimizer_nvme_path": 2**60})
    complete(nvme, _machine(tmp_path), needs={"offload_optimizer_nvme_path": 1})


def test_questions_without_a_default_are_missing(tmp_path: Path) -> None:
    settled = complete({"num_machines": 2, "multinode_launcher": "ssh"}, _machine(tmp_path))
    assert [question.key for question in settled.missing] == ["hostfile", "main_process_ip"]


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("zero_stage", "3", 3),
        ("use_cpu", "Yes", True),
        ("use_cpu", "0", False),
        ("gradient_accumulation_steps", "auto", AUTO),
        ("gradient_clipping", "1e-1", 0.1),
        ("mixed_precision", "BF16", "bf16"),
    ],
)
def test_text_becomes_a_value(key: str, text: str, value: Any) -> None:
    assert parse(by_key(key), text) == value


@pytest.mark.parametrize(
    ("key", "text", "words"),
    [
        ("zero_stage", "7", "expected 0, 1, 2 or 3, got '7'"),
        ("offload_param_device", "gpu", "expected none, cpu or nvme, got 'gpu'"),
        ("num_processes", "auto", "expected a whole number, got 'auto'"),
        ("gradient_accumulation_steps", "x", "expected a whole number, or \"auto\", got 'x'"),
        ("use_cpu", "maybe", "expected yes or no, got 'maybe'"),
        ("main_process_ip", " ", "expected text, got an empty answer to 'What is the network address of machine 0?'"),
        ("hostfile", "", "expected a path, got an empty answer to 'Where is the hostfile?'"),
    ],
)
def test_invalid_answers_are_refused(key: str, text: str, words: str) -> None:
    with pytest.raises(InvalidAnswer, match=re.escape(words)):
        parse(by_key(key), text)


def test_an_update_keeps_settings_without_a_question(tmp_path: Path) -> None:
    text = "num_processes: 2\nmax_restarts: 3\ndynamo_config: {dynamo_backend: 'no'}\nmixed_precision: bf16\n"
    former, extras = answers_of(checked(text, "zeroaccel.yaml"))
    again = yaml.safe_load(render(complete({"zero_stage": 1}, _machine(tmp_path), former=former).answers, extras))
    assert (again["num_processes"], again["max_restarts"], again["mixed_precision"]) == (2, 3, "bf16")
    assert again["deepspeed_config"]["zero_stage"] == 1
    assert "dynamo_config" not in again


def test_questions_fit_80_columns() -> None:
    for question in QUESTIONS:
        for words in filter(None, (question.ask.words, question.ask.gate)):
            by_keys = question.kind in ("choice", "yes_no") or words == question.ask.gate
            assert len(f"? {words} " + ("(arrow keys)" if by_keys else "(< back, :q quit) 29500")) <= 80, words


def test_a_file_for_several_machines_ends_with_the_command_for_each() -> None:
    answers = {"num_machines": 3, "main_process_ip": "10.0.0.1"}
    assert start_lines(answers, "zeroaccel launch train.py") == [
        "with 10.0.0.1 as machine 0, and this file on each machine:",
        *(f"zeroaccel launch --machine_rank {rank} train.py   # on machine {rank}" for rank in range(3)),
    ]
    assert start_lines({**answers, "num_machines": 40}, "zeroaccel launch train.py")[-1].endswith("--machine_rank 39")
    assert start_lines({**answers, "multinode_launcher": "ssh"}, "x train.py") == ["x train.py"]


def test_a_mesh_is_asked_for_where_there_are_several_processes(tmp_path: Path) -> None:
    asker = Scripted({"num_processes": 4, "use_parallelism_config": True, "tp_size": 2})
    answers = _walk(_machine(tmp_path), asker)
    assert [key for key in asker.asked if key.endswith("_size")] == ["tp_size", "sp_size", "pp_size"]
    asker = Scripted({"num_processes": 4, "use_parallelism_config": True, "ep_size": 2})
    divided = _walk(_machine(tmp_path), asker)
    assert yaml.safe_load(render(divided))["parallelism_config"] == {"ep_size": 2}
    assert yaml.safe_load(render(answers))["parallelism_config"] == {"parallelism_config_tp_size": 2}
    with pytest.raises(ConfigError, match=r"--tp_size: expected sizes that divide the job's 4 ranks"):
        complete({"num_processes": 4, "tp_size": 3}, _machine(tmp_path))
    with pytest.raises(ConfigError, match=r"--ep_size: ParallelConfig\(ep=3\): expected a divisor of dp_shard x sp"):
        complete({"num_processes": 4, "ep_size": 3}, _machine(tmp_path))
    with pytest.raises(ConfigError, match="already share the experts"):
        complete({"num_processes": 4, "tp_size": 2, "ep_size": 2}, _machine(tmp_path))
    with pytest.raises(ConfigError, match="it does not apply: there is one process"):
        complete({"num_processes": 1, "tp_size": 2}, _machine(tmp_path))
    (tmp_path / "ds.json").write_text(json.dumps({"train_batch_size": 2, "tensor_parallel": {"autotp_size": 2}}))
    asker = Scripted({"num_processes": 4, "deepspeed_config_file": str(tmp_path / "ds.json")})
    _walk(_machine(tmp_path), asker)
    assert "use_parallelism_config" not in asker.asked
    assert "tp_size 2" in asker.remarks[0]


def test_a_frozen_base_may_be_stored_as_codes_where_layers_are_whole(tmp_path: Path) -> None:
    script = {"num_processes": 4, "frozen_weights": "mxfp4"}
    answers = _walk(_machine(tmp_path), Scripted(script))
    assert yaml.safe_load(render(answers))["deepspeed_config"]["frozen_weights"] == "mxfp4"
    for axis in ("tp", "ep"):
        asker = Scripted({**script, "use_parallelism_config": True, f"{axis}_size": 2})
        _walk(_machine(tmp_path), asker)
        assert "frozen_weights?" not in asker.asked
        with pytest.raises(ConfigError, match=f"--frozen_weights: it does not apply: .*--{axis}_size"):
            complete({**script, f"{axis}_size": 2}, _machine(tmp_path))


def test_zeropp_is_asked_for_at_stage_3_of_several_machines(tmp_path: Path) -> None:
    script = {"num_machines": 2, "main_process_ip": "a", "num_processes": 4, "zero_stage": 3}
    asker = Scripted({**script, "zero_hpz_partition_size": 2, "zero_quantized_weights": True})
    answers = _walk(_machine(tmp_path), asker)
    section = yaml.safe_load(render(answers))["deepspeed_config"]
    assert (section["zero_hpz_partition_size"], section["zero_quantized_weights"]) == (2, True)
    asker = Scripted({**script, "zero_stage": 2})
    _walk(_machine(tmp_path), asker)
    assert not [key for key in asker.asked if key.startswith("zero_quantized")]


def test_a_model_that_fits_on_a_mesh_only_gets_one(tmp_path: Path) -> None:
    model = Model("125m", 8192, 1)
    answers = {"num_processes": 2, "mixed_precision": "bf16", "use_cpu": False}
    devices = (Device("Small", 8 * 2**30, has_bf16=True),) * 2  # a single rank needs 8.7 GB, 8.4 GB with torch 2.6
    machine = Machine(devices, 2**20, 8)
    plan = best_plan(model, machine, answers)
    assert plan.note.startswith("125m fits only on a mesh: ")
    assert plan.answers["use_parallelism_config"]


class _Tables:
    """Answers a `PlanTable`: text questions from a list, tables by one of their last possible rows."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.said: list[str] = []
        self.texts = ["1m", "1024", "1"]

    def text(self, words: str, proposal: str, check: Any, *, back: bool) -> str:
        return self.texts.pop(0)

    def remark(self, words: str) -> None:
        self.said.append(words)

    def choose(
        self, words: str, options: list[Option], proposal: Any, *, back: bool, heading: str, footing: str
    ) -> Any:
        # Only one row has the suffix "best", and it is a row that fits.
        self.lines += [f"   {one.title.removesuffix('  best')} (no: device)" for one in options]
        self.lines += [f"? {words} (arrow keys)", f"   {heading}", f"   {footing}"]
        return [one.value for one in options if not one.impossible][-1 if words.startswith("Which mesh") else -2]


def test_tables_fit_80_columns_and_the_picked_row_answers(tmp_path: Path) -> None:
    machine = _machine(tmp_path, *(Device("Small", 100 * 2**20, has_bf16=True),) * 4)
    tables = _Tables()
    tables.texts[0] = "llama-3.1-8x"
    tables.texts.insert(1, "1m")
    planner = PlanTable(tables, None, machine, {})  # type: ignore[arg-type]
    state = complete({"num_processes": 4}, machine, questions=QUESTIONS[:13]).state
    plan = planner(state, False)
    assert "did you mean llama-3.1-8b" in tables.said[0]
    assert {key: value for key, value in plan.answers.items() if key.endswith("_size")} == {
        "tp_size": 1,
        "sp_size": 1,
        "pp_size": 4,
        "ep_size": 1,
    }
    assert max(map(len, tables.lines)) <= 80, max(tables.lines, key=len)
    assert len([line for line in tables.lines if "a tenth of device" in line]) == 1
    answers = complete({"num_processes": 4}, machine, former=plan.answers).answers
    assert (answers["zero_stage"], answers["pp_size"]) == (plan.answers["zero_stage"], 4)


def test_a_plan_that_does_not_fit_says_by_how_much() -> None:
    from zeroaccel.cli.config.memory_plan import _short
    from zeroaccel.estimate import Capacity, Workload, plan_table

    workload, capacity = Workload(ranks=2, sequence=64), Capacity(device=2**20, host=2**30)
    row = plan_table("1m", workload, capacity)[0]
    assert row.short_of == "device"
    assert _short(row, workload, capacity).startswith("no: device 0.0")
    assert _short(row, workload, capacity).endswith(" GiB")
    assert _short(plan_table("1m", workload, Capacity())[0], workload, Capacity()) == ""
