"""Runs unedited scripts of other projects with zeroaccel and as plain DDP, and compares their losses.

    python tests/interop/scripts --sources DIR --work DIR [--only 'cifar*'] [--table FILE]

Runs in the environment of `make .venv/.installed`, with further packages that the scripts import:

    .venv/bin/pip install evaluate scikit-learn schedulefree nltk fire loguru pytz sh bitsandbytes
    .venv/bin/pip install --no-deps torchvision==0.28.0 albumentations albucore==0.0.24 torchmetrics \
        lightning-utilities opencv-python-headless pycocotools scipy stringzilla simsimd

`pictures/` replaces torchvision and timm for accelerate's examples, `sounds/` torchcodec. The folder of sources has
checkouts with these names:

    DeepSpeedExamples  github.com/deepspeedai/DeepSpeedExamples: training/, applications/DeepSpeed-Chat/
    accelerate         github.com/huggingface/accelerate: examples/
    transformers       github.com/huggingface/transformers: examples/pytorch/, which the sdist does not have
    trl                github.com/huggingface/trl: trl/scripts/, trl/accelerate_configs/, examples/scripts/
    peft               github.com/huggingface/peft: examples/

DeepSpeed-Chat imports `no_init_weights` of `transformers.modeling_utils`, which transformers 5 does not have: its rows
need an environment with "transformers==4.56.2" "accelerate==1.10.1" "datasets==4.0.0". Rows with a generator need one
with "trl==1.10.0", whose client does without CUDA; `generator/` is vLLM's part of that. A row whose script or packages
are missing is not run, and its line says what is missing.

Each run gets two CPU ranks, its seeds from `on_path/sitecustomize.py`, and a log in the working folder,
`runs/ROW/WAY/log`. A row with results does not run again. The last column has the number of saved folders that plain
transformers or PEFT loaded with the values of their files, and the greatest difference of a tensor from that of the DDP
run, relative to the tensor's greatest value.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from inputs import write_inputs
from saved import compare_saved
from scripts import SCRIPTS, Script, missing

_HERE = Path(__file__).parent
_WAYS = ("zeroaccel", "plain")
# Optimizer and scheduler are Trainer's own in both runs, as DeepSpeed's WarmupDecayLR is another schedule.
_ZERO3: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": "auto",
    "train_batch_size": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


class Runner:
    """Runs rows in the working folder; each run writes `runs/ROW/WAY/`: log, losses by rank, result, output."""

    def __init__(self, sources: Path, work: Path, seconds: float) -> None:
        self._sources, self._work, self._seconds = sources.resolve(), work.resolve(), seconds

    def run(self, script: Script, way: str) -> dict[str, object]:
        """Returns a run's exit status, seconds and losses by rank; reads them from its folder if it ran before."""
        folder = self._folder(script, way)
        result = folder / "result.json"
        if result.exists():
            made: dict[str, object] = json.loads(result.read_text())
            return made
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "out").mkdir(parents=True)
        if script.after:
            shutil.copytree(self._named(script.after, way) / "out", folder / "out", dirs_exist_ok=True)
        ports = dict(zip(("port", "group_port"), _free_ports(2), strict=True))
        command = self._command(script, way, folder, ports)
        begun = time.perf_counter()
        with (folder / "log").open("w") as log:
            log.write(f"$ {shlex.join(command)}\n")
            log.flush()
            environment = self._environment(script, way, folder)
            try:
                with self._generator(script, folder, ports["port"], environment):
                    status = subprocess.run(
                        command,
                        cwd=self._place(folder) if script.inside else self._work,
                        env=environment,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        timeout=self._seconds,
                        check=False,
                    ).returncode
            except subprocess.TimeoutExpired:
                status = -1
        losses = [[float(line) for line in path.read_text().split()] for path in sorted(folder.glob("losses.*"))]
        made = {"status": status, "seconds": time.perf_counter() - begun, "losses": losses}
        if script.measure and status == 0:
            measured = json.loads((folder / "out" / "all_results.json").read_text())[script.measure]
            made["losses"] = [[float(measured)]]
        result.write_text(json.dumps(made))
        return made

    @contextmanager
    def _generator(self, script: Script, folder: Path, port: int, environment: dict[str, str]) -> Iterator[None]:
        if not script.generator:
            yield
            return
        server = str(_HERE / "generator" / "server.py")
        asked = ["--model", script.generator, "--port", str(port), "--log", str(folder / "received")]
        with (folder / "generator.log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, server, *asked], cwd=self._work, env=environment, stdout=log, stderr=subprocess.STDOUT
            )
            try:
                yield
            finally:
                process.kill()
                process.wait()

    def saved(self, script: Script) -> str:
        """Compares the saved files of both runs."""
        with contextlib.chdir(self._work):
            return compare_saved(*(self._folder(script, way) / "out" for way in _WAYS))

    def _place(self, folder: Path) -> Path:
        """Makes the run's output folder a working folder, too, with links to the inputs."""
        for path in self._work.iterdir():
            if path.name not in ("runs", "commands", "hf_home"):
                (folder / "out" / path.name).symlink_to(path)
        return folder / "out"

    def is_done(self, script: Script) -> bool:
        """Returns True if both runs of a row have results."""
        return all((self._folder(script, way) / "result.json").exists() for way in _WAYS)

    def forget(self, script: Script) -> None:
        """Deletes a row's results, so that it runs again."""
        for way in _WAYS:
            (self._folder(script, way) / "result.json").unlink(missing_ok=True)

    def _folder(self, script: Script, way: str) -> Path:
        return self._named(script.plainly if way == "plain" and script.plainly else script.name, way)

    def _named(self, name: str, way: str) -> Path:
        return self._work / "runs" / name.replace(" ", "_").replace(",", "") / way

    def _command(self, script: Script, way: str, folder: Path, ports: dict[str, int]) -> list[str]:
        if script.imports and way == "zeroaccel":
            path = str(self._changed(script, folder))
        else:
            path = script.path if script.path.startswith("-m ") else str(self._sources / script.path)
        if way == "zeroaccel":
            launcher = f"-m zeroaccel.cli launch {script.launch}"
            if script.command == "deepspeed":
                launcher = f"{self._work}/commands/bin/deepspeed {script.launch}"
            arguments = f"{script.arguments} {script.extra}"
        else:
            launcher, arguments = script.plain, f"{script.arguments} {script.plain_extra}"
        line = f"{launcher} {path} {arguments}"
        return [sys.executable, *shlex.split(line.format(out=folder / "out", sources=self._sources, **ports))]

    def _changed(self, script: Script, folder: Path) -> Path:
        """Writes a copy of the script that differs only in the imported package."""
        source = self._sources / script.path
        lines = source.read_text().splitlines(keepends=True)
        copy = folder / source.name
        copy.write_text(
            "".join(
                line.replace("accelerate", "zeroaccel")
                if line.lstrip().startswith(("from accelerate", "import accelerate"))
                else line
                for line in lines
            )
        )
        return copy

    def _environment(self, script: Script, way: str, folder: Path) -> dict[str, str]:
        path = [str(_HERE / "on_path")]
        if script.command == "deepspeed" and way == "zeroaccel":
            path.append(str(self._work / "commands" / "lib"))
        if script.generator:
            path.append(str(_HERE / "generator"))
        if script.sounds:
            path.append(str(_HERE / "sounds"))
        if script.pictures:
            path.append(str(_HERE / "pictures"))
        if script.path.startswith("DeepSpeedExamples/applications"):
            path.append(str(self._sources / "DeepSpeedExamples/applications/DeepSpeed-Chat"))
        if script.stands_in and way == "plain":
            path.insert(0, str(_HERE / "plain"))
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*path, *filter(None, [os.environ.get("PYTHONPATH")])]),
            "FOREIGN_SCRIPTS_LOSSES": str(folder / "losses"),
            "PYTHONDONTWRITEBYTECODE": "",
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(self._work / "hf_home"),
            "NLTK_DATA": str(self._work / "nltk_data"),
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            **({"FOREIGN_SCRIPTS_ORDER": "one"} if script.one_order else {}),
            **({"FOREIGN_SCRIPTS_SCHEDULE": "one"} if script.one_schedule and way == "plain" else {}),
            **({"FOREIGN_SCRIPTS_HARDWARE": "made"} if script.hardware else {}),
            **({"FOREIGN_SCRIPTS_DUMMIES": "there"} if script.dummies and way == "plain" else {}),
            # This variable makes accelerate use DDP for ranks on CPUs, without any DeepSpeed plugin.
            **({"ACCELERATE_USE_CPU": "true"} if way == "plain" else {}),
        }


