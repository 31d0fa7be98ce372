"""Short forwards of a model at the start, which leave no trace: their batches, and what is put back after them."""

from __future__ import annotations

import inspect
import logging
import random
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from zeroaccel.comm.collectives import Collectives
from zeroaccel.comm.rank_device import ACCELERATOR

_IDS = ("input_ids", "decoder_input_ids")
_LIBRARIES = {"zeroaccel", "torch", "transformers"}
_LENGTHS = ("max_position_embeddings", "n_positions", "max_sequence_length")


@contextmanager
def without_trace(model: nn.Module, collectives: Collectives) -> Iterator[None]:
    """Within it forwards change nothing that a program could see.

    There are no gradients and no dropout, compiled code runs eagerly, hooks of the program are off, and traffic is not
    counted. Afterwards random generators, buffers, training flags and all attributes of the modules are as before.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # it would compile for the trial's shapes
        stack.enter_context(collectives.uncounted())
        stack.enter_context(_random_states())
        stack.enter_context(_silent("torch._subclasses.fake_tensor"))  # logs what it raises, too
        for module in model.modules():
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                stack.callback(_hide_foreign(hooks))
            stack.callback(_restorer(module))
        for module in model.modules():
            module.training = False  # not by eval(), which programs override
        yield


@contextmanager
def _silent(name: str) -> Iterator[None]:
    log = logging.getLogger(name)
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


@contextmanager
def _random_states() -> Iterator[None]:
    states = random.getstate(), np.random.get_state()
    module = ACCELERATOR.module
    devices = [module.current_device()] if module.is_initialized() else []
    with torch.random.fork_rng(devices, device_type=ACCELERATOR.type):
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


def _hide_foreign(hooks: MutableMapping[int, Any]) -> Callable[[], None]:
    """Takes out the hooks that no library has put there; returns what puts all back, in their order."""
    before = dict(hooks)
    for key, hook in before.items():
        if _library(hook) not in _LIBRARIES:
            del hooks[key]

    def restore() -> None:
        hooks.clear()
        hooks.update(before)

    return restore


def _library(hook: Any) -> str:
    while isinstance(hook, partial):
        hook = hook.func
    module = getattr(hook, "__module__", None) or type(hook).__module__
    return str(module).partition(".")[0]


def _restorer(module: nn.Module) -> Callable[[], None]:
    """What gives a module its attributes and the values of its buffers back."""
    attributes, buffers = dict(vars(module)), dict(module._buffers)
    values = [(buffer, buffer._version, buffer.clone()) for buffer in buffers.values() if buffer is not None]

    def restore() -> None:
        vars(module).clear()
        vars(module).update(attributes)
        module._buffers.clear()
        module._buffers.update(buffers)
        for buffer, version, value in values:
            if buffer._version != version:
                buffer.copy_(value)

    return restore


class NoBatch(Exception):
    """A model's forward takes what a trial cannot make up; the message says what."""


def trial_batch(model: nn.Module, tokens: int, seed: int, device: torch.device) -> dict[str, Any]:
    """A batch of one row for a model, the same on every rank: token ids, or numbers for a first linear layer.

    Raises:
        NoBatch: the forward takes something else, or not so many tokens.
    """
    params = inspect.signature(model.forward).parameters
    generator = torch.Generator().manual_seed(seed)
    config = getattr(model, "config", None)
    longest = min((size for key in _LENGTHS if isinstance(size := getattr(config, key, None), int)), default=tokens)
    if longest < tokens:
        raise NoBatch(f"its config has at most {longest} positions, and the trial {tokens} tokens")
    names = [name for name in _IDS if name in params]
    required = [
        name
        for name, param in params.items()
        if param.default is param.empty and param.kind in (param.POSITIONAL_OR_KEYWORD, param.KEYWORD_ONLY)
    ]
    if not names and len(required) == 1:
        return {required[0]: _first_input(model, tokens, generator).to(device)}
    if not names or set(required) - set(names):
        raise NoBatch(f"its forward takes {', '.join(required) or ', '.join(params)}")
    ids = torch.randint(_vocabulary(model), (1, tokens), generator=generator)
    batch: dict[str, Any] = {name: ids.to(device) for name in names}
    if "position_ids" in params:
        batch["position_ids"] = torch.arange(tokens, device=device)[None]
    if "use_cache" in params:
        batch["use_cache"] = False
    return batch


def _first_input(model: nn.Module, tokens: int, generator: torch.Generator) -> Tensor:
    """For a model with one argument, by the first layer of it that has parameters."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            return torch.randint(module.num_embeddings, (1, tokens), generator=generator)
        if isinstance(module, nn.Linear):
            return torch.randn((1, tokens, module.in_features), generator=generator).to(module.weight.dtype)
        if next(iter(module._parameters.values()), None) is not None:
            break
    raise NoBatch("its first layer is no nn.Linear and no nn.Embedding")


def _vocabulary(model: nn.Module) -> int:
    """How many token ids there are: by the embedding, or by the config where another rank has it."""
    find: Any = getattr(model, "get_input_embeddings", None)
    embedding = next((module for module in model.modules() if isinstance(module, nn.Embedding)), None)
    embedding = embedding if find is None else find()
    sizes = getattr(embedding, "num_embeddings", None), getattr(getattr(model, "config", None), "vocab_size", None)
    size = next((size for size in sizes if isinstance(size, int)), None)
    if size is None:
        raise NoBatch("it has no nn.Embedding, which would say how many tokens there are")
    return size
