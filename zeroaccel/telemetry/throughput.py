"""Rates of a training run: tokens and model FLOPs per second, the shares of padding and of waiting for data, memory.

A model's FLOPs are those that its formulas need, without recomputation: per token, 6 for each weight of a matrix
product that trains and 4 for each that is frozen, of a mixture's experts only the chosen ones; and 12 x layers x heads
x head size x sequence length for attention, without the saving of causal masks. (PaLM, arXiv:2204.02311, appendix B)
MFU, the model FLOPs utilization, divides them by the device's peak. Quantized weights count with their decoded sizes,
and with `position_ids` the length is that of each document of a packed row, or of the whole sequence of a cut one.

`Throughput` counts on the device; the host reads the counts when a line is due.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from zeroaccel.logs import log_once

PEAK_TFLOPS: Final[Mapping[str, float]] = {
    "B200": 2250.0,
    "GH200": 989.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H800": 989.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "A40": 150.0,
    "A30": 165.0,
    "A10": 125.0,
    "RTX 6000 Ada": 364.0,
    "RTX 5090": 209.5,
    "RTX 4090": 165.2,
    "RTX 3090": 71.0,
    "V100": 125.0,
    "T4": 65.0,
}
"""Part of a device's name -> TFLOPS of dense 16-bit matrix products, from the vendor's data sheets. The first wins."""


def peak_tflops(device_name: str) -> float | None:
    """Returns the peak of a device by its name; None if the table does not have it.

    Example:
        >>> peak_tflops("NVIDIA H100 80GB HBM3"), peak_tflops("NVIDIA A10G"), peak_tflops("a processor")
        (989.0, None, None)
    """
    words = f" {device_name.replace('-', ' ')} "
    return next((peak for name, peak in PEAK_TFLOPS.items() if f" {name} " in words), None)


def known_peak(device_name: str) -> float | None:
    """Returns `peak_tflops`, and warns if the table does not have the device."""
    peak = peak_tflops(device_name)
    if peak is None:
        text = "peak_tflops: expected a known device, got %s; no MFU without peak_tflops in the config or --peak_tflops"
        log_once(logging.WARNING, text % device_name)
    return peak


# -- seconds without a batch


class DataWait:
    """Seconds that this process has waited for batches of prepared loaders.

    Attributes:
        seconds: the sum so far; 0.0 if no loader is prepared.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yields the batches, and adds the time until each is there."""
        iterator = iter(batches)
        try:
            while True:
                begun = time.perf_counter()
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
                finally:
                    self.seconds += time.perf_counter() - begun
                yield batch
        finally:
            close = getattr(iterator, "close", None)
            if close is not None:
                close()


data_wait = DataWait()
"""The waiting time of this process."""


# -- the work of a token


@dataclass(frozen=True)
class ModelWork:
    """FLOPs of one token's forward and backward.

    Attributes:
        per_token: FLOPs of matrix products with weights.
        per_token_and_position: FLOPs of attention for each position of the sequence, if there is no window.
        windows: (FLOPs for each position, most positions) of layers with sliding windows.
    """

    per_token: float
    per_token_and_position: float = 0.0
    windows: tuple[tuple[float, int], ...] = ()

    def of(self, tokens: int, length: int) -> float:
        """Returns the FLOPs of `tokens` tokens in sequences of `length`.

        Example:
            >>> ModelWork(6.0, 2.0, ((3.0, 4),)).of(tokens=10, length=8)
            340.0
        """
        lengths = [length, *(min(length, most) for _, most in self.windows)]
        return self.of_pairs(tokens, [tokens * each for each in lengths])

    def of_pairs(self, tokens: int, pairs: Iterable[float]) -> float:
        """Returns the FLOPs of tokens that attend to this number of pairs, without and within each window."""
        factors = (self.per_token_and_position, *(each for each, _ in self.windows))
        return tokens * self.per_token + sum(each * count for each, count in zip(factors, pairs, strict=False))

    def pairs(self, positions: Tensor) -> Tensor:
        """Returns the pairs of tokens for `of_pairs`, (1 + number of windows,) int64, on the device.

        A token at position p adds 2p + 1 pairs to the square of its document's length, so parts of a document add up.

        Example:
            >>> ModelWork(1.0, 1.0, ((1.0, 2),)).pairs(torch.tensor([[0, 1, 2, 0, 1]]))  # 3 * 3 + 2 * 2, 3 * 2 + 2 * 2
            tensor([13, 10])
        """
        all_pairs = 2 * positions.long() + 1
        within = (torch.where(positions < most, all_pairs, most) for _, most in self.windows)
        return torch.stack([each.sum() for each in (all_pairs, *within)])


def work_of(
    model: nn.Module, weights: Mapping[str, tuple[Sequence[int], bool]], experts: Sequence[nn.Module]
) -> ModelWork:
    """Returns the work of a token.

    Args:
        weights: name of a parameter in the model -> (its whole shape, whether it trains); those with one dim, as of
            norms, are in no matrix product.
        experts: modules that hold all experts of a layer as 3-D weights, of which a token uses
            `config.num_experts_per_tok`.
    """
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    looked_up = _embedding_names(model)
    shares = _expert_shares(model, experts, text)
    decoded = _decoded_sizes(model)
    sizes = {
        name: math.prod(shape)
        for name, (shape, _) in weights.items()
        if len(shape) > 1 and name.rpartition(".")[0] not in decoded
    }
    trained = {name for name, (_, trains) in weights.items() if trains}
    flops = sum(
        (6.0 if name in trained else 4.0) * size * shares.get(name, 1.0)
        for name, size in (sizes | decoded).items()
        if name not in looked_up
    )
    return ModelWork(flops, *_attention_work(text))


def _decoded_sizes(model: nn.Module) -> dict[str, int]:
    """Returns name -> number of values of each quantized weight, whose tensors have codes, and others shapes."""
    sizes = {}
    for path, module in model.named_modules():
        features = getattr(module, "in_features", None), getattr(module, "out_features", None)
        for name, param in module.named_parameters(path, recurse=False):
            shape = getattr(getattr(param, "quant_state", None), "shape", None)
            if hasattr(param, "__tensor_flatten__") and not hasattr(param, "_local_tensor"):
                sizes[name] = param.numel()
            elif shape is not None:
                sizes[name] = math.prod(shape)
            elif None not in features and (hasattr(param, "quant_state") or not param.is_floating_point()):
                sizes[name] = math.prod(features)
    return sizes


def _embedding_names(model: nn.Module) -> set[str]:
    """Returns the names of weights that are only looked up, not multiplied: a head that shares one multiplies it."""
    multiplied = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)}
    return {
        f"{name}.weight" if name else "weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and id(module.weight) not in multiplied
    }


def _expert_shares(model: nn.Module, experts: Sequence[nn.Module], config: Any) -> dict[str, float]:
    """Returns name of an expert's weight -> the share of it that a token uses."""
    chosen = next((n for key in ("num_experts_per_tok", "top_k_experts") if (n := getattr(config, key, None))), None)
    if chosen is None:
        return {}
    inside = {id(param) for module in experts for param in module.parameters()}
    counts = {id(param): module.num_experts for module in experts for param in module.parameters()}
    return {
        name: min(1.0, chosen / counts[id(param)]) for name, param in model.named_parameters() if id(param) in inside
    }


