"""Ulysses sequence parallelism: the exchange of attention heads, under transformers' attention interface.

(Ulysses: Jacobs et al., 2023, arXiv:2309.14509, section 3.2.) A model of transformers looks up its attention function
and its mask function by the name in its config ("sdpa", "flash_attention_2", "eager"). This module replaces both
functions under that name; the replacements call the originals for models without sequence parallelism. For a model
with it, the attention function computes:

```text
query (B, H, s, D), key, value (B, K, s, D)    this rank's tokens, all heads
  exchange                                     one all-to-all of the three
query (B, H/P, S, D), key, value (B, K/P, S, D)    all tokens, this rank's heads and the key heads that they read
  the model's own attention function, with the mask of whole sequences
out (B, S, H/P, D)
  exchange
out (B, s, H, D)
```

**Heads** are dealt by `dealing.py`, also if P does not divide them. If P is larger, ranks share heads, each with some
of the tokens, and `ring.py` computes attention instead of the model's function. Layers other than attention that carry
something along the sequence are in `sequence_layers.py`.

**The mask** must be that of whole sequences. Before each forward the ranks gather their padding masks and positions;
the model gets the padding mask of all S tokens, from which transformers' mask functions take the length of the keys.
Positions that restart within a row are packed sequences, which do not attend to each other.

**The balancing loss** of a mixture of experts is a product of means over all tokens, so it is not the mean of the
losses of runs. The loss function in the file of the model is replaced: the ranks gather the routers' logits, and each
rank computes the loss of whole sequences. The gradient of the logits is the sum over the losses of all ranks.
"""

from __future__ import annotations

import inspect
import math
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.weak import WeakIdKeyDictionary

from zeroaccel.comm.agree import agreed
from zeroaccel.comm.collectives import Collectives
from zeroaccel.comm.topology import Topology, peer_recorder
from zeroaccel.config.parallel import ParallelConfig
from zeroaccel.engine import EngineBase
from zeroaccel.errors import UsageError
from zeroaccel.parallel.attention_pattern import Band, Pattern, WholeSequences, with_blocks
from zeroaccel.parallel.dealing import Dealing, Dealt, to_heads, to_tokens
from zeroaccel.parallel.ring import Ring
from zeroaccel.parallel.sequence import SequenceGroup
from zeroaccel.parallel.sequence_layers import SequenceLayers, check_layers, has_layers
from zeroaccel.setup.axis import Axis
from zeroaccel.setup.axis_estimate import AxisEstimate, EstimatedJob
from zeroaccel.setup.cut_check import Cut
from zeroaccel.setup.job import JobSpec

__all__ = ["SequenceAxis", "UlyssesAttention"]

_EAGER = "eager"
_BLOCK_NUMBERS = "get_block_sequence_ids_for_mask"  # counts the images of each rank; other models have one block
_CURE = "train it with sp=1, and more ranks of dp_shard"


