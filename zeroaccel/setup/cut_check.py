"""The check at the start that a model computes the same results whether or not an axis of the mesh cuts it.

Cutting a sequence is correct only if everything except attention works on each token independently; splitting a layer
is correct only if the code behind it works on parts. Other models would train with wrong numbers. The check therefore
runs a short batch through the model twice, whole and cut, and compares each module's output. For an axis with its own
backward, it also compares gradients (`Cut.gradients`).

Both forwards are the engine's own, so sharded and offloaded parameters are gathered unit by unit, and leave no trace.

[Note: tolerance] Correct results differ by the order of sums: in fp32 by 1e-6 of the size of a module's output; wrong
ones differ by 1e-2 and more. In half precision, rounding alone causes differences of about 1e-2. If results differ by
more, both forwards run again with weights and activations in fp32, one module's weights at a time, and that comparison
decides.
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
from zeroaccel.engine import EngineBase
from zeroaccel.errors import UsageError, ZeroAccelError
from zeroaccel.logs import log_always, log_once, logger
from zeroaccel.nested import leaves_of

_LEAST_TOKENS, _MOST_TOKENS, _TOKENS_PER_RANK = 16, 64, 4
_SEEDS = (0, 1, 2)
_TOLERANCE = 1e-3
_HALF_TOLERANCE = 3e-2
# For a half-precision model that does not run in fp32: detects only differences that rounding cannot explain.
_COARSE_TOLERANCE = 0.25
_MOST_SECONDS = 3.0
_HALF = (torch.float16, torch.bfloat16)
_FEATURES = 64


class Cut(ABC):
    """The way in which an axis cuts the model, for a trial.

    Attributes:
        name: name of the axis and number of sharing ranks: "sequence parallelism (sp=2)".
        whole: description of the model without the axis: "whole sequences".
        size, index: number of ranks that share, and the index of this rank among them.
        by_tokens: True if each rank has a part of the tokens and the whole of each module, and gradients are added up;
            False if each rank has all tokens and parts of modules.
        cure: advice for a model that cannot be cut.
    """

    name: str
    whole: str
    size: int
    index: int
    by_tokens: bool
    cure: str

    @abstractmethod
    def computing(self, *, whole: bool) -> AbstractContextManager[None]:
        """Returns a context in which the model computes without the axis (`whole`) or with it, in any mode."""

    def part_of(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Returns this rank's part of a batch."""
        return batch

    def gradients(self) -> Iterable[tuple[str, Tensor]]:
        """Returns named gradients of the module whose forward has just ended, for a trial loss on its output."""
        return ()

    def is_split(self, module: nn.Module) -> bool:
        """True if the cut changes the module's own inputs, outputs or handling of gradients."""
        return False


def verify_cuts(engine: EngineBase, cuts: Sequence[Cut], *, enabled: bool) -> None:
    """Compares the model under each axis' cut with the whole one. (all ranks)

    Raises:
        UsageError: on every rank, if a module computes different values. The engine is destroyed.
    """
    names = " and ".join(cut.name for cut in cuts)
    if not cuts:
        return
    if not enabled:
        log_always(f"initialize: verify_cut=False, so nothing checks that {names} preserves the model's results")
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
    logger.info("initialize: checked in %.2f s that %s preserves the model's results", seconds, names)


@dataclass(frozen=True)
class _Difference:
    """A module whose output changes when the model is cut.

    Attributes:
        order: index of its call in the forward.
        expected: expected behaviour of the module.
        got: relative difference of the outputs; or a description of a failure, which does not depend on the batch.
        inside: an input of a module inside it differs, so that its own output decides.
    """

    order: int
    module: str
    expected: str
    got: float | str
    inside: bool = False

    @property
    def is_measured(self) -> bool:
        """True for a numeric difference, which another batch may not show."""
        return isinstance(self.got, float)


def _verify(engine: EngineBase, cut: Cut) -> None:
    """Refuses a model whose results a cut changes; logs a warning if the trial is impossible. (all ranks)"""
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
    # A router may rarely choose another expert because of the last bit, but not with every seed.
    for seed in _SEEDS[1:]:
        if difference is not None and difference.is_measured:
            reason, difference = trial.run(seed, tolerance)
    if difference is not None and difference.is_measured and trial.is_random():
        reason = "its forward draws random numbers in eval mode, too"
    if reason:
        model = type(engine.module).__name__
        log_once(logging.WARNING, f"initialize: nothing checks that {cut.name} preserves results of {model}: {reason}")
    elif difference is not None:
        raise UsageError(
            f"{cut.name}: {difference.module}",
            expected=difference.expected,
            got=difference.got,
            fix=f"{cut.cure}; ParallelConfig(verify_cut=False) trains it anyway",
        )


