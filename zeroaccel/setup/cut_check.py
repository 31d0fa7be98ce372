"""The check at the start that a model computes the same whether an axis of the mesh cuts it or not.

A sequence that is cut is right only where everything but attention works on tokens by themselves, and a split layer
only where what lies behind it works on parts. Models of which that is not true train, to other numbers. So a short
batch goes through the model twice, whole and cut, and each module's output is compared. Of an axis with a backward of
its own, gradients are, too (`Cut.gradients`).

Both forwards are the engine's own, so sharded and offloaded parameters are gathered unit by unit, and leave no trace.

[Note: tolerance] What is right differs by the order of sums: in fp32 by 1e-6 of the size of a module's output, and
what is wrong by 1e-2 and more. In half precision rounding alone makes up to some 1e-2. What is farther apart there is
computed again with weights and activations in fp32, one module's weights at a time, and that counts.
"""

from __future__ import annotations

import inspect
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zeroaccel.checkpoint.plain_codec import preserved_random_state
from zeroaccel.comm.agree import agreed
from zeroaccel.comm.collectives import Collectives
from zeroaccel.errors import UsageError, ZeroAccelError
from zeroaccel.logs import log_always, log_once, logger
from zeroaccel.nested import leaves_of
from zeroaccel.zero.engine_base import EngineBase

_LEAST_TOKENS, _MOST_TOKENS, _TOKENS_PER_RANK = 16, 64, 4
_SEEDS = (0, 1, 2)
_TOLERANCE = 1e-3
_HALF_TOLERANCE = 3e-2
# Where a half-precision model does not run in fp32: only what no rounding explains.
_COARSE_TOLERANCE = 0.25
_MOST_SECONDS = 3.0
_HALF = (torch.float16, torch.bfloat16)
_FEATURES = 64


class Cut(ABC):
    """What an axis cuts, for a trial.

    Attributes:
        name: of the axis, and how many ranks share: "sequence parallelism (sp=2)".
        whole: what there would be without it: "whole sequences".
        size, index: ranks that share, and which of them this one is.
        by_tokens: the ranks have parts of the tokens and the whole of each module, and their gradients are added up;
            else they have all tokens and parts of modules.
        cure: what to do about a model that cannot be cut.
    """

    name: str
    whole: str
    size: int
    index: int
    by_tokens: bool
    cure: str

    @abstractmethod
    def computing(self, *, whole: bool) -> AbstractContextManager[None]:
        """Within it the model computes as without the axis, or as with it, in any mode."""

    def part_of(self, batch: dict[str, Any]) -> dict[str, Any]:
        """This rank's part of a batch."""
        return batch

    def gradients(self) -> Iterable[tuple[str, Tensor]]:
        """Those that the module whose forward has just ended has for a loss of its own, by names: compared, too."""
        return ()

    def is_split(self, module: nn.Module) -> bool:
        """Whether the cut changes what the module itself takes, returns, or does for its gradients."""
        return False


def verify_cuts(engine: EngineBase, cuts: Sequence[Cut], *, enabled: bool) -> None:
    """Compares the model as each axis cuts it with the whole one. (all ranks)

    Raises:
        UsageError: on every rank: a module computes something else. The engine is destroyed.
    """
    names = " and ".join(cut.name for cut in cuts)
    if not cuts:
        return
    if not enabled:
        log_always(f"initialize: verify_cut=False, so nothing checks that {names} keeps the model's numbers")
        return
    began = time.monotonic()
    try:
        for cut in cuts:
            with without_trace(engine.module, engine.collectives), ExitStack() as others:
                for other in cuts:
                    if other is not cut:
                        others.enter_context(other.computing(whole=True))
                _verify(engine, cut)
    except BaseException:
        engine.destroy()
        raise
    seconds = time.monotonic() - began
    if seconds > _MOST_SECONDS:
        log_always(f"initialize: the check of {names} took {seconds:.1f} s; ParallelConfig(verify_cut=False) omits it")
    logger.info("initialize: checked in %.2f s that %s keeps the model's numbers", seconds, names)


@dataclass(frozen=True)
class _Difference:
    """A module whose output is another one when the model is cut.

    Attributes:
        order: of its call in the forward.
        expected: of the module.
        got: how far apart outputs are, relative to their size; or what happened, which another batch would not change.
    """

    order: int
    module: str
    expected: str
    got: float | str

    @property
    def is_measured(self) -> bool:
        """Whether it is one of numbers, which another batch may not show."""
        return isinstance(self.got, float)


