"""Whether a script takes --local_rank is read from its source, which does not run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.environment import outside_any_job
from zeroaccel.cli.launch import runner
from zeroaccel.cli.launch.launch_plan import local_rank_option

ARGPARSE = "import argparse\np = argparse.ArgumentParser()\np.add_argument({}, type=int, default=-1)\n"


@pytest.mark.parametrize(
    ("source", "option"),
    [
        (ARGPARSE.format("'--local_rank'"), "--local_rank"),
        (ARGPARSE.format("'--local-rank'"), "--local-rank"),
        (ARGPARSE.format("'-r', '--local_rank'"), "--local_rank"),
        (
            "import click\n@click.command()\n@click.option('--local_rank', type=int)\ndef main(local_rank): ...",
            "--local_rank",
        ),
        ("import fire\ndef train(lr: float = 1.0, local_rank: int = -1): ...\nfire.Fire(train)\n", "--local_rank"),
        ("import fire\ndef train(lr: float = 1.0): ...\nfire.Fire(train)\n", None),
        (ARGPARSE.format("'--rank'"), None),
        ("text = '--local_rank'\n# add_argument('--local_rank')\n", None),
        ("raise SystemExit('this must not run')\n", None),
        ("def broken(:\n", None),
        ("", None),
    ],
)
def test_what_a_script_declares(source: str, option: str | None, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(source)
    assert local_rank_option(script) == option


def test_modules_beside_the_script_are_read_too(tmp_path: Path) -> None:
    package = tmp_path / "project"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "arguments.py").write_text("from . import more\nfrom .. import nothing\nimport torch\n")
    (package / "more.py").write_text(f"import project.arguments\n{ARGPARSE.format(repr('--local_rank'))}")
    (tmp_path / "train.py").write_text("import os\nfrom project.arguments import parse\n")
    assert local_rank_option(tmp_path / "train.py") == "--local_rank"
    (package / "more.py").write_bytes(b"\xff\xfe\x00")  # no Python
    assert local_rank_option(tmp_path / "train.py") is None
    assert local_rank_option(tmp_path / "absent.py") is None


@pytest.mark.parametrize("program", [("s.py",), ("-m", "s")])
def test_the_runner_puts_the_local_rank_before_what_was_given(program: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text("import json, sys\nprint(json.dumps(sys.argv))\n")
    done = subprocess.run(
        [sys.executable, runner.__file__, "--local_rank_as=--local-rank", *program, "a"],
        cwd=tmp_path,
        env=outside_any_job() | {"LOCAL_RANK": "3"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout)[1:] == ["--local-rank=3", "a"]
