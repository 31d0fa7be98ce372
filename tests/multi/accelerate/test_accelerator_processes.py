"""Collectives on nested data and process control on two ranks; wrong calls raise an error on every rank."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.pool import Ranks
from tests.support.refusals import message
from zeroaccel import Accelerator, PartialState, ProfileKwargs
from zeroaccel.accelerate.beside_accelerate import leave_accelerate
from zeroaccel.errors import UsageError
from zeroaccel.operations import (
    broadcast,
    broadcast_object_list,
    concatenate,
    gather_object,
    pad_across_processes,
)

Pair = namedtuple("Pair", "left right")


def _nested() -> dict[str, Any]:
    accelerator = Accelerator()
    rank = accelerator.process_index
    data = OrderedDict(
        a=[torch.full((2, 3), rank), torch.tensor(rank)],
        b=Pair(torch.tensor([rank == 0]), (torch.full((1,), rank, dtype=torch.bfloat16),)),
    )
    gathered = accelerator.gather(data)
    assert type(gathered) is OrderedDict
    assert type(gathered["b"]) is Pair
    assert gathered["a"][0].tolist() == [[0] * 3] * 2 + [[1] * 3] * 2
    assert gathered["a"][1].tolist() == [0, 1]
    assert gathered["b"].left.tolist() == [True, False]
    assert gathered["b"].right[0].dtype is torch.bfloat16
    assert accelerator.gather(torch.zeros(0, 4)).shape == (0, 4)
    summed = accelerator.reduce({"x": torch.tensor([1.0, rank])})
    assert summed["x"].tolist() == [2.0, 1.0]
    assert accelerator.reduce(torch.tensor([2.0, rank]), "mean", scale=2.0).tolist() == [4.0, 1.0]
    assert accelerator.reduce(torch.tensor([2, rank]), "mean").tolist() == [2.0, 0.5]
    assert broadcast([torch.tensor([rank, 7])], from_process=1)[0].tolist() == [1, 7]
    assert broadcast_object_list(["mine", rank], from_process=1) == ["mine", 1]
    assert gather_object([rank, "x"]) == [0, "x", 1, "x"]
    assert gather_object({"rank": rank}) == [{"rank": 0}, {"rank": 1}]
    ragged = {"t": torch.full((rank + 1, 2), rank)}
    padded = accelerator.pad_across_processes(ragged, pad_index=-1)
    assert padded["t"].tolist() == ([[0, 0], [-1, -1]] if rank == 0 else [[1, 1], [1, 1]])
    assert pad_across_processes(ragged["t"], pad_index=-1, pad_first=True).tolist()[0] == ([-1, -1], [1, 1])[rank]
    assert pad_across_processes(torch.tensor(3)).item() == 3
    assert concatenate([{"x": torch.ones(1)}, {"x": torch.zeros(2)}])["x"].tolist() == [1.0, 0.0, 0.0]
    return {"rank": rank}


def test_nested_data(ranks: Ranks) -> None:
    assert ranks(2).run(_nested) == [{"rank": 0}, {"rank": 1}]


def _refusals() -> list[str]:
    accelerator = Accelerator()
    rank = accelerator.process_index
    told = []
    for function, value in (
        (accelerator.gather, torch.zeros(2 + rank)),
        (accelerator.gather, {"x": [torch.zeros(1), "text"]}),
        (accelerator.gather, torch.zeros(1) if rank else "text"),
        (accelerator.reduce, [torch.zeros(1, dtype=torch.float32 if rank else torch.float64)]),
        (lambda value: accelerator.reduce(value, "max"), torch.zeros(1)),  # type: ignore[arg-type]
        (lambda value: broadcast(value, 5), torch.zeros(1)),
        (accelerator.pad_across_processes, [torch.zeros(1)] * (1 + rank)),
    ):
        told.append(message(UsageError, function, value))
    return told


def test_values_that_cannot_be_gathered_are_reported_on_every_rank(ranks: Ranks) -> None:
    expected = [
        "gather: expected the same shapes and dtypes on every rank, got 'rank 0: (2,) torch.float32; rank 1: (3,)",
        "gather: the value at ['x'][1]: expected tensors, or tuples, lists and mappings of them, got 'str'",
        "gather: the value at the top: expected tensors",
        "reduce: expected the same shapes and dtypes on every rank",
        'reduce: reduction: expected "mean", "sum" or "none", got \'max\'',
        "broadcast: from_process: expected 0 to 1, got 5",
        "pad_across_processes: expected the same number of tensors on every rank, got 'rank 0: 1; rank 1: 2'",
    ]
    for told in ranks(2).run(_refusals):
        assert [part in said for part, said in zip(expected, told, strict=True)] == [True] * len(expected), told


def _control(folder: Path) -> list[Any]:
    accelerator = Accelerator()
    state = PartialState()
    rank = accelerator.process_index
    assert (state.num_processes, state.process_index, state.is_main_process) == (2, rank, rank == 0)
    assert (accelerator.is_local_main_process, accelerator.is_last_process) == (rank == 0, rank == 1)
    assert str(accelerator.distributed_type) == "DistributedType.MULTI_CPU"
    assert accelerator.distributed_type == "MULTI_CPU"
    ran: list[Any] = []
    accelerator.on_main_process(ran.append)("main")
    accelerator.on_local_main_process(ran.append)("local main")
    state.on_last_process(ran.append)("last")

    @accelerator.on_process(process_index=1)  # type: ignore[arg-type, operator]
    def second() -> None:
        ran.append("second")

    second()
    accelerator.on_local_process(ran.append, local_process_index=0)("first here")  # type: ignore[operator]
    with accelerator.main_process_first():
        if rank == 0:
            time.sleep(0.05)
            (folder / "made").write_text("")
        assert (folder / "made").exists()
    with accelerator.local_main_process_first():
        pass
    parts: list[Any] = []
    for inputs, padding in (
        ([0, 1, 2], False),
        ((0, 1, 2), True),
        (torch.arange(3), True),
        ({"a": [1, 2], "b": ["x", "y"]}, False),
    ):
        with accelerator.split_between_processes(inputs, apply_padding=padding) as part:
            parts.append(part.tolist() if isinstance(part, torch.Tensor) else part)
    with (
        pytest.raises(UsageError, match="expected values of equal lengths"),
        accelerator.split_between_processes({"a": [1], "b": [1, 2]}),
    ):
        pass
    with (
        pytest.raises(UsageError, match="expected a list, tuple, tensor, dataset"),
        accelerator.split_between_processes(3),
    ):
        pass
    assert accelerator.check_trigger() is False
    if rank == 1:
        accelerator.set_trigger()
    assert [accelerator.check_trigger(), accelerator.check_trigger()] == [True, False]
    with accelerator.profile(ProfileKwargs(output_trace_dir=str(folder))) as profiler:
        torch.ones(4).sum()
    assert "aten::sum" in profiler.key_averages().table()
    assert (folder / f"profile_{rank}.json").exists()
    with (
        pytest.raises(UsageError, match=r'activities\): expected "cpu" or "cuda", got'),
        accelerator.profile(ProfileKwargs(activities=["disk"])),
    ):
        pass
    with (
        pytest.raises(UsageError, match=r"output_trace_dir\): expected a folder that .* created, got '.*made/below"),
        accelerator.profile(ProfileKwargs(output_trace_dir=str(folder / "made" / "below"))),
    ):
        pytest.fail("the block ran")
    accelerator.wait_for_everyone()
    return [ran, parts]


def test_process_control(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks(2).run(_control, tmp_path)
    assert first == [
        ["main", "local main", "first here"],
        [[0, 1], (0, 1), [0, 1], {"a": [1], "b": ["x"]}],
    ]
    assert second == [["last", "second"], [[2], (2, 2), [2, 2], {"a": [2], "b": ["y"]}]]


def _as_scripts_for_accelerate(folder: Path) -> list[str]:
    import random

    from zeroaccel.local_sgd import LocalSGD
    from zeroaccel.logging import get_logger
    from zeroaccel.utils import extract_model_from_parallel, set_seed, tqdm

    accelerator = Accelerator(rng_types=["python", "generator"])
    rank = accelerator.process_index
    handler = logging.FileHandler(folder / "lines")  # both ranks open it to append
    logger = get_logger("a.script.on.ranks")
    logger.logger.addHandler(handler)
    logger.logger.propagate = False
    logger.logger.setLevel("INFO")
    try:
        logger.info("main")
        accelerator.wait_for_everyone()
        for turn in range(3):
            logger.info("turn %d", turn, in_order=True)
    finally:
        logger.logger.removeHandler(handler)
        handler.close()
    set_seed(5, device_specific=True)
    own = random.random()
    loader = accelerator.prepare(torch.utils.data.DataLoader(torch.arange(4), batch_size=1))  # type: ignore[arg-type]
    for _ in loader:
        shared = random.random()
        break
    assert accelerator.gather(torch.tensor([own])).unique().numel() == 2
    assert accelerator.gather(torch.tensor([shared])).unique().numel() == 1  # because of `rng_types`
    assert tqdm(range(2), leave=False).disable == (rank != 0)
    model = torch.nn.Linear(2, 1)
    engine, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert extract_model_from_parallel(engine) is model
    with pytest.raises(UsageError, match=r"LocalSGD\(enabled=True\): expected one process.*got '2 processes'"):
        LocalSGD(accelerator, engine, 8)
    LocalSGD(accelerator, engine, 8, enabled=False)
    assert accelerator.should_save_model == (rank == 0)
    accelerator.free_memory()
    return (folder / "lines").read_text().splitlines()


def test_what_scripts_for_accelerate_call_on_two_ranks(ranks: Ranks, tmp_path: Path) -> None:
    lines, _ = ranks(2).run(_as_scripts_for_accelerate, tmp_path)
    in_turn = [f"[RANK {rank}] turn {turn}" for turn in range(3) for rank in range(2)]
    assert lines == ["[RANK 0] main", *in_turn]


def _beside_accelerate() -> bool:
    accelerate = pytest.importorskip("accelerate")
    from accelerate.logging import get_logger  # type: ignore[import-not-found,unused-ignore]

    accelerate.state.PartialState._reset_state()
    accelerator = Accelerator()
    try:
        get_logger("beside").info("no error")
        theirs = accelerate.state.PartialState()
        return bool(
            (theirs.process_index, theirs.num_processes) == (accelerator.process_index, accelerator.num_processes)
        )
    finally:
        leave_accelerate()
        accelerate.state.PartialState._reset_state()


def test_accelerates_own_state_agrees(ranks: Ranks) -> None:
    assert ranks(2).run(_beside_accelerate) == [True, True]
