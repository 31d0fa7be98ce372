"""Launch files and command lines of public projects (tests/data/collection): their settings, also as accelerate's.

No process starts. Each line runs in an empty folder with the scripts and files that it names: a launch file requests
three processes in bf16, a hostfile has four machines with four or eight slots.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from click import UsageError

from zeroaccel.cli.launch import launch_job as launch_module
from zeroaccel.cli.launch import launch_plan as plan_module
from zeroaccel.cli.launch.launch_command import launch
from zeroaccel.config.launch.launch_file import parse_launch_file
from zeroaccel.config.launch.launch_sources import ExplicitSettings
from zeroaccel.config.launch.resolution import resolve
from zeroaccel.errors import ConfigError

_COLLECTION = Path(__file__).parents[2] / "data" / "collection"
_LEAST = 0.97
_LAUNCHERS = ("accelerate.commands.launch", "deepspeed.launcher.runner", "torch.distributed.run")
_COMMANDS = (("accelerate", "launch"), ("deepspeed",), ("torchrun",), *(("-m", one) for one in _LAUNCHERS))
_LAUNCH_FILE = "distributed_type: MULTI_GPU\nnum_processes: 3\nmixed_precision: bf16\n"
_HOSTS = {
    "myhostfile": "worker-1 slots=4\nworker-2 slots=4\n",
    "host.txt": "127.0.0.1 slots=8\n127.0.0.2 slots=8\n127.0.0.3 slots=8\n",
}


def _collected(name: str) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = json.loads((_COLLECTION / name).read_text())
    return entries


_FILES, _LINES = _collected("launch_files.json"), _collected("launch_lines.json")


def _of_file(entry: dict[str, Any]) -> dict[str, Any]:
    """Returns the checked settings of a launch from this file on machine 0."""
    here = {"machine_rank": 0, "main_process_ip": "127.0.0.1"} if entry["settings"].get("num_machines", 1) > 1 else {}
    over = ExplicitSettings({key: value for key, value in here.items() if key not in entry["settings"]})
    file = parse_launch_file(yaml.safe_dump(entry["settings"]), "file.yaml", over=over)
    explicit, _ = resolve(over, file=lambda _: file, json=lambda _: None)
    return {**explicit.settings().model_dump(exclude_none=True), **explicit.values}


@pytest.mark.parametrize("entry", _FILES, ids=lambda entry: entry["source"])
def test_a_launch_file_is_resolved_or_refused_with_the_key(entry: dict[str, Any]) -> None:
    if "refused" in entry:
        with pytest.raises(ConfigError) as caught:
            _of_file(entry)
        for key in entry["refused"]:
            assert f": {key}: " in str(caught.value)
        return
    resolved = _of_file(entry)
    assert {key: resolved.get(key) for key in entry["resolved"]} == entry["resolved"]


@pytest.mark.parametrize("entry", [one for one in _FILES if "refused" not in one], ids=lambda entry: entry["source"])
def test_a_launch_file_means_what_it_means_to_accelerate(entry: dict[str, Any], tmp_path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    path = tmp_path / "file.yaml"
    known = {key: value for key, value in entry["settings"].items() if key not in ("command", "main_process_ip")}
    path.write_text(yaml.safe_dump({"compute_environment": "LOCAL_MACHINE", **known}))
    try:
        theirs = load_config_from_file(str(path))
    except (ValueError, TypeError):
        pytest.skip("this release of accelerate reads no such file")
    resolved = _of_file(entry)
    names = ["num_machines", "machine_rank", "main_process_port", "mixed_precision", "debug", "use_cpu"]
    if resolved["distributed_type"] != "NO":  # "NO" means one process, whatever the number
        names.append("num_processes")
    for name in names:
        if (value := getattr(theirs, name, None)) is not None and name in resolved and name in entry["settings"]:
            assert str(resolved[name]).lower() == str(value).lower(), name
    if str(theirs.distributed_type) == "DistributedType.DEEPSPEED":
        for name, value in theirs.deepspeed_config.items():
            if name in resolved and value not in (None, "none", "standard") and name != "offload_param_device":
                assert str(resolved[name]).lower() == str(value).lower(), name


def _words(line: str) -> list[str]:
    """Returns the arguments of a launch line, without leading variables and the launcher's name."""
    words = shlex.split(line)
    while "=" in words[0]:
        words = words[1:]
    if words[0].startswith("python"):
        words = words[words.index("-m") :]
    commands = (*_COMMANDS, ("-m", "torch.distributed.launch"))
    return words[next(len(one) for one in commands if tuple(words[: len(one)]) == one) :]