class UlyssesAttention:
    """Applies sequence parallelism to one model of transformers, until `undo`.

    Args:
        model: takes this rank's run of the tokens, as cut by `SequenceGroup.shard`.
        head_parts: number of `tp` ranks, each of which has some of the heads in the model's config.
        in_eval: also in eval mode; if False, each rank computes its own whole sequences in eval mode.

    A second call for the same model, such as a second `prepare`, replaces the first.

    Raises:
        UsageError: the model has no attention of transformers and no layers along the sequence.

    Example:
        >>> from zeroaccel.comm.topology import destroy, init_process_group
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4)
        >>> group = SequenceGroup.of(init_process_group(), size=1)
        >>> attention = UlyssesAttention(LlamaForCausalLM(config), group)
        >>> attention.undo()
        >>> destroy()
    """

    def __init__(self, model: nn.Module, group: SequenceGroup, *, in_eval: bool = True, head_parts: int = 1) -> None:
        self.group = group
        self._in_eval, self._head_parts = in_eval, head_parts
        self._model = weakref.ref(model)
        config = _config_of(model)
        text = config.get_text_config()
        self.implementation: str = getattr(text, "_attn_implementation", None) or _EAGER
        _check_eager(self.implementation)
        _check_attention(model, text)
        self._configs = {id(module.config) for module in model.modules() if hasattr(module, "config")}
        for earlier in {
            id(attached): attached for module in model.modules() if (attached := _ATTACHED.get(module))
        }.values():
            earlier.undo()
        self._sequences: WholeSequences | None = None
        self._agreed: set[tuple[object, ...]] = set()  # run shapes already compared between the ranks of the group
        self._forced: bool | None = None
        self.run, self.packs = 0, True
        self._numbers_blocks = any(hasattr(_file_of(module), _BLOCK_NUMBERS) for module in model.modules())
        self._patterns: dict[int, Pattern] = {}  # address of a mask that stands for one -> the pattern
        # Positions of this rank's run -> positions of whole sequences; recomputation in backward needs them again.
        self._positions: Any = WeakIdKeyDictionary()
        for module in model.modules():
            _ATTACHED[module] = self
            if callable(generate := getattr(module, "generate", None)):
                vars(module)["generate"] = partial(self._generate, module, generate)
        _replacements(self.implementation).add(self)
        _replace_balancing(model)
        self._layers = SequenceLayers(model, self)
        self._hooks = [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after, always_call=True),
        ]

    @staticmethod
    def of(model: nn.Module) -> UlyssesAttention | None:
        """Returns the instance that is attached to a model, if any."""
        return _ATTACHED.get(model)

    def undo(self) -> None:
        """Restores the model's attention."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._layers.undo()
        model = self._model()
        for module in () if model is None else model.modules():
            if _ATTACHED.get(module) is self:
                del _ATTACHED[module]
                vars(module).pop("generate", None)
        _replacements(self.implementation).discard(self)
        if not any(_users()):
            _restore_balancing()

    def is_on(self, module: nn.Module) -> bool:
        """True if the model's sequences are cut in its current mode."""
        if self._forced is not None:
            return self._forced
        return self.group.size > 1 and (self._in_eval or module.training)

    @contextmanager
    def computing(self, *, whole: bool) -> Iterator[None]:
        """Context in which the model takes whole sequences, or runs of them, in either mode."""
        self._forced = not whole
        try:
            yield
        finally:
            self._forced = None

    def _generate(self, model: nn.Module, generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Refuses to generate from tokens that would be taken for a run of a sequence."""
        if self.is_on(model):
            raise UsageError(
                f"sequence parallelism: {type(model).__name__}.generate",
                expected="a forward over this rank's run of the tokens",
                got="a request for tokens after them",
                fix="generate with a model that was loaded without sp",
            )
        return generate(*args, **kwargs)

    # -- a forward

    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.is_on(model):
            return None
        tokens = next((kwargs[k] for k in ("input_ids", "inputs_embeds") if kwargs.get(k) is not None), None)
        tokens = args[0] if tokens is None and args else tokens
        padding, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
        _check_cut(tokens, kwargs)
        self._check_same(tokens, padding, positions, _filled_cache(model, args, kwargs))
        assert isinstance(tokens, Tensor), "_check_same refuses anything else"
        run, group = tokens.shape[1], self.group
        self.run = run
        counts = positions is None or group.counts_from_0(positions)
        if positions is None:
            first = group.rank * run
            positions = torch.arange(first, first + run, device=tokens.device)
        indices = positions.expand(len(tokens), -1).contiguous()
        whole = group.gather(indices)
        self._positions[indices] = whole
        packed = (torch.diff(whole, prepend=whole[:, :1] - 1, dim=1) != 1).cumsum(1)
        all_padding = None if padding is None else group.gather(padding.to(torch.bool))
        # Padded rows may count positions in any way; a padding mask alone defines the attention.
        is_packed = all_padding is None and not counts and bool((packed[:, -1] > 0).any())
        self._sequences = WholeSequences(
            whole.shape[1], whole.device, all_padding, packed if is_packed else None, whole
        )
        if all_padding is None:
            all_padding = torch.ones_like(whole, dtype=torch.bool)
        taken = inspect.signature(model.forward).parameters
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values())
        added = {"position_ids": indices, "attention_mask": all_padding}
        return args, kwargs | {name: value for name, value in added.items() if takes_all or name in taken}

    def _after(self, model: nn.Module, args: Any, output: Any) -> None:
        self._sequences = None

    def _check_same(self, tokens: Any, padding: Any, positions: Any, cache: str) -> None:
        """Refuses unsuitable inputs, and shapes that differ between ranks. (all ranks of the group, once per shape)

        Later mistakes raise only on the rank that makes them. If only one rank has a new shape, it waits until the
        watchdog reports it: comparing in every forward would block the host each time.
        """
        where = "sequence parallelism: forward"
        with nullcontext() if self._agreed else agreed(self.group.checks, where):
            if not isinstance(tokens, Tensor) or tokens.ndim < 2:
                raise UsageError(where, expected="input_ids of (batch, tokens)", got=type(tokens).__name__)
            if isinstance(padding, Tensor) and (padding.ndim != 2 or padding.shape != tokens.shape[:2]):
                raise UsageError(
                    f"{where}: attention_mask",
                    expected=f"{tuple(tokens.shape[:2])} for this rank's tokens",
                    got=tuple(padding.shape),
                    fix="pass a padding mask of two dims; the attention mask is computed from it",
                )
            if cache:
                raise UsageError(
                    f"{where}: {cache}",
                    expected="none",
                    got="a cache",
                    fix="generate without sequence parallelism",
                )
        facts = (tuple(tokens.shape), padding is not None, positions is not None)
        if facts in self._agreed:
            return
        shapes = self.group.checks.gather_objects(facts, "sequences of a new shape")
        if len(set(shapes)) > 1:
            differing = next(rank for rank, shape in enumerate(shapes) if shape != shapes[0])
            raise UsageError(
                where,
                expected="the same shapes on all ranks of a sequence, and masks and positions on all or none",
                got=" and ".join(f"{shapes[r]} on {self.group.collectives.named([r])}" for r in (0, differing)),
                fix="cut batches with SequenceLoader or SequenceGroup.shard",
            )
        module, window = self._layers.window
        if tokens.shape[1] < window:
            raise UsageError(
                f"{where}: {module}",
                expected=f"at least {window} tokens on each rank, which it reads from the rank before",
                got=f"{tokens.shape[1]} tokens",
                fix="train longer sequences, or use fewer ranks of sp",
            )
        self._agreed.add(facts)

    # -- replacements of transformers' functions

    def mask(self, make: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        """Builds the mask of whole sequences with transformers' own mask function."""
        sequences = self._sequences
        assert sequences is not None, "a mask is built outside a forward"
        length = sequences.length
        changed: dict[str, Any] = {"kv_length": length, "kv_offset": 0, "attention_mask": sequences.padding}
        if (places := arguments.get("cache_position")) is not None:  # transformers 4 passes the positions of queries
            changed["cache_position"] = torch.arange(length, device=places.device)
        else:
            changed |= {"q_length": length, "q_offset": 0}
        function = with_blocks(arguments["mask_function"], self._whole_blocks)
        changed["mask_function"] = function
        band = Band.of(function)
        if not self.packs or (band is not None and band.after > 0):  # transformers packs causal attention only
            sequences = replace(sequences, packed=None)
        if sequences.packed is not None:
            changed["mask_function"] = _within_sequences(sequences.within(function), sequences.packed)
            changed["allow_is_causal_skip"] = False
        heads = getattr(arguments["config"], "num_attention_heads", None)
        dealing = self._dealing(heads // self._head_parts if isinstance(heads, int) else self.group.size)
        whole = partial(make, **{**arguments, **changed})
        if dealing.ring_size == 1:
            return whole()
        pieces = dealing.all_pieces(length // self.group.size)
        rows = arguments["batch_size"]
        pattern = Pattern(band, pieces, function=function, rows=rows, sequences=sequences, whole=whole)
        # Models pass a mask of 4 dims on. NaN shows if one computes with it.
        mask = torch.full((), math.nan, device=sequences.device).expand(rows, 1, length, length)
        self._patterns[mask.data_ptr()] = pattern
        weakref.finalize(mask.untyped_storage(), self._patterns.pop, mask.data_ptr(), None)
        return mask

    def _whole_blocks(self, shard: Tensor) -> Tensor:
        """Returns the block of each token of whole sequences, -1 for none; this rank's come first in `shard`."""
        sequences = self._sequences
        assert sequences is not None, "a mask is built outside a forward"
        if sequences.packed is not None:
            raise UsageError(
                "sequence parallelism: forward: position_ids",
                expected="one sequence in each row, for tokens that attend to each other in blocks, such as images",
                got="packed sequences",
                fix="train one sequence per row, with a padding mask",
            )
        run = sequences.length // self.group.size
        ids = self.group.gather(shard[:, :run])
        if not self._numbers_blocks:
            return ids
        # A block that the cut divides goes on: the ids of two ranks have nothing in common.
        follows = ids[:, 1:] == ids[:, :-1]
        follows[:, run - 1 :: run] = True
        starts = functional.pad(~(follows & (ids[:, :-1] >= 0)), (1, 0), value=True) & (ids >= 0)
        return torch.where(ids >= 0, starts.cumsum(1) - 1, -1)

    def attend(
        self,
        attention: Callable[..., Any],
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        """Computes attention of this rank's heads over whole sequences.

        Args:
            query: (B, H, s, D).
            key, value: (B, K, s, D); D may differ for values.

        Returns:
            ((B, s, H, D), None)
        """
        group, run = self.group, query.shape[2]
        dealing = self._dealing(query.shape[1])
        share = dealing.share(group.rank)
        _check_attended(module, query, key, kwargs)
        for name in ("s_aux", "sinks"):
            if kwargs.get(name) is not None:
                kwargs[name] = _of_heads(kwargs[name], query.shape[1], share, module)
        sinks = getattr(module, "sinks", None)
        sinks = _of_heads(sinks, dealing.heads, share, module) if isinstance(sinks, Tensor) else None
        in_ring = dealing.ring_size > 1
        known = self._patterns.get(mask.data_ptr()) if isinstance(mask, Tensor) and not any(mask.stride()) else None
        if known is not None and not in_ring:  # a layer with more heads than others
            mask = known.whole()
        pattern = known or self._pattern(module, dealing, run, mask, kwargs) if in_ring else None
        dealt = [Dealt(query, 2, 1, in_ring=True), *(Dealt(tensor, 2, 1, in_ring=in_ring) for tensor in (key, value))]
        query, key, value = to_heads(group, dealing, dealt, "exchange heads")
        if pattern is not None:
            scale = kwargs.get("scaling")
            scale = 1 / math.sqrt(query.shape[3]) if scale is None else scale
            ring = Ring(group, dealing, run, pattern, scale, kwargs.get("softcap"))
            out = ring.attend(query, key, value, kwargs.get("s_aux", kwargs.get("sinks", sinks)))
            return to_tokens(group, dealing, Dealt(out.transpose(1, 2), 1, 2), run, "exchange outputs"), None
        positions = kwargs.get("position_ids")
        if positions is not None:
            kwargs["position_ids"] = self._positions.get(positions, positions)
        grouped = _Grouped(module, query.shape[1] // key.shape[1], sinks)
        out, _ = attention(grouped, query, key, value, mask, **kwargs)
        return to_tokens(group, dealing, Dealt(out, 1, 2), run, "exchange outputs"), None

    def _dealing(self, heads: int) -> Dealing:
        return Dealing(heads, self.group.size, in_rings=True)

    def _pattern(self, module: nn.Module, dealing: Dealing, run: int, mask: Any, kwargs: Mapping[str, Any]) -> Pattern:
        """Returns which tokens attend to which, for attention whose heads ranks share."""
        pieces, length = dealing.all_pieces(run), run * self.group.size
        if mask is None and self.implementation in (_EAGER, "sdpa"):
            is_causal = kwargs.get("is_causal")
            is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
            return Pattern(Band(after=0) if is_causal and self.implementation != _EAGER else Band(), pieces)
        if not isinstance(mask, Tensor) or mask.ndim != 4 or mask.shape[-2:] != (length, length):
            raise UsageError(
                f"sequence parallelism: {type(module).__name__}",
                expected=f"at least {self.group.size} attention heads, or a mask of {length} queries and keys",
                got=f"{dealing.heads} heads, {self.implementation} and "
                + (
                    f"a mask of {tuple(mask.shape)}" if isinstance(mask, Tensor) else f"a mask of {type(mask).__name__}"
                ),
                fix='load the model with attn_implementation="sdpa", or use fewer ranks of sp',
            )
        share = dealing.share(self.group.rank)
        return Pattern(None, pieces, values=mask if mask.shape[1] == 1 else mask[:, share.start : share.stop])

    def whole_logits(self, layers: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Gathers router logits, (B s, E) of each layer -> (B S, E), differentiable. (all ranks of the group)"""
        assert self._sequences is not None, "a router loss is computed outside a forward"
        size, run = self.group.size, self._sequences.length // self.group.size
        stacked = torch.stack(layers)
        runs = self.group.exchange(stacked.reshape(1, -1).expand(size, -1), "exchange logits of routers")
        whole = runs.view(size, len(layers), -1, run, stacked.shape[-1]).movedim(0, 2)
        return whole.reshape(len(layers), -1, stacked.shape[-1]).unbind()


def _check_attended(module: nn.Module, query: Tensor, key: Tensor, kwargs: Mapping[str, Any]) -> None:
    """Refuses attention that an exchange of heads would change, on all ranks, whose shapes are equal."""
    heads, key_heads = query.shape[1], key.shape[1]
    is_cross = getattr(module, "is_cross_attention", False) or "CrossAttention" in type(module).__name__
    reasons = {
        "attention of a sequence to itself": (is_cross or key.shape[2] != query.shape[2])
        and f"{query.shape[2]} queries and {key.shape[2]} keys on a rank (cross-attention)",
        "a number of heads that is a multiple of that of key heads": heads % key_heads
        and f"{heads} heads and {key_heads} key heads",
        "attention whose heads differ only in their weights": kwargs.get("position_bias") is not None
        and "position_bias, which has values per head and pair of tokens",
        "attention without dropout, whose random numbers differ between heads on one rank and on several": kwargs.get(
            "dropout"
        )
        and f"dropout {kwargs.get('dropout')}",
    }
    for expected, got in reasons.items():
        if got:
            fix = "set attention dropout to 0 in its config" if "dropout" in expected else _CURE
            raise UsageError(f"sequence parallelism: {type(module).__name__}", expected=expected, got=str(got), fix=fix)


def _of_heads(values: Tensor, heads: int, share: range, module: nn.Module) -> Tensor:
    """Returns the values of a share of heads, such as sinks."""
    if values.shape != (heads,):
        raise UsageError(
            f"sequence parallelism: sinks of {type(module).__name__}",
            expected=f"one value for each of {heads} heads",
            got=tuple(values.shape),
            fix=_CURE,
        )
    return values[share.start : share.stop]


def _within_sequences(mask_function: Callable[..., Any], packed: Tensor) -> Callable[..., Any]:
    """Returns a mask function of transformers that restricts attention to tokens of the same packed sequence."""

    def same_sequence(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return mask_function(batch, head, query, key) & (packed[batch, query] == packed[batch, key])

    return same_sequence


class _Grouped:
    """Wraps an attention module and overrides its number of query heads per key head, and values per head."""

    def __init__(self, module: nn.Module, groups: int, sinks: Tensor | None) -> None:
        self._module = module
        self.num_key_value_groups = groups
        if sinks is not None:
            self.sinks = sinks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


# -- transformers' tables of attention functions

_ATTACHED: weakref.WeakKeyDictionary[nn.Module, UlyssesAttention] = weakref.WeakKeyDictionary()
_BY_NAME: dict[str, _Replacements] = {}


def _replacements(name: str) -> _Replacements:
    return _BY_NAME.setdefault(name, _Replacements(name))


class _Replacements:
    """Replaces the functions under one name in transformers' tables, while any model needs it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._users: list[UlyssesAttention] = []
        self._attention: Callable[..., Any] | None = None
        self._mask: Callable[..., Any] | None = None

    def add(self, user: UlyssesAttention) -> None:
        if not self._users:
            attentions, masks = _interfaces()
            # "eager" is in no table: each model's file defines its own.
            self._attention = attentions.get(self._name)
            self._mask = masks.get(self._name)
            attentions[self._name] = self.attend
            if self._mask is not None:
                masks[self._name] = self.mask
        self._users.append(user)

    def discard(self, user: UlyssesAttention) -> None:
        if user not in self._users:
            return
        self._users.remove(user)
        if not self._users:
            for table in _interfaces():
                with suppress(KeyError):
                    del table[self._name]

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
        attention = self._attention or _eager_of(module)
        user = _ATTACHED.get(module)
        if user is None or not user.is_on(module):
            return attention(module, query, key, value, mask, **kwargs)
        return user.attend(attention, module, query, key, value, mask, **kwargs)

    def mask(self, *args: Any, **kwargs: Any) -> Any:
        assert self._mask is not None, "no mask function under this name"
        config = kwargs.get("config")
        for user in self._users:
            if user._sequences is not None and id(config) in user._configs:
                return user.mask(self._mask, kwargs)
        return self._mask(*args, **kwargs)


def _users() -> Iterator[UlyssesAttention]:
    return (user for replaced in _BY_NAME.values() for user in replaced._users)


_BALANCING = "load_balancing_loss_func"
_MIXTRAL = "transformers.models.mixtral.modeling_mixtral"  # whose function TRL calls for every model
_BALANCING_OF: dict[str, Callable[..., Any]] = {}  # file of a model -> transformers' function there


def _replace_balancing(model: nn.Module) -> None:
    names = {
        name for name in {type(layer).__module__ for layer in model.modules()} if hasattr(sys.modules[name], _BALANCING)
    }
    if names:
        names.add(import_module(_MIXTRAL).__name__)
    for name in names:
        original = getattr(sys.modules[name], _BALANCING)
        if name in _BALANCING_OF:
            continue

        def of_whole_sequences(
            gate_logits: Any, *args: Any, original: Callable[..., Any] = original, **kwargs: Any
        ) -> Any:
            user = next((user for user in _users() if user._sequences is not None), None)
            if user is not None and isinstance(gate_logits, tuple):
                gate_logits = user.whole_logits(gate_logits)
            return original(gate_logits, *args, **kwargs)

        _BALANCING_OF[name] = original
        setattr(sys.modules[name], _BALANCING, of_whole_sequences)


def _restore_balancing() -> None:
    while _BALANCING_OF:
        name, original = _BALANCING_OF.popitem()
        setattr(sys.modules[name], _BALANCING, original)


def _interfaces() -> tuple[Any, Any]:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS


def _eager_of(module: nn.Module) -> Callable[..., Any]:
    file = _file_of(module)
    try:
        function: Callable[..., Any] = file.eager_attention_forward
    except AttributeError:
        raise UsageError(
            f"sequence parallelism: {type(module).__name__}",
            expected="eager_attention_forward in the model's file, as in transformers' models",
            got="none",
            fix='load the model with attn_implementation="sdpa"',
        ) from None
    return function


def _check_cut(tokens: Any, kwargs: Mapping[str, Any]) -> None:
    """Refuses labels that the model would shift: a cut batch has `shift_labels`, labels already shifted.

    This also catches whole batches, different on each rank, which would be taken for runs of one batch.
    """
    labels = kwargs.get("labels")
    if kwargs.get("shift_labels") is not None or not (isinstance(labels, Tensor) and isinstance(tokens, Tensor)):
        return
    if labels.ndim >= 2 and labels.shape[:2] == tokens.shape[:2]:
        raise UsageError(
            "sequence parallelism: forward",
            expected="a run of a batch, with shift_labels (the next token of each position)",
            got="labels, which the model would shift within the run",
            fix="cut batches with SequenceLoader or SequenceGroup.shard, or pass shift_labels beside labels",
        )


_CACHES = ("past_key_values", "past_key_value", "cache", "cache_params", "past", "mems", "state")


def _filled_cache(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Returns the name of an argument that has keys, values or states of earlier tokens; "" if there is none.

    Caches of transformers are recognized in any argument, and tuples of tensors by the names that models give them.
    """
    names = list(inspect.signature(model.forward).parameters) if len(args) > 1 else []
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    for name, value in arguments.items():
        if isinstance(value, (tuple, list)) and name in _CACHES and any(layer is not None for layer in value):
            return name
        for question in ("get_seq_length", "has_previous_state"):
            answer = getattr(value, question, False)
            with suppress(ValueError):  # the cache has no layer of this kind
                if answer() if callable(answer) else answer:
                    return name
    return ""


def _config_of(model: nn.Module) -> Any:
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        raise UsageError(
            f"sequence parallelism: {type(model).__name__}",
            expected="a model of transformers, which looks up its attention by the name in its config",
            got="no config of transformers",
            fix="call SequenceGroup.exchange in the model's own attention",
        )
    return config


def _check_eager(implementation: str) -> None:
    """Refuses eager attention with transformers 4, whose models call the function of their file directly."""
    attentions, _ = _interfaces()
    if implementation == _EAGER and not hasattr(attentions, "get_interface"):
        from transformers import __version__

        raise UsageError(
            'sequence parallelism: attn_implementation="eager"',
            expected="a transformers version whose models look up eager attention by name",
            got=f"transformers {__version__}",
            fix='load the model with attn_implementation="sdpa", or upgrade transformers to 5',
        )


def _check_attention(model: Any, config: Any) -> None:
    """Refuses models without attention and layers along the sequence that an exchange could serve."""
    where = f"sequence parallelism: {type(model).__name__}"
    if getattr(model.config, "is_encoder_decoder", False):
        raise UsageError(
            where,
            expected="one sequence per sample",
            got="an encoder and a decoder, whose cross-attention reads another sequence",
            fix=_CURE,
        )
    if has_layers(model):
        return
    if not isinstance(getattr(config, "num_attention_heads", None), int):
        raise UsageError(
            where,
            expected="num_attention_heads in its config, or operations along the sequence that transformers names",
            got="neither",
            fix="call SequenceGroup.exchange in the model's own layers",
        )
    attentions = [(name, layer) for name, layer in model.named_modules() if "Attention" in type(layer).__name__]
    if attentions and not any(hasattr(_file_of(layer), "ALL_ATTENTION_FUNCTIONS") for layer in model.modules()):
        name, module = attentions[0]
        raise UsageError(
            f"{where}: {name} ({type(module).__name__})",
            expected="attention that transformers looks up by the name in the model's config",
            got="attention of the module's own",
            fix=_CURE,
        )


def _file_of(module: nn.Module) -> Any:
    return sys.modules.get(type(module).__module__)


class SequenceCut(Cut):
    """Sequences cut into runs, for the check at the start of training."""

    whole = "whole sequences"
    by_tokens = True
    cure = _CURE

    def __init__(self, attention: UlyssesAttention) -> None:
        self._attention, group = attention, attention.group
        self.name, self.size, self.index = f"sequence parallelism (sp={group.size})", group.size, group.rank

    def computing(self, *, whole: bool) -> AbstractContextManager[None]:
        return self._attention.computing(whole=whole)

    def part_of(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in self._attention.group.shard(batch).items() if name in batch}


class SequenceAxis(Axis):
    """The ranks that hold runs of the same sequences; every engine has the group, as `engine.sequence_group`.

    Args:
        layer_ranks: size of `tp`, whose ranks already divide the attention heads.
        verifies: refuse layers that are known to carry a state across the cut.
    """

    name: ClassVar[str] = "sp"
    divides_parameters: ClassVar[bool] = False

    def __init__(self, group: SequenceGroup, layer_ranks: int, *, verifies: bool = True) -> None:
        self.group, self._layer_ranks, self._verifies = group, layer_ranks, verifies
        self._attention: UlyssesAttention | None = None
        self._cut: SequenceCut | None = None

    @property
    def cut(self) -> Cut | None:
        return self._cut

    @classmethod
    def join(cls, mesh: ParallelConfig, topology: Topology, job: JobSpec) -> SequenceAxis:
        # Pipeline stages issue different collectives, so histories are comparable only within a stage.
        recorder = peer_recorder(topology, mesh.peer_groups)
        group = SequenceGroup.of(topology, mesh.sp, stride=mesh.tp, recorder=recorder)
        return cls(group, mesh.tp, verifies=mesh.verify_cut)

    @classmethod
    def estimate(cls, mesh: ParallelConfig) -> AxisEstimate | None:
        return SequenceEstimate(mesh.sp, mesh.tp) if mesh.sp > 1 else None

    @classmethod
    def check_launched(cls, mesh: ParallelConfig, sources: Mapping[str, str]) -> None:
        """Refuses a launch with `sp` if the caller passes no mesh: the script must cut its batches.

        Raises:
            UsageError: the launcher requests `sp`.
        """
        if mesh.sp > 1:
            raise UsageError(
                f"initialize(parallel): the launch requests sp={mesh.sp} ({sources.get('sp_size', 'its environment')})",
                expected=f"parallel=ParallelConfig(sp={mesh.sp}), with batches loaded by data-parallel rank",
                got=None,
                fix="pass it, prepare the model and loaders with an Accelerator, or launch without sp",
            )

    def connect(self, collectives: Collectives) -> None:
        if self.group.size > 1:
            collectives.observe(self.name, self.group.collectives)

    def install(self, model: nn.Module) -> None:
        """Makes the model's attention exchange heads, unless it already does.

        Raises:
            UsageError: the model has no attention of transformers and no layers along the sequence.
        """
        if self.group.size == 1:
            return
        if self._verifies:
            check_layers(model, f"{_CURE}; ParallelConfig(verify_cut=False) trains it anyway")
        attention = UlyssesAttention.of(model)
        if attention is None:
            attention = self._attention = UlyssesAttention(model, self.group, head_parts=self._layer_ranks)
        self._cut = SequenceCut(attention)

    def attach(self, engine: EngineBase, loader: Any) -> None:
        vars(engine)["sequence_group"] = self.group

    def undo(self) -> None:
        if self._attention is not None:
            self._attention.undo()
            self._attention = None


class SequenceEstimate(AxisEstimate):
    """Estimates sequence parallelism: 1 / sp of the tokens; the engine's own code exchanges heads.

    Args:
        layer_ranks: size of `tp`, whose ranks already divide the attention heads.
    """

    name: ClassVar[str] = "sp"
    in_blocks: ClassVar[bool] = True

    def __init__(self, size: int, layer_ranks: int) -> None:
        super().__init__(size)
        self._layer_ranks = layer_ranks

    def tokens(self, sequence: int) -> int:
        return sequence // self.size

    def share(self, job: EstimatedJob, model: nn.Module) -> None:
        # No process group: exchanges go through simulated ranks.
        group = SequenceGroup(job.ranks(self.size, self.name), cast(Any, None))
        if job.shape is None:
            _UlyssesWithoutValues(model, group)
            return
        exchange = _ExchangeOnly(group)
        for module in model.modules():
            if "exchange" in vars(module):
                vars(module)["exchange"] = exchange


class _ExchangeOnly(UlyssesAttention):
    """Only the exchange of heads, for a decoder that calls it."""

    def __init__(self, group: SequenceGroup) -> None:
        self.group = group
        self._positions = {}
        self.implementation = "sdpa"


class _UlyssesWithoutValues(UlyssesAttention):
    """Attention without reading positions and masks: sequences are neither packed nor padded."""

    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tokens = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        self._sequences = WholeSequences(tokens.shape[1] * self.group.size, tokens.device, None, None)
        return None
