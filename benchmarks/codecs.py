"""How fast codes are made and read, compared with a plain copy of the same bytes.

    python benchmarks/codecs.py --markdown result.md

A rate counts the bytes of the values (2 per bf16), for the copy as for the codec. Rounds alternate between the copy and
each codec, and a ratio is the median over rounds, so that a slow second of the machine is slow for both sides. Exit
code 1 if a codec is slower than 0.6 of the copy.
"""

from __future__ import annotations

import platform
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import click
import torch

from zeroaccel.comm.quantized import INT4, INT8, dequantize, dequantize_add, quantize

BAR = 0.6
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _rates(numel: int, dtype: torch.dtype, rounds: int) -> dict[str, tuple[float, float]]:
    """What is done -> (GB/s, median ratio to the copy)."""
    values = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(dtype)
    out, total = torch.empty_like(values), torch.zeros(numel)
    work: dict[str, Callable[[], object]] = {"copy": lambda: out.copy_(values)}
    for codec in (INT8, INT4):
        code = torch.empty(codec.nbytes(numel), dtype=torch.uint8)
        name = f"int{codec.bits}"
        work[f"{name} encode"] = lambda codec=codec, code=code: quantize(values, codec, code)  # type: ignore[misc]
        work[f"{name} decode"] = lambda codec=codec, code=code: dequantize(code, codec, out)  # type: ignore[misc]
        if dtype is torch.float32:  # sums are in fp32, whatever the values were
            work[f"{name} decode and add"] = lambda codec=codec, code=code: dequantize_add(code, codec, total)  # type: ignore[misc]
    for warm in work.values():
        warm()
    times = {name: [] for name in work}  # type: dict[str, list[float]]
    for _ in range(rounds):
        for name, once in work.items():
            times[name].append(_seconds(once))
    return {
        name: (
            values.nbytes / statistics.median(taken) / 1e9,
            statistics.median(copy / own for copy, own in zip(times["copy"], taken, strict=True)),
        )
        for name, taken in times.items()
    }


@click.command(context_settings={"show_default": True})
@click.option("--numel", default=1 << 24, help="Values; more than a cache holds.")
@click.option("--rounds", default=15)
@click.option("--threads", default=1)
@click.option("--markdown", type=click.Path(dir_okay=False, path_type=Path), help="Write the table here, too.")
def main(numel: int, rounds: int, threads: int, markdown: Path | None) -> None:
    """Prints a table; exits with 1 where a codec misses the bar."""
    torch.set_num_threads(threads)
    lines = [
        f"# Codecs beside a copy, {date.today()}",
        "",
        f"`python benchmarks/codecs.py --numel {numel} --rounds {rounds} --threads {threads}`, "
        f"torch {torch.__version__}, Python {platform.python_version()}. Rates count the bytes of the values; "
        f"the ratio is the median over rounds; the bar is {BAR}.",
        "",
        "| values | what | GB/s | of the copy |",
        "| --- | --- | ---: | ---: |",
    ]
    slow = []
    for name, dtype in _DTYPES.items():
        for what, (rate, ratio) in _rates(numel, dtype, rounds).items():
            lines.append(f"| {name} | {what} | {rate:.1f} | {ratio:.2f} |")
            if ratio < BAR:
                slow.append(f"{name} {what}")
    text = "\n".join(lines) + "\n"
    print(text)
    if markdown is not None:
        markdown.write_text(text)
    if slow:
        sys.exit(f"slower than {BAR} of the copy: {', '.join(slow)}")


if __name__ == "__main__":
    main()