def _verify(engine: EngineBase, cut: Cut) -> None:
    """Refuses a model that a cut changes, unless the trial cannot be made: then the log says so. (all ranks)"""
    tokens = cut.size * max(1, min(max(_TOKENS_PER_RANK, _LEAST_TOKENS // cut.size), _MOST_TOKENS // cut.size))
    trial = _Comparison(engine, cut, tokens)
    reason, difference = trial.run(_SEEDS[0], _TOLERANCE)
    tolerance = _TOLERANCE
    if trial.is_half and difference is not None and difference.is_measured:
        trial.in_fp32 = True
        reason, difference = trial.run(_SEEDS[0], tolerance)
        if reason or (difference is not None and not difference.is_measured):  # the model casts by itself
            trial.in_fp32, tolerance = False, _COARSE_TOLERANCE
            reason, difference = trial.run(_SEEDS[0], tolerance)
    # Seldom does a router choose another expert by the last bit; it does not with every seed.
    for seed in _SEEDS[1:]:
        if difference is not None and difference.is_measured:
            reason, difference = trial.run(seed, tolerance)
    if difference is not None and difference.is_measured and trial.is_random():
        reason = "its forward draws random numbers in eval mode, too"
    if reason:
        model = type(engine.module).__name__
        log_once(logging.WARNING, f"initialize: nothing checks that {cut.name} keeps the numbers of {model}: {reason}")
    elif difference is not None:
        raise UsageError(
            f"{cut.name}: {difference.module}",
            expected=difference.expected,
            got=difference.got,
            fix=f"{cut.cure}; ParallelConfig(verify_cut=False) trains it regardless",
        )


class _Comparison:
    """Pairs of forwards of one model, whole and cut.

    Attributes:
        in_fp32: weights and activations are widened.
        is_half: an output has been in half precision.
    """

    def __init__(self, engine: EngineBase, cut: Cut, tokens: int) -> None:
        self.engine, self.cut, self.tokens = engine, cut, tokens
        self.in_fp32 = self.is_half = False

    def run(self, seed: int, tolerance: float) -> tuple[str, _Difference | None]:
        """(why there is no trial or "", the first difference of any rank). (all ranks)"""
        job, whole, reason = self.engine.collectives.job, _Record(self.tokens, self.cut), ""
        batch: dict[str, Any] = {}
        try:
            batch = trial_batch(self.engine.module, self.tokens, seed, self.engine.collectives.topology.device)
            with self.cut.computing(whole=True):
                self._forward(batch, whole)
        except NoBatch as error:
            reason = str(error)
        except Exception as error:
            reason = f"its forward on the trial's batch failed at {whole.running}: {type(error).__name__}: {error}"
        self.is_half = whole.is_half
        reasons: list[str] = job.gather_objects(reason, "initialize: whole model")
        if reason := next(filter(None, reasons), ""):
            self.engine.reset()
            return reason, None
        if self.is_half:
            tolerance = max(tolerance, _HALF_TOLERANCE)
        part = _Record(self.tokens, self.cut, whole, tolerance)
        with agreed(job, "initialize: cut model"):
            try:
                with self.cut.computing(whole=False):
                    self._forward(self.cut.part_of(batch), part)
            except ZeroAccelError:  # refused by name already
                raise
            except Exception as error:
                part.fails(error)
        if any(job.gather_objects(part.failed, "initialize: failures")):
            self.engine.reset()
        differences = job.gather_objects(part.difference, "initialize: differences")
        return "", min(filter(None, differences), key=lambda one: one.order, default=None)

    def is_random(self) -> bool:
        """Whether the whole model computes something else a second time. (all ranks)"""
        first = _Record(self.tokens, self.cut)
        second = _Record(self.tokens, self.cut, first, _TOLERANCE)
        batch = trial_batch(self.engine.module, self.tokens, _SEEDS[0], self.engine.collectives.topology.device)
        with self.cut.computing(whole=True):
            self._forward(batch, first)
            self._forward(batch, second)
        return any(self.engine.collectives.job.gather_objects(second.difference is not None, "initialize: repeated"))

    def _forward(self, batch: Mapping[str, Any], record: _Record) -> None:
        model = self.engine.module
        with _wrapped(model, self.cut, record, in_fp32=self.in_fp32):
            record.output(self.engine.run_trial(batch))


@dataclass
class _OutputSample:
    """A part of a module's output that stands for the whole of it.

    Attributes:
        shape: of the output.
        values: of it every so many features.
        size: its root mean square.
    """

    shape: torch.Size
    values: Tensor
    size: Tensor

    @classmethod
    def of(cls, output: Tensor, most_features: int) -> _OutputSample:
        step = -(-output.shape[-1] // most_features) if output.ndim else 1
        values = (output.detach()[..., ::step] if output.ndim else output.detach()).float().clone()
        return cls(output.shape, values, values.square().mean().sqrt())


@dataclass
class _Record:
    """What one forward went through; of a cut model, beside that of the whole one.

    Attributes:
        tokens: of the whole batch.
        whole: the forward to compare with; None for that itself.
        samples: of outputs, by module and number of the call.
        inputs: elements of the first input, by the same.
        running: the innermost module whose forward has begun.
        difference: the first one from the whole.
    """

    tokens: int
    cut: Cut
    whole: _Record | None = None
    tolerance: float = 0.0
    samples: dict[tuple[str, int], _OutputSample] = field(default_factory=dict)
    inputs: dict[tuple[str, int], int] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    stack: list[str] = field(default_factory=list)
    is_half: bool = False
    failed: bool = False
    difference: _Difference | None = None

    @property
    def running(self) -> str:
        return self.stack[-1] if self.stack else "the model"

    def begin(self, name: str, module: nn.Module, source: Tensor | None) -> tuple[str, int]:
        """A module's forward begins."""
        call = name, self.calls.get(name, 0)
        self.calls[name] = call[1] + 1
        if source is not None and source.numel():
            self.inputs[call] = source.numel()
            self._check_weights(call, module, source)
            if source.is_floating_point():  # what comes in differently was made so by the module around
                self._add((f"input of {name}", call[1]), source, _FEATURES, named=self.running)
        self.stack.append(name)
        return call

    def end(self, call: tuple[str, int], output: Any) -> None:
        """It is over; not called where it has raised, so that `running` says where."""
        self.stack.pop()
        first = next((leaf for _, leaf in leaves_of(output) if isinstance(leaf, Tensor)), None)
        if first is not None and first.is_floating_point() and first.numel():
            self._add(call, first, _FEATURES)

    def gradient(self, call: tuple[str, int], name: str, value: Tensor) -> None:
        """One of `Cut.gradients`, of the module."""
        about = f"{call[0]}: gradient of {name}"
        self._add((about, call[1]), value, _FEATURES)

    def output(self, output: Any) -> None:
        """What the model returns."""
        for index, (_, leaf) in enumerate(leaves_of(output)):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.ndim > 1 and leaf.numel():
                self._add(("the model's output", index), leaf, leaf.shape[-1], is_result=True)

    def fails(self, error: Exception) -> None:
        """The forward of the cut model raised."""
        self.failed = True
        text = str(error).partition("\n")[0]
        if self.difference is None or not self.difference.is_measured:
            self._differs(self.running, "a forward that runs, as with {}", f"{type(error).__name__}: {text}")

    def _add(
        self, call: tuple[str, int], output: Tensor, features: int, *, named: str = "", is_result: bool = False
    ) -> None:
        self.is_half |= output.dtype in _HALF
        sample = _OutputSample.of(output, features)
        if self.whole is None:
            self.samples[call] = sample
        elif self.difference is None and (expected := self.whole.samples.get(call)) is not None:
            self._compare(named or call[0], expected, sample, is_result=is_result)

    def _compare(self, name: str, whole: _OutputSample, own: _OutputSample, *, is_result: bool) -> None:
        expected = whole.values
        if whole.shape != own.shape:
            dim = self._cut_dim(whole.shape, own.shape)
            if dim is None:
                if is_result:
                    self._differs(name, f"the shape {tuple(whole.shape)}, as with {{}}", str(tuple(own.shape)))
                return
            expected = expected.narrow(dim, self.cut.index * own.shape[dim], own.shape[dim])
        elif self.cut.by_tokens and not is_result:
            return  # nothing of tokens: the same on all ranks, or pooled, which the result shows
        size = whole.size.item()
        if not 1e-12 < size < float("inf"):  # nothing to compare with
            return
        figure = (own.values - expected).square().mean().sqrt().item() / size
        if not figure <= self.tolerance:
            about = f"numbers within {self.tolerance:g} of their size of those with {{}}, on a trial batch"
            self._differs(name, about, float(f"{figure:.1e}"))

    def _cut_dim(self, whole: torch.Size, own: torch.Size) -> int | None:
        """Along which dim an output has this rank's tokens; None where it is no part of the whole one's."""
        if not self.cut.by_tokens or len(whole) != len(own):
            return None
        dims = [dim for dim in range(len(whole)) if whole[dim] != own[dim]]
        if len(dims) != 1 or whole[dims[0]] != self.tokens or own[dims[0]] * self.cut.size != self.tokens:
            return None
        return dims[0]

    def _check_weights(self, call: tuple[str, int], module: nn.Module, source: Tensor) -> None:
        """Weights that every rank has but that see a part get a part of their gradient, which is never added up."""
        if self.whole is None or self.cut.by_tokens or self.difference is not None:
            return
        params = [key for key, param in module._parameters.items() if param is not None and param.requires_grad]
        whole = self.whole.inputs.get(call)
        if params and whole is not None and source.numel() != whole:
            about = f"a style that adds up gradients of {params[0]}, which each rank has and computes a part with"
            self._differs(call[0], about, f"none, and {source.numel()} of {whole} elements")

    def _differs(self, module: str, expected: str, got: float | str) -> None:
        self.difference = _Difference(len(self.calls), module, expected.format(self.cut.whole), got)


@contextmanager
def _wrapped(model: nn.Module, cut: Cut, record: _Record, *, in_fp32: bool) -> Iterator[None]:
    """Records the forward of each module of a model, inside its hooks."""
    scratch = _Scratch()
    before = []
    for name, module in model.named_modules():
        forward: Callable[..., Any] = module.forward
        if in_fp32:
            forward = partial(_run_in_fp32, module, forward, scratch)
        label = f"{name} ({type(module).__name__})" if name else type(module).__name__
        forward = partial(_recorded, label, module, forward, record, cut)
        before.append((module, vars(module).get("forward")))
        vars(module)["forward"] = forward
    try:
        yield
    finally:
        for module, own in before:
            vars(module).pop("forward", None)
            if own is not None:
                vars(module)["forward"] = own


def _recorded(
    name: str,
    module: nn.Module,
    forward: Callable[..., Any],
    record: _Record,
    cut: Cut,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if cut.is_split(module):
        record.stack.append(name)
        output = forward(*args, **kwargs)
        record.stack.pop()
        return output
    source = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
    call = record.begin(name, module, source)
    output = forward(*args, **kwargs)
    record.end(call, output)
    for key, value in cut.gradients():
        record.gradient(call, key, value)
    return output


class _Scratch:
    """Memory for the widened weights of modules whose forwards are running, one inside the other."""

    def __init__(self) -> None:
        self.depth = 0
        self._buffers: list[Tensor] = []

    def widened(self, value: Tensor, used: int) -> Tensor:
        """A copy in fp32 behind the first `used` elements of this depth's buffer."""
        buffer = self._buffers[self.depth - 1]
        copy = buffer[used : used + value.numel()].view(value.shape)
        return copy.copy_(value)

    def enter(self, numel: int, device: torch.device) -> None:
        self.depth += 1
        if len(self._buffers) < self.depth:
            self._buffers.append(torch.empty(0))
        if self._buffers[self.depth - 1].numel() < numel:
            self._buffers[self.depth - 1] = torch.empty(numel, device=device)


def _run_in_fp32(module: nn.Module, forward: Callable[..., Any], scratch: _Scratch, *args: Any, **kwargs: Any) -> Any:
    """A module's forward with its own weights and buffers in fp32."""
    tables = {**module._parameters, **module._buffers}
    # In the instance's own dict, which is read before its parameters; split layers have theirs there already.
    own = {key: vars(module).get(key, value) for key, value in tables.items()}
    half = {key: value for key, value in own.items() if value is not None and value.dtype in _HALF}
    before = {key: vars(module)[key] for key in half if key in vars(module)}
    plain = {key: value for key, value in half.items() if type(value) in (Tensor, nn.Parameter)}
    device = next(iter(half.values())).device if half else torch.device("cpu")
    scratch.enter(sum(value.numel() for value in plain.values()), device)
    used = 0
    for key, value in half.items():
        if key in plain:
            vars(module)[key] = scratch.widened(value.detach(), used)
            used += value.numel()
        else:
            vars(module)[key] = value.float()
    try:
        with torch.autocast(device.type, enabled=False):
            return forward(*map(_float, args), **{key: _float(value) for key, value in kwargs.items()})
    finally:
        scratch.depth -= 1
        for key in half:
            vars(module).pop(key, None)
        vars(module).update(before)


def _float(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in _HALF else value


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
        stack.enter_context(preserved_random_state(collectives.topology.device))
        log = logging.getLogger("torch._subclasses.fake_tensor")  # logs what it raises, too
        stack.callback(setattr, log, "disabled", log.disabled)
        log.disabled = True
        for module in model.modules():
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                stack.callback(_hide_foreign(hooks))
            stack.callback(_restorer(module))
        for module in model.modules():
            module.training = False  # not by eval(), which programs override
        yield


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
