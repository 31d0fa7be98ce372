"""Layers that carry something along the sequence, under sequence parallelism.

A table has transformers' operations by their kind (`_ALONG`, `_WINDOWS`), not the models that use them:

| kind | operation | exchange |
|---|---|---|
| heads | gated delta rules, Mamba-2's scan | each rank computes whole sequences of some heads |
| channels | scans of Mamba-1, RWKV, RG-LRU | the same, of some channels; each rank gets B and C, which have none |
| window | short convolutions, token shifts | the last k - 1 tokens of the rank before |

A model's forward stays as it is. Its file looks these operations up by name, as functions of the module (the name also
leads to kernels from the hub and from packages) or as a method; the replacement under that name calls the original one
with whole sequences. Functions that fuse an operation with the projections around it answer None, upon which models
call the separate ones. Hooks tell for which model a function runs, also if backward recomputes a layer.

Gates, decays and parameters of heads go with their heads: a rank's slice gets the gradient of all tokens, and the sum
over ranks is the parameter's. Padding reaches layers as this rank's part of the mask.
"""

from __future__ import annotations

import functools
import inspect
import re
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import CodeType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from zeroaccel.errors import UsageError
from zeroaccel.parallel.dealing import Dealing, Dealt, to_heads, to_tokens
from zeroaccel.parallel.sequence import SequenceGroup


@dataclass(frozen=True)
class _Along:
    """An operation along the sequence whose heads are independent.

    Attributes:
        arguments: in the order of the function, with the meaning of their first dims: `b` samples, `t` tokens, `h`
            heads or channels, `g` groups of heads, `-` anything else. Others belong to all heads.
        whole: the argument with all heads, whose dims the (first) result shares.
    """

    arguments: Mapping[str, str]
    whole: str


_DELTA_RULE = _Along(
    {"query": "btg", "key": "btg", "value": "bth", "g": "bth", "beta": "bth", "initial_state": "bh"}, "value"
)
_ALONG = {
    "chunk_gated_delta_rule": _DELTA_RULE,
    "torch_chunk_gated_delta_rule": _DELTA_RULE,
    "chunk_kimi_delta_attention": _DELTA_RULE,
    "mamba2_chunk_scan": _Along(
        {
            **{"hidden_states": "bth", "dt": "bth", "A": "h", "B": "btg", "C": "btg", "chunk_size": "", "D": "h"},
            **{"dt_bias": "h", "z": "bth", "initial_states": "bh", "seq_idx": "bt"},
        },
        "hidden_states",
    ),
    "mamba_selective_scan": _Along(
        {
            **{"hidden_states": "bht", "dt": "bht", "A": "h", "B": "b-t", "C": "b-t", "D": "h", "z": "bht"},
            **{"delta_bias": "h", "seq_idx": "bt"},
        },
        "hidden_states",
    ),
    "rwkv_linear_attention": _Along({"time_decay": "h", "time_first": "h", "key": "bth", "value": "bth"}, "value"),
    "_rnn_scan": _Along(
        {"hidden_states": "bth", "recurrent_gate": "bth", "reset": "bt", "recurrent_states": "bh"}, "hidden_states"
    ),
}
_WINDOWS = frozenset({"causal_conv1d_fn"})
_FUSED = frozenset({"mamba_inner_fn", "mamba2_split_conv1d_scan_combined"})
_MASKS, _PADDING = "create_recurrent_attention_mask", "apply_mask_to_padding_states"
_ATTENTION_MASKS = frozenset({"create_causal_mask", "create_sliding_window_causal_mask", "create_bidirectional_mask"})
_OF_ATTENTION = _ATTENTION_MASKS | {_MASKS, _PADDING}
_FUNCTIONS = frozenset(_ALONG) | _WINDOWS | _FUSED | _OF_ATTENTION
# Class names of transformers' layers that carry a state or a window from token to token.
_CARRIES = re.compile(
    r"Mamba2?Mixer|MambaLayer|^(Bamba|FalconH1)Mixer|Rwkv\w*Attention|GatedDeltaNet|DeltaAttention|LightningAttention"
    r"|ShortConv|RecurrentBlock|xLSTM\w*Layer"
)


class CutModel(Protocol):
    """The model whose sequences are cut.

    Attributes:
        run: tokens of this rank in the latest forward.
        packs: the mask that is being built keeps packed sequences apart.
    """

    group: SequenceGroup
    run: int
    packs: bool

    def is_on(self, module: nn.Module) -> bool: ...


