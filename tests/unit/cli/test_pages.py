"""The pages of `estimate`, `checkpoint inspect` and `report`: their tables against their sources."""

from __future__ import annotations

import html
import io
import json
import re
import shutil
import threading
import time
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from tests import time_limits
from tests.support.commands import typed
from tests.unit.checkpoint.checkpoint_by_hand import Entry, make_checkpoint
from zeroaccel.cli.pages.frame import MOST_NBYTES, page
from zeroaccel.cli.progress import progress
from zeroaccel.config import load_config
from zeroaccel.telemetry.trackers import CsvTracker, JsonlTracker, build_monitors

MODEL = "tests.unit.cli.test_cli_estimate:tiny"


class _Page(HTMLParser):
    """A parsed page: the tables' rows by caption, the ids, and the addresses of fetched files and links."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.ids: set[str] = set()
        self.fetched: list[str] = []
        self.open: list[str] = []
        self._caption, self._rows = "", list[list[str]]()
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if identity := found.get("id"):
            assert identity not in self.ids
            self.ids.add(identity)
        self.fetched += [str(found[name]) for name in ("src", "href") if name in found]
        if tag == "table":
            self._rows = []
        if tag == "tr":
            self._rows.append([])
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop() != tag:
            pass
        if tag == "table":
            self.tables[self._caption] = self._rows

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("th", "td"):
            self._rows[-1].append(data)
        elif self.open and self.open[-1] == "caption":
            self._caption = data


def _read(path: Path) -> _Page:
    text = path.read_text(encoding="utf-8")
    assert len(text.encode()) <= MOST_NBYTES
    found = _Page(text)
    assert found.fetched == []
    assert "http" not in text
    return found


_WORKLOAD = ("--ranks", "2", "--seq", "8", "--device_memory", "1MB")


@pytest.fixture(scope="module")
def estimated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("estimate") / "memory.html"
    typed("estimate", MODEL, *_WORKLOAD, "--html", str(path))
    return path


def test_the_page_of_an_estimate_agrees_with_its_json(estimated: Path) -> None:
    path = estimated
    plans = json.loads(typed("estimate", MODEL, *_WORKLOAD, "--json").out)["plans"]
    found = _read(path)
    (rows,) = found.tables.values()
    assert [row[0] for row in rows[1:]] == [plan["device"] and _name(plan) for plan in plans]
    for row, plan in zip(rows[1:], plans, strict=True):
        assert row[5] == f"{plan['device']['total'] / 1e9:.3f}"
        assert row[8] == ("recommended" if plan["recommended"] else "yes")
    # The command to copy gives the same estimate, for the same memory.
    words = re.search(r'<code id="command">zeroaccel (.*?)</code>', path.read_text())
    assert words is not None
    assert json.loads(typed("", *words[1].split(), "--json").out)["plans"] == plans
    # People want the config of the recommended plan and the command that trains with it.
    config = re.search(r'<code id="config">(.*?)</code>', path.read_text(), re.DOTALL)
    assert config is not None
    recommended = next(plan for plan in plans if plan["recommended"])
    zero = load_config(json.loads(html.unescape(config[1]))).zero_optimization
    assert zero.stage == recommended["stage"]
    launch = re.search(r'<code id="launch">zeroaccel launch (.*?)</code>', path.read_text())
    assert launch is not None
    assert "--num_processes 2 --deepspeed_config_file ds_config.json train.py" in launch[1]
    # Each position of the sliders has the figures of its own estimate: here with one more rank than was requested.
    texts = re.search(r'id="data">(.*?)</script>', path.read_text())
    assert texts is not None
    tables = json.loads(texts[1])["tables"]
    other = {
        _name(plan): plan
        for plan in json.loads(
            typed("estimate", MODEL, "--ranks", "4", "--seq", "16", "--batch", "4", "--checkpointing", "--json").out
        )["plans"]
    }
    for name, numbers in tables["4/4/16/1"].items():
        device = other[name]["device"]
        assert numbers[:4] == [device[kind] for kind in ("params", "optimizer", "gradients", "activations")]


def _name(plan: dict[str, object]) -> str:
    optimizer, param = plan["offload_optimizer"], plan["offload_param"]
    if optimizer != "none" and optimizer == param:
        return f"stage {plan['stage']}, all on {param}"
    words = [f"stage {plan['stage']}"]
    words += [f"optimizer on {optimizer}"] if optimizer != "none" else []
    words += [f"parameters on {param}"] if param != "none" else []
    return ", ".join(words)


def test_the_page_of_a_checkpoint_covers_every_tensor(tmp_path: Path) -> None:
    entries = {
        "a.weight": Entry("F32", np.arange(30, dtype=np.float32).reshape(5, 6)),
        "b<b>": Entry("F32", np.zeros(7, np.float32)),
    }
    make_checkpoint(tmp_path / "out", entries, world_size=3)
    path = tmp_path / "checkpoint.html"
    facts = json.loads(typed("checkpoint inspect", str(tmp_path / "out"), "--json", "--html", str(path)).out)
    assert (facts["world_size"], facts["stage"]) == (3, 3)
    found = _read(path)
    rows = found.tables["Elements [from, to) of each tensor"][1:]
    for key, tensor in facts["tensors"].items():
        numel, stop = int(np.prod(tensor["shape"])), 0
        for one in sorted(tensor["intervals"], key=lambda one: int(one["start"])):
            assert one["start"] == stop
            stop = one["stop"]
            assert [key, str(one["rank"])] in [[row[0], row[3]] for row in rows]
        assert stop == numel
    assert len(rows) == sum(len(tensor["intervals"]) for tensor in facts["tensors"].values())
    summary = dict(found.tables["Summary"][1:])
    assert summary["parameters"] == "37 in 2 tensors"
    assert summary["verified"].startswith("no: ")
    assert f"zeroaccel zero-to-fp32 {tmp_path / 'out'} weights --tag global_step1" in path.read_text()
    sizes = {row[0]: int(row[2]) for row in found.tables["Files"][1:]}
    assert sizes == {file.name: file.stat().st_size for file in (tmp_path / "out" / "global_step1").glob("rank*")}


def test_inspect_lists_the_folders_of_a_trainer(tmp_path: Path) -> None:
    for step in (100, 20):
        make_checkpoint(tmp_path / f"checkpoint-{step}", {"w": Entry("F32", np.zeros(7, np.float32))})
    for command in ("inspect", "verify", "inspect --json"):
        done = typed(f"checkpoint {command}", str(tmp_path), code=1)
        assert "checkpoint-20, checkpoint-100; " in done.err
        assert f"such as {tmp_path / 'checkpoint-100'}" in done.err


def test_a_report_shows_every_metric_of_two_runs(tmp_path: Path) -> None:
    for name, first in (("one", 4.0), ("two", 8.0)):
        tracker = CsvTracker(name, tmp_path / name)
        for step in range(1, 101):
            tracker.log({"Train/loss": first / step, **({"Train/lr": 0.1} if name == "one" else {})}, step=step)
        tracker.finish()
    path = tmp_path / "report.html"
    typed("report", str(tmp_path / "one"), str(tmp_path / "two"), "-o", str(path))
    found = _read(path)
    rows = {row[0].rsplit("/", 1)[-1]: row[1:] for row in found.tables["Every metric of the run"][1:]}
    assert rows["Train_lr, one"] == ["0.1", "0.1", "0.1", "0.1", "1", "100", "100"]
    assert rows["Train_loss, two"] == ["0.08", "0.41499", "0.08", "8", "1", "100", "100"]
    assert path.read_text().count("<polyline") == 2
    assert "<h2>Train_lr</h2><p>0.1 at every step.</p>" in path.read_text().replace("\n", "")
    values = next(table for caption, table in found.tables.items() if "Train_loss: 40 of 100 steps" in caption)
    assert (values[1], values[-1]) == (["1", "4", "8"], ["100", "0.04", "0.08"])
    typed("report", str(tmp_path / "one"))
    assert (tmp_path / "one" / "report.html").exists()


def _timed_run(folder: Path, slower: float) -> None:
    tracker = JsonlTracker("run", folder)
    tracker.store_init_configuration({"lr": 0.1})
    for step in range(1, 5):
        times = {"Time/forward_seconds": 0.002, "Time/backward_seconds": 0.004, "Time/reduce_seconds": 0.001}
        times |= {"Time/update_seconds": 0.001} | ({"Time/step_seconds": 0.010 * slower} if step > 1 else {})
        sizes = {
            "Memory/peak_bytes": 3e6,
            "Sent/across_bytes": 2e6,
            "Offload/optimizer_nvme_read_bytes_per_second": 4e9,
        }
        tracker.log({"Train/loss": 1.0 / step, "note": "text", **times, **sizes}, step=8 * step)
    tracker.finish()


def test_a_report_splits_the_time_of_a_step(tmp_path: Path) -> None:
    for name, slower in (("one", 1.0), ("two", 1.5)):
        _timed_run(tmp_path / name, slower)
    path = tmp_path / "report.html"
    typed("report", str(tmp_path / "one"), str(tmp_path / "two"), "-o", str(path))
    found = _read(path)
    assert found.tables["Means over the steps, all but the first"][1:] == [
        ["forward", "2.000", "20.0 %", "2.000", "13.3 %", "1.000"],
        ["backward", "4.000", "40.0 %", "4.000", "26.7 %", "1.000"],
        ["update", "1.000", "10.0 %", "1.000", "6.7 %", "1.000"],
        ["other", "3.000", "30.0 %", "8.000", "53.3 %", "2.667"],
        ["step", "10.000", "100.0 %", "15.000", "100.0 %", "1.500"],
        ["reductions, a part of backward", "1.000", "10.0 %", "1.000", "6.7 %", "1.000"],
    ]
    last = {row[0]: row[1] for row in found.tables["Every metric of the run"][1:]}
    assert last["Memory_peak (MB), one"] == "3"
    assert last["Sent_across (MB), two"] == "2"
    assert last["Offload_optimizer_nvme_read (GB/s), one"] == "4"
    assert next(iter(last)) == "Train_loss, one"
    damaged = tmp_path / "one" / "run" / "metrics.jsonl"
    damaged.write_text(damaged.read_text() + '{"step": 4')
    path.unlink()
    typed("report", str(tmp_path / "one"), "-o", str(path), code=2)
    assert not path.exists()


def test_a_report_begins_with_the_run_and_its_loss(tmp_path: Path) -> None:
    config = {"jsonl_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "first"}}
    facts = {"model": "LlamaForCausalLM", "stage": 3, "ranks": 2, "config": "ds_config.json"}
    monitors = build_monitors(load_config(config), 0, facts)
    for step in range(1, 6):
        values = {"Train/grad_norm": 0.5 / step, "Train/loss": 4.0 / step, "Time/samples_per_second": 100.0 + step}
        monitors.write([(name, value, 16 * step) for name, value in values.items()])
    monitors.close()
    typed("report", str(tmp_path / "first"))
    text = (tmp_path / "first" / "report.html").read_text()
    shown = dict(row for row in _read(tmp_path / "first" / "report.html").tables["The run"][1:])
    assert time.strptime(shown.pop("begun"), "%Y-%m-%d %H:%M")
    assert shown == {**{k: str(v) for k, v in facts.items()}, "last loss": "0.8", "last samples per second": "105"}
    headings = re.findall("<h2>(.*?)</h2>", text)
    assert headings == ["Train_loss", "Summary", "Train_grad_norm", "Time_samples_per_second"]
    assert "sample 80<" in text  # the engine numbers by samples
    assert "step 80<" not in text


def test_a_report_of_many_metrics_stays_small(tmp_path: Path) -> None:
    tracker = JsonlTracker("run", tmp_path)
    for step in range(500):
        tracker.log({f"metric{number}": step * number / 7 for number in range(80)}, step=step)
    tracker.finish()
    typed("report", str(tmp_path), "-o", str(tmp_path / "a.html"))
    assert "more metrics are in the summary only" in (tmp_path / "a.html").read_text()
    assert len(_read(tmp_path / "a.html").tables["Every metric of the run"]) == 81


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("report {empty}", "expected CSV or JSONL files of a tracker, got 'none with numbers in it'"),
        ("report {empty}/none", "expected the folder of a run"),
        ("report {empty} {empty}", "expected two different runs"),
        ("estimate 7b --html {empty}/a.txt", "expected a file that ends in .html"),
        ("estimate 7b --html {empty}/none/a.html", "make it, or name another"),
        ("checkpoint inspect {empty} --html a.html", "latest"),
    ],
)
def test_mistakes_write_nothing(arguments: str, message: str, tmp_path: Path) -> None:
    code = 1 if arguments.startswith("checkpoint") else 2
    assert message in typed(arguments.format(empty=tmp_path), code=code).err
    assert list(tmp_path.iterdir()) == []


def test_names_are_escaped_in_pages() -> None:
    hostile = "</script><script>alert(1)</script>"
    text = page(hostile, [], data={"name": hostile})
    assert hostile not in text
    assert text.count("<script") == 2


def test_pages_work_in_a_browser_in_both_themes(estimated: Path) -> None:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    browser = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no Chromium is installed")
    with sync_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        papers = []
        for theme in ("light", "dark"):
            shown = launched.new_page(color_scheme=theme)
            errors: list[str] = []
            shown.on("pageerror", lambda error, errors=errors: errors.append(str(error)))
            shown.goto(estimated.as_uri())
            before = shown.locator("#config").inner_text()
            shown.locator("#checkpointing").click()
            config = json.loads(shown.locator("#config").inner_text())
            assert config["activation_checkpointing"] == {"wrap_blocks": True}
            shown.locator("#checkpointing").click()
            assert json.loads(shown.locator("#config").inner_text()) == json.loads(before)
            assert shown.locator("#config").inner_text().splitlines() == before.splitlines()
            papers.append(shown.evaluate("getComputedStyle(document.body).backgroundColor"))
            drawn = shown.locator("#bars rect").nth(3)
            before = float(drawn.get_attribute("width"))
            shown.locator("#batch").focus()
            shown.keyboard.press("ArrowRight")
            assert abs(float(drawn.get_attribute("width")) - before) > 1
            assert "--batch 4" in shown.locator("#command").inner_text()
            shown.keyboard.press("ArrowLeft")
            assert float(drawn.get_attribute("width")) == pytest.approx(before, abs=0.1)
            assert errors == []
        launched.close()
    assert papers[0] != papers[1]


def test_an_interrupted_page_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("zeroaccel.cli.estimate.positions", lambda workload: [workload])
    monkeypatch.setattr("zeroaccel.cli.estimate.estimate_page", interrupted)
    typed("estimate", MODEL, *_WORKLOAD, "--html", str(tmp_path / "a.html"), code=130)
    assert list(tmp_path.iterdir()) == []


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_line_names_a_long_operation_and_disappears(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    shown = threading.Event()
    monkeypatch.setattr(terminal, "flush", shown.set)
    with progress("counting"):
        assert shown.wait(time_limits.seconds(60.0))
    assert re.match(r"\r\S zeroaccel: counting \(\d+\.\d s\)", terminal.getvalue())
    assert terminal.getvalue().endswith(" \r")
    monkeypatch.setattr("zeroaccel.cli.progress._PATIENCE_SECONDS", 60)
    quick = _Terminal()
    monkeypatch.setattr("sys.stderr", quick)
    with progress("counting"):
        pass
    assert quick.getvalue() == ""
