"""`benchmarks/gpu` on a machine without a GPU: it skips every part by name, and a rehearsal runs the campaign."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.cuda_model import guard_library
from tests.cuda_model.network_size import Size
from tests.support.environment import ROOT
from tests.support.scripts import load_script
from zeroaccel.config import load_config


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The command's module, with its own module path, on a machine without a device."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks" / "gpu"), str(ROOT / "benchmarks"), *sys.path])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return load_script("benchmarks/gpu/__main__.py")


@pytest.fixture
def gpu(program: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The command."""

    def run(*arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", ["benchmarks/gpu", *map(str, arguments)])
        return int(program.main())

    return run


@pytest.mark.parametrize(
    ("parts", "first", "last"),
    [((), "facts", "files_and_states"), (("machine", "largest"), "machine", "largest")],
    ids=["campaign", "parts"],
)
def test_every_part_is_skipped_by_name(
    parts: tuple[str, ...], first: str, last: str, gpu: Callable[..., int], tmp_path: Path
) -> None:
    assert gpu(*parts, "--no-predictions", "--out", tmp_path) == 0
    why = "torch sees no CUDA device" if torch.backends.cuda.is_built() else "this torch is built without CUDA"
    [report] = tmp_path.glob("gpu-*.md")
    sections = report.read_text().split("\n## ")[1:]
    names = [section.splitlines()[0] for section in sections]
    assert [names[0], names[-1]] == [first, last]
    assert all(f"skipped: {why}" in section for section in sections)


def test_figures_of_earlier_runs_are_kept(gpu: Callable[..., int], tmp_path: Path) -> None:
    (tmp_path / "predictions.json").write_text('{"stage 2/waits": 1.0}')
    figures = importlib.import_module("figures")
    file = figures.FigureFile(tmp_path / "figures.jsonl")
    file.begin("memory", {"card": "another"})
    file.add("memory", figures.Figure("peak", 7.0, "GiB", note="of another machine"))
    file.end("memory", "9 s")
    assert gpu("waits", "--kept", "--out", tmp_path) == 0
    [report] = tmp_path.glob("gpu-*.md")
    text = report.read_text()
    assert "of another machine" in text
    assert "| stage 2/waits |  | 1 | " in text
    assert gpu("waits", "--no-predictions", "--out", tmp_path) == 0
    assert "of another machine" not in report.read_text()


# In the place of `benchmarks/gpu`: a stage that notes its start, writes a figure, and may not end.
_STAGE = """
import json, pathlib, sys, time
name, folder = sys.argv[sys.argv.index("--only") + 1], pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
with (folder / "started").open("a") as file:
    file.write(name + "\\n")
figure = {"name": f"speed of {name}", "value": 7.0, "unit": "GB/s", "predicted": 6.0, "note": ""}
with (folder / "figures.jsonl").open("a") as file:
    file.write(json.dumps({"part": name, "figure": figure}) + "\\n")
print("predictions:", json.load(sys.stdin))
if (folder / f"{name} hangs").exists():
    time.sleep(60)
"""


@pytest.fixture
def device(program: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Makes the command run `_STAGE` as on a device, in two calls, the second without time."""
    here = tmp_path / "tree" / "benchmarks" / "gpu"
    here.mkdir(parents=True)
    (here / "__main__.py").write_text(_STAGE)
    campaign = importlib.import_module("campaign")
    stages = {"facts": 5.0, "host_update": 5.0, "contenders": 30.0}
    short = campaign.Call(0.0, {"more_kernels": 30.0})
    monkeypatch.setattr(campaign, "CALLS", {1: campaign.Call(40.0, stages), 2: short})
    monkeypatch.setattr(program, "HERE", here)
    monkeypatch.setattr(program, "_no_gpu", lambda: None)
    monkeypatch.setattr(program, "_card", lambda: "a card")


@pytest.mark.usefixtures("device")
def test_a_cut_loses_one_stage_and_a_later_call_repeats_only_that(gpu: Callable[..., int], tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "predictions.json").write_text("{}")
    (folder / "host_update hangs").touch()

    def started() -> list[str]:
        return (folder / "started").read_text().split()

    assert gpu("--call", 1, "--out", folder) == 1
    assert started() == ["facts", "host_update", "contenders"]
    [page] = folder.glob("gpu-*.md")
    text = page.read_text()
    assert "a card, torch " in text
    for name in ("facts", "host_update", "contenders"):
        assert f"## {name}\n" in text
        assert f"| speed of {name} | 7 GB/s | 6 GB/s |  |" in text
    [limit] = re.findall(r"failed: more than (\d+) s", text)
    assert 5 < int(limit) <= 10, "its limit, and what the first stage has saved"
    assert text.count("predictions: {}") == 1, "the end of its log, and of no other's"

    (folder / "host_update hangs").unlink()
    assert gpu("--call", 1, "--out", folder) == 0
    assert started()[3:] == ["host_update"]
    assert "failed" not in page.read_text()
    assert page.read_text().count("| 7 GB/s |") == 3

    assert gpu("--call", 2, "--out", folder) == 1
    assert "## more_kernels" in page.read_text()
    assert "failed: no time was left in call 2" in page.read_text()
    assert gpu("--call", 1, "--size", "small", "--out", folder) == 0
    assert started()[4:] == ["facts", "host_update", "contenders"]


@pytest.mark.usefixtures("device")
def test_changed_code_is_measured_again(gpu: Callable[..., int], tmp_path: Path) -> None:
    for code, count in (("", 3), ("", 3), ("changed = True", 6)):
        package = tmp_path / "tree" / "zeroaccel"
        package.mkdir(exist_ok=True)
        (package / "module.py").write_text(code)
        assert gpu("--call", 1, "--out", tmp_path) == 0
        assert len((tmp_path / "started").read_text().split()) == count


def test_no_two_rows_of_updates_are_the_same(program: ModuleType) -> None:
    configs = [load_config(config) for config in importlib.import_module("campaign")._UPDATES.values()]
    assert all(one != other for one, other in itertools.combinations(configs, 2))


@pytest.mark.usefixtures("device")
def test_a_call_leaves_few_files_and_figures_outlast_a_look_without_a_device(
    gpu: Callable[..., int], program: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    assert gpu("--call", 1, "--out", folder) == 0
    assert {file.name for file in folder.iterdir()} - {"started"} == {"figures.jsonl", "log", page_name(folder)}
    monkeypatch.setattr(program, "_no_gpu", lambda: "no device")
    monkeypatch.setattr(program, "_card", lambda: "no device")
    assert gpu("--call", 1, "--no-predictions", "--out", folder) == 0
    assert "skipped: no device" in (folder / page_name(folder)).read_text()
    monkeypatch.setattr(program, "_no_gpu", lambda: None)
    monkeypatch.setattr(program, "_card", lambda: "a card")
    assert gpu("--call", 1, "--out", folder) == 0
    assert len((folder / "started").read_text().split()) == 3
    assert (folder / page_name(folder)).read_text().count("| 7 GB/s |") == 3


def page_name(folder: Path) -> str:
    [page] = folder.glob("gpu-*.md")
    return page.name


def test_a_cut_of_a_call_keeps_the_figures_before_it(program: ModuleType, tmp_path: Path) -> None:
    figures, path = importlib.import_module("figures"), tmp_path / "figures.jsonl"
    file, state = figures.FigureFile(path), {"tree": "a"}
    for name in ("facts", "waits"):
        file.begin(name, state)
        for value in (1.0, 2.0):
            file.add(name, figures.Figure(f"of {name}", value))
        file.end(name, "3 s")
    for nbytes in range(len(path.read_bytes())):
        (tmp_path / "cut").write_bytes(path.read_bytes()[: -nbytes or None])
        kept = figures.FigureFile(tmp_path / "cut")
        before = kept.sections()
        assert all(section.state == state for section in before.values())
        kept.begin("later", state)
        kept.end("later", "1 s")
        after = kept.sections()
        assert after.pop("later").outcome == "1 s", "an unfinished line takes the next one with it"
        assert after == before
    assert [figure.value for figure in file.sections()["facts"].figures] == [1.0, 2.0]
    assert file.sections()["waits"].outcome == "3 s"
    file.begin("facts", {"tree": "b"})
    assert file.sections()["facts"] == figures.Section({"tree": "b"}, [], "failed: it was cut")


@pytest.mark.parametrize("parts", [(), ("waits",)], ids=["campaign", "a part"])
def test_a_torch_with_cuda_makes_no_predictions(
    parts: tuple[str, ...], gpu: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    """Its library of CUDA and that of the model exclude each other."""
    folder = tmp_path / "torch" / "lib"
    folder.mkdir(parents=True)
    (folder / "libtorch_cuda.so").touch()
    spec = SimpleNamespace(origin=str(tmp_path / "torch" / "__init__.py"))
    monkeypatch.setattr(guard_library.importlib.util, "find_spec", lambda name: spec)
    predictions = importlib.import_module("predictions")
    monkeypatch.setattr(predictions, "predict", lambda size: pytest.fail("it would end with an error of the library"))
    assert gpu(*parts, "--out", tmp_path) == 0
    reason = "the CUDA model replaces CUDA, so it needs torch's build for CPUs"
    assert f"no predictions: {reason}\n" in capfd.readouterr().out
    assert not (tmp_path / "predictions.json").exists(), "a later call with the other build makes them"
    assert gpu(*parts, "--rehearse", "--size", "small", "--out", tmp_path) == 2
    assert f"benchmarks/gpu: --rehearse: {reason}: run it in" in capfd.readouterr().err


def test_a_missing_package_is_named_before_any_stage(
    gpu: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "zeroaccel.config", None)
    assert gpu("--no-predictions", "--out", tmp_path / "out") == 2
    assert "cannot import zeroaccel.config: ModuleNotFoundError" in (error := capsys.readouterr().err)
    assert "'Without a network' in benchmarks/gpu.md" in error
    assert not (tmp_path / "out").exists()


def test_limits_fit_the_calls(program: ModuleType) -> None:
    for call, most in zip(program._calls().values(), (500.0, 300.0), strict=True):
        assert sum(call.stages.values()) <= call.seconds <= most
    named = [name for call in program._calls().values() for name in call.stages]
    assert named == list(importlib.import_module("campaign").STAGES)


def test_a_rehearsal_runs_a_stage_in_its_own_process(gpu: Callable[..., int], tmp_path: Path) -> None:
    if reason := guard_library.why_not():
        pytest.skip(reason)
    assert gpu("facts", "--rehearse", "--size", "small", "--no-predictions", "--out", tmp_path) == 0
    [page] = tmp_path.glob("gpu-*.md")
    assert "**A rehearsal: no figure is a measurement.**" in page.read_text()
    assert "| both directions of the bus at once |" in page.read_text()


def test_the_programs_for_comparison_step_without_a_gpu(gpu: Callable[..., int]) -> None:
    contenders = importlib.import_module("contenders_on_gpu")
    try:
        for make in (contenders.torch_step, contenders.fsdp2_step):
            step = make(Size(layers=1, tokens=16))
            for _ in range(2):
                step()
    finally:
        torch.distributed.destroy_process_group()


def test_too_little_host_memory_is_named_before_weights_are_drawn(
    program: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, largest_model = importlib.import_module("parts"), importlib.import_module("largest_model")
    monkeypatch.setattr(importlib.import_module("host_memory"), "grown_nbytes", lambda nbytes: 3 * 10**9)
    monkeypatch.setattr(largest_model, "train", lambda *_: pytest.fail("the model is built"))
    figures: list[Any] = []
    parts.train_largest(parts.Run("large", 10.0, figures.append, {}), tuple(largest_model.MODELS))
    notes = {figure.name: figure.note for figure in figures}
    assert list(notes) == list(largest_model.MODELS)
    assert notes["13B, residual masters, int8 moments"] == "skipped: 109 GB of host memory, 3 free"


def test_mistakes_are_named(gpu: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for part in ("wait", "everything"):
        with pytest.raises(SystemExit, match="2"):
            gpu(part)
        assert f"no part '{part}'; there are facts, host_update, host_training" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        gpu("waits", "--call", 1)
    assert "leave it out to run named parts" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert gpu("--no-predictions", "--out", tmp_path / "file") == 2
    assert "file: expected a folder that can be written (File exists)" in capsys.readouterr().err


def test_a_contender_that_fails_leaves_the_others(program: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    campaign, contenders = importlib.import_module("campaign"), importlib.import_module("contenders_on_gpu")
    parts = importlib.import_module("parts")

    def torch_step(size: Size, *, compiles: bool) -> Callable[[], None]:
        if compiles:
            raise RuntimeError("Failed to find C compiler\nof a long text")
        return lambda: None

    monkeypatch.setattr(contenders, "torch_step", torch_step)
    monkeypatch.setattr(contenders, "fsdp2_step", lambda size, *, compiles: lambda: None)
    monkeypatch.setattr(campaign, "_own", lambda *_: (lambda: None, lambda: None))
    monkeypatch.setattr(campaign, "milliseconds", lambda step, count: 2.0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    figures: list[Any] = []
    campaign.contenders(parts.Run("small", 10.0, figures.append, {}))
    notes = {figure.name: figure.note for figure in figures}
    assert notes["plain torch, bf16 states, compiled"] == "skipped: RuntimeError: Failed to find C compiler"
    assert notes["FSDP2, compiled, median of the turns"] == "zeroaccel, stage 2: 1.00x"
    assert notes["plain torch, bf16 states, eager, median of the turns"] == "zeroaccel, stage 2: 1.00x"


def test_longer_batches_run_until_the_memory_of_the_device_ends(
    program: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, largest_model = importlib.import_module("parts"), importlib.import_module("largest_model")
    randint = torch.randint

    class Engine:
        def __call__(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            if len(tokens) > 16:
                raise torch.OutOfMemoryError
            return torch.tensor(float(len(tokens)))

        def backward(self, loss: torch.Tensor | None = None) -> None:
            """Does nothing."""

        step = backward

    monkeypatch.setattr("zeroaccel.initialize", lambda *_, **__: (Engine(),))
    free = [10**12]
    monkeypatch.setattr(importlib.import_module("host_memory"), "grown_nbytes", lambda nbytes: free[0])
    monkeypatch.setattr("zeroaccel.offload.free_nbytes", lambda: free[0])
    monkeypatch.setattr(torch, "randint", lambda *size, device: randint(*size))
    for name in ("get_device_properties", "set_per_process_memory_fraction", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: SimpleNamespace(total_memory=64 * 10**9))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 6 * 10**9)
    monkeypatch.setattr("zeroaccel.zero.Init", lambda **_: contextlib.nullcontext())
    monkeypatch.setattr(largest_model, "Decoder", lambda shape: None)
    figures: list[Any] = []
    for seconds in (10.0, -1.0):  # in time, and after the deadline
        parts.train_largest(parts.Run("large", seconds, figures.append, {}), tuple(largest_model.MODELS))
    name = "13B, residual masters, int8 moments"
    start = [f"{name}, {phase}" for phase in ("weights drawn", "initialize", "first step")]
    assert [figure.name for figure in figures] == [
        *start,
        f"{name}, batch 8",
        f"{name}, batch 16",
        *start,
        f"{name}, batch 8",
    ]
    assert "e9 parameters, step 0.00 s, loss 16.000 to 16.000, peak 6.0 GB of 32, host" in figures[4].note
    assert figures[4].note.endswith("(8.19 expected), 0.0 GB page-locked")
    # Of a batch of 16, block inputs take 2.6 GB more than of 8.
    figures.clear()
    monkeypatch.setattr("zeroaccel.offload.free_nbytes", lambda: 3 * 10**9)
    parts.train_largest(parts.Run("large", 10.0, figures.append, {}), tuple(largest_model.MODELS))
    assert [figure.name for figure in figures] == [*start, f"{name}, batch 8"]


@pytest.mark.parametrize(("wanted", "reached"), [(30, 30), (10, 10), (90, 60)])
def test_memory_that_arrives_on_demand_counts(
    wanted: int, reached: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine of 60 MB that shows 10 of them at the start, and more as they are used."""
    module, total, ones, used = load_script("benchmarks/gpu/host_memory.py"), 10, torch.ones, 0

    def grow(seconds: float) -> None:
        nonlocal total
        total = min(60, total + 5)

    def taken(numel: int, **options: Any) -> torch.Tensor:
        nonlocal used
        used += numel >> 20
        assert used < total, "the system would have killed the process"
        return ones(numel, **options)

    monkeypatch.setattr(torch, "ones", taken)
    monkeypatch.setattr(module, "time", SimpleNamespace(sleep=grow))
    for name, value in {
        "free_nbytes": lambda: (total - used) << 20,
        "_STEP_NBYTES": 4 << 20,
        "_SPARE_NBYTES": 1 << 20,
    }.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(module, "_PATIENCE_SECONDS", 0.3)
    monkeypatch.setattr(Path, "write_text", lambda *_: 0)  # this process should not be the first to be killed
    module._grow(wanted << 20)
    printed = [int(line) >> 20 for line in capsys.readouterr().out.split()]
    assert reached <= printed[-1] <= reached + 5
    assert printed == sorted(printed)
