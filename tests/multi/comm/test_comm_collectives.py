"""The collectives on real gloo ranks: values to the last bit, traffic, and agreement on errors."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.support.job import run_job
from tests.support.pool import RankFailure, Ranks
from zeroaccel.comm.agree import agree_or_raise, disagreement_report
from zeroaccel.comm.collectives import Collectives
from zeroaccel.comm.recording import CollectiveCall, RecordingCollectives
from zeroaccel.comm.topology import current_topology, init_process_group
from zeroaccel.comm.transport import close_connections, send_recv_backend
from zeroaccel.errors import CheckpointError, ConfigError

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def _collectives() -> RecordingCollectives:
    return RecordingCollectives(Collectives(current_topology()))


def _values_of(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns the values that `rank` contributes; every rank can compute them."""
    values = torch.randn(numel, generator=torch.Generator().manual_seed(rank)) * 100
    return values.to(dtype)


def _gather_all_sorts() -> list[str]:
    collectives = _collectives()
    rank, world_size = collectives.rank, collectives.world_size
    wrong = []
    for dtype in (*FLOATS, torch.uint8, torch.int64):
        for numel in (0, 1, 7, 4096):
            for in_place in (False, True):
                own = _values_of(rank, numel, dtype)
                out = torch.zeros(world_size * numel, dtype=dtype)
                shard = out[rank * numel : (rank + 1) * numel] if in_place else own.clone()
                shard.copy_(own)
                collectives.all_gather(out, shard, "unshard layers.0").wait()
                expected = torch.cat([_values_of(peer, numel, dtype) for peer in range(world_size)])
                if not (torch.equal(out, expected) and torch.equal(shard, own)):
                    wrong.append(f"{numel} x {dtype}, in place: {in_place}")
    return wrong


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_gather_puts_every_shard_in_its_place(ranks: Ranks, world_size: int) -> None:
    assert ranks(world_size).run(_gather_all_sorts) == [[]] * world_size


def _reduce_all_sorts() -> list[str]:
    collectives = _collectives()
    rank, world_size = collectives.rank, collectives.world_size
    scale = torch.tensor(1 / world_size)
    wrong = []
    for wire in FLOATS:
        for result in FLOATS:
            for numel in (0, 1, 7, 4096):
                out = torch.full((numel,), torch.nan, dtype=result)
                flat = _values_of(rank, numel * world_size, wire)
                collectives.reduce_scatter(out, flat, "reduce layers.0", float(scale)).wait()
                total = torch.zeros(numel)
                for peer in range(world_size):
                    total += _values_of(peer, numel * world_size, wire).view(world_size, numel)[rank].float()
                if not torch.equal(out, (total * scale).to(result)):
                    wrong.append(f"{numel} x {wire} into {result}")
                if not torch.equal(flat, _values_of(rank, numel * world_size, wire)):
                    wrong.append(f"{numel} x {wire} changed its source")
    return wrong


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_reduction_adds_in_rank_order_and_rounds_once(ranks: Ranks, world_size: int) -> None:
    assert ranks(world_size).run(_reduce_all_sorts) == [[]] * world_size


def _order_of_addition() -> list[float]:
    # In fp32, (1e8 + 1) - 1e8 is 0 and (1e8 - 1e8) + 1 is 1: only rank order gives the first.
    collectives = _collectives()
    flat = torch.full((3,), (1e8, 1.0, -1e8)[collectives.rank])
    out = torch.empty(1)
    collectives.reduce_scatter(out, flat, "reduce layers.0").wait()
    control = torch.tensor([(1e8, 1.0, -1e8)[collectives.rank]])
    collectives.all_reduce(control, "sum", "norm")
    return [out.item(), control.item()]


def test_the_order_of_addition_is_that_of_the_ranks(ranks: Ranks) -> None:
    results = ranks(3).run(_order_of_addition)
    assert [reduced for reduced, _ in results] == [0.0] * 3
    assert len({summed for _, summed in results}) == 1


