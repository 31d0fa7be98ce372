"""Compares the step time of stage 3 with and without ZeRO++ between two hosts that share a slow link.

    sudo python benchmarks/throttled.py --rates 100,300,1000 --markdown result.md

The hosts are two network namespaces joined by a pair of virtual interfaces, each throttled by a token bucket (`tc`),
with two ranks on each; ranks of one host communicate over its loopback. It needs root, `ip` and `tc`, and removes the
namespaces at the end.
All combinations run in the same processes, one after the other; the step time is the median over steps of the slowest
rank's time. The bar: all three parts of ZeRO++ together at least 1.8 times as fast as plain stage 3 at every rate. Exit
code 1 if not.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import click

BAR = 1.8
RANKS_PER_HOST, HOSTS = 2, 2
COMBINATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "qwZ + hpZ": {"zero_quantized_weights": True, "zero_hpz_partition_size": RANKS_PER_HOST},
    "qgZ": {"zero_quantized_gradients": True},
    "all three": {
        "zero_quantized_weights": True,
        "zero_hpz_partition_size": RANKS_PER_HOST,
        "zero_quantized_gradients": True,
    },
    "replicas (mics_shard_size)": {"mics_shard_size": RANKS_PER_HOST},
}
_ROOT = Path(__file__).resolve().parents[1]
_PORT = 29533


# -- the link


@contextmanager
def two_hosts(mbit: int) -> Iterator[list[str]]:
    """Creates two network namespaces, joined by a link of this rate in each direction; yields their names."""
    spaces = [f"zeroaccel-{os.getpid()}-{host}" for host in range(HOSTS)]
    ends = [f"za{os.getpid() % 10**6}{host}" for host in "ab"]
    try:
        for space in spaces:
            _ip("netns", "add", space)
        _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for host, (space, end) in enumerate(zip(spaces, ends, strict=True)):
            _ip("link", "set", end, "netns", space)
            _inside(space, "ip", "addr", "add", f"10.77.0.{host + 1}/24", "dev", end)
            _inside(space, "ip", "link", "set", "lo", "up")
            _inside(space, "ip", "link", "set", end, "up")
            burst = max(32, mbit // 4)  # KiB: two milliseconds of the rate
            shape = f"tc qdisc add dev {end} root tbf rate {mbit}mbit burst {burst}kb latency 400ms"
            _inside(space, *shape.split())
        yield spaces
    finally:
        for space in spaces:
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def _inside(space: str, *words: str) -> None:
    subprocess.run(["ip", "netns", "exec", space, *words], check=True)


# -- one rank


def run_rank(steps: int, dim: int, layers: int) -> None:
    """Trains with every combination; rank 0 prints one JSON line."""
    import torch

    import zeroaccel
    from zeroaccel.comm.collectives import Collectives
    from zeroaccel.comm.recording import RecordingCollectives
    from zeroaccel.comm.topology import current_topology, init_process_group

    sys.path.insert(0, str(_ROOT / "examples"))
    from train_gpt import GPT

    torch.set_num_threads(1)
    init_process_group()
    found: dict[str, Any] = {}
    for name, zero in COMBINATIONS.items():
        torch.manual_seed(0)
        model = GPT(dim, layers, 4)
        settings = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {
                "stage": 3,
                "stage3_param_persistence_threshold": 4 * dim,
                "stage3_max_reuse_distance": 0,
                **zero,
            },
        }
        recorder = RecordingCollectives(Collectives(current_topology()))
        engine, *_ = zeroaccel.initialize(model, config=settings, collectives=recorder)
        counting = engine.collectives
        assert isinstance(counting, RecordingCollectives)
        random = torch.Generator().manual_seed(counting.rank)
        seconds, losses = [], []
        for step in range(steps + 2):
            ids = torch.randint(0, 256, (1, 17), generator=random)
            counting.barrier("measure")
            counting.reset()
            start = time.perf_counter()
            logits = engine(ids[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            engine.backward(loss)
            engine.step()
            taken = torch.tensor([time.perf_counter() - start])
            across = counting.across_nbytes()
            counting.all_reduce(taken, "max", "measure")
            if step >= 2:  # step 0 records the module order, step 1 warms up prefetching
                seconds.append(taken.item())
            losses.append(loss.item())
        found[name] = {
            "seconds": statistics.median(seconds),
            "across_nbytes": across,
            "loss": losses[-1],
            "numel": sum(unit.numel for unit in engine.units),
        }
        engine.destroy()
    if current_topology().rank == 0:
        print(json.dumps(found))
    torch.distributed.destroy_process_group()


def run_on_two_hosts(mbit: int, command: list[str]) -> str:
    """Runs a command as four ranks, two on each host; returns the output of rank 0."""
    ranks = []
    with two_hosts(mbit) as spaces:
        try:
            for rank in range(HOSTS * RANKS_PER_HOST):
                host, place = divmod(rank, RANKS_PER_HOST)
                address = f"ip -o -4 addr show to 10.77.0.{host + 1}"
                end = subprocess.run(
                    ["ip", "netns", "exec", spaces[host], *address.split()], check=True, capture_output=True, text=True
                ).stdout.split()[1]
                environment = os.environ | {
                    "RANK": str(rank),
                    "WORLD_SIZE": str(HOSTS * RANKS_PER_HOST),
                    "LOCAL_RANK": str(place),
                    "LOCAL_WORLD_SIZE": str(RANKS_PER_HOST),
                    "MASTER_ADDR": "10.77.0.1",
                    "MASTER_PORT": str(_PORT),
                    "GLOO_SOCKET_IFNAME": end.split("@")[0],
                    "OMP_NUM_THREADS": "1",
                    "PYTHONPATH": str(_ROOT),
                }
                ranks.append(
                    subprocess.Popen(
                        ["ip", "netns", "exec", spaces[host], *command],
                        env=environment,
                        stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                        text=True,
                    )
                )
            output = ranks[0].communicate(timeout=600)[0]
            if any(process.wait(timeout=60) for process in ranks):
                raise SystemExit("a rank failed; its message is above")
        finally:
            for process in ranks:
                process.kill()
    return output


def _measure(mbit: int, steps: int, dim: int, layers: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--rank", "--steps", steps, "--dim", dim, "--layers", layers]
    return json.loads(run_on_two_hosts(mbit, list(map(str, command))).splitlines()[-1])  # type: ignore[no-any-return]


@click.command(context_settings={"show_default": True})
@click.option("--rates", default="100,300,1000", help="Rates of the link, Mbit/s.")
@click.option("--steps", default=5, help="Timed steps.")
@click.option("--dim", default=256, help="Width of the model.")
@click.option("--layers", default=6)
@click.option("--markdown", type=click.Path(dir_okay=False, path_type=Path), help="Also write the table to this file.")
@click.option("--rank", is_flag=True, hidden=True)
def main(rates: str, steps: int, dim: int, layers: int, markdown: Path | None, rank: bool) -> None:
    """Measures every combination at every rate."""
    if rank:
        run_rank(steps, dim, layers)
        return
    lines = [
        f"# Step time over a throttled link, {date.today()}",
        "",
        f"`python benchmarks/throttled.py --rates {rates} --steps {steps} --dim {dim} --layers {layers}`: two network",
        f"namespaces with {RANKS_PER_HOST} ranks each, a token bucket on the link between them, {os.cpu_count()} cores",
        "for all. Seconds per step, and the speed-up over plain stage 3; MB are the megabytes that rank 0 sends across",
        "in a step.",
        "",
        "| link | " + " | ".join(COMBINATIONS) + " |",
        "| --- |" + " ---: |" * len(COMBINATIONS),
    ]
    slow: list[str] = []
    sent: dict[str, float] = {}
    for mbit in map(int, rates.split(",")):
        found = _measure(mbit, steps, dim, layers)
        plain = found["plain"]["seconds"]
        cells = [f"{row['seconds']:.2f} s ({plain / row['seconds']:.2f}x)" for row in found.values()]
        lines.append(f"| {mbit} Mbit/s | " + " | ".join(cells) + " |")
        sent = {name: row["across_nbytes"] / 1e6 for name, row in found.items()}
        numel = found["plain"]["numel"]
        if plain / found["all three"]["seconds"] < BAR:
            slow.append(f"{mbit} Mbit/s")
    lines.append("| MB across | " + " | ".join(f"{sent[name]:.2f}" for name in COMBINATIONS) + " |")
    lines += ["", f"{numel / 1e6:.1f} M parameters in bf16. The bar: all three at least {BAR}x at every rate."]
    text = "\n".join(lines) + "\n"
    print(text)
    if markdown is not None:
        markdown.write_text(text)
    if slow:
        sys.exit(f"below {BAR}x at {', '.join(slow)}")


if __name__ == "__main__":
    main()
