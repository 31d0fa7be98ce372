"""The rules of "auto": per key, what fills it, what contradicts it, and what happens when nothing is known.

One table, `RULES`, in an order in which a later rule may read what an earlier one filled. `resolve` applies it. Nothing
here walks a config or raises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from zeroaccel.config.facts import Fact, Facts

__all__ = ["RULES", "Known", "Rule", "shown"]


@dataclass(frozen=True)
class Known:
    """What a rule may read: the facts, and the config's values as far as they are given or filled."""

    facts: Facts
    tree: Mapping[str, Any]

    def at(self, path: str) -> Any:
        """The value at a dotted path in the schema's names, or None."""
        value: Any = self.tree
        for part in path.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def count(self, path: str) -> int | None:
        """The same, if it is a number that can be multiplied: a wrong value is the schema's business."""
        value = self.at(path)
        return value if type(value) is int and value > 0 else None


Filler = Callable[[Known], "Fact[Any] | None"]


def shown(value: object) -> str:
    """A value as JSON writes it, for messages."""
    return str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else str(value)


def _unknown(known: Known) -> Fact[Any] | None:
    return None


@dataclass(frozen=True)
class Rule:
    """How one key is filled.

    Attributes:
        path: dotted, in the schema's names.
        fill: what an "auto" becomes, or None if nothing is known. The source says how the value came about.
        stated: the fact that means what the key means, in the key's terms; a binding one must agree with a value given.
        otherwise: what an "auto" that nothing fills falls back to, as a note; the key is left to its default.
        needed: whether that is an error instead.
        fix: what to do then.
        completes: a binding fact also goes in where the key is absent.
        reverse: what the fact would have to be for the config's value to be right, as text.
    """

    path: str
    fill: Filler
    stated: Filler = _unknown
    otherwise: str = ""
    needed: Callable[[Known], bool] = lambda known: False
    fix: str = ""
    completes: bool = True
    reverse: Callable[[Any], str] = shown


# -- from the model's width


def _hidden(formula: str, size: Callable[[int], int]) -> Filler:
    def fill(known: Known) -> Fact[int] | None:
        hidden = known.facts.hidden_size
        if hidden is None:
            return None
        value = size(hidden.value)
        return Fact(value, f"{formula} = {value}, hidden {hidden.value} from {hidden.source}")

    return fill


def _sized(key: str, formula: str, size: Callable[[int], int]) -> Rule:
    return Rule(f"zero_optimization.{key}", _hidden(formula, size), otherwise="no hidden size is known")


# -- facts that are the value


def _fact(name: str, meaning: Callable[[Any], Any] = lambda value: value) -> Filler:
    def fill(known: Known) -> Fact[Any] | None:
        fact: Fact[Any] | None = getattr(known.facts, name)
        return None if fact is None else Fact(meaning(fact.value), fact.source, fact.binding)

    return fill


def _stated(path: str, name: str, **how: Any) -> Rule:
    return Rule(path, _fact(name), _fact(name), **how)


def _always(known: Known) -> bool:
    return True


def _required(path: str, name: str, fix: str, **how: Any) -> Rule:
    return _stated(path, name, needed=_always, fix=fix, **how)


def _enabled(dtype: str) -> Rule:
    stated = _fact("precision", lambda precision: precision == dtype)

    def reverse(enabled: bool) -> str:
        return f'"{dtype}"' if enabled else f'a precision other than "{dtype}"'

    return Rule(f"{dtype}.enabled", stated, stated, otherwise="no precision was asked for", reverse=reverse)


# -- batch sizes: train = micro * accumulation * ranks

_TRAIN, _MICRO, _STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def _ranks(known: Known) -> int | None:
    return known.facts.world_size.value if known.facts.world_size is not None else None


