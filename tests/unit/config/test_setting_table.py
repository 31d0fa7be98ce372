"""The table of settings: every place finds a new row, and the functions that rows name exist."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.support.environment import ROOT
from tests.support.job import run_command
from zeroaccel.cli.config.questions import QUESTIONS
from zeroaccel.config.launch.setting_table import ROWS

pytest.importorskip("mkdocs")


def test_a_setting_is_one_row(tmp_path: Path) -> None:
    script = Path(__file__).with_name("added_row.py")
    path = f"{ROOT / 'docs' / 'site'}:{ROOT}"
    done = run_command([sys.executable, str(script), str(tmp_path)], env={"PYTHONPATH": path}, fresh=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "help": True,
        "file": [7, "z.yaml:3:3"],
        "resolved": [9, "--group_numel"],
        "variable": True,
        "ranks": 9,
        "plugin": [9, True],
        "json": "--sub_group_size 6: conflicts with ds.json:1:36: zero_optimization.sub_group_size 5; remove it here, "
        'or write "auto" there to use this one',
        "question": ["How many parameters has a sub-group?", 1000],
        "answer": "there",
        "written": True,
        "read back": 7,
        "config flag": True,
        "convert": {"num_processes": 2, "deepspeed_config": {"sub_group_size": 3}},
        "explain": [
            "sub_group_size: Number of parameters per sub-group.",
            "  flag         --sub_group_size, --group_numel",
            "  environment  ZEROACCEL_SUB_GROUP_SIZE, ACCELERATE_DEEPSPEED_SUB_GROUP_SIZE",
            "  launch file  deepspeed_config.sub_group_size",
            "  JSON config  zero_optimization.sub_group_size",
            "  form         a whole number",
            "  default      the JSON config's",
            "  read by      the ranks",
        ],
        "page": [
            "| `deepspeed_config.sub_group_size` | `--sub_group_size` | `ZEROACCEL_SUB_GROUP_SIZE`, "
            "`ACCELERATE_DEEPSPEED_SUB_GROUP_SIZE` | Number of parameters per sub-group. [default: the JSON config's] "
            "| the ranks |"
        ],
        "completion": ["--sub_group_size"],
        "value completion": ["there"],
    }


def test_every_question_has_the_functions_that_its_row_names() -> None:
    from zeroaccel.cli.config import questions

    for question in QUESTIONS:
        ask = question.ask
        assert set(ask.when.split()) <= set(questions._CONDITIONS), question.key
        assert not ask.computed or ask.computed in questions._COMPUTED, question.key
        assert not ask.check or ask.check in questions._CHECKS, question.key
        assert {choice.unless for choice in question.choices} <= {"", *questions._IMPOSSIBLE}, question.key


def test_no_two_settings_have_the_same_name_as_a_flag_or_a_variable() -> None:
    names = [name for row in ROWS.values() for name in (row.flag_name, row.short, *row.spelled, *row.same, *row.means)]
    variables = [variable for row in ROWS.values() for variable in row.read_variables]
    for each in ([name for name in names if name], variables):
        assert len(each) == len(set(each))