def _job(line: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Returns the settings and the number of processes from a dry run of a line."""
    (folder / "inner").mkdir()
    monkeypatch.chdir(folder / "inner")
    words = _words(line)
    files = {word: "" for word in words if word.endswith(".py")}
    for place, word in enumerate(words):
        name, _, value = word.partition("=")
        value = value or (words[place + 1] if name in ("--config_file", "--hostfile") else "")
        if name == "--config_file":
            trl = next(one["settings"] for one in _FILES if "trl docs" in one["source"])
            files[value] = yaml.safe_dump({**trl, "machine_rank": 0}) if "multi_node" in value else _LAUNCH_FILE
        elif name == "--hostfile":
            files[value] = _HOSTS[value]
    for name, text in files.items():
        (folder / "inner" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "inner" / name).write_text(text)

    job: dict[str, Any] = {}
    plan = launch_module.plan_launch

    def planned(settings: Any, *arguments: Any, **options: Any) -> Any:
        made = plan(settings, *arguments, **options)
        job.update(settings.model_dump(exclude_none=True), num_processes=made.world_size)
        return made

    def started(self: Any, **_: Any) -> int:
        job.update(self.explicit.settings().model_dump(exclude_none=True))
        return 0

    monkeypatch.setattr(launch_module, "plan_launch", planned)
    monkeypatch.setattr(launch_module.JobOnHosts, "run", started)
    monkeypatch.setattr(launch_module.os, "environ", {"HOME": str(folder), "PATH": "/usr/bin:/bin"})
    monkeypatch.setattr(plan_module, "port_trouble", lambda _: "")
    monkeypatch.setattr(plan_module, "own_address_towards", lambda _: "127.0.0.1")
    launch.main(["--dry_run", *words], standalone_mode=False, prog_name="zeroaccel launch")
    return job


@pytest.mark.parametrize("entry", _LINES, ids=lambda entry: entry["line"][:60])
def test_a_line_is_resolved_or_refused_with_the_flag(
    entry: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "refused" in entry:
        with pytest.raises((ConfigError, UsageError)) as caught:
            _job(entry["line"], tmp_path, monkeypatch)
        message = caught.value.format_message() if isinstance(caught.value, UsageError) else str(caught.value)
        assert entry["refused"] in message
        return
    job = _job(entry["line"], tmp_path, monkeypatch)
    assert {key: job.get(key) for key in entry["job"]} == entry["job"]


@pytest.mark.parametrize(
    "entry",
    [one for one in _LINES if "accelerate" in one["line"] and "job" in one],
    ids=lambda entry: entry["line"][:60],
)
def test_a_line_means_what_it_means_to_accelerate(
    entry: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate.commands.launch import launch_command_parser

    theirs = launch_command_parser().parse_args(_words(entry["line"]))
    job = _job(entry["line"], tmp_path, monkeypatch)
    for name in ("num_processes", "num_machines", "machine_rank", "mixed_precision", "main_process_port"):
        if (value := getattr(theirs, name)) is not None:
            assert job[name] == value, name
    assert job["use_cpu"] == theirs.cpu


def test_nearly_all_entries_are_resolved_and_few_are_equal() -> None:
    for entries, key, least in ((_FILES, "settings", 45), (_LINES, "line", 80)):
        assert len(entries) >= least
        texts = {json.dumps(entry[key], sort_keys=True) for entry in entries}
        assert len(texts) >= 0.9 * len(entries)
        assert all("/" in entry["source"].partition(" ")[0] for entry in entries)
    # Files for accelerate alone: 8-bit arithmetic, parallelism, MPI and SageMaker need other engines or launchers.
    others = ("fp8_config", "parallelism_config", "mpirun_config", "compute_environment")
    ours = [one for one in _FILES if not set(one.get("refused", ())) & set(others)]
    assert sum("refused" not in one for one in ours) >= _LEAST * len(ours)
    assert sum("refused" not in one for one in _LINES) >= _LEAST * len(_LINES)
