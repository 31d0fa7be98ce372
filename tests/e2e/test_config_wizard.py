"""The questionnaire in a pseudo-terminal, key by key; the printed flags produce the same bytes."""

from __future__ import annotations

import io
import json
import re
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pexpect
import pytest
from click.testing import CliRunner

from tests import time_limits
from tests.support.environment import ROOT, outside_any_job
from tests.support.screen import lines_of
from zeroaccel.cli.main import main

CONFIG = ["-m", "zeroaccel.cli", "config"]
ENTER, DOWN, UP, CLEAR, CTRL_C = "\r", "\x1b[B", "\x1b[A", "\x15", "\x03"
FILE = "zeroaccel.yaml"


class Terminal:
    """A user at the questionnaire: waits for words, then presses keys."""

    def __init__(self, process: pexpect.spawn[str]) -> None:
        self.process = process
        self._log = process.logfile_read = io.StringIO()

    @property
    def everything(self) -> str:
        """All output so far, as plain text."""
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self._log.getvalue())

    def screen(self, columns: int) -> list[str]:
        """The lines that a terminal of this width shows now."""
        return lines_of(self._log.getvalue(), columns)

    def at(self, words: str, keys: str = ENTER) -> None:
        self.process.expect_exact(words)
        self.process.expect_exact("quit")  # waits until the prompt is drawn completely
        self.process.send(keys)

    def ends(self) -> tuple[int, str]:
        """Waits for the end; returns the exit code and the output since the last prompt, as plain text."""
        self.process.expect(pexpect.EOF)
        said = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.process.before or "")
        self.process.close()
        return (128 + self.process.signalstatus if self.process.signalstatus else self.process.exitstatus), said


@contextmanager
def _terminal(folder: Path, *flags: str, columns: int = 200) -> Iterator[Terminal]:
    # A prompt waits a second for the terminal to report its cursor position; this terminal never does.
    terminal = {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "NO_COLOR": "1"}
    environment = outside_any_job() | terminal | {"CI": "", "XDG_CONFIG_HOME": str(folder)}
    process = pexpect.spawn(
        sys.executable,
        [*CONFIG, *flags],
        env=environment,
        cwd=str(folder),
        encoding="utf-8",
        timeout=time_limits.seconds(40),
        dimensions=(60, columns),
    )
    try:
        yield Terminal(process)
    finally:
        process.close(force=True)


