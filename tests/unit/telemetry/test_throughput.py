"""Tokens and FLOPs that a run reports, against torch's counter of operations."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, PreTrainedModel

from tests.support.log_lines import log_lines
from tests.support.mixtures import small_mixture
from tests.unit.telemetry.test_step_report import FakeEngine, Sink
from zeroaccel.telemetry.step_report import StepReport
from zeroaccel.telemetry.throughput import (
    DataWait,
    ModelWork,
    Rates,
    Throughput,
    known_peak,
    peak_tflops,
    slowest_rank,
    work_of,
)
from zeroaccel.zero.wrap_policy import has_expert_interface

SHAPE = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def _llama(**changes: Any) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(**{**SHAPE, "num_key_value_heads": 2, "attn_implementation": "eager", **changes})
    )


def _work(model: nn.Module) -> ModelWork:
    weights = {name: (param.shape, param.requires_grad) for name, param in model.named_parameters()}
    return work_of(model, weights, [module for module in model.modules() if has_expert_interface(module)])


def _counted(model: PreTrainedModel, rows: int, length: int) -> int:
    ids = torch.randint(0, 96, (rows, length))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("tied", [False, True])
def test_work_is_that_of_the_operations(tied: bool) -> None:
    model = _llama(tie_word_embeddings=tied)
    assert _work(model).of(tokens=3 * 16, length=16) == _counted(model, 3, 16)


def test_work_of_frozen_weights_has_no_gradient_of_weights() -> None:
    model = _llama()
    model.model.layers[1].requires_grad_(False)
    model.lm_head.requires_grad_(False)
    assert _work(model).of(tokens=3 * 16, length=16) == _counted(model, 3, 16)


def test_a_token_uses_the_chosen_experts_only() -> None:
    model = small_mixture("Olmoe")
    config = model.config
    share = config.num_experts_per_tok / next(m.num_experts for m in model.modules() if has_expert_interface(m))
    all_experts = sum(p.numel() for m in model.modules() if has_expert_interface(m) for p in m.parameters())
    dense = (
        sum(p.numel() for p in model.parameters() if p.dim() > 1)
        - all_experts
        - model.get_input_embeddings().weight.numel()
    )
    assert _work(model).per_token == pytest.approx(6 * (dense + share * all_experts))


def test_windows_bound_the_positions() -> None:
    full = _work(nn.ModuleDict({"a": nn.Linear(2, 2)}))
    assert full == ModelWork(6.0 * 4)
    model = nn.Linear(2, 2, bias=False)
    model.config = MistralConfig(**SHAPE, sliding_window=8)
    model.config.layer_types = ["sliding_attention", "full_attention"]
    work = _work(model)
    assert (work.per_token_and_position, work.windows) == (12.0 * 32, ((12.0 * 32, 8),))
    assert work.of(tokens=1, length=4) == 24 + 2 * 12 * 32 * 4


def test_packed_documents_attend_within_themselves() -> None:
    work = ModelWork(1.0, 2.0, ((3.0, 4),))
    throughput = Throughput(work, None, lambda own: [own])
    throughput.start()
    packed = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    throughput.count((), {"input_ids": torch.zeros(1, 8, dtype=torch.int64), "position_ids": packed})
    apart = work.of(tokens=3, length=3) + work.of(tokens=5, length=5)
    assert _flops(throughput) == apart < work.of(tokens=8, length=8)


def test_parts_of_a_sequence_add_up_to_the_whole() -> None:
    work = ModelWork(1.0, 2.0, ((3.0, 4),))
    total = 0.0
    for part in torch.arange(8).view(2, 1, 4):
        throughput = Throughput(work, None, lambda own: [own])
        throughput.start()
        throughput.count((), {"input_ids": torch.zeros(1, 4, dtype=torch.int64), "position_ids": part})
        total += _flops(throughput)
    assert total == work.of(tokens=8, length=8)


class _Coded(nn.Linear):
    """A layer of 8 x 6 values, whose tensor has codes."""

    def __init__(self, kind: str) -> None:
        super().__init__(6, 8, bias=False)
        codes: Tensor = torch.zeros(24, dtype=torch.uint8)
        if kind == "in 16 bits":
            codes = codes.view(torch.bfloat16)[:, None]
        if kind == "a wrapper":
            codes = TwoTensor(torch.zeros(8, 6), torch.zeros(8, 6))
        self.weight = nn.Parameter(codes, requires_grad=False)
        if kind == "in 16 bits":
            self.weight.quant_state = SimpleNamespace(shape=torch.Size([8, 6]))  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["in bytes", "in 16 bits", "a wrapper"])
def test_quantized_weights_count_decoded(kind: str) -> None:
    model = nn.Sequential(_Coded(kind), nn.Linear(8, 2))
    names = {"in bytes": ["0.weight"], "in 16 bits": ["0.weight"], "a wrapper": ["0.weight.codes", "0.weight.scales"]}
    weights = {name: ([24, 1] if kind != "in bytes" else [24], False) for name in names[kind]} | {
        "0.weight.absmax": ([6, 4], False)
    }
    work = work_of(model, {**weights, "1.weight": ([2, 8], True), "1.bias": ([2], True)}, [])
    assert work.per_token == 4 * 48 + 6 * 16


def _flops(throughput: Throughput) -> float:
    found: list[float] = []
    gather = throughput._gather
    throughput._gather = lambda own: found.append(own[2]) or gather(own)  # type: ignore[func-returns-value]
    _rates(throughput)
    return found[0]


def _rates(throughput: Throughput) -> Rates:
    rates = throughput.take()
    assert rates is not None, "the first call only starts the time"
    return rates


def test_rates_are_those_of_all_ranks() -> None:
    def gather(own: tuple[float, ...]) -> list[tuple[float, ...]]:
        return [own, (10.0, 100.0, 4e12, 0.5, 0.0, 3.0 * 2**30, 2.0**30)]

    throughput = Throughput(ModelWork(1e12), 2.0, gather, lambda: (2.0 * 2**30, 2.0 * 2**30))
    assert throughput.take() is None
    ids = torch.zeros(2, 5, dtype=torch.int64)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    throughput.count((), {"input_ids": ids, "attention_mask": mask})
    throughput.count((ids,), {})  # without a mask, every position is a token
    rates = _rates(throughput)
    assert rates.padding == pytest.approx(1 - (18 + 10) / 120)
    assert rates.tflops is not None
    assert rates.mfu == pytest.approx(rates.tflops / 2)
    assert rates.tokens_per_second is not None
    assert rates.tflops / rates.tokens_per_second == pytest.approx((20 + 4) / 2 / 28)
    assert rates.slowest == "slowest rank 1: waits 50 % of the time for data, the others 0 %"
    assert "peak 3 GiB, model states 1 GiB" in rates.text()
    assert rates.events()["Memory/most_bytes"] == 3 * rates.events()["Memory/states_bytes"]


def test_inputs_that_are_no_tokens_give_no_rate_of_tokens() -> None:
    throughput = Throughput(ModelWork(1e12), None, lambda own: [own])
    throughput.start()
    throughput.count((torch.zeros(2, 3),), {})
    rates = _rates(throughput)
    assert (rates.tokens_per_second, rates.tflops, rates.mfu) == (None, None, None)
    assert "tokens" not in rates.text()
    assert set(rates.events()) == {"Rate/data_wait"}


def test_text_leaves_out_what_is_not_known() -> None:
    rates = Rates(5120.4, 0.031, 1.25, 0.125, 0.004, "")
    assert rates.text() == "5120 tokens/s | 1.25 TFLOPS (MFU 12.5 %) | padding 3.1 % | data 0.4 %"
    assert Rates(None, 0.0, None, None, 0.0, "").text() == ""


@pytest.mark.parametrize(
    ("nbytes", "words"),
    [(100, "100 bytes"), (204 * 1024, "204 KiB"), (519 * 2**20, "519 MiB"), (1.25 * 2**30, "1.25 GiB")],
)
def test_each_size_has_its_unit(nbytes: float, words: str) -> None:
    rates = Rates(None, 0.0, None, None, 0.0, "", memory=(nbytes, nbytes))
    assert rates.text() == f"peak {words}, model states {words}"


def test_waiting_counts_only_the_source_and_closes_it() -> None:
    closed = []

    def source() -> Any:
        try:
            yield from range(3)
        finally:
            closed.append(True)

    wait = DataWait()
    batches = wait.timed(source())
    assert next(batches) == 0
    assert wait.seconds > 0
    batches.close()
    assert closed == [True]
    assert list(DataWait().timed([1, 2])) == [1, 2]


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("Tesla T4", 65.0),
        ("another device", None),
    ],
)
def test_peak_of_a_device(name: str, peak: float | None) -> None:
    assert peak_tflops(name) == peak


def test_a_device_of_unknown_peak_is_named() -> None:
    with log_lines() as lines:
        assert known_peak("NVIDIA H200") == 989.0
        assert known_peak("Accelerator 9") is None
    (line,) = lines
    assert "got Accelerator 9; no MFU without peak_tflops" in line


def test_one_rank_is_never_the_slowest() -> None:
    assert slowest_rank([100.0], [0.9], [0.0]) == ""


def test_a_rank_whose_script_takes_the_time_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    throughput = Throughput(ModelWork(1.0), None, lambda own: [(0.0, 0.0, 0.0, 0.0, 0.1, 0.0, 0.0), own])
    throughput.start()
    for between, inside in ((2.0, 1.0), (4.0, 3.0)):
        throughput.enter()
        now[0] += inside
        throughput.leave()
        now[0] += between
    throughput.enter()
    now[0] += 2.0
    throughput.leave()
    expected = "slowest rank 1: spends 50 % of the time in its script or trackers, the others 10 %"
    assert _rates(throughput).slowest == expected


def test_waiting_for_other_ranks_is_not_the_scripts_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now, shares = [0.0], []
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def slow(own: tuple[float, ...]) -> list[tuple[float, ...]]:
        shares.append(own[4])
        now[0] += 5.0  # another rank is late
        return [own]

    report, engine = StepReport(steps_per_print=1), FakeEngine()
    report.throughput = Throughput(ModelWork(1.0), None, slow)
    for _ in range(3):
        now[0] += 1.0  # the script
        report.begin("step")
        now[0] += 3.0
        report.end("step")
        engine.advance(report)
    assert shares == [0.25, 0.25]  # none at the first step


def test_a_slow_tracker_counts_like_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    now, shares = [0.0], []
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    class Slow(Sink):
        def write(self, events: Any) -> None:
            now[0] += 3.0

    report, engine = StepReport(steps_per_print=1, monitors=Slow()), FakeEngine()
    report.throughput = Throughput(ModelWork(1.0), None, lambda own: shares.append(own[4]) or [own])
    for _ in range(3):
        report.begin("step")
        now[0] += 1.0
        report.end("step")
        engine.advance(report)
    assert shares == [0.75, 0.75]


def test_a_call_of_the_engine_counts_its_batches_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    report = StepReport(steps_per_print=1)
    report.throughput = throughput = Throughput(ModelWork(1.0), None, lambda own: [own])
    throughput.start()
    ids = torch.zeros(2, 5, dtype=torch.int64)
    with report.whole_call():
        report.batches([{"input_ids": ids}, (ids, ids)])
        for _ in range(3):  # forwards of parts of the model
            report.begin("forward")
            report.forward((), {"input_ids": ids})
            report.end("forward")
            now[0] += 1.0
    throughput.enter()
    assert (throughput._positions, throughput.outside) == (20, 0.0)
