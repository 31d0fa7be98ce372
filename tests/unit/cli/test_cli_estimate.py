"""`zeroaccel estimate`: the table, the JSON, the charts, and the messages for wrong command lines."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from torch import Tensor, nn

from tests.support.commands import typed
from zeroaccel.cli.pages.estimate_page import command
from zeroaccel.estimate import Capacity, Workload

MODEL = f"{__name__}:tiny"


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.head = nn.Linear(32, 64)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.embedding(ids))
        return out


def tiny() -> nn.Module:
    return Tiny()


def test_json_is_all_there_is_on_stdout() -> None:
    report = json.loads(typed("estimate", MODEL, "--ranks", "2", "--seq", "8", "--device-memory", "1MB", "--json").out)
    assert report["workload"]["ranks"] == 2
    assert report["capacity"]["device"] == 10**6
    assert len(report["plans"]) == 11
    assert [plan["recommended"] for plan in report["plans"]].index(True) == 0
    for plan in report["plans"]:
        device = plan["device"]
        assert device["total"] == sum(device[part] for part in ("params", "optimizer", "gradients", "activations"))


def test_a_config_sets_what_no_flag_sets(tmp_path: Path) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": True},
        "activation_checkpointing": {"wrap_blocks": True},
        "optimizer": {"type": "AdamW", "params": {"moments_dtype": "int8"}},
        "data_types": {"master_weights": "residual"},
        "zero_optimization": {"stage": 3},
    }
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    arguments = ("estimate", MODEL, "--ranks", "2", "--seq", "8", "--json", "--config", str(path))
    work = json.loads(typed(*arguments, "--accumulation", "1").out)["workload"]
    expected = {"batch": 3, "accumulation": 1, "precision": "bf16", "checkpointing": True, "optimizer": "adam"}
    expected |= {"moments_dtype": "int8", "residual_masters": True}
    assert {key: work[key] for key in expected} == expected
    config["data_types"] = {}
    config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "ratio": 0}  # type: ignore[index]
    path.write_text(json.dumps(config))
    assert json.loads(typed(*arguments).out)["workload"]["ratio"] == 0
    budget = json.loads(typed(*arguments, "--ratio", "1", "--device_budget", "2GB").out)["workload"]
    assert (budget["ratio"], budget["device_budget"]) == (1, 2 * 10**9)
    for kind, words in (("Muon", "optimizer.type: expected one of adam"), ("Lion", "--moments_dtype: expected fp32")):
        path.write_text(json.dumps(config | {"optimizer": {"type": kind, "params": {"moments_dtype": "int8"}}}))
        assert words in typed(*arguments, code=2).err
    assert "no.json" in typed("estimate", MODEL, "--config", str(tmp_path / "no.json"), code=2).err


def test_a_table_in_a_pipe_is_plain_text() -> None:
    typed("estimate", MODEL, "--ranks", "2", "--seq", "8", "--device_memory", "1KB", code=2)
    shown = typed("estimate", MODEL, "--ranks", "2", "--seq", "8", "--device_memory", "1MiB")
    lines = shown.out.splitlines()
    assert lines[0] == f"{MODEL}: 4.16e-06 B parameters, 2 ranks, bf16, batch 1 x 8, adam; GB"
    assert re.match(r" stage 1 +0\.000 +0\.000 .* recommended", lines[2])
    assert len(lines) == 13
    assert shown.out.isascii()
    assert "first 1,000,000,000 elements of each rank's shards stay there (offload_param.max_in_cpu)" in shown.err


def test_a_model_without_a_fitting_plan_gets_a_remedy() -> None:
    assert (
        "no plan fits, not even with --checkpointing and --batch 1; use more ranks"
        in typed("estimate", MODEL, "--seq", "8", "--host_memory", "1MB", "--device_memory", "0.001MB").err
    )


def test_a_smaller_batch_that_fits_has_a_command_and_a_config(tmp_path: Path) -> None:
    size = ("--ranks", "2", "--batch", "8", "--sequence", "64")
    plans = json.loads(typed("estimate", "20k", *size, "--checkpointing", "--json").out)["plans"]
    limit = f"{min(plan['device']['total'] for plan in plans) * 1.2 / 1e9:.9f}GB"
    said = typed("estimate", "20k", *size, "--device_memory", limit)
    smaller = json.loads(typed("estimate", "20k", *size, "--device_memory", limit, "--json").out)["smaller"]
    assert smaller["checkpointing"]
    assert smaller["config"]["train_micro_batch_size_per_gpu"] == 8
    assert smaller["command"] in said.err
    assert json.dumps(smaller["config"]) in said.err
    again = json.loads(typed(*shlex.split(smaller["command"].removeprefix("zeroaccel ")), "--json").out)
    assert [smaller["total"]] == [plan["device"]["total"] for plan in again["plans"] if plan["recommended"]]
    (tmp_path / "ds.json").write_text(json.dumps(smaller["config"]))
    words = ("--ranks", "2", "--sequence", "64", "--config", str(tmp_path / "ds.json"))
    read = json.loads(typed("estimate", "20k", *words, "--json").out)
    assert smaller["total"] in {plan["device"]["total"] for plan in read["plans"]}
    assert (read["workload"]["checkpointing"], read["workload"]["precision"]) == (True, "bf16")


@pytest.mark.parametrize("kind", ["html", "png"])
def test_charts_are_written(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"chart.{kind}"
    typed("estimate", MODEL, "--seq", "8", "--device_memory", "1MB", "--plot", str(path))
    if kind == "png":
        assert path.read_bytes().startswith(b"\x89PNG")
    else:
        page = path.read_text()
        assert page.count("<title>masters and states</title>") == 11
        assert "stage 3, all on cpu" in page
        assert "GB, recommended</text>" in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["7x"], "MODEL: expected a parameter count such as 7b"),
        ([MODEL, "--ranks", "8", "--ranks_per_machine", "3"], "--ranks_per_machine: expected a divisor of the 8 ranks"),
        ([MODEL, "--disk", "much"], "'much' is not a size such as 80GB or 512MiB"),
        ([MODEL, "--plot", "/no/such/folder/a.png"], "there is no folder /no/such/folder; make it, or name another"),
        ([MODEL, "--plot", "a.pdf"], "--plot: expected a file that ends in .html or .png, got 'a.pdf'"),
        ([MODEL, "--batch", "0"], "0 is not in the range x>=1"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(arguments: list[str], message: str) -> None:
    said = typed("estimate", *arguments, code=2)
    assert message in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""


def test_the_command_of_a_page_is_on_its_mesh() -> None:
    on_mesh = Workload(ranks=8).on_mesh(2, 1, 2)
    assert " --pp_size 2 --tp_size 2 --cpu" in command("7b", on_mesh, Capacity(on_cpu=True))
