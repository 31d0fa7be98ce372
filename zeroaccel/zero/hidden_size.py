"""What a model says about itself that a config may leave "auto": its hidden size.

Reads the config object that models of the Hugging Face family carry, by the names of its attributes alone, and else the
shapes of the weights. `config.resolve` makes sizes of buckets from it; no library of models is imported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from zeroaccel.config import Fact, Facts

__all__ = ["facts_from_model"]


def facts_from_model(model: nn.Module) -> Facts:
    """The hidden size of a model, and where it was found.

    In this order: `config.hidden_size`, the largest of `config.hidden_sizes`, the same two of the text model's config
    (`text_config`, `get_text_config()`), the most common last dimension of the model's 2-D weights. A model without
    any of these has none.
    """
    for name, config in _configs(model):
        size, sizes = _read(config, "hidden_size"), _read(config, "hidden_sizes")
        if _is_size(size):
            return Facts(hidden_size=Fact(size, f"{name}.hidden_size"))
        if isinstance(sizes, (list, tuple)) and sizes and all(map(_is_size, sizes)):
            return Facts(hidden_size=Fact(max(sizes), f"max({name}.hidden_sizes)"))
    widths = Counter(param.shape[-1] for param in model.parameters() if param.dim() == 2 and param.shape[-1] > 0)
    if not widths:
        return Facts()
    width, count = max(widths.items(), key=lambda item: (item[1], item[0]))
    why = f"the last dimension of {count} of the model's {widths.total()} 2-D weights, as its config has no hidden size"
    return Facts(hidden_size=Fact(width, why))


def _configs(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The model's config and that of the text model within, with the expression that leads to each."""
    config = getattr(model, "config", None)
    if config is None:
        return
    yield "model.config", config
    nested = _read(config, "text_config")
    if nested is not None:
        yield "model.config.text_config", nested
    find = getattr(config, "get_text_config", None)
    if callable(find):
        try:
            yield "model.config.get_text_config()", find()
        except ValueError:  # there are several, and the config cannot say which is meant
            return


def _read(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