class SequenceLayers:
    """Makes a model's layers along the sequence exchange what they need, until `undo`.

    Attributes:
        window: the module with the longest window and the number of tokens that it reads from the rank before.
    """

    def __init__(self, model: nn.Module, owner: CutModel) -> None:
        self._owner = owner
        self._hooks: list[Any] = []
        self._methods: list[tuple[nn.Module, str]] = []
        self.window: tuple[str, int] = ("", 0)
        for name, module in model.named_modules():
            functions, methods = _operations(type(module))
            for method in methods:
                self._methods.append((module, method))
                vars(module)[method] = functools.partial(self._along, getattr(module, method), _ALONG[method])
            if functions:
                self._hooks.append(module.register_forward_pre_hook(self._enter))
                self._hooks.append(module.register_forward_hook(self._leave, always_call=True))
            if (shift := _shift_of(module)) is not None:
                self._hooks.append(module.register_forward_pre_hook(functools.partial(self._lengthen, *shift)))
                self._hooks.append(module.register_forward_hook(functools.partial(self._shorten, *shift)))
                self.window = max(
                    self.window, (f"{name} ({type(module).__name__})", shift[0]), key=lambda pair: pair[1]
                )
            for namespace, function in functions:
                _replace(namespace, function)
        _USERS.append(self)

    def undo(self) -> None:
        """Restores the model's operations."""
        for hook in self._hooks:
            hook.remove()
        for module, method in self._methods:
            vars(module).pop(method, None)
        self._hooks.clear()
        self._methods.clear()
        if self in _USERS:
            _USERS.remove(self)
        if not _USERS:
            _restore()

    # -- which model is running

    def _enter(self, module: nn.Module, args: Any) -> None:
        _RUNNING.stack.append((self, module))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if _RUNNING.stack and _RUNNING.stack[-1] == (self, module):
            _RUNNING.stack.pop()

    def call(self, name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls one of transformers' functions for a module of this model."""
        if name in _FUSED:
            return None
        if name in _ATTENTION_MASKS:  # without positions, transformers cannot know of packed sequences
            self._owner.packs = _named(original, args, kwargs).get("position_ids") is not None
            try:
                return original(*args, **kwargs)
            finally:
                self._owner.packs = True
        if name == _MASKS:
            return self._mask(original, **_named(original, args, kwargs))
        if name == _PADDING:
            arguments = _named(original, args, kwargs)
            mask, states = arguments.get("attention_mask"), arguments["hidden_states"]
            if isinstance(mask, Tensor) and mask.shape[1] == self._owner.group.size * states.shape[1]:
                arguments["attention_mask"] = self._own(mask, states.shape[1])
            return original(**arguments)
        if name in _WINDOWS:
            return self._convolve(original, *args, **kwargs)
        return self._along(original, _ALONG[name], *args, **kwargs)

    # -- the kinds of operations

    def _along(self, original: Callable[..., Any], operation: _Along, *args: Any, **kwargs: Any) -> Any:
        """Computes this rank's heads over whole sequences."""
        group = self._owner.group
        arguments = dict(zip(operation.arguments, args, strict=False)) | kwargs
        whole: Tensor = arguments[operation.whole]
        dims = operation.arguments[operation.whole]
        if not self._is_cut(whole.shape[dims.index("t")]):
            return original(*args, **kwargs)
        dealing = Dealing(whole.shape[dims.index("h")], group.size)
        share = dealing.share(group.rank)
        exchanged: dict[str, Dealt] = {}
        for name, layout in operation.arguments.items():
            value = arguments.get(name)
            if not isinstance(value, Tensor):
                continue
            heads = next((layout.index(letter) for letter in "hg" if letter in layout), None)
            if "t" not in layout:
                if heads is not None:
                    arguments[name] = value.narrow(heads, share.start, len(share))
            elif heads is None and not value.is_floating_point():
                tokens = layout.index("t")
                arguments[name] = group.gather(value.movedim(tokens, 1)).movedim(1, tokens)
            else:
                exchanged[name] = Dealt(value, layout.index("t"), heads)
        received = to_heads(group, dealing, list(exchanged.values()), "exchange heads of a recurrence")
        arguments |= {name: whole.contiguous() for name, whole in zip(exchanged, received, strict=True)}
        if share:
            leading = [arguments.pop(name) for name, _ in zip(operation.arguments, args, strict=False)]
            result = original(*leading, *args[len(operation.arguments) :], **arguments)
        else:  # more ranks than heads; zero elements keep each parameter in the graph
            empty = arguments[operation.whole]
            for value in arguments.values():
                if isinstance(value, Tensor) and value.is_floating_point() and value.requires_grad:
                    empty = empty + 0 * value.sum().to(empty.dtype)
            result = (empty, None) if _answers_pairs(operation, kwargs) else empty
        output = result[0] if isinstance(result, tuple) else result
        dealt = Dealt(output, dims.index("t"), dims.index("h"))
        output = to_tokens(group, dealing, dealt, whole.shape[dims.index("t")], "exchange outputs of a recurrence")
        output = output.contiguous()  # models view it
        return (output, *result[1:]) if isinstance(result, tuple) else output

    def _convolve(self, original: Callable[..., Any], states: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Computes a causal convolution, (B, C, s), which reads the last tokens of the rank before."""
        run, count = self._owner.run, weight.shape[-1] - 1
        if not self._is_cut(run) or states.shape[-1] < run:
            return original(states, weight, *args, **kwargs)
        group = self._owner.group
        states = states[..., -run:]  # a cache without tokens puts zeros in front
        longer = group.before(states, count, -1, "exchange windows")
        if isinstance(index := kwargs.get("seq_idx"), Tensor):  # which packed sequence a token belongs to
            before = group.gather(index)[:, max(group.rank * run - count, 0) : group.rank * run]
            if not group.rank:
                before = index[:, :1].expand(-1, count)
            kwargs["seq_idx"] = torch.cat([before, index], 1)
        return original(longer, weight, *args, **kwargs)[..., count:].contiguous()

    def _lengthen(self, count: int, dim: int, module: nn.Module, args: tuple[Any, ...]) -> Any:
        """Puts tokens of the rank before in front of a module's input."""
        states = args[0]
        if not self._is_on(module, states.shape[dim]):
            return None
        return (self._owner.group.before(states, count, dim, "exchange windows"), *args[1:])

    def _shorten(self, count: int, dim: int, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Any:
        """Drops the outputs for these tokens."""
        states = args[0]
        if not self._is_on(module, states.shape[dim] - count):
            return None
        return output.narrow(dim, count, output.shape[dim] - count)

    # -- parts of the sequence

    def _is_cut(self, tokens: int) -> bool:
        module = _RUNNING.stack[-1][1] if _RUNNING.stack else None
        return module is None or self._is_on(module, tokens)

    def _is_on(self, module: nn.Module, tokens: int) -> bool:
        return self._owner.is_on(module) and tokens == self._owner.run

    def _own(self, mask: Tensor, run: int) -> Tensor:
        rank = self._owner.group.rank
        return mask[:, rank * run : (rank + 1) * run].contiguous()

    def _mask(self, original: Callable[..., Any], **arguments: Any) -> Any:
        """Returns this rank's part of the padding mask; None on all ranks if none has padding."""
        mask, run = arguments.get("attention_mask"), arguments["inputs_embeds"].shape[1]
        if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.shape[1] != self._owner.group.size * run:
            return original(**arguments)
        return None if bool(mask.all()) else self._own(mask, run)


def check_layers(model: nn.Module, fix: str) -> None:
    """Refuses layers that are known to carry something along the sequence in a way that the table does not have."""
    for name, module in model.named_modules():
        if _CARRIES.search(type(module).__name__) and not any(map(_has_operations, module.modules())):
            raise UsageError(
                f"sequence parallelism: {name} ({type(module).__name__})",
                expected="layers that work on each token by itself, attention, and operations along the sequence by "
                f"their names in transformers ({', '.join(sorted(_ALONG | dict.fromkeys(_WINDOWS)))})",
                got="one that carries a state from token to token in its own way, which would restart on each rank",
                fix=fix,
            )


def has_layers(model: nn.Module) -> bool:
    """True if a model has operations along the sequence besides attention."""
    return any(map(_has_operations, model.modules()))


def _has_operations(module: nn.Module) -> bool:
    functions, methods = _operations(type(module))
    named = {name for _, name in functions} - _OF_ATTENTION
    return bool(named or methods) or _shift_of(module) is not None


def _operations(kind: type) -> tuple[list[tuple[dict[str, Any], str]], list[str]]:
    """Returns the functions that a class calls, each with the namespace where it looks them up, and the methods."""
    if kind in _OPERATIONS_OF:
        return _OPERATIONS_OF[kind]
    functions, methods = [], []
    for base in kind.__mro__:
        if base is nn.Module:
            break
        for attribute in vars(base).values():
            code = inspect.unwrap(attribute) if callable(attribute) else None
            if not inspect.isfunction(code):
                continue
            for name in _names_in(code.__code__):
                if name in _FUNCTIONS and name in code.__globals__:
                    functions.append((code.__globals__, name))
                elif name in _ALONG and callable(getattr(kind, name, None)):
                    methods.append(name)
    _OPERATIONS_OF[kind] = functions, sorted(set(methods))
    return _OPERATIONS_OF[kind]


def _names_in(code: CodeType) -> Iterator[str]:
    """Yields the names that a function looks up, also inside its lambdas."""
    yield from code.co_names
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _names_in(value)


_OPERATIONS_OF: weakref.WeakKeyDictionary[type, tuple[list[tuple[dict[str, Any], str]], list[str]]] = (
    weakref.WeakKeyDictionary()
)


def _shift_of(module: nn.Module) -> tuple[int, int] | None:
    """Returns (tokens that a module reads from before each one, dim of tokens) if it is a causal window itself."""
    if isinstance(module, nn.Conv1d):
        count = (module.kernel_size[0] - 1) * module.dilation[0]
        causal = module.groups == module.in_channels and module.padding == (count,) and module.stride == (1,)
        return (count, -1) if causal and count > 0 else None
    if isinstance(module, nn.ZeroPad2d):
        left, right, top, bottom = module.padding
        return (top, -2) if (left, right) == (0, 0) and top == -bottom > 0 else None
    return None


def _answers_pairs(operation: _Along, kwargs: Mapping[str, Any]) -> bool:
    final = kwargs.get("return_final_states") or kwargs.get("return_last_state")
    return operation is _DELTA_RULE or bool(final) or operation.whole == "value" or "reset" in operation.arguments


def _named(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return dict(zip(inspect.signature(function).parameters, args, strict=False)) | dict(kwargs)


# -- transformers' functions


class _Running(threading.local):
    """The modules of cut models whose forward is running in this thread."""

    def __init__(self) -> None:
        self.stack: list[tuple[SequenceLayers, nn.Module]] = []


_RUNNING = _Running()
_USERS: list[SequenceLayers] = []
_REPLACED: list[_Replaced] = []


@dataclass
class _Replaced:
    namespace: dict[str, Any]
    name: str
    original: Callable[..., Any]


def _replace(namespace: dict[str, Any], name: str) -> None:
    if any(known.namespace is namespace and known.name == name for known in _REPLACED):
        return
    replaced = _Replaced(namespace, name, namespace[name])

    @functools.wraps(replaced.original)
    def operation(*args: Any, **kwargs: Any) -> Any:
        layers, module = _RUNNING.stack[-1] if _RUNNING.stack else (None, None)
        if layers is None or module is None or not layers._owner.is_on(module):
            return replaced.original(*args, **kwargs)
        return layers.call(name, replaced.original, *args, **kwargs)

    _REPLACED.append(replaced)
    namespace[name] = operation


def _restore() -> None:
    while _REPLACED:
        replaced = _REPLACED.pop()
        replaced.namespace[replaced.name] = replaced.original


@contextmanager
def shapes_of_scans(model: nn.Module) -> Iterator[None]:
    """Makes scans compute results without values, inside a block: at once, where torch's code has a loop over chunks.

    Backward has the inputs and the output, as with kernels.
    """
    found = [place for module in model.modules() for place in _operations(type(module))[0] if place[1] in _ALONG]
    with ExitStack() as stack:
        for namespace, name in {(id(namespace), name): (namespace, name) for namespace, name in found}.values():
            place = next((entry for entry in _REPLACED if entry.namespace is namespace and entry.name == name), None)
            scan = functools.partial(_scan_shape, _ALONG[name])
            if place is None:
                stack.callback(namespace.__setitem__, name, namespace[name])
                namespace[name] = scan
            else:
                stack.callback(setattr, place, "original", place.original)
                place.original = scan
        yield


def _scan_shape(operation: _Along, *args: Any, **kwargs: Any) -> Any:
    arguments = dict(zip(operation.arguments, args, strict=False)) | kwargs
    tensors = [tensor for tensor in arguments.values() if isinstance(tensor, Tensor)]
    out: Tensor = _Scan.apply(arguments[operation.whole], *tensors)  # type: ignore[no-untyped-call]
    return (out, None) if _answers_pairs(operation, kwargs) else out


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, *tensors: Tensor) -> Tensor:
        out = torch.empty_like(whole)
        ctx.save_for_backward(out, *tensors)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _, *tensors = ctx.saved_tensors
        needed = ctx.needs_input_grad[1:]
        return (
            None,
            *(torch.empty_like(t) if need else None for t, need in zip(tensors, needed, strict=True)),
        )
