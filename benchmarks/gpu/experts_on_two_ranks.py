"""One of two ranks that share a GPU over NCCL: gathers in e4m3, and 32 experts over two ranks; see `campaign.py`.

Prints a line `FIGURE name: value` for each.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).resolve().parents[2])]

import torch  # noqa: E402
from parts import union_ms  # noqa: E402
from plans import plan  # noqa: E402
from two_ranks import TRAVELLING, results  # noqa: E402

import zeroaccel  # noqa: E402
from zeroaccel.comm.topology import init_process_group  # noqa: E402
from zeroaccel.config.parallel import ParallelConfig  # noqa: E402

__all__: list[str] = []

LAYERS, WIDTH, TOKENS, EXPERTS = 8, 1024, 2048, 32


def gathers_in_e4m3() -> float:
    """Returns the largest relative difference of a loss from that of exact gathers."""
    coded = plan(3, zero_quantized_weights=True, zeropp={"weight_format": "fp8"}, **TRAVELLING)
    exact, rounded = results(plan(3, **TRAVELLING)), results(coded)
    return max(abs(one[0] - other[0]) / other[0] for one, other in zip(rounded, exact, strict=True))


def experts() -> tuple[float, float]:
    """Returns the milliseconds of a step of a mixture, and those in which its device runs no kernel."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "num_hidden_layers": LAYERS}
    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "vocab_size": 8192}
    chosen = {"num_local_experts": EXPERTS, "num_experts_per_tok": 2}
    with torch.device("cuda", torch.cuda.current_device()):
        model = MixtralForCausalLM(MixtralConfig(**heads, **sizes, **chosen))
        tokens = torch.randint(8192, (1, TOKENS))
    engine, *_ = zeroaccel.initialize(model, config=plan(2), parallel=ParallelConfig(ep=2))

    def step() -> None:
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
        torch.cuda.synchronize()

    times = []
    for _ in range(6):
        begun = time.perf_counter()
        step()
        times.append(time.perf_counter() - begun)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
    spans = [(event.time_range.start, event.time_range.end) for event in profile.events()]
    idle = (max(end for _, end in spans) - min(start for start, _ in spans)) / 1e3 - union_ms(spans)
    engine.destroy()
    return 1e3 * statistics.median(times[2:]), idle


def main() -> int:
    init_process_group()
    print(f"FIGURE gathers in e4m3, relative difference of a loss: {gathers_in_e4m3()!r}", flush=True)
    milliseconds, idle = experts()
    print(f"FIGURE {EXPERTS} experts over two ranks, ms of a step: {milliseconds!r}", flush=True)
    print(f"FIGURE {EXPERTS} experts over two ranks, ms without a kernel: {idle!r}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