class _Comparison:
    """Pairs of forwards of one model, whole and cut.

    Attributes:
        in_fp32: True to widen weights and activations.
        is_half: True if an output was in half precision.
    """

    def __init__(self, engine: EngineBase, cut: Cut, tokens: int) -> None:
        self.engine, self.cut, self.tokens = engine, cut, tokens
        self.in_fp32 = self.is_half = False

    def run(self, seed: int, tolerance: float) -> tuple[str, _Difference | None]:
        """Returns (why there is no trial or "", the first difference on any rank). (all ranks)"""
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
        record = _Record(self.tokens, self.cut, whole, tolerance)
        with agreed(job, "initialize: cut model"):
            try:
                with self.cut.computing(whole=False):
                    self._forward(self.cut.part_of(batch), record)
            except ZeroAccelError:  # already refused by name
                raise
            except Exception as error:
                record.fails(error)
        if any(job.gather_objects(record.failed, "initialize: failures")):
            self.engine.reset()
        differences = job.gather_objects(record.difference, "initialize: differences")
        return "", min(filter(None, differences), key=lambda difference: difference.order, default=None)

    def is_random(self) -> bool:
        """True if the whole model computes different values a second time. (all ranks)"""
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
    """A part of a module's output that represents it.

    Attributes:
        shape: shape of the output.
        values: every n-th feature of the output.
        size: root mean square of `values`.
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
    """The outputs of one forward; for a cut model, compared with those of the whole one.

    Attributes:
        tokens: number of tokens in the whole batch.
        whole: the forward to compare with; None if this is the whole model's.
        samples: samples of outputs, by module and number of the call.
        inputs: number of elements of the first input, by the same keys.
        running: the innermost module whose forward has begun.
        difference: the first difference from the whole model.
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
        """Records the start of a module's forward."""
        call = name, self.calls.get(name, 0)
        self.calls[name] = call[1] + 1
        if source is not None and source.numel():
            self.inputs[call] = source.numel()
            self._check_weights(call, module, source)
            if source.is_floating_point():  # a different input is the surrounding module's fault
                self._add((f"input of {name}", call[1]), source, _FEATURES, named=self.running)
        self.stack.append(name)
        return call

    def end(self, call: tuple[str, int], output: Any) -> None:
        """Records the end of a forward; not called if the forward raises, so that `running` names the place."""
        self.stack.pop()
        first = next((leaf for _, leaf in leaves_of(output) if isinstance(leaf, Tensor)), None)
        if first is not None and first.is_floating_point() and first.numel():
            inside = self.difference
            if inside is None or not inside.inside or inside.module != call[0]:
                self._add(call, first, _FEATURES)
                return
            # A mixture of experts may order its tokens by expert inside, and returns them in their own order.
            self.difference = None
            if not self._add(call, first, _FEATURES):
                self.difference = inside

    def gradient(self, call: tuple[str, int], name: str, value: Tensor) -> None:
        """Records one of the module's `Cut.gradients`."""
        about = f"{call[0]}: gradient of {name}"
        self._add((about, call[1]), value, _FEATURES)

    def output(self, output: Any) -> None:
        """Records the model's return value."""
        for index, (_, leaf) in enumerate(leaves_of(output)):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.ndim > 1 and leaf.numel():
                self._add(("the model's output", index), leaf, leaf.shape[-1], is_result=True)

    def fails(self, error: Exception) -> None:
        """Records that the forward of the cut model raised."""
        self.failed = True
        text = str(error).partition("\n")[0]
        if self.difference is None or not self.difference.is_measured:
            self._differs(self.running, "a forward that runs, as with {}", f"{type(error).__name__}: {text}")

    def _add(
        self, call: tuple[str, int], output: Tensor, features: int, *, named: str = "", is_result: bool = False
    ) -> bool:
        """Records an output, or compares it; returns whether it agrees with that of the whole model."""
        self.is_half |= output.dtype in _HALF
        sample = _OutputSample.of(output, features)
        if self.whole is None:
            self.samples[call] = sample
        elif self.difference is None and (expected := self.whole.samples.get(call)) is not None:
            return self._compare(named or call[0], expected, sample, inside=bool(named), is_result=is_result)
        return False

    def _compare(self, name: str, whole: _OutputSample, cut: _OutputSample, *, inside: bool, is_result: bool) -> bool:
        expected = whole.values
        if whole.shape != cut.shape:
            dim = self._cut_dim(whole.shape, cut.shape)
            if dim is None:
                if is_result:
                    self._differs(name, f"the shape {tuple(whole.shape)}, as with {{}}", str(tuple(cut.shape)))
                return False
            expected = expected.narrow(dim, self.cut.index * cut.shape[dim], cut.shape[dim])
        elif self.cut.by_tokens and not is_result:
            return False  # not per token: equal on all ranks, or pooled, which the result shows
        size = whole.size.item()
        if not 1e-12 < size < float("inf"):  # nothing to compare with
            return False
        figure = (cut.values - expected).square().mean().sqrt().item() / size
        if not figure <= self.tolerance:
            about = f"a relative difference of at most {self.tolerance:g} from the values with {{}}, on a trial batch"
            self._differs(name, about, float(f"{figure:.1e}"), inside=inside)
        return figure <= self.tolerance

    def _cut_dim(self, whole: torch.Size, cut: torch.Size) -> int | None:
        """Returns the dim along which an output has this rank's tokens; None if it is no part of the whole output."""
        if not self.cut.by_tokens or len(whole) != len(cut):
            return None
        dims = [dim for dim in range(len(whole)) if whole[dim] != cut[dim]]
        if len(dims) != 1 or whole[dims[0]] != self.tokens or cut[dims[0]] * self.cut.size != self.tokens:
            return None
        return dims[0]

    def _check_weights(self, call: tuple[str, int], module: nn.Module, source: Tensor) -> None:
        """Checks weights that every rank holds but applies to a part: nothing would add up their partial gradients."""
        if self.whole is None or self.cut.by_tokens or self.difference is not None:
            return
        params = [key for key, param in module._parameters.items() if param is not None and param.requires_grad]
        whole = self.whole.inputs.get(call)
        if params and whole is not None and source.numel() != whole:
            about = f"a style that adds up gradients of {params[0]}, which every rank holds but applies to a part"
            self._differs(call[0], about, f"none, and an input with {source.numel()} of {whole} elements")

    def _differs(self, module: str, expected: str, got: float | str, *, inside: bool = False) -> None:
        self.difference = _Difference(len(self.calls), module, expected.format(self.cut.whole), got, inside)


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
        for module, original in before:
            vars(module).pop("forward", None)
            if original is not None:
                vars(module)["forward"] = original


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
        """Returns an fp32 copy behind the first `used` elements of this depth's buffer."""
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
    """Runs a module's forward with its own weights and buffers in fp32."""
    tables = {**module._parameters, **module._buffers}
    # In the instance's own dict, which takes precedence over its parameters; split layers have theirs there already.
    tables_before = {key: vars(module).get(key, value) for key, value in tables.items()}
    half = {key: value for key, value in tables_before.items() if value is not None and value.dtype in _HALF}
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
    """Returns a context in which forwards leave no change that a program could observe.

    There are no gradients and no dropout, compiled code runs eagerly, hooks of the program are off, and traffic is not
    counted. At the end it restores random generators, buffers, training flags and all attributes of the modules.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # avoids compiling for the trial's shapes
        stack.enter_context(collectives.uncounted())
        stack.enter_context(preserved_random_state(collectives.topology.device))
        log = logging.getLogger("torch._subclasses.fake_tensor")  # also logs the errors that it raises
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
    """Removes the hooks that no library has registered; returns a function that restores all of them in order."""
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
    """Returns a function that restores a module's attributes and the values of its buffers."""
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
    """A model's forward has inputs that the trial cannot make; the message names them."""


