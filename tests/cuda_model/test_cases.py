"""On the model of streams every access of every configuration is ordered, and the costs of a step equal these numbers.

The counts are exact. A change that lowers one updates the number here; a change that raises one gives the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from tests.cuda_model.configurations import CASES, PEAKS, SLOW, Peak
from tests.cuda_model.conftest import ModelProcess
from tests.cuda_model.gated_network import GatedNetwork
from zeroaccel.estimate import Workload, estimate

Outcomes = Callable[..., SimpleNamespace]

_NAMES = [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in CASES]


@pytest.mark.parametrize("name", _NAMES)
def test_every_access_is_ordered(name: str, outcome_of: Outcomes) -> None:
    outcome = outcome_of(name)
    assert not outcome.error
    known = CASES[name].open
    if known:  # strictly: a finding that is gone must be removed from the table
        assert outcome.findings
    assert all(known and known in finding for finding in outcome.findings), outcome.findings
    # Checks the waits of a step, too: it is the same run.
    waits = sum(outcome.waits.values())
    assert waits == MORE_WAITS[name] if name in MORE_WAITS else waits <= 1, outcome.waits
    # After the first steps the allocator finds a block for every request, and the device does not wait for the driver.
    assert outcome.mallocs == MALLOCS.get(name, 0), outcome.mallocs
    assert outcome.locks == LOCKS.get(name, 0), outcome.locks
    assert not outcome.late


# Number of times the host waits for the device in a step, if it exceeds one, by the reason for it.
MORE_WAITS: dict[str, int] = {
    # The host computes the norm after the gradients of a backward arrive; with several ranks it waits for their sum.
    "stage 2, optimizer on the host, several ranks": 2,
    "stage 2, optimizer on the host, small buckets": 2,
    "stage 2, optimizer on the host, accumulation": 4,
    "stage 3, both on the host, several ranks": 2,
    "stage 3, residual masters and int8 moments, both on the host": 2,
    "stage 3, both on the host, fp16": 2,
    "stage 3, both on the host, two buffers for a unit": 2,
    "stage 2, update during the next step": 2,
    "stage 3, both on the host, update during the next step": 2,
    # At the end of a backward, the host waits for each gradient that is still on its way, to start its update.
    "stage 2, update during the backward": 6,
    "stage 3, both on the host, update during the backward": 6,
    # Squares of gradients that stay come with those that leave; after several micro-batches, the host asks for them.
    "stage 2, half of the optimizer on the host, several ranks": 2,
    "stage 2, half of the optimizer on the host, accumulation": 6,
    "stage 3, half of the optimizer on the host": 2,
    "stage 3, half of the optimizer on the host, fp32": 2,
    "stage 2, half of the optimizer on the host, update during the next step": 2,
    "stage 3, half of the states in files": 2,
    # Weights go to a file from host memory after they have arrived there.
    "stage 2, states in files": 2,
    "stage 2, states in files, update during the next step": 2,
    "stage 3, both in files": 2,
    "stage 3, parameters in files": 5,
    "stage 3, parameters in files, one buffer": 10,
    # Each copy of pageable memory is a wait.
    "stage 3, both on the host, unpinned": 15,
    # NCCL takes sizes from the host, which reads the number of tokens per rank once in each of two layers.
    "stage 1, ep": 3,
    "stage 3, ep": 3,
    # Programs that take several steps, or evaluate before they step.
    "evaluation before the step, both on the host": 2,
    "two engines": 2,
    "two engines, both on the host": 2,
    "steps that nothing waits for": 2,
    # Programs that need values on the host: of parameters, and of chunks of a checkpoint.
    "full parameters read and written": 2,
    "full parameters read and written, both on the host": 24,
    # The program gets payloads in host memory: one wait for a packet, or for a shard whose elements are coded there.
    "weights to a generator": 6,
    "weights in a generator on another stream": 13,
    "weights to a generator, both on the host": 2,
    # The norm; the copies to the host, and `cudaFree` after them; the copies back.
    "states to the host and back": 4,
    # The norm, twice; two chunks, and the end of the copies, for which the saver's threads wait.
    "a checkpoint saved in the background": 5,
    "a checkpoint saved in the background, small chunks": 39,
    "a checkpoint saved in the background, both on the host": 2,
}

# Calls of the driver for memory in the third step: each new stream of the program has a pool of its own.
MALLOCS = {"evaluation on another stream": 1, "evaluation on another stream, parameters on the host": 1}

# Slabs that are page-locked in the third step, for which the host waits.
LOCKS: dict[str, int] = {
    # The first update that overlaps with another step's gradients needs a second slab for them.
    "stage 2, update during the next step": 1,
    "stage 3, both on the host, update during the next step": 1,
    "stage 2, half of the optimizer on the host, update during the next step": 1,
    "stage 2, states in files, update during the next step": 1,
    # One buffer is less than a unit and the next one need, so that some exceed the budget.
    "stage 3, parameters in files, one buffer": 2,
}


def test_there_are_cases_of_every_kind() -> None:
    assert len(CASES) >= 30
    assert set(CASES) >= SLOW
    assert {case.loop for case in CASES.values()} >= {"plain", "two_engines", "background_save", "full_parameters"}


# -- what a step costs

_UNITS = 4  # units of the small network: its root and three blocks

# At the end of a step: kernels, and bytes per element of the rank's shard; in the step: waits of the host for the
# device, and blocking collectives in host memory.
COUNTS: dict[str, tuple[int, float, int, int]] = {
    "stage 1, one rank": (18, 32.0, 1, 0),
    "stage 1": (24, 38.0, 1, 0),
    "stage 3": (20, 32.0, 1, 0),
    "stage 3, fp32": (20, 36.0, 0, 0),
    "stage 3, fp16": (20, 32.0, 1, 0),
    "stage 3, qgZ": (20, 32.0, 1, 0),
    "stage 3, frozen weights as nf4": (20, 32.0, 1, 0),
    "stage 2, SGD with momentum": (24, 30.0, 1, 0),
    "stage 3, RMSprop": (20, 40.0, 1, 0),
    "stage 3, Muon": (105, 105.0, 1, 0),
    "stage 3, Lamb": (19, 44.2, 1, 0),
    "stage 2, bf16 moments": (24, 30.0, 1, 0),
    "stage 2, int8 moments": (24, 26.1, 1, 0),
    "stage 2, optimizer on the host": (4, 2.0, 1, 0),
    "stage 2, optimizer on the host, several ranks": (11, 8.0, 2, 0),
    "stage 3, parameters on the host": (24, 34.0, 1, 0),
    "stage 3, parameters in files": (24, 34.0, 5, 3),
    "stage 3, both on the host, several ranks": (3, 0.0, 2, 1),
}


@pytest.mark.parametrize("name", COUNTS)
def test_a_step_has_these_counts(name: str, outcome_of: Outcomes) -> None:
    outcome = outcome_of(name)
    waits, control = sum(outcome.waits.values()), sum(outcome.control.values())
    assert (outcome.boundary_kernels, outcome.boundary_bytes, waits, control) == COUNTS[name], outcome.waits


# Covers streams and events of every module that has some: copies, files, activations, saves, two hops, a mesh.
_OF_ANY_DEVICE = (
    "stage 3, both on the host, several ranks",
    "stage 3, both in files",
    "stage 2, activations on the host",
    "a checkpoint saved in the background, small chunks",
    "stage 3, qwZ, qgZ and hpZ",
    "stage 1, pp",
)


@pytest.mark.slow  # the house rule `devices_are_asked_for_their_type` is in `make test`
def test_xpu_devices_have_the_same_counts(xpu_process: ModelProcess, outcome_of: Outcomes) -> None:
    for name in _OF_ANY_DEVICE:
        other, outcome = xpu_process.outcome(name), outcome_of(name)
        assert not other.error
        assert not other.findings
        for count in (
            "kernels",
            "boundary_kernels",
            "boundary_bytes",
            "waits",
            "control",
            "calls",
            "ms",
            "peak_nbytes",
        ):
            assert getattr(other, count) == getattr(outcome, count), f"{name}: {count}"


@pytest.mark.slow  # that kernels make these codes is in tests/unit/ops/test_device_kernels.py
def test_weights_in_e4m3_cost_as_much_as_in_int8(outcome_of: Outcomes) -> None:
    integers, floating = outcome_of("stage 3, qwZ"), outcome_of("stage 3, qwZ in e4m3")
    assert (floating.kernels, floating.ms, floating.peak_nbytes) == (
        integers.kernels,
        integers.ms,
        integers.peak_nbytes,
    )


def test_one_launch_decodes_the_codes_of_all_ranks(outcome_of: Outcomes) -> None:
    # Six gathers of codes from 4 ranks: with a launch for each rank's part, 18 more.
    assert outcome_of("stage 3, frozen weights as nf4").kernels == 173
    assert outcome_of("stage 3, frozen weights as int8, parameters on the host").kernels == 191


def test_reductions_in_4_bits_add_few_launches(outcome_of: Outcomes) -> None:
    plain, quantized = outcome_of("stage 3"), outcome_of("stage 3, qgZ")
    assert quantized.kernels - plain.kernels == 7 * _UNITS


@pytest.mark.parametrize(
    ("name", "most_ms", "waits"),
    [
        ("overlap, stage 3 on 8 ranks", 28.5, 0),
        ("overlap, stage 3 on 8 ranks, layers of 70B", 391.5, 0),
        ("overlap, stage 1 on 8 ranks", 27.0, 0),
        ("overlap, stage 2, optimizer on the host", 33.5, 1),
        ("overlap, stage 3, both on the host", 50.5, 1),
    ],
)
def test_copies_and_collectives_overlap_with_kernels(
    name: str, most_ms: float, waits: int, outcome_of: Outcomes
) -> None:
    outcome = outcome_of(name)
    # No lane can end before its work, so the time is between that of the busiest lane and the limit.
    assert max(outcome.busy_ms.values()) < outcome.ms <= most_ms
    assert sum(outcome.waits.values()) == waits, outcome.waits


def test_reductions_of_stage_1_overlap_by_default(outcome_of: Outcomes) -> None:
    overlapped, without = (outcome_of(f"overlap, stage 1 on 8 ranks{rest}") for rest in ("", ", without"))
    assert without.ms > overlapped.ms + 3  # of 31
    assert without.peak_nbytes == overlapped.peak_nbytes


def test_a_generator_gets_the_memory_of_all_states(outcome_of: Outcomes) -> None:
    states, before, away, after = outcome_of("states to the host and back").live_nbytes
    assert states > 0
    assert before - away == states
    assert after == before


def test_codes_behind_a_copy_outlive_their_readers(outcome_of: Outcomes) -> None:
    assert outcome_of("stage 3, qwZ, parameters on the host").early_frees == {}


def test_the_host_waits_for_copies_of_file_shards_only_where_there_is_no_room(outcome_of: Outcomes) -> None:
    def waits(name: str) -> int:
        return sum(count for text, count in outcome_of(name).waits.items() if " at offload/nvme.py" in text)

    assert waits("stage 3, parameters in files, one buffer") > 0
    assert waits("stage 3, parameters in files") == 0


# `make test` runs every second one, `make test-all` all.
_PEAK_NAMES = [pytest.param(name, marks=[pytest.mark.slow] if index % 2 else []) for index, name in enumerate(PEAKS)]


def _subject(peak: Peak) -> Callable[[], tuple[nn.Module, Callable[[nn.Module, int, int], Tensor]]]:
    def step(model: nn.Module, batch: int, sequence: int) -> Tensor:
        loss: Tensor = model(torch.zeros(batch, sequence, dtype=torch.long))
        return loss

    return lambda: (GatedNetwork(peak.case.size), step)


@pytest.mark.parametrize("name", _PEAK_NAMES)
def test_the_most_memory_is_as_estimated(name: str, outcome_of: Outcomes) -> None:
    peak = PEAKS[name]
    outcome = outcome_of(name)
    assert not outcome.error
    workload = Workload(
        ranks=peak.case.world_size,
        precision=peak.precision,
        sequence=peak.case.size.tokens,
        accumulation=peak.accumulation,
    )
    [estimated] = estimate(_subject(peak), workload, [peak.plan])
    assert outcome.peak_nbytes == pytest.approx(estimated.device.total, rel=0.005)
    # Slabs are whole pages, and new weights are rounded into a few more before they leave.
    # If gradients are summed over micro-steps, there is pageable memory as well.
    if peak.plan[1] == "cpu" and peak.accumulation == 1:
        assert estimated.host.total <= outcome.host_nbytes <= 1.2 * estimated.host.total
