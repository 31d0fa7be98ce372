"""Measures the cost of weights for a generator: gathered bytes, peak of a stream, deltas of 200 steps, 1,024 ranks.

    python benchmarks/rollout_streams.py [--steps 200] [--markdown FILE] [--check]

Trains the GPT of examples/train_gpt.py on its text, ZeRO-3 in bf16 on two CPU ranks. After each delta
it compares the bits of a receiver beside rank 0 with those of the engine. `RecordingCollectives` counts the bytes; the
table of a large job uses closed forms and the measured payload.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

LAYERS, WIDTH, HEADS, LENGTH, BATCH = 4, 256, 4, 128, 8
SMALL_RATE, LARGE_RATE, LARGE_STEPS = 3e-6, 1e-3, 20
BUCKET = 1 << 20
PAYLOAD_BAR, LOOP_BAR = 0.03, 1.02
# A large job: ranks, parameters, bytes per second of a rank's link and of the generator's.
RANKS, NUMEL, LINK, UNITS = 1024, 671e9, 50e9, 61


def _engine(rate: float, weights: dict[str, Any] | None = None) -> tuple[Any, Any, Iterator[Any]]:
    import torch
    from train_gpt import GPT, batches, corpus

    import zeroaccel
    from zeroaccel.comm.collectives import Collectives
    from zeroaccel.comm.recording import RecordingCollectives
    from zeroaccel.comm.topology import current_topology, init_process_group

    init_process_group()
    counted = RecordingCollectives(Collectives(current_topology()))
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": rate, "weight_decay": 0.01}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    model = GPT(WIDTH, LAYERS, HEADS)
    if weights is not None:
        model.load_state_dict(weights)
    engine, *_ = zeroaccel.initialize(model, config=config, collectives=counted)
    text, _ = corpus(None, at_least=LENGTH + 1)
    return engine, counted, batches(text, BATCH, LENGTH, seed=counted.rank)


def _step(engine: Any, data: Iterator[Any]) -> float:
    from torch.nn import functional

    inputs, targets = next(data)
    begun = time.perf_counter()
    loss = functional.cross_entropy(engine(inputs).flatten(0, 1), targets.flatten())
    engine.backward(loss)
    engine.step()
    return time.perf_counter() - begun


def _gathers() -> dict[str, float]:
    """Returns gathered elements of each way / those of the padded model, and a stream's peak in units and buckets."""
    from zeroaccel.zero import GatheredParameters

    engine, counted, data = _engine(SMALL_RATE)
    _step(engine, data)
    numel = sum(buffer.layout.numel for unit in engine.units for buffer in unit.buffers)
    largest = max(sum(buffer.nbytes for buffer in unit.buffers) for unit in engine.units)

    def gathered() -> float:
        total = sum(call.numel for call in counted.calls if call.op == "all_gather")
        counted.reset()
        return total / numel

    def resident() -> int:
        return sum(buffer.full.untyped_storage().nbytes() for unit in engine.units for buffer in unit.buffers)

    found: dict[str, float] = {"model": numel}
    counted.reset()
    for _, param in engine.module.named_parameters():
        with GatheredParameters([param]):
            pass
    found["loop"] = gathered()
    param = max(engine.module.parameters(), key=lambda item: item.numel())
    engine.finish_update()
    counted.reset()
    with GatheredParameters([param]):
        pass
    found["one"] = gathered() * numel / param.numel()
    units = buckets = 0.0
    for packet in engine.stream_weights(bucket_bytes=BUCKET):
        units = max(units, resident() / largest)
        buckets = max(buckets, packet.payload.untyped_storage().nbytes() / BUCKET)
    found |= {"stream": gathered(), "units": units, "buckets": buckets}
    engine.mark_changes()
    counted.reset()
    for _ in engine.stream_deltas():
        pass
    found["deltas"] = gathered()
    engine.destroy()
    return found


def _trained(steps: int) -> dict[str, Any]:
    """Returns the weights after `steps` steps at the larger rate."""
    from zeroaccel.zero import safe_get_full_fp32_param

    engine, _, data = _engine(LARGE_RATE)
    for _ in range(steps):
        _step(engine, data)
    weights = {name: safe_get_full_fp32_param(param) for name, param in engine.module.named_parameters()}
    engine.destroy()
    return weights