def _by_flags(folder: Path, said: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs the printed command in another folder and returns the file that it makes."""
    line = next(line for line in said.splitlines() if line.startswith("again:"))
    words = shlex.split(line.removeprefix("again:"))[1:]
    elsewhere = folder / "again"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.stderr
    assert result.stdout == ""
    return (elsewhere / FILE).read_text()


def _until_stage(person: Terminal) -> None:
    """Accepts the defaults up to the question of the stage."""
    for words in ("Run on the CPU only", "How many machines"):
        person.at(words)
    person.at("How many processes", f"{CLEAR}2{ENTER}")
    for words in ("Shard the training with ZeRO", "Do you have a JSON", "Which precision?", "What will you train"):
        person.at(words)
    person.at("Use tensor, sequence, pipeline or expert")


def _accept_the_rest(person: Terminal) -> tuple[int, str]:
    """Accepts the defaults from the question after gradient accumulation on; returns the exit status and the output."""
    for words in ("Clip gradients?", "frozen base model", "Gather the whole model", "zero.Init", "mixture-of-experts"):
        person.at(words)
    person.at("Compile the model")
    person.at(f"Write {FILE}?")
    return person.ends()


def test_without_a_json_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with _terminal(tmp_path) as person:
        person.process.expect_exact("this machine")
        _until_stage(person)
        person.at("Which stage of ZeRO?", UP + ENTER)  # from 2 to 1
        person.at("Where are optimizer states stored?")
        person.at("gradient accumulation steps", "0")  # replaces the default
        person.process.expect_exact("expected a number of at least 1, got 0")
        person.process.send(f"{CLEAR}4{ENTER}")
        person.at("Clip gradients?", UP + ENTER)
        person.at("maximum norm", f"0.5{ENTER}")
        person.at("frozen base model")
        person.at("Compile the model")
        person.at(f"Write {FILE}?")
        code, said = person.ends()
    assert code == 0
    text = (tmp_path / FILE).read_text()
    assert "  zero_stage: 1\n" in text
    assert "  gradient_accumulation_steps: 4\n  gradient_clipping: 0.5\n" in text
    assert "written: zeroaccel.yaml\r\nstart:   zeroaccel launch train.py\r\n" in said
    assert re.fullmatch(r"trains:  with ZeRO stage 1, \d+ process(es)?", said.splitlines()[-1])
    assert _by_flags(tmp_path, said, monkeypatch) == text


def test_with_a_json_config_and_an_existing_file(tmp_path: Path) -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / FILE).write_text("num_processes: 7\n")
    with _terminal(tmp_path, "--num_processes", "2") as person:
        person.at("Run on the CPU only")
        person.at("How many machines")
        person.at("Shard the training with ZeRO")
        person.at("Do you have a JSON config", UP + ENTER)
        person.at("Where is the JSON config?", "nowhere.json")
        person.process.expect_exact("there is no file nowhere.json")
        person.process.send(f"{CLEAR}broken.json")
        person.process.expect_exact("valid JSON: expecting property name")
        person.process.send(f"{CLEAR}ds.json{ENTER}")
        person.process.expect_exact("ds.json decides zero_stage 2, mixed_precision bf16; these questions are skipped")
        person.at("Use tensor, sequence, pipeline or expert")
        person.at("Compile the model")  # all other answers are fixed by now
        person.process.expect_exact("-num_processes: 7")
        person.at(f"Write {FILE}?")
        code, said = person.ends()
    assert code == 0
    text = (tmp_path / FILE).read_text()
    assert "num_processes: 2\ndeepspeed_config:\n  deepspeed_config_file: ds.json\n" in text
    assert "mixed_precision" not in text
    assert (tmp_path / f"{FILE}.bak").read_text() == "num_processes: 7\n"
    assert "(the former content is in zeroaccel.yaml.bak)" in said


@pytest.mark.slow
def test_stage_3_on_nvme_after_going_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with _terminal(tmp_path, "--use_cpu", "yes", "--num_machines", "1") as person:
        person.at("How many processes", f"2{ENTER}")
        person.at("Shard the training with ZeRO")
        person.at("Do you have a JSON config")
        person.at("Which precision?")
        person.at("What will you train")
        person.at("Use tensor, sequence, pipeline or expert")
        person.at("Which stage of ZeRO?")
        person.at("Where are optimizer states stored?", DOWN * 3 + ENTER)  # below the three tiers: the entry to go back
        person.at("Which stage of ZeRO?", DOWN + ENTER)  # and from 2 to 3
        person.at("Where are optimizer states stored?", DOWN * 2 + ENTER)
        person.at("Where are parameters stored", DOWN + ENTER)
        person.at("In which local folder are optimizer states stored?", f"{CLEAR}/proc{ENTER}")
        person.process.expect_exact("/proc is not on a disk")
        person.process.send(f"{CLEAR}{tmp_path}{ENTER}")
        person.at("gradient accumulation steps", f"{CLEAR}<{ENTER}")  # and back from a text input
        person.at("In which local folder are optimizer states stored?")
        person.at("gradient accumulation steps")
        code, said = _accept_the_rest(person)
    assert code == 0
    text = (tmp_path / FILE).read_text()
    assert "  zero_stage: 3\n  offload_optimizer_device: nvme\n  offload_param_device: cpu\n" in text
    assert f"  offload_optimizer_nvme_path: {tmp_path}\n" in text
    assert _by_flags(tmp_path, said, monkeypatch) == text


@pytest.mark.slow
def test_a_plan_answers_mesh_and_stage_and_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with _terminal(tmp_path, "--num_processes", "2", "--use_cpu", "yes", "--num_machines", "1", columns=80) as person:
        person.at("Shard the training with ZeRO")
        person.at("Do you have a JSON config")
        person.at("Which precision?")
        person.at("What will you train", "llama-3.1-8" + ENTER)
        person.process.expect(r"did\s+you\s+mean\s+llama-3\.1-8b")
        person.at("What will you train", "1m" + ENTER)
        person.at("How many tokens per sample?", f"64{ENTER}")
        person.at("How many samples per process")
        person.at("Which mesh of 2 processes?", DOWN + ENTER)  # below the recommended plan
        person.at("Which plan, for", DOWN * 2 + ENTER)  # the third line: stage 3
        person.at("gradient accumulation steps", f"<{ENTER}")  # back to the plan, which is still selected
        person.at("Which plan, for")
        person.at("gradient accumulation steps")  # skips the questions that the plan answers
        code, said = _accept_the_rest(person)
    assert code == 0
    text = (tmp_path / FILE).read_text()
    assert "  zero_stage: 3\n" in text
    assert re.search(r"parallelism_config:\n  parallelism_config_\w+: 2\n|parallelism_config:\n  pp_size: 2\n", text)
    assert "1m takes " in person.everything
    assert _by_flags(tmp_path, said, monkeypatch) == text


@pytest.mark.slow
def test_the_recorded_terminal_is_that_of_the_questionnaire(tmp_path: Path) -> None:
    with _terminal(tmp_path, "--num_processes", "2", "--use_cpu", "yes", "--num_machines", "1", columns=96) as person:
        for words in ("Shard the training with ZeRO", "Do you have a JSON config", "Which precision?"):
            person.at(words)
        person.at("What will you train", f"125m{ENTER}")
        for words in ("How many tokens per sample?", "How many samples per process", "Which mesh of 2 processes?"):
            person.at(words)
        person.process.expect_exact("Which plan, for")
        person.process.expect_exact("quit without writing")
        shown = person.screen(96)
        person.process.send(CTRL_C)
        person.ends()
    # Without the facts of this machine, which come first and in the line of free memory.
    lines = [re.sub(r"host [\d.]+, disk [\d.]+", "host 24, disk 66", line) for line in shown]
    lines = lines[next(number for number, line in enumerate(lines) if line.startswith("?")) :]
    (tmp_path / "wizard.txt").write_text("\n".join(lines) + "\n")
    recorded = ROOT / "docs" / "site" / "recorded" / "wizard.txt"
    assert lines == recorded.read_text().splitlines(), f"copy {tmp_path}/wizard.txt, then run docs/site/pictures.py"


@pytest.mark.parametrize("typed", [CTRL_C, pytest.param(f":q{ENTER}", marks=pytest.mark.slow)], ids=["control c", ":q"])
def test_leaving_at_a_question_writes_nothing(tmp_path: Path, typed: str) -> None:
    with _terminal(tmp_path, "--use_cpu", "yes") as person:
        person.at("How many machines", typed)
        code, said = person.ends()
    assert (code, said.splitlines()[-1]) == (130, "nothing was written")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", ["estimate 70b --ranks 32 --meshes", "estimate 7b --html page.html"])
def test_control_c_while_it_computes(words: str, tmp_path: Path) -> None:
    process = pexpect.spawn(
        sys.executable,
        ["-m", "zeroaccel.cli", *words.split(), "--device_memory", "80GB"],
        env=outside_any_job() | {"TERM": "xterm", "NO_COLOR": "1"},
        cwd=str(tmp_path),
        encoding="utf-8",
        timeout=time_limits.seconds(40),
        dimensions=(24, 40),  # the terminal cuts a wider line, so that it stays one line
    )
    seconds = 0.0 if "--html" in words else 3.0  # while it imports, and while it computes
    process.expect(r"[-/|\\] zeroaccel: estimating [^\r\n]{5,25}\r")
    time.sleep(seconds)
    process.send(CTRL_C)
    process.expect(pexpect.EOF)
    process.close()
    assert process.exitstatus == 130
    assert list(tmp_path.iterdir()) == []


def test_what_is_typed_while_it_computes_answers_no_question(tmp_path: Path) -> None:
    with _terminal(tmp_path, "--use_cpu", "yes") as person:
        person.process.send(ENTER * 3)  # it examines the machine now
        person.process.expect_exact("How many machines")
        with pytest.raises(pexpect.TIMEOUT):
            person.process.expect_exact("How many processes", timeout=2)
        person.process.send(CTRL_C)
        code, _ = person.ends()
    assert code == 130


def test_addresses_and_ports_are_checked_and_shared_layers_across_machines_cautioned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["config", "--yes", "--num_machines", "2", "--num_processes", "4", "--use_cpu", "yes", "--zero_stage", "1"]
    for flag, value, message in (
        ("--main_process_ip", "10.0.0.256", "10.0.0.256 is not an IP address"),
        ("--main_process_ip", "http://node", "is not an IP address"),
        ("--main_process_ip", "no de", "'no de' is not a host name"),
        ("--main_process_port", "70000", "70000 is not a port"),
    ):
        rest = ["--main_process_ip", "node0"] if flag != "--main_process_ip" else []
        result = CliRunner().invoke(main, [*words, *rest, flag, value])
        assert result.exit_code == 2
        assert message in result.stderr
    shared = ["--main_process_ip", "fe80::1", "--use_parallelism_config", "yes", "--tp_size", "4"]
    result = CliRunner().invoke(main, [*words, *shared])
    assert result.exit_code == 0, result.stderr
    assert "caution: tp_size 4 divides layers across machines of 2 processes" in result.stderr
    assert result.stderr.splitlines()[-1] == "trains:  with ZeRO stage 1, 4 processes"
