"""The command line: few imports, help texts, and one message for every mistake."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import zeroaccel
from tests.support.commands import typed
from tests.support.job import run_command
from tests.support.mesh_training import NEEDS_STAGES
from zeroaccel.cli.main import SUB_COMMANDS, main

SCRIPT = "train.py"


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A script in the working directory."""
    (tmp_path / SCRIPT).touch()
    monkeypatch.chdir(tmp_path)
    return SCRIPT


@NEEDS_STAGES  # an older torch imports sympy itself
def test_torchs_schedules_are_imported_for_a_pipeline_only() -> None:
    """They import torch's compiler and sympy, which took a quarter of the time of `zeroaccel estimate`."""
    check = (
        "import sys, zeroaccel.estimate, zeroaccel.initialization\n"
        "assert not {'torch.distributed.pipelining', 'torch._dynamo', 'sympy', 'transformers'} & set(sys.modules)\n"
        "from zeroaccel.parallel import PipelineEngine\nfrom zeroaccel.engine import EngineBase\n"
        "assert 'torch.distributed.pipelining' in sys.modules and issubclass(PipelineEngine, EngineBase)"
    )
    done = run_command([sys.executable, "-c", check], fresh=True)
    assert done.returncode == 0, done.stderr


def test_the_package_is_a_program(tmp_path: Path) -> None:
    done = run_command([sys.executable, "-m", "zeroaccel.cli", "--version"], cwd=tmp_path, fresh=True)
    assert done.stdout.startswith(f"zeroaccel {zeroaccel.__version__} (torch 2.")


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("zeroaccel la", ["launch"]),
        ("zeroaccel config exp", ["explain"]),
        ("zeroaccel config --zero_st", ["--zero_stage"]),
        ("zeroaccel launch --deepspeed_c", ["--deepspeed_config_file"]),
    ],
)
def test_the_shell_completes_commands_and_flags(
    words: str, completed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"_ZEROACCEL_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    for name, value in asked.items():
        monkeypatch.setenv(name, value)
    assert [line.removeprefix("plain,") for line in typed("").out.split()] == completed


def test_help_names_every_command() -> None:
    shown = typed("").out
    assert all(f"  {name} " in shown for name in SUB_COMMANDS)


def test_every_command_can_be_imported() -> None:
    context = main.make_context("zeroaccel", [], resilient_parsing=True)
    for name in SUB_COMMANDS:
        command = main.get_command(context, name)
        assert command is not None
        assert command.name == name


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["lanch"], "No such command 'lanch'. Did you mean launch?"),
        (["launch", "--num_proceses", "2", SCRIPT], "--num_processes"),
        (["launch", "--num_processes", "two", SCRIPT], "--num_processes: expected a whole number, got 'two'"),
        (["launch", "--num-processes", "-3", SCRIPT], "--num_processes: expected a number above 0, got -3"),
        (["launch"], "Missing argument 'SCRIPT'"),
        (["launch", "--module", "--no-python", SCRIPT], "exclude each other"),
        (["launch", "--tee", "0=3", SCRIPT], "0:3,1:2"),
        (["launch", "--rdzv_conf", "timeout", SCRIPT], "--rdzv_conf: expected the form KEY=NUMBER"),
        (["launch", "--rdzv_backend", "etcd", SCRIPT], "--rdzv_backend: expected 'static' or 'c10d', got 'etcd'"),
    ],
)
def test_a_mistake_is_one_message_on_stderr_and_exit_code_2(arguments: list[str], words: str, script: str) -> None:
    said = typed("", *arguments, code=2)
    assert said.out == ""
    assert said.err.startswith("zeroaccel: ")
    assert said.err.count("\n") == 1
    assert words in said.err


def test_several_wrong_settings_are_reported_together(script: str) -> None:
    assert [
        line.split(":")[0]
        for line in typed("launch --max_restarts -1 --monitor_interval 0", script, code=2).err.splitlines()[1:]
    ] == [
        "  --max_restarts",
        "  --monitor_interval",
    ]