def _reduce_many_at_once() -> bool:
    """Starts more reductions than there are scratch buffers and finishes them in reverse, twice."""
    collectives = _collectives()
    right = True
    for _ in range(2):
        flats = [torch.full((2 * numel,), float(numel), dtype=torch.bfloat16) for numel in (10, 500, 30, 2000)]
        outs = [torch.empty(flat.numel() // 2) for flat in flats]
        works = [collectives.reduce_scatter(*pair, "reduce") for pair in zip(outs, flats, strict=True)]
        for work in reversed(works):
            work.wait()
            work.wait()
        right &= all(torch.equal(out, torch.full_like(out, 2.0 * out.numel())) for out in outs)
        right &= all(work.is_completed() for work in works)
    return right


def test_many_reductions_at_once_do_not_share_memory(ranks: Ranks) -> None:
    assert ranks(2).run(_reduce_many_at_once) == [True, True]


def _interleave_differently() -> list[float]:
    collectives = _collectives()
    full, shard = torch.zeros(2), torch.full((1,), float(collectives.rank))
    out, flat = torch.empty(1), torch.tensor([1.0, 2.0])
    calls = [
        lambda: collectives.all_gather(full, shard, "unshard a"),
        lambda: collectives.reduce_scatter(out, flat, "reduce a"),
    ]
    for work in [call() for call in (calls if collectives.rank == 0 else reversed(calls))]:
        work.wait()
    return [*full.tolist(), out.item(), float(collectives.flight_recorder.digest())]


def test_gathers_and_reductions_may_interleave_differently(ranks: Ranks) -> None:
    first, second = ranks(2).run(_interleave_differently)
    assert first[:3] == [0.0, 1.0, 2.0]
    assert second[:3] == [0.0, 1.0, 4.0]
    assert first[3] == second[3]


def _control() -> list[object]:
    collectives = _collectives()
    rank, world_size = collectives.rank, collectives.world_size
    counts = torch.tensor([rank, -rank], dtype=torch.int64)
    collectives.all_reduce(counts, "sum", "count")
    largest = torch.tensor([[float(rank), float("nan") if rank == 1 else 0.0]], dtype=torch.float64)
    collectives.all_reduce(largest, "max", "overflow")
    sources = []
    for src in range(world_size):
        weights = torch.full((2, 3), float(rank), dtype=torch.bfloat16)
        collectives.broadcast(weights, src, "weights")
        sources.append(weights.unique().tolist())
    collectives.broadcast(torch.empty(0), 0, "nothing")
    collectives.barrier("end")
    objects = collectives.gather_objects({"rank": rank, "text": "x" * 1000 * rank}, "objects")
    return [counts.tolist(), largest.tolist(), sources, [len(o["text"]) for o in objects]]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_control_collectives(ranks: Ranks, world_size: int) -> None:
    for counts, largest, sources, lengths in ranks(world_size).run(_control):
        total = world_size * (world_size - 1) // 2
        assert counts == [total, -total]
        assert largest[0][0] == world_size - 1
        assert largest[0][1] != largest[0][1]
        assert sources == [[float(src)] for src in range(world_size)]
        assert lengths == [1000 * rank for rank in range(world_size)]


def _traffic() -> tuple[list[CollectiveCall], dict[str, int]]:
    collectives = _collectives()
    world_size = collectives.world_size
    collectives.all_gather(torch.empty(10 * world_size), torch.empty(10), "unshard a").wait()
    flat = torch.ones(10 * world_size, dtype=torch.bfloat16)
    collectives.reduce_scatter(torch.empty(10), flat, "reduce a").wait()
    collectives.all_reduce(torch.ones(2, dtype=torch.float64), "max", "overflow")
    return collectives.calls, collectives.nbytes_by_op()


def test_traffic_is_what_the_formulas_say(ranks: Ranks) -> None:
    for calls, nbytes in ranks(3).run(_traffic):
        assert calls[:2] == [
            CollectiveCall("all_gather", "unshard a", "float32", 30, 2 * 10 * 4),
            CollectiveCall("reduce_scatter", "reduce a", "bfloat16", 30, 2 * 10 * 2),
        ]
        assert nbytes == {"all_gather": 80, "reduce_scatter": 40, "all_reduce": 2 * 2 * 8}


def _agree(failing: dict[int, Exception]) -> None:
    collectives = _collectives()
    agree_or_raise(collectives, failing.get(collectives.rank), "check the files")


def test_agreement_without_errors_is_silent(ranks: Ranks) -> None:
    assert ranks(3).run(_agree, {}) == [None] * 3


def test_every_rank_raises_what_one_rank_found(ranks: Ranks) -> None:
    with pytest.raises(RankFailure) as caught:
        ranks(3).run(_agree, {1: CheckpointError("step-5: no such folder")})
    assert sorted(caught.value.reports) == [0, 1, 2]
    for report in caught.value.reports.values():
        assert "CheckpointError: step-5: no such folder [rank 1]" in report


def test_the_lowest_rank_gives_the_class_and_all_give_their_messages(ranks: Ranks) -> None:
    with pytest.raises(RankFailure) as caught:
        ranks(3).run(_agree, {0: ConfigError("no"), 2: ConfigError("no"), 1: OSError("full")})
    for report in caught.value.reports.values():
        assert "ConfigError: no [ranks 0, 2]\nfull [rank 1]" in report


class _WantsTwo(Exception):
    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} and {two}")


def test_an_error_that_cannot_be_made_anew_keeps_its_name(ranks: Ranks) -> None:
    with pytest.raises(RankFailure) as caught:
        ranks(2).run(_raise_odd)
    for report in caught.value.reports.values():
        assert "RuntimeError: _WantsTwo: this and that [rank 1]" in report


def _raise_odd() -> None:
    collectives = _collectives()
    agree_or_raise(collectives, _WantsTwo("this", "that") if collectives.rank == 1 else None, "check")


def _go_through_different_labels() -> tuple[bool, str]:
    collectives = Collectives(current_topology())
    collectives.barrier("same")
    # As if messages, which match by order alone, had delivered the data of a different call unnoticed.
    label = "unshard layers.3" if collectives.rank == 0 else "unshard layers.4"
    collectives.flight_recorder.issue("gather", "all_gather", label, 8, "float32")
    digest = collectives.flight_recorder.digest()
    extremes = torch.tensor([float(digest), -float(digest)], dtype=torch.float64)
    collectives.all_reduce(extremes, "max", "overflow")
    return extremes[0].item() == -extremes[1].item(), disagreement_report(collectives)


def test_ranks_that_desynced_without_hanging_are_reported(ranks: Ranks) -> None:
    for same, report in ranks(2).run(_go_through_different_labels):
        assert not same
        assert re.fullmatch(
            r"the ranks have issued different collectives: gather #\d+ is "
            r'all_gather "unshard layers\.3" of 8 x float32 on rank 0, '
            r'all_gather "unshard layers\.4" of 8 x float32 on rank 1',
            report,
        )
    ranks(2).close()  # its history now differs


def _share_a_topology() -> tuple[bool, int, int]:
    one, other = Collectives(init_process_group()), Collectives(current_topology())
    before = one.flight_recorder.issued()["control"]
    one.barrier("first engine")
    other.barrier("second engine")
    return (
        one.flight_recorder is other.flight_recorder,
        other.flight_recorder.issued()["control"] - before,
        dist.get_world_size(),
    )


def test_engines_share_groups_and_history(ranks: Ranks) -> None:
    assert ranks(2).run(_share_a_topology) == [(True, 2, 2)] * 2


def test_the_users_own_process_group_is_taken() -> None:
    result = run_job(2, USERS_OWN, env={"LOCAL_RANK": "", "LOCAL_WORLD_SIZE": ""})
    assert result.returncodes == (0, 0), result.stderr
    assert result.stdout.split() == ["0", "of", "2,", "sum", "1", "1", "of", "2,", "sum", "1"]
    assert result.stderr == ""


USERS_OWN = "tests/multi/comm/users_own_group.py"


def _closes_after_its_neighbour() -> str:
    """Rank 2 waits for rank 1, which sends nothing, and closes its connections after rank 0 closed its own."""
    group = dist.new_group(backend="gloo")
    assert group is not None
    dist.barrier()  # closing connections while another rank opens them would break that rank's group
    if group.rank() == 0:
        close_connections(group)
    said = ""
    if group.rank() == 2:
        with pytest.raises(RuntimeError):
            send_recv_backend(group).recv([torch.empty(1)], 0, 7).wait()
        waited = send_recv_backend(group).recv([torch.empty(1)], 1, 7)
        with ThreadPoolExecutor() as executor:
            waiting = executor.submit(waited.wait, timedelta(seconds=30))
            close_connections(group)
            said = str(waiting.exception())
    dist.barrier()
    return said


def test_connections_close_also_where_a_peer_has_closed_first(ranks: Ranks) -> None:
    said = ranks(3).run(_closes_after_its_neighbour)[2]
    assert said
    assert "30000" not in said  # the timeout of the wait in milliseconds