def _quotient(known: Known, what: str, factor: int | None) -> Fact[int] | None:
    """train / (factor * ranks) where it is whole; where it is not, the engine's check tells all four numbers."""
    train, ranks = known.count(_TRAIN), _ranks(known)
    if train is None or factor is None or ranks is None or train % (factor * ranks):
        return None
    return Fact(train // (factor * ranks), f"{_TRAIN} {train} / ({what} {factor} * ranks {ranks})")


def _first(fact: Fact[int] | None, derived: Fact[int] | None) -> Fact[int] | None:
    """What somebody wrote comes before what follows from the config, and that before what was merely seen."""
    return fact if fact is not None and (fact.binding or derived is None) else derived


def _micro(known: Known) -> Fact[int] | None:
    steps = known.facts.accumulation
    factor = known.count(_STEPS) or (steps.value if steps is not None else 1)
    return _first(known.facts.micro_batch_size, _quotient(known, _STEPS, factor))


def _steps(known: Known) -> Fact[int] | None:
    if known.count(_TRAIN) is None:
        return known.facts.accumulation or Fact(1, "default")
    return _first(known.facts.accumulation, _quotient(known, _MICRO, known.count(_MICRO)))


def _train(known: Known) -> Fact[int] | None:
    micro, steps, ranks = known.count(_MICRO), known.count(_STEPS) or 1, _ranks(known)
    if micro is None or ranks is None:
        return None
    return Fact(micro * steps * ranks, f"{_MICRO} {micro} * {_STEPS} {steps} * ranks {ranks}")


def _trains(known: Known) -> bool:
    return (known.facts.training or known.at("optimizer") is not None) and known.count(_TRAIN) is None


# -- schedules


def _peak(known: Known) -> Fact[float] | None:
    lr = known.at("optimizer.params.lr")
    return Fact(lr, f"optimizer.params.lr = {lr}") if lr is not None else known.facts.lr


RULES: tuple[Rule, ...] = (
    _stated("zero_optimization.stage", "stage"),
    _stated("zero_optimization.offload_param.device", "offload_param_device"),
    _stated("zero_optimization.offload_param.nvme_path", "offload_param_path"),
    _stated("zero_optimization.offload_optimizer.device", "offload_optimizer_device"),
    _stated("zero_optimization.offload_optimizer.nvme_path", "offload_optimizer_path"),
    _stated("zero_optimization.gather_16bit_weights_on_model_save", "save_16bit_weights"),
    _sized("reduce_bucket_size", "hidden^2", lambda hidden: hidden * hidden),
    # Not 9 * hidden^2 // 10: the libraries whose configs say "auto" here round this product of floats.
    _sized("prefetch_bucket_size", "int(0.9 * hidden^2)", lambda hidden: int(0.9 * hidden * hidden)),
    _sized("param_persistence_threshold", "10 * hidden", lambda hidden: 10 * hidden),
    Rule(
        _MICRO,
        _micro,
        _fact("micro_batch_size"),
        otherwise="it follows from the other sizes, and is needed to train only",
        needed=_trains,
        fix="write a number, or pass a training loader that has a batch size",
    ),
    Rule(_STEPS, _steps, _fact("accumulation"), otherwise="it follows from the other sizes"),
    Rule(_TRAIN, _train, otherwise=f"{_MICRO} * {_STEPS} * ranks"),
    _stated("gradient_clipping", "clipping", otherwise="0 does not clip"),
    _enabled("fp16"),
    _enabled("bf16"),
    Rule("optimizer.type", _unknown, needed=_always, fix="name the optimizer, or remove the section"),
    _required("optimizer.params.lr", "lr", "write a number, or pass lr where the optimizer's placeholder is made"),
    _stated("optimizer.params.weight_decay", "weight_decay"),
    _stated("optimizer.params.betas", "betas"),
    _stated("optimizer.params.eps", "eps"),
    Rule("scheduler.type", _unknown, needed=_always, fix="name the schedule, or remove the section"),
    Rule("scheduler.params.warmup_max_lr", _peak, otherwise="each param group's own lr"),
    _required(
        "scheduler.params.warmup_num_steps",
        "warmup_num_steps",
        "write a number of optimizer steps, or pass warmup_num_steps where the scheduler's placeholder is made",
        completes=False,  # not every schedule has it
    ),
    _required(
        "scheduler.params.total_num_steps",
        "total_num_steps",
        "write a number of optimizer steps, or pass total_num_steps where the scheduler's placeholder is made",
        completes=False,
    ),
)
"""A rule reads only what stands before it."""