def trial_batch(model: nn.Module, tokens: int, seed: int, device: torch.device) -> dict[str, Any]:
    """Makes a batch with one row, the same on every rank: token ids, or numbers for a first linear layer.

    Raises:
        NoBatch: the forward takes other inputs, or fewer tokens.
    """
    params = inspect.signature(model.forward).parameters
    generator = torch.Generator().manual_seed(seed)
    config = getattr(model, "config", None)
    longest = min((size for key in _LENGTHS if isinstance(size := getattr(config, key, None), int)), default=tokens)
    if longest < tokens:
        raise NoBatch(f"its config has at most {longest} positions, but the trial has {tokens} tokens")
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
    """Makes the input of a model with one argument, for its first layer with parameters."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            return torch.randint(module.num_embeddings, (1, tokens), generator=generator)
        if isinstance(module, nn.Linear):
            return torch.randn((1, tokens, module.in_features), generator=generator).to(module.weight.dtype)
        if next(iter(module._parameters.values()), None) is not None:
            break
    raise NoBatch("its first layer is neither nn.Linear nor nn.Embedding")


def _vocabulary(model: nn.Module) -> int:
    """Returns the number of token ids, from the embedding, or from the config if another rank has the embedding."""
    find: Any = getattr(model, "get_input_embeddings", None)
    embedding = next((module for module in model.modules() if isinstance(module, nn.Embedding)), None)
    embedding = embedding if find is None else find()
    sizes = getattr(embedding, "num_embeddings", None), getattr(getattr(model, "config", None), "vocab_size", None)
    size = next((size for size in sizes if isinstance(size, int)), None)
    if size is None:
        raise NoBatch("it has no nn.Embedding, so the number of token ids is unknown")
    return size
