"""Functions on several processes of this machine, started from a plain Python process as in a notebook."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support.job import JobResult, run_command

SCRIPT = """
import os, time
import torch
import torch.distributed as dist
from zeroaccel.comm.collectives import Collectives
from zeroaccel.comm.topology import destroy, init_process_group
from zeroaccel.accelerate.script_calls import debug_launcher, notebook_launcher
from zeroaccel.errors import ZeroAccelError
from zeroaccel.state import PartialState


def total(start):
    topology = init_process_group()
    value = torch.tensor(float(start + topology.rank))
    dist.all_reduce(value)
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION")
    place = f"rank {topology.rank} of {topology.world_size}"
    forked = PartialState().fork_launched
    print(f"{place}: {value.item()} on {topology.device}, {precision}, forked: {forked}", flush=True)


def again():
    for number in range(3):
        topology = init_process_group()
        everyone = Collectives(topology).gather_objects((number, topology.rank), "who")
        destroy()
    print(f"again: {everyone}", flush=True)


def fail_on_1():
    init_process_group()
    if dist.get_rank() == 1:
        raise KeyError("lost on the way")
    time.sleep(60)


torch.ones(64, 64) @ torch.ones(64, 64)
debug_launcher(total, (10,))
debug_launcher(again)
notebook_launcher(total, (20,), num_processes=2, mixed_precision="bf16")
here = os.getpid()
notebook_launcher(lambda: print("alone", os.environ["ACCELERATE_MIXED_PRECISION"], os.getpid() == here), (), 1)
assert "ACCELERATE_MIXED_PRECISION" not in os.environ and "RANK" not in os.environ
start = time.monotonic()
try:
    debug_launcher(fail_on_1)
except Exception as error:
    print("raised:", type(error).__name__, error)
assert time.monotonic() - start < 30 * float(os.environ["TEST_TIME_FACTOR"]), "the other rank was waited for"
for call in (
    lambda: debug_launcher(total, (1,), num_processes=0),
    lambda: notebook_launcher(total, (1,), mixed_precision="fp8"),
    lambda: notebook_launcher(total, (1,), num_nodes=2),
    lambda: (init_process_group(), debug_launcher(total, (1,))),
):
    try:
        call()
    except ZeroAccelError as error:
        print("refused:", error)
"""


def test_launching_from_a_python_process(tmp_path: Path) -> None:
    script = tmp_path / "notebook.py"
    script.write_text(SCRIPT)
    result: JobResult = run_command([sys.executable, script])
    assert result.returncode == 0, result.stderr
    for line in (
        "rank 0 of 2: 21.0 on cpu, None, forked: True",
        "rank 1 of 2: 21.0 on cpu, None, forked: True",
        "rank 0 of 2: 41.0 on cpu, bf16, forked: True",
        "rank 1 of 2: 41.0 on cpu, bf16, forked: True",
        "alone no True",
        "again: [(2, 0), (2, 1)]",  # groups that are created again after destroy()
        "raised: ProcessRaisedException",
        "in fail_on_1",
        "KeyError: 'lost on the way'",
        "num_processes: expected at least 1, got 0",
        "mixed_precision): expected no, fp16, bf16, got 'fp8'",
        "use_port): expected the same port on all nodes, got None",
        "this process has already joined a job; restart the notebook",
    ):
        assert line in result.stdout, result.stdout + result.stderr


ON_DEVICES = """
import os
import sys
import torch
from zeroaccel.accelerate.script_calls import notebook_launcher
from zeroaccel.errors import ZeroAccelError

# A driver with two devices: a process that has asked it for anything has children that cannot use it.
here, asked, counts = os.getpid(), {os.getpid(): False}, int(sys.argv[1])


def ask():
    asked[os.getpid()] = True
    return counts


torch.cuda.device_count = ask
torch.cuda.is_available = lambda: ask() > 0
torch.cuda._is_in_bad_fork = lambda: os.getpid() != here and asked[here]


def train(name):
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
    print(f"{name}: rank {os.environ['RANK']} sees {visible}, fails: {torch.cuda._is_in_bad_fork()}", flush=True)


def attempt(*arguments):
    try:
        notebook_launcher(*arguments)
    except ZeroAccelError as error:
        print("refused:", error)


attempt(train, ("first",))
attempt(train, ("more", ), 3)
print("asked here:", asked[here])
torch.cuda.is_available()
attempt(train, ("second",))
attempt(train, ("on the CPU",), 3)
torch.cuda.is_initialized = lambda: True
attempt(train, ("third",))
"""


def test_a_notebook_does_not_ask_the_driver_of_its_devices(tmp_path: Path) -> None:
    script = tmp_path / "notebook.py"
    script.write_text(ON_DEVICES)
    result: JobResult = run_command([sys.executable, script, "2"])
    assert result.returncode == 0, result.stderr
    for line in (
        "first: rank 0 sees all, fails: False",
        "first: rank 1 sees all, fails: False",
        "more: rank 2 sees , fails: False",
        "asked here: False",
        "refused: launching train: this process has called the CUDA driver, for example with torch.cuda.is_available()",
        "on the CPU: rank 2 sees ,",
        "refused: launching train: this process uses CUDA",
    ):
        assert line in result.stdout, result.stdout + result.stderr
    assert "second:" not in result.stdout
    assert "third:" not in result.stdout
