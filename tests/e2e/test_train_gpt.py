"""The example trains: loss below the unigram entropy, memory within the ZeRO formula, the same text at every stage."""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.support.environment import ROOT
from tests.support.job import JobResult, run_command, run_job
from tests.support.scripts import load_script

SCRIPT = ROOT / "examples" / "train_gpt.py"
SEQ = 32
TINY = ("--dim", 64, "--layers", 2, "--heads", 2, "--seq", SEQ, "--steps", 50, "--lr", 1e-2, "--generate", 40)
TEXT = "".join(f"{number} squared is {number**2}\n" for number in range(3000)).encode()
NUMEL = 2 * 256 * 64 + 2 * 64 + 2 * (4 * 64 + 12 * 64**2 + (3 + 1 + 4 + 1) * 64)
HELD_OUT = re.compile(r"held-out loss ([\d.]+) bits/byte, unigram entropy ([\d.]+) bits/byte: (below|NOT BELOW)")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "squares.txt"
    path.write_bytes(TEXT)
    return path


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return load_script("examples/train_gpt.py")


@pytest.fixture(scope="module")
def launched(text: Path) -> JobResult:
    """ZeRO-3 in bf16 on two processes: a small version of `make demo`."""
    launch = (sys.executable, "-m", "zeroaccel.cli", "launch", "--cpu", "--num_processes", 2)
    return run_command([*launch, SCRIPT, "--text", text, *TINY, "--report", text.parent / "demo"], timeout=90.0)


def test_it_ends_with_its_report_and_what_to_try_next(launched: JobResult, text: Path) -> None:
    page = text.parent / "demo" / "report.html"
    assert f"s in all; {page} shows losses" in launched.stdout
    assert "make demo OFFLOAD=cpu" in launched.stdout.splitlines()[-4]
    assert "Where a step's time goes" in page.read_text()


def test_it_ends_below_the_unigram_entropy_of_text_it_has_not_seen(launched: JobResult) -> None:
    assert launched.returncode == 0, launched.stderr
    found = HELD_OUT.search(launched.stdout)
    assert found is not None, launched.stdout
    held_out = TEXT[-(len(TEXT) // 10) :]
    windows = (len(held_out) - 1) // SEQ // 2 * 2  # two ranks read equally many bytes
    counts = Counter(held_out[1 : windows * SEQ + 1])
    entropy = -sum(count * math.log2(count / counts.total()) for count in counts.values()) / counts.total()
    assert float(found[2]) == pytest.approx(entropy, abs=1e-3)
    assert 0 < float(found[1]) < entropy - 0.5
    assert found[3] == "below"


def test_the_state_it_prints_is_what_the_zero_formula_says(launched: JobResult) -> None:
    found = re.search(r"model state: ([\d,]+) bytes per rank .* by the formula ([\d,]+)", launched.stdout)
    assert found is not None, launched.stdout
    state, formula = (int(number.replace(",", "")) for number in found.groups())
    assert formula == 16 * NUMEL / 2
    # Norms and biases are unsharded on both ranks, 2 bytes each, and shards are padded a little.
    whole = 2 * 64 + 2 * (4 * 64 + (3 + 1 + 4 + 1) * 64)
    assert whole <= state - formula < whole + 1000


def test_only_rank_0_speaks(launched: JobResult) -> None:
    steps = [line for line in launched.stdout.splitlines() if line.startswith("step ")]
    assert len(steps) == 1
    assert re.search(r"50/50  [\d.]+ bits/byte  [\d,]+ tokens/s  [\d.]+ MB/rank \(formula [\d.]+\)$", steps[0])


def test_stage_0_learns_and_writes_the_same(launched: JobResult, text: Path) -> None:
    result = run_job(2, SCRIPT, ["--text", text, "--stage", 0, *TINY], timeout=90.0)
    assert result.returncodes == (0, 0), result.stderr
    assert _written(result, stage=0) == _written(launched, stage=3)
    assert HELD_OUT.findall(result.stdout) == HELD_OUT.findall(launched.stdout)


def test_with_everything_in_files_it_writes_the_same(launched: JobResult, text: Path, tmp_path: Path) -> None:
    result = run_job(2, SCRIPT, ["--text", text, *TINY, "--offload", "nvme", "--nvme-path", tmp_path], timeout=90.0)
    assert result.returncodes == (0, 0), result.stderr
    assert _written(result, stage=3) == _written(launched, stage=3)
    assert "offloaded params, nvme" in result.stdout
    held = re.search(r"offloaded optimizer, nvme: ([\d,]+) bytes per rank", result.stdout)
    assert held is not None
    assert 0 <= int(held[1].replace(",", "")) - 12 * NUMEL / 2 < 6000  # padding
    assert "optimizer on" in result.stderr


def test_one_process_that_has_not_learned_enough_says_so(text: Path) -> None:
    result = run_command([sys.executable, SCRIPT, "--text", text, "--precision", "fp32", *TINY, "--steps", 1])
    assert result.returncode == 1, result.stderr
    assert [verdict for _, _, verdict in HELD_OUT.findall(result.stdout)] == ["NOT BELOW"]
    assert f"by the formula {16 * NUMEL:,}" in result.stdout


def test_arguments_that_do_not_fit_are_refused(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, complaint in (
        (["--text", "nowhere.txt"], "--text: nowhere.txt is not a file"),
        (["--dim", "36", "--heads", "4"], "--dim: 36 is not an even number for each of 4 heads"),
        (["--offload", "cpu", "--stage", "0"], "--offload: needs --stage 1, 2 or 3"),
    ):
        monkeypatch.setattr(sys, "argv", ["train_gpt.py", *words])
        with pytest.raises(SystemExit, match="2"):
            example.arguments()
        assert complaint in capsys.readouterr().err
    short = tmp_path / "short.txt"
    short.write_bytes(b"x" * 100)
    with pytest.raises(SystemExit, match=r"short\.txt: expected 11 bytes or more to hold out, got 10"):
        example.corpus(short, at_least=11)


def test_the_standard_library_is_split_by_files(example: ModuleType) -> None:
    train, held_out = (bytes(part.tolist()) for part in example.corpus(None, at_least=1))
    assert len(train) > 20 * len(held_out) > 1_000_000
    marks = {name: Path(sys.modules[name].__file__ or "").read_bytes() for name in ("argparse", "typing", "inspect")}
    assert sum(mark in train for mark in marks.values()) >= 2
    assert not any(mark in train and mark in held_out for mark in marks.values())


def test_no_byte_is_predicted_from_what_comes_after_it(example: ModuleType) -> None:
    torch.manual_seed(0)
    model = example.GPT(dim=16, layers=2, heads=2)
    ids = torch.randint(256, (1, 12))
    changed = ids.clone()
    changed[0, 7] += 1 if ids[0, 7] == 0 else -1
    with torch.no_grad():
        before, after = model(ids), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:], atol=1e-3)


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_the_formula_gives_the_figures_of_the_paper(example: ModuleType, stage: int, gigabytes: float) -> None:
    # Figure 1 of the ZeRO paper: 7.5 billion parameters on 64 ranks.
    assert example.zero_formula(7.5e9, stage, 64, "bf16") / 1e9 == pytest.approx(gigabytes, abs=0.05)


def _written(result: JobResult, stage: int) -> str:
    """Returns the generated text, between its two rules."""
    found = re.search(rf"generated under ZeRO-{stage} .*?\n(.*?)\n─+\n", result.stdout, flags=re.DOTALL)
    assert found is not None, result.stdout
    assert found[1].startswith("class ")
    return found[1]