def _follow(rate: float, steps: int, start: dict[str, Any] | None = None) -> dict[str, float]:
    """Returns payloads of deltas / bytes of the weights; fails if a bit of the receiver differs."""
    import torch

    from zeroaccel.rollout import Packet, WeightReceiver

    engine, counted, data = _engine(rate, start)
    weights = {name: torch.empty_like(value) for name, value in engine.iter_named_full_params()}
    nbytes = sum(value.nbytes for value in weights.values())
    receiver = WeightReceiver(weights)
    engine.mark_changes()
    for packet in engine.stream_weights():
        receiver.take(packet)
    shares, changed = [], []
    for _ in range(steps):
        _step(engine, data)
        before = {name: value.clone() for name, value in weights.items()}
        rank_packets = [Packet(p.manifest, p.payload.clone()) for p in engine.stream_deltas(engine.streamed_version)]
        packets = [packet for of_rank in counted.gather_objects(rank_packets, "send") for packet in of_rank]
        for packet in packets:
            receiver.take(packet)
        for name, value in engine.iter_named_full_params():
            assert torch.equal(weights[name].view(torch.int16), value.view(torch.int16)), name
        shares.append(sum(packet.payload.numel() for packet in packets) / nbytes)
        differing = sum(int((before[n].view(torch.int16) != v.view(torch.int16)).sum()) for n, v in weights.items())
        changed.append(differing * 2 / nbytes)
    marks = sum(b.own.numel // 8 for unit in engine.units for b in unit.buffers)
    own_numel = sum(b.own.numel for unit in engine.units for b in unit.buffers)
    engine.destroy()
    return {
        "mean": statistics.mean(shares),
        "most": max(shares),
        "changed": statistics.mean(changed),
        "bits": marks * 8 / own_numel,
        "steps": steps,
    }


def _step_times(rounds: int) -> list[float]:
    """Returns the ratios of step times with marks / without, measured in turn on one engine."""
    engine, _, data = _engine(SMALL_RATE)
    ratios = []
    for _ in range(3):
        _step(engine, data)
    for number in range(rounds):
        took = {}
        for marks in (bool(number % 2), not number % 2):
            engine.mark_changes(marks)
            _step(engine, data)  # allocates the bits
            took[marks] = min(_step(engine, data) for _ in range(3))
        ratios.append(took[True] / took[False])
    engine.destroy()
    return ratios


def _adapter_times(rounds: int) -> list[float]:
    """Returns time ratios of a stream that merges LoRA of all layers / one that sends adapters apart, in turn."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    import zeroaccel

    torch.manual_seed(0)
    shape = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8, "num_attention_heads": 8}
    base = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=4000)).bfloat16()
    model = get_peft_model(base, LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": SMALL_RATE}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    engine, *_ = zeroaccel.initialize(model, config=config)
    ratios = []
    for number in range(rounds + 1):
        took = {}
        for merges in (bool(number % 2), not number % 2):
            begun = time.perf_counter()
            for _ in engine.stream_weights(merge_adapters=merges):
                pass
            took[merges] = time.perf_counter() - begun
        ratios.append(took[True] / took[False])
    engine.destroy()
    return ratios[1:]


def measure(steps: int) -> None:
    """Runs all measurements as one rank."""
    import torch

    torch.set_num_threads(1)
    found = {
        "gathers": _gathers(),
        "small": _follow(SMALL_RATE, steps, _trained(steps)),
        "fresh": _follow(SMALL_RATE, steps),
        "large": _follow(LARGE_RATE, min(steps, LARGE_STEPS)),
        "times": _step_times(9),
        "adapters": _adapter_times(9),
    }
    if torch.distributed.get_rank() == 0:
        print(json.dumps(found), flush=True)


def _large_job(payload: float) -> Iterator[str]:
    """Returns rows for `RANKS` ranks that hold `NUMEL` bf16 weights; every link carries `LINK` bytes per second."""
    weights = 2 * NUMEL
    shard = weights / RANKS
    gathered = weights - shard  # bytes that a rank receives in gathers of all units
    rows = [
        ("gather all units, one rank sends them", gathered, weights, UNITS * (RANKS - 1), gathered + weights),
        ("the same as a stream: gathers and sends overlap", gathered, weights, UNITS * (RANKS - 1), weights),
        ("all values of every shard, no gather", 0.0, shard, 0, weights),
        (f"delta of {payload:.2%}, no gather", 0.0, shard * payload, 0, weights * payload),
    ]
    for name, received, sent, messages, serial in rows:
        yield (f"| {name} | {received / 1e9:,.1f} | {messages:,} | {sent / 1e9:,.3f} | {serial / LINK:,.2f} |")


def report(found: dict[str, Any]) -> Iterator[str]:
    """Returns the tables."""
    gathers, small, fresh, large, times = (found[key] for key in ("gathers", "small", "fresh", "large", "times"))
    yield f"# Weights to a generator, {date.today()}"
    yield ""
    yield (
        f"The GPT of examples/train_gpt.py, width {WIDTH}, {LAYERS} blocks, {gathers['model']:,.0f} padded elements, "
        "bf16, ZeRO-3, two CPU ranks; every call counted."
    )
    yield ""
    yield "| way | gathered elements / the model's |"
    yield "| --- | --- |"
    yield f"| a loop over named_parameters() with GatheredParameters | {gathers['loop']:.3f} (bar {LOOP_BAR}) |"
    yield f"| engine.stream_weights() | {gathers['stream']:.3f} |"
    yield f"| engine.stream_deltas() | {gathers['deltas']:.3f} |"
    yield f"| GatheredParameters of the largest weight, over that weight | {gathers['one']:.3f} |"
    yield ""
    yield f"A stream held at most {gathers['units']:.2f} of the largest unit and {gathers['buckets']:.2f} buckets."
    yield ""
    yield "| AdamW, learning rate | from | steps | changed elements, mean | payload / bf16 weights, mean | largest |"
    yield "| --- | --- | --- | --- | --- | --- |"
    after = f"{small['steps']} steps at {LARGE_RATE:g}"
    for rate, begins, run in ((SMALL_RATE, after, small), (SMALL_RATE, "new", fresh), (LARGE_RATE, "new", large)):
        yield f"| {rate:g} | {begins} | {run['steps']} | {run['changed']:.2%} | {run['mean']:.2%} | {run['most']:.2%} |"
    yield ""
    verdict = "met" if small["mean"] <= PAYLOAD_BAR else "missed"
    yield (
        "The receiver had the engine's bits after each step. Payloads are positions and values of each shard; bar of "
        f"the first mean: {PAYLOAD_BAR:.0%}, {verdict}. Marks take {small['bits']:.2f} bits per element."
    )
    yield ""
    spread = f"{min(times):.3f}..{max(times):.3f}, {len(times)} rounds"
    yield f"Step with marks / step without: {statistics.median(times):.3f} ({spread})."
    merged = found["adapters"]
    spread = f"{min(merged):.3f}..{max(merged):.3f}, {len(merged)} rounds"
    yield f"Stream that merges LoRA of all layers / that sends it apart: {statistics.median(merged):.3f} ({spread})."
    yield ""
    yield (
        f"Closed forms for {RANKS:,} ranks and {NUMEL / 1e9:.0f} B bf16 parameters in {UNITS} units, links of "
        f"{LINK / 1e9:.0f} GB/s for each rank and for the generator; times are bytes over links, "
        "with nothing overlapped unless a row says so."
    )
    yield ""
    yield "| way | gathered, GB received per rank | messages received in gathers | sent by a sending rank, GB | s |"
    yield "| --- | --- | --- | --- | --- |"
    yield from _large_job(small["mean"])
    yield ""
    yield f"Marks of changed elements: {NUMEL / RANKS / 8 / 1e6:,.0f} MB per rank."


def main() -> None:
    """Runs the ranks, and prints or writes the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bar is missed")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank:
        return measure(asked.steps)
    launch = [sys.executable, "-m", "zeroaccel.cli", "launch", "--cpu", "--num_processes", "2", __file__]
    result = subprocess.run(
        [*launch, "--rank", "--steps", str(asked.steps)], capture_output=True, text=True, check=False
    )
    if result.returncode:
        raise SystemExit(result.stderr[-4000:])
    found = json.loads(next(line for line in result.stdout.splitlines() if line.startswith("{")))
    text = "\n".join(report(found)) + "\n"
    if asked.markdown:
        asked.markdown.write_text(text)
    print(text)
    missed = found["small"]["mean"] > PAYLOAD_BAR or found["gathers"]["loop"] > LOOP_BAR
    if asked.check and missed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