def test_options_after_the_script_are_the_scripts(script: str) -> None:
    shown = typed("launch --cpu --dry-run", script, "--num_processes", "7", "--dry-run", "--", "-x").out
    assert "WORLD_SIZE=1" in shown
    assert shown.rstrip().endswith(f"{script} --num_processes 7 --dry-run -- -x")


def test_the_dry_run_prints_each_process_and_nothing_else(script: str) -> None:
    said = typed("launch --cpu --num_processes 3 --timeout 5 --dry_run", script, "a b")
    assert said.err == ""
    commands = [line for line in said.out.splitlines() if not line.startswith("#")]
    assert len(commands) == 3
    for rank, line in enumerate(commands):
        assert line.startswith(f"RANK={rank} LOCAL_RANK={rank} WORLD_SIZE=3 LOCAL_WORLD_SIZE=3 MASTER_ADDR=127.0.0.1")
        assert "ZEROACCEL_COLLECTIVE_TIMEOUT=5" in line
        assert "CUDA_VISIBLE_DEVICES=''" in line
        assert line.endswith("train.py 'a b'")


def test_debug_may_come_from_the_environment(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for value, expected in [("0", False), ("1", True)]:
        monkeypatch.setenv("ZEROACCEL_DEBUG", value)
        assert ("ZEROACCEL_DEBUG=1" in typed("launch --cpu --dry_run", script).out) is expected


@pytest.mark.parametrize(
    ("name", "here"),
    [("merge-weights", "zero-to-fp32"), ("estimate-memory", "estimate"), ("ds_report", "doctor")],
)
def test_names_of_accelerate_and_deepspeed_lead_to_ours(name: str, here: str) -> None:
    assert f"No such command '{name}'; zeroaccel {here}" in typed(name, code=2).err


def _commands(command: click.Command, path: str, above: click.Context | None) -> Iterator[tuple[str, click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        ctx = click.Context(command, info_name=path, parent=above)
        for name in command.list_commands(ctx):
            below = command.get_command(ctx, name)
            assert below is not None
            yield from _commands(below, f"{path} {name}", ctx)


def test_every_help_has_examples_and_no_long_list_without_groups() -> None:
    seen = {}
    for path, command in _commands(main, "zeroaccel", None):
        shown = CliRunner().invoke(main, [*path.split()[1:], "--help"]).output
        assert "Examples:\n" in shown or "examples:\n" in shown, path
        flags = [param for param in command.params if isinstance(param, click.Option) and not param.hidden]
        headings = re.findall(r"^[A-Z][^\n]*:$", shown, re.MULTILINE)
        assert len(flags) <= 8 or len(headings) >= 4, path
        seen[path] = len(flags)
    assert len(seen) > 20


def test_misspelt_flags_are_answered_with_the_one_that_was_meant() -> None:
    tried = 0
    for path, command in _commands(main, "zeroaccel", None):
        option = next(
            (p for p in command.params if isinstance(p, click.Option) and len(p.opts[0]) > 6 and not p.hidden), None
        )
        if option is None or path in ("zeroaccel verify", "zeroaccel trace"):  # they pass unknown flags on to launch
            continue
        wrong = option.opts[0][:-2] + option.opts[0][-1] + option.opts[0][-2]
        if wrong == option.opts[0]:
            wrong += "x"
        said = typed("", *path.split()[1:], wrong, code=2).err
        assert "did you mean" in said.lower(), path
        assert option.opts[0].lstrip("-")[:4] in said.lower().split("did you mean")[1].replace("-", "_"), path
        tried += 1
    assert tried > 10


def test_flags_of_the_launcher_after_the_script_are_noted(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    for flag in ("--num_processes", "--num-processes=2", "--zero_stage"):
        said = typed("launch --cpu --dry_run", tmp_path / "train.py", flag, "2")
        assert f"note: {flag} after" in said.err
        assert "goes to the script; the launcher's own flags come before" in said.err
    assert "note:" not in typed("launch --cpu --dry_run", tmp_path / "train.py", "--lr", "2").err
