"""Adds one row to the table of settings, and prints where it is found, as JSON. The argument is a folder."""

from __future__ import annotations

import inspect
import json
import os
import sys
from pathlib import Path
from typing import Any

from zeroaccel.config.launch import setting_table as table
from zeroaccel.config.launch.setting import Ask, Choice, Setting

ROW = Setting(
    "sub_group_size",
    "count",
    table.TRAINING,
    "Number of parameters per sub-group. [default: the JSON config's]",
    section=table.ZERO_SECTION,
    same={"group_numel": ""},
    rank_variable="ACCELERATE_DEEPSPEED_SUB_GROUP_SIZE",
    json_path="zero_optimization.sub_group_size",
    ask=Ask("How many parameters has a sub-group?", "zero open", 1000),
)
WORD = Setting(
    "update_place",
    "choice",
    table.TRAINING,
    "Place of the update.",
    choices=("here", "there"),
    ask=Ask("Where is the update?", choices=(Choice("here", "on this side"), Choice("there"))),
)
for row in (ROW, WORD):
    table.ROWS[row.name] = table.SETTINGS[row.name] = row


def found(folder: Path) -> dict[str, Any]:
    """Returns every place that should know the rows, with its content."""
    import pages
    from click.shell_completion import ShellComplete
    from click.testing import CliRunner

    from zeroaccel.accelerate.zero_plugin import ZeroPlugin
    from zeroaccel.cli.config.answers import complete, parse
    from zeroaccel.cli.config.config_file import answers_of, render
    from zeroaccel.cli.config.convert import convert_launch
    from zeroaccel.cli.config.questions import by_key
    from zeroaccel.cli.launch.launch_command import launch
    from zeroaccel.cli.launch.typed_settings import TypedSettings
    from zeroaccel.cli.machine import Machine
    from zeroaccel.cli.main import main
    from zeroaccel.config.launch.launch_file import parse_launch_file
    from zeroaccel.config.launch.launch_sources import from_environment, known_variables, launched_environment
    from zeroaccel.config.launch.resolution import resolve
    from zeroaccel.errors import ConfigError

    def run(*words: str) -> str:
        return CliRunner().invoke(main, words).output

    def typed(*words: str) -> TypedSettings:
        return TypedSettings.of(launch.make_context("launch", [*words, "train.py"]).params)

    def plugin(**arguments: Any) -> Any:
        return ZeroPlugin(zero_stage=3, **arguments).deepspeed_config["zero_optimization"]["sub_group_size"]

    file = parse_launch_file("deepspeed_config:\n  zero_stage: 3\n  sub_group_size: 7\n", "z.yaml")
    answers = complete({"num_processes": 1}, Machine()).answers
    ours = resolve(typed("--group_numel", "9").settings, {"ZEROACCEL_SUB_GROUP_SIZE": "8"}, file=lambda _: file)[0]
    variables = launched_environment(ours.settings(), ours.sources)
    (folder / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 3, "sub_group_size": 5}}))
    words = typed("--sub_group_size", "6", "--deepspeed_config_file", str(folder / "ds.json"))
    try:
        conflict = str(resolve(words.settings))
    except ConfigError as error:
        conflict = str(error).replace(f"{folder}/", "")
    os.environ |= variables
    by_launcher = plugin()
    with_shell = ShellComplete(main, {}, "zeroaccel", "_ZEROACCEL_COMPLETE")
    return {
        "help": "--sub_group_size N" in run("launch", "--help"),
        "file": [file.values["sub_group_size"], file.sources["sub_group_size"]],
        "resolved": [ours.values["sub_group_size"], ours.sources["sub_group_size"]],
        "variable": "ZEROACCEL_SUB_GROUP_SIZE" in known_variables(),
        "ranks": from_environment(variables)[0].sub_group_size,
        "plugin": [by_launcher, "sub_group_size" in inspect.signature(ZeroPlugin).parameters],
        "json": conflict,
        "question": [by_key("sub_group_size").ask.words, answers["sub_group_size"]],
        "answer": parse(by_key("update_place"), "THERE"),
        "written": "sub_group_size: 1000\n" in render(answers),
        "read back": answers_of(file)[0]["sub_group_size"],
        "config flag": "--sub_group_size N" in run("config", "--help"),
        "convert": convert_launch("num_processes: 2\ndeepspeed_config:\n  sub_group_size: 3\n", "a.yaml")[0],
        "explain": run("config", "explain", "group_numel").splitlines(),
        "page": [line for line in pages._launch_keys() if "sub_group_size" in line],
        "completion": [one.value for one in with_shell.get_completions(["launch"], "--sub_")],
        "value completion": [one.value for one in with_shell.get_completions(["launch", "--update_place"], "t")],
    }


if __name__ == "__main__":
    print(json.dumps(found(Path(sys.argv[1]))))