def _attention_work(config: Any) -> tuple[float, tuple[tuple[float, int], ...]]:
    layers, heads = getattr(config, "num_hidden_layers", None), getattr(config, "num_attention_heads", None)
    if not isinstance(layers, int) or not isinstance(heads, int):
        return 0.0, ()
    size = getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // heads
    each = 12.0 * heads * size
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * layers
    window = getattr(config, "sliding_window", None) or 0
    windows = kinds.count("sliding_attention") if window else 0
    full = kinds.count("full_attention") + (0 if window else kinds.count("sliding_attention"))
    return full * each, ((windows * each, int(window)),) if windows else ()


# -- counting


@dataclass(frozen=True)
class Rates:
    """Rates over some steps.

    Attributes:
        tokens_per_second: over all ranks, without padding; None if the inputs are not tokens.
        padding: share of the positions that are padding.
        tflops: model TFLOPS per rank; None without tokens.
        mfu: `tflops` as a share of the device's peak; None if that is not known.
        data_wait: largest share of the time that a rank waited for batches.
        slowest: "rank 3: 1.62x the mean tokens" for a rank that stands out; "" if none does.
        memory: peak bytes of the rank with the most, and the bytes of its model states on the device.
    """

    tokens_per_second: float | None
    padding: float
    tflops: float | None
    mfu: float | None
    data_wait: float
    slowest: str
    memory: tuple[float, float] = (0.0, 0.0)

    def text(self) -> str:
        """``5120 tokens/s | 1.25 TFLOPS (MFU 12.5 %) | padding 3.1 % | data 0.4 %``; empty parts are left out."""
        parts = []
        if self.tokens_per_second is not None:
            parts.append(f"{self.tokens_per_second:.0f} tokens/s")
        if self.tflops is not None:
            used = "" if self.mfu is None else f" (MFU {self.mfu:.1%})".replace("%", " %")
            parts.append(f"{self.tflops:.3g} TFLOPS{used}")
        if self.tokens_per_second is not None and self.padding:
            parts.append(f"padding {100 * self.padding:.1f} %")
        if self.data_wait >= 0.001:
            parts.append(f"data {100 * self.data_wait:.1f} %")
        if self.memory[0]:
            parts.append("peak {}, model states {}".format(*map(_size, self.memory)))
        if self.slowest:
            parts.append(self.slowest)
        return " | ".join(parts)

    def events(self) -> dict[str, float]:
        """Returns name -> value for monitors."""
        values = {
            "Rate/tokens_per_second": self.tokens_per_second,
            "Rate/tflops": self.tflops,
            "Rate/mfu": self.mfu,
            "Rate/padding": self.padding if self.tokens_per_second is not None else None,
            "Rate/data_wait": self.data_wait,
            "Memory/most_bytes": self.memory[0] or None,
            "Memory/states_bytes": self.memory[1] or None,
        }
        return {name: value for name, value in values.items() if value is not None}


