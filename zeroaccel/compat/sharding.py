"""`deepspeed.zero` and `deepspeed.runtime.zero.partition_parameters`: calls of `zeroaccel.zero`, with the facade's marks.

`Init` also shows DeepSpeed's members on the parameters it shards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zeroaccel.compat.parameters import attach
from zeroaccel.zero import init as own

__all__ = ["Init", "zero_wrapper_for_fp_tensor_constructor"]


class Init(own.Init):
    """`zeroaccel.zero.Init`, whose parameters have the members that libraries read."""

    def __enter__(self) -> Any:
        entered = super().__enter__()
        attach(self.keeper)
        return entered


def zero_wrapper_for_fp_tensor_constructor(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """`fn` as it is: `Init` shards parameters and leaves the dtype of other tensors to the model.

    transformers replaces this name for the time of a model's construction, to keep the dtype of position tables.
    """
    return fn
