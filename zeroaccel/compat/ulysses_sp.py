"""`deepspeed.runtime.sequence_parallel.ulysses_sp`: what accelerate and transformers' Trainer call of it.

Any attention of transformers can be exchanged, "eager" included, and padding masks count; DeepSpeed leaves masks out.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import nn

from zeroaccel.compat import parallel_state_sp
from zeroaccel.errors import UsageError
from zeroaccel.parallel.sequence import SequenceLoader
from zeroaccel.parallel.ulysses import UlyssesAttention

__all__ = ["UlyssesSPAttentionHF", "UlyssesSPDataLoaderAdapter"]


class UlyssesSPAttentionHF:
    """The call that turns sequence parallelism on; `UlyssesAttention` does it."""

    @classmethod
    def register_with_transformers(
        cls,
        model_name_or_path: nn.Module,
        core_attn_implementation: str | None,
        sequence_parallel_size: int,
        micro_batch_size: int,
        seq_length: int | None = None,
        seq_length_is_variable: bool = True,
        disable_in_eval: bool = False,
        max_length: int | None = None,
    ) -> ModuleType | None:
        """Exchanges heads in the attention of a model. (all ranks)

        Args:
            model_name_or_path: the model; a name, which DeepSpeed takes too, would mean every model of the process.
            core_attn_implementation: what the model's config says; None, as accelerate has it where nothing is chosen,
                says the same.
            micro_batch_size, seq_length, seq_length_is_variable, max_length: of no effect: any length that the ranks
                divide can be exchanged.
            disable_in_eval: in eval mode each rank computes sequences of its own.

        Returns:
            The mpu for `deepspeed.initialize`; None for one rank.

        Raises:
            UsageError: the model is none, its attention is another, or its heads cannot be shared out.
        """
        if sequence_parallel_size == 1:
            return None
        where = "UlyssesSPAttentionHF.register_with_transformers"
        if not isinstance(model_name_or_path, nn.Module):
            raise UsageError(
                f"{where}(model_name_or_path)",
                expected="the model",
                got=model_name_or_path,
                fix="make the model first, and pass it",
            )
        parallel_state_sp.initialize_sequence_parallel(sequence_parallel_size)
        attention = UlyssesAttention(
            model_name_or_path, parallel_state_sp.sequence_group(), in_eval=not disable_in_eval
        )
        if core_attn_implementation not in (None, attention.implementation):
            attention.undo()
            raise UsageError(
                f"{where}(core_attn_implementation)",
                expected=f'"{attention.implementation}", as the model\'s config says',
                got=core_attn_implementation,
                fix="load the model with the same attn_implementation",
            )
        return parallel_state_sp


class UlyssesSPDataLoaderAdapter(SequenceLoader):
    """A loader of which each rank's batches are cut over the ranks of a sequence, one after another.

    Iterating goes on where it stopped, as in DeepSpeed; after the last batch it begins anew.
    """

    def __init__(self, dl: Any, sp_rank: int, sp_group: Any, sp_world_size: int, device: torch.device) -> None:
        group = parallel_state_sp.sequence_group()
        if (sp_rank, sp_world_size) != (group.rank, group.size):
            raise UsageError(
                "UlyssesSPDataLoaderAdapter(sp_rank, sp_world_size)",
                expected=f"{(group.rank, group.size)}, of the sequence parallel group",
                got=(sp_rank, sp_world_size),
            )
        super().__init__(dl, group, device=torch.device(device))
        self._batches: Iterator[dict[str, Any]] | None = None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def __next__(self) -> dict[str, Any]:
        if self._batches is None:
            self._batches = super().__iter__()
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = None
            raise
