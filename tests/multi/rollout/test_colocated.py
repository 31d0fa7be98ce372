"""A generator in the trainer's process: it samples while the engine's states are away, and no bit of training changes.

`offload_states` moves nothing on a CPU, whose memory is the host's. Here it copies the states and overwrites them, so
that a use in the meantime, or a state that does not come back, changes the results. `tests/cuda_model` counts the bytes
that a device gets.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

import zeroaccel
from tests.multi.rollout.test_weight_streams import receive
from tests.support.mesh_training import small_llama
from tests.support.pool import Ranks
from tests.support.training import config, train_step
from zeroaccel.errors import EngineStateError
from zeroaccel.zero.storage.state_offload import StateOffload

STEPS, PROMPTS, LENGTH = 3, 2, 6


class _Away:
    """States whose bytes are overwritten until `restore`."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
        self._copies = [(storage, storage.clone()) for storage in storages.values()]
        self.nbytes = sum(storage.nbytes() for storage, _ in self._copies)
        for storage, _ in self._copies:
            torch.empty(0, dtype=torch.uint8).set_(storage).fill_(0xFF)  # NaN in every format of floats

    def restore(self) -> None:
        for storage, copy in self._copies:
            storage.copy_(copy)


def _offload(states: StateOffload, kinds: Iterable[str], *, pinned: bool) -> None:
    states._offloaded = _Away(tensor for kind in kinds for tensor in states._tensors(kind))  # type: ignore[assignment]


def _sampled(policy: Any, generator: torch.Generator) -> Tensor:
    """Returns sampled sequences, (PROMPTS, LENGTH)."""
    ids = torch.randint(policy.config.vocab_size, (PROMPTS, 1), generator=generator)
    with torch.no_grad():
        while ids.shape[1] < LENGTH:
            odds = policy(input_ids=ids).logits[:, -1].float().softmax(-1)
            ids = torch.cat([ids, torch.multinomial(odds, 1, generator=generator)], dim=1)
    return ids


def _colocated(stage: int, leaves: bool) -> tuple[list[float], list[Tensor], list[int], int, int]:
    """Returns losses, final weights, the bytes away while sampling, and the elements of weights and of masters."""
    torch.manual_seed(0)
    engine, *_ = zeroaccel.initialize(small_llama(), config=config(stage, "bf16"))
    policy = small_llama().bfloat16()
    values = policy.state_dict()
    generator = torch.Generator().manual_seed(engine.collectives.rank)
    losses, nbytes = [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StateOffload, "offload", _offload)
        for _ in range(STEPS):
            receive(engine.stream_weights(), values)
            if leaves:
                engine.offload_states()
                nbytes.append(engine._state_offload._offloaded.nbytes)  # type: ignore[union-attr]
                with pytest.raises(EngineStateError, match="reload_states"):
                    engine(input_ids=torch.zeros(1, 2, dtype=torch.long))
            ids = _sampled(policy, generator)
            engine.reload_states()
            loss = engine(input_ids=ids, labels=ids).loss
            losses.append(train_step(engine, loss))
    weights = [value.clone() for _, value in engine.iter_named_full_params()]
    buffers = [buffer for unit in engine.units for buffer in unit.buffers]
    sizes = sum(buffer.shard.range.numel for buffer in buffers), sum(buffer.masters.range.numel for buffer in buffers)
    engine.destroy()
    return losses, weights, nbytes, *sizes


@pytest.mark.parametrize("stage", [2, 3])
def test_states_are_away_while_the_generator_samples(ranks: Ranks, stage: int) -> None:
    runs, stayed = (ranks(2).run(_colocated, stage, leaves) for leaves in (True, False))
    for (losses, weights, nbytes, elements, masters), (expected, same, _, _, _) in zip(runs, stayed, strict=True):
        assert losses == expected
        assert all(torch.equal(own, other) for own, other in zip(weights, same, strict=True))
        # In bytes per element: the weights of the stage, masters and two moments; before the first step no moments.
        assert nbytes == [2 * elements + 4 * masters, *[2 * elements + 12 * masters] * (STEPS - 1)]
