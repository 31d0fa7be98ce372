"""One of two ranks that share a GPU over NCCL: compares the results of every plan with stage 0; see `parts.ranks`.

Prints a line `FIGURE name: same`, or the differing results, for each.
"""

from __future__ import annotations

import sys
import zlib
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).resolve().parents[2])]

import torch  # noqa: E402
from plans import plan  # noqa: E402

import zeroaccel  # noqa: E402
from tests.cuda_model.gated_network import GatedNetwork  # noqa: E402
from tests.cuda_model.network_size import Size  # noqa: E402

__all__: list[str] = []

SIZE = Size(layers=3, width=256, inner=512, tokens=128, vocabulary=4096)
HOST = {"device": "cpu"}
TRAVELLING = {
    "stage3_prefetch_bucket_size": 10_000_000,
    "stage3_max_reuse_distance": 0,
    "stage3_param_persistence_threshold": 0,
}
EXACT = {
    "stage 0": plan(0),
    "stage 1": plan(1),
    "stage 2": plan(2),
    "stage 3": plan(3, **TRAVELLING),
    "stage 3, parameters on host": plan(3, offload_param=HOST, **TRAVELLING),
    "stage 2, optimizer on host": plan(2, offload_optimizer=HOST),
    "stage 3, both on host": plan(3, offload_param=HOST, offload_optimizer=HOST, **TRAVELLING),
    "stage 3, secondary shards": plan(3, zero_hpz_partition_size=1, **TRAVELLING),
}
ROUNDED = {
    "stage 3, quantized weights": plan(3, zero_quantized_weights=True, **TRAVELLING),
    "stage 3, quantized gradients": plan(
        3, zero_quantized_gradients=True, zeropp={"quantize_gradients_on_one_node": True}, **TRAVELLING
    ),
}
STEPS = 4
ROUNDED_BOUND = 0.02  # relative to the loss; int8 weights and int4 gradients differ by a few per mille


Results = list[tuple[float, float | None, int]]
"""Results of each step: the loss, the norm of the gradients, and a checksum of the weights."""


def with_sgd(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the same config with SGD, because Adam hides the scale of a gradient."""
    return {**config, "optimizer": {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9}}}


def results(config: dict[str, Any]) -> Results:
    """Returns the results of a few steps from the same weights and batches."""
    torch.manual_seed(0)
    device = torch.device("cuda", torch.cuda.current_device())
    with torch.device(device):
        network = GatedNetwork(SIZE)
    engine, *_ = zeroaccel.initialize(network, config=config)
    print("STEPS BEGIN", flush=True)
    torch.manual_seed(1 + engine.collectives.rank)
    found: Results = []
    for _ in range(STEPS):
        loss = engine(torch.randint(SIZE.vocabulary, (1, SIZE.tokens), device=device))
        engine.backward(loss)
        engine.step()
        found.append((float(loss.detach()), engine.get_global_grad_norm(), _checksum(list(network.parameters()))))
    print("STEPS END", flush=True)
    engine.destroy()
    return found


def _checksum(params: list[torch.nn.Parameter]) -> int:
    checksum = 0
    for param in params:
        with zeroaccel.zero.GatheredParameters([param]):
            checksum = zlib.crc32(param.detach().float().cpu().numpy().tobytes(), checksum)
    return checksum


def main() -> int:
    first: Results = []
    different = False
    for name, config in EXACT.items():
        found = results(config)
        first = first or found
        different |= found != first
        print(f"FIGURE two ranks, {name}: {'same' if found == first else f'{found} for {first}'}", flush=True)
    for name, config in ROUNDED.items():
        found = results(config)
        close = all(
            abs(one - other) <= ROUNDED_BOUND * other for (one, *_), (other, *_) in zip(found, first, strict=True)
        )
        different |= not close
        print(f"FIGURE two ranks, {name}, close: {'same' if close else f'{found} for {first}'}", flush=True)
    return int(different)


if __name__ == "__main__":
    sys.exit(main())
