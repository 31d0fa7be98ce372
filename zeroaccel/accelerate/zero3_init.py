"""Models that are sharded while they are built, where a plugin asks for it: by a script, and by transformers.

Own code runs inside `zero.Init`. `from_pretrained` and `from_config` of transformers enter one by themselves, of the
`deepspeed` that they import, if they are told of a config with stage 3; that is done here, in processes where
`import deepspeed` gives zeroaccel. What the engine does with such models is no different.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from zeroaccel.zero.access.deferred_init import Init

__all__ = ["built_sharded", "tell_transformers"]


@contextmanager
def built_sharded(offload: Mapping[str, Any]) -> Iterator[None]:
    """Modules that are built inside are sharded. (all ranks)

    Args:
        offload: the config's `offload_param`, for where the shards are kept until `prepare`.
    """
    device = offload.get("device", "none")
    with Init(remote_device=None if device in ("none", "auto") else device, nvme_path=offload.get("nvme_path")):
        yield


def tell_transformers(offload: Mapping[str, Any]) -> object | None:
    """From now on transformers builds models sharded, for as long as the result is kept.

    Returns:
        None if it cannot: it is not installed, or `import deepspeed` does not give zeroaccel in this process.
    """
    if not _answers_for_deepspeed() or find_spec("transformers") is None or find_spec("accelerate") is None:
        return None
    kept = {key: value for key, value in offload.items() if value != "auto"}
    section = {"stage": 3} | ({"offload_param": kept} if kept.get("device", "none") != "none" else {})
    told: object = import_module("transformers.integrations").HfDeepSpeedConfig({"zero_optimization": section})
    return told


def _answers_for_deepspeed() -> bool:
    try:
        spec = find_spec("deepspeed")
    except ValueError:  # a module that somebody put there by hand
        return False
    return spec is not None and spec.origin == "zeroaccel"
