"""Predictions of the stream model for the plans.

As a program this file prints them as JSON: the library that replaces CUDA must be loaded before torch, so `predict`
starts a separate process.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from tests.cuda_model.guard_library import why_not  # noqa: E402  # does not import torch

__all__ = ["predict", "why_not"]


def predict(size: str) -> dict[str, float]:
    """Returns, by "plan/quantity": waits, ms and "peak GiB" of a step; milliseconds of kernels for 1e9 elements."""
    command = [sys.executable, str(Path(__file__).resolve()), size]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if found.returncode:
        raise RuntimeError(f"the stream model failed:\n{found.stderr[-4000:]}")
    predictions: dict[str, float] = json.loads(found.stdout.splitlines()[-1])
    return predictions


def main() -> None:
    """Runs each plan and each kernel on the model."""
    from tests.cuda_model.run import run_case  # first: it loads the library before torch

    from plans import PLANS, SIZES  # isort: skip
    from tests.cuda_model.configurations import Case

    predictions = {}
    for name, config in PLANS.items():
        outcome = run_case(Case(config, 1, size=SIZES[sys.argv[1]]))
        if outcome.error or outcome.findings:
            raise RuntimeError(f"{name}: {outcome.error or outcome.findings}")
        predictions[f"{name}/waits"] = float(outcome.num_waits)
        predictions[f"{name}/ms"] = outcome.ms
        predictions[f"{name}/peak GiB"] = outcome.peak_nbytes / 2**30
    print(json.dumps({**predictions, **_kernels()}))


def _kernels() -> dict[str, float]:
    """Returns milliseconds for 1e9 elements at the model's rate, from the bytes of each launch."""
    import torch

    from tests.cuda_model.modelled_ranks import modelled_rank
    from tests.cuda_model.stream_model import StreamModel
    from zeroaccel.comm.quantized import INT4, INT8, dequantize, dequantize_add, quantize
    from zeroaccel.ops import Adam
    from zeroaccel.ops.reductions import max_abs_into, square_sums_into

    numel, model = 1 << 20, StreamModel()
    found: dict[str, float] = {}

    def note(name: str) -> None:
        nbytes = sum(model.kernel_nbytes.values()) / numel
        found[f"kernels/{name}"] = nbytes * 1e9 / model.rates.device * 1e3
        model.reset_counts()

    def zeros(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(count, dtype=dtype, device="cuda")

    with modelled_rank(1, model):
        master, total = zeros(numel), zeros(numel)
        grad, out = (zeros(numel, torch.bfloat16) for _ in range(2))
        control, largest, sums = zeros(2), zeros(1, torch.int32), zeros(2, torch.int64)
        for kind in ("fp32", "bf16", "int8"):
            optimizer = Adam([master], moments_dtype=kind)
            for _ in range(2):  # the first step creates the states
                model.reset_counts()
                optimizer.step_shard(optimizer.param_groups[0], master, grad, grad_scale=control, out=out)
            note(f"adam {kind}")
        model.reset_counts()
        max_abs_into(grad, largest)
        note("max")
        square_sums_into(grad, largest, sums)
        note("squares")
        for codec, name in ((INT8, "int8"), (INT4, "int4")):
            code = zeros(codec.nbytes(numel), torch.uint8)
            model.reset_counts()
            quantize(grad, codec, code)
            note(f"quantize {name}")
            dequantize(code, codec, out)
            note(f"dequantize {name}")
            dequantize_add(code, codec, total)
            note(f"dequantize_add {name}")
    return found


if __name__ == "__main__":
    main()