class Throughput:
    """Counts the inputs of training forwards, and joins the counts of the ranks.

    1. `count` before each forward, and `enter` and `leave` around each call of the engine. 2. `start` after the first
    step, which has the costs of the start. 3. `take` after any later step. (all ranks)

    Args:
        work: FLOPs of a token.
        peak: TFLOPS of the device, or None.
        gather: returns the values of all ranks. (all ranks)
        memory: returns this rank's peak bytes, and the bytes of its model states on the device.
        counts: False on a rank whose tokens another rank counts.

    Attributes:
        outside: seconds between calls of the engine, and in trackers.
    """

    def __init__(
        self,
        work: ModelWork,
        peak: float | None,
        gather: Callable[[tuple[float, ...]], Sequence[tuple[float, ...]]],
        memory: Callable[[], tuple[float, float]] = lambda: (0.0, 0.0),
        *,
        counts: bool = True,
    ) -> None:
        self._work, self._peak, self._gather, self._memory = work, peak, gather, memory
        self._counts, self._inside = counts, False
        self._since: float | None = None
        self._left: float | None = None  # the time of the engine's last return to the script
        self._forget()

    def start(self) -> None:
        """Starts the time that the next `take` measures."""
        self._forget()
        self._since = time.perf_counter()

    def enter(self) -> None:
        """Marks a call of the engine; the time since the last one was the script's."""
        if self._left is not None:
            self.outside += time.perf_counter() - self._left
            self._left = None

    def leave(self) -> None:
        """Marks the end of a call of the engine."""
        if not self._inside:
            self._left = time.perf_counter()

    @contextmanager
    def whole_call(self) -> Iterator[None]:
        """Makes calls of the engine within the block parts of one call, which counts its batches itself."""
        self.enter()
        before, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = before
            self.leave()

    def count_forward(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Counts the batch of a forward, unless it is a part of a `whole_call`."""
        if not self._inside:
            self.count(args, kwargs)

    def _forget(self) -> None:
        self._positions = self._unmasked = 0
        self._flops = self.outside = 0.0
        self._real: Tensor | None = None  # tokens under masks, on the device
        self._pairs: Tensor | None = None  # of batches with positions, on the device
        self._waited = data_wait.seconds

    def count(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Counts a batch: `input_ids`, or else the first argument, (B, S) integers; where the mask is 0 is padding."""
        tokens = _tokens_of(args, kwargs)
        if tokens is None or not self._counts:
            return
        self._positions += tokens.numel()
        named = args[0] if args and isinstance(args[0], Mapping) else kwargs
        mask, positions = named.get("attention_mask"), named.get("position_ids")
        if isinstance(positions, Tensor) and positions.shape == tokens.shape:
            pairs = self._work.pairs(positions)
            self._pairs = pairs if self._pairs is None else self._pairs + pairs
            self._flops += self._work.of_pairs(tokens.numel(), ())
        else:
            self._flops += self._work.of(tokens.numel(), tokens.shape[-1])
        if not isinstance(mask, Tensor) or mask.shape != tokens.shape:
            self._unmasked += tokens.numel()
            return
        if self._real is None:
            self._real = torch.zeros((), dtype=torch.int64, device=mask.device)
        self._real += mask.count_nonzero()

    def take(self) -> Rates | None:
        """Returns the rates since the last call or `start`; None before them. (all ranks)"""
        if self._since is None:
            self.start()
            return None
        seconds = max(time.perf_counter() - self._since, 1e-9)
        real = self._unmasked + (0 if self._real is None else int(self._real))
        if self._pairs is not None:
            self._flops += self._work.of_pairs(0, self._pairs.tolist())
        waited = (data_wait.seconds - self._waited) / seconds
        script = max(0.0, self.outside / seconds - waited)
        ranks = self._gather((float(real), float(self._positions), self._flops, waited, script, *self._memory()))
        self.start()
        tokens, positions, flops = (sum(rank[index] for rank in ranks) for index in range(3))
        tflops = flops / len(ranks) / seconds / 1e12 if flops else None
        return Rates(
            tokens_per_second=tokens / seconds if positions else None,
            padding=1.0 - tokens / positions if positions else 0.0,
            tflops=tflops,
            mfu=tflops / self._peak if tflops is not None and self._peak else None,
            data_wait=max(rank[3] for rank in ranks),
            slowest=slowest_rank(*([rank[index] for rank in ranks] for index in (1, 3, 4))),
            memory=max((rank[5], rank[6]) for rank in ranks),
        )


def slowest_rank(positions: Sequence[float], waited: Sequence[float], script: Sequence[float]) -> str:
    """Names a rank that the others wait for, with the reason; "" if none stands out.

    Args:
        positions: number of tokens of each rank, padding included; 0 if another rank counts them.
        waited: share of the time that each rank waited for data.
        script: share of the time that each rank spent between calls of the engine and in trackers, without the waits.

    Example:
        >>> slowest_rank([100, 100, 250], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0])
        'slowest rank 2: 1.67x the mean tokens'
        >>> slowest_rank([100, 100], [0.4, 0.02], [0.0, 0.0])
        'slowest rank 0: waits 40 % of the time for data, the others 2 %'
        >>> slowest_rank([100, 100], [0.01, 0.0], [0.02, 0.3])
        'slowest rank 1: spends 30 % of the time in its script or trackers, the others 2 %'
        >>> slowest_rank([100, 100], [0.01, 0.0], [0.0, 0.02])
        ''
    """
    for shares, words in ((waited, "waits {} % of the time for data"), (script, _BETWEEN_CALLS)):
        late = max(range(len(shares)), key=shares.__getitem__)
        others = max((share for rank, share in enumerate(shares) if rank != late), default=None)
        if others is not None and shares[late] - others > TIME_MARGIN:
            return f"slowest rank {late}: {words.format(round(100 * shares[late]))}, the others {100 * others:.0f} %"
    mean = sum(positions) / max(1, sum(map(bool, positions)))
    most = max(range(len(positions)), key=positions.__getitem__)
    if mean and positions[most] > 1.2 * mean:
        return f"slowest rank {most}: {positions[most] / mean:.2f}x the mean tokens"
    return ""


#: A rank is named for its time if its share of it is larger than that of every other rank by this much.
TIME_MARGIN = 0.05

_BETWEEN_CALLS = "spends {} % of the time in its script or trackers"


def _size(nbytes: float) -> str:
    number = min(3, int(math.log2(max(nbytes, 1)) / 10))
    return f"{nbytes / 1024**number:.3g} {('bytes', 'KiB', 'MiB', 'GiB')[number]}"


def _tokens_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    first = kwargs.get("input_ids", args[0] if args else None)
    if isinstance(first, Mapping):
        return _tokens_of((), first)
    is_tokens = isinstance(first, Tensor) and first.dim() == 2 and first.dtype in (torch.int64, torch.int32)
    return first if is_tokens else None