def _free_ports(count: int) -> list[int]:
    with ExitStack() as opened:
        sockets = [opened.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [server.getsockname()[1] for server in sockets]


def compare(here: list[list[float]], plain: list[list[float]]) -> float | None:
    """Returns the maximum relative difference of the losses on any rank; None if their numbers differ."""
    if not here or [len(losses) for losses in here] != [len(losses) for losses in plain] or not here[0]:
        return None
    pairs = [pair for a, b in zip(here, plain, strict=True) for pair in zip(a, b, strict=True)]
    return max(abs(a - b) / max(abs(b), 1e-3) for a, b in pairs)


def row(script: Script, results: dict[str, dict[str, object]], saved: str) -> str:
    """Formats one line of the table."""
    here, plain = (results[way] for way in _WAYS)
    launch = f"{script.command} " + script.launch.replace("{sources}/", "")
    steps = len(here["losses"][0]) if here["losses"] else 0  # type: ignore[index, arg-type]
    last = [result["losses"][0][-1] if result["losses"] and result["losses"][0] else None for result in (here, plain)]  # type: ignore[index]
    difference = compare(here["losses"], plain["losses"])  # type: ignore[arg-type]
    if here["status"] or plain["status"]:
        verdict = f"exit status {here['status']} here, {plain['status']} plainly"
    elif difference is None:
        verdict = "numbers of losses differ"
    else:
        verdict = f"{difference:.1e}" + ("" if difference <= script.tolerance else " !")
    shown = [f"{value:.6f}" if value is not None else "-" for value in last]
    cells = (script.name, f"`{launch}` `{script.extra}`".replace("``", ""), steps, *shown, verdict, saved)
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sources", type=Path, required=True, help="folder with the checkouts")
    parser.add_argument("--work", type=Path, required=True, help="folder for inputs, logs and results")
    parser.add_argument("--only", default="*", help="pattern for the names of rows")
    parser.add_argument("--seconds", type=float, default=560, help="time limit of a run in seconds")
    parser.add_argument("--table", type=Path, help="file for the table, which is also printed")
    parser.add_argument("--again", action="store_true", help="run rows again that already have results")
    parser.add_argument("--done", action="store_true", help="run nothing; print the table of rows that have results")
    arguments = parser.parse_args()
    write_inputs(arguments.work)
    for stage in (2, 3):
        config = {**_ZERO3, "zero_optimization": {**_ZERO3["zero_optimization"], "stage": stage}}
        (arguments.work / f"zero{stage}.json").write_text(json.dumps(config, indent=2))
    install = [sys.executable, "-m", "zeroaccel.cli", "compat", "install", str(arguments.work / "commands")]
    subprocess.run(install, check=True, stdout=subprocess.DEVNULL)
    runner = Runner(arguments.sources, arguments.work, arguments.seconds)
    lines = [
        "| script | started by | losses | last, here | last, DDP | greatest difference | files loaded again |",
        "|---|---|---|---|---|---|---|",
    ]
    for script in SCRIPTS:
        if fnmatch(script.name, arguments.only) and (not arguments.done or runner.is_done(script)):
            if arguments.again:
                runner.forget(script)
            if not runner.is_done(script) and (absent := missing(script, arguments.sources)):
                lines.append(f"| {script.name} | `{script.command}` | 0 | - | - | not run, missing: {absent} | none |")
            else:
                results = {way: runner.run(script, way) for way in _WAYS}
                lines.append(row(script, results, runner.saved(script)))
            print(lines[-1], flush=True)
    if arguments.table:
        arguments.table.write_text("\n".join([*lines, ""]))


if __name__ == "__main__":
    main()
