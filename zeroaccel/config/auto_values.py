"""Resolution of "auto": fills every "auto" of a config tree from facts and records the source of each value.

`Facts` come from the model, the loaders, the launcher and arguments in code; the frontends collect them and pass them
in. Each rule of `RULES` describes how to fill one key, which facts contradict it, and its default without facts; a
later rule may read a value that an earlier one filled. `load_config` calls `fill` between translating keys and
validating values; `resolve` does the same for a plain dict.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from zeroaccel.config.diagnostics import KeyPath, Note, Problem, Provenance, at, dotted, put, report
from zeroaccel.config.document import Document, key_paths, read_document
from zeroaccel.config.launch.setting_table import SETTINGS
from zeroaccel.config.normalize import NormalizedConfig, UnknownKeys
from zeroaccel.config.schema import Config
from zeroaccel.config.section import ConfigSection, nested_section, spellings

T = TypeVar("T")


@dataclass(frozen=True)
class Fact(Generic[T]):
    """A value and its source.

    Attributes:
        value: the value.
        source: the source, worded to follow "from": "model.config.hidden_size", "Accelerator(...)".
        explicit: True if the user set it, in code or for the launcher: it fills an absent key too, and a config with
            another value contradicts it. False for an inferred value, which only fills "auto".
    """

    value: T
    source: str
    explicit: bool = True


@dataclass(frozen=True)
class Facts:
    """All facts that can fill an "auto"; None for unknown ones.

    Example:
        >>> facts = Facts(hidden_size=Fact(512, "model.config.hidden_size"))
        >>> resolve({"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}}, facts).tree
        {'zero_optimization': {'stage': 3, 'reduce_bucket_size': 262144}}


    Attributes:
        hidden_size: width of the model, which determines bucket sizes.
        world_size: number of ranks with different samples.
        micro_batch_size: samples per rank and micro-batch, from an argument, the loader or a probed batch.
        accumulation: micro-batches per optimizer step.
        clipping: maximum global L2 norm of the gradients; 0 disables clipping.
        precision: dtype for training.
        stage: 0 to 3.
        offload_param_device, offload_optimizer_device: "none", "cpu" or "nvme".
        offload_param_path, offload_optimizer_path: folder for "nvme".
        save_16bit_weights: gather and write all weights in 16 bits when a model is saved.
        hpz_partition_size, quantized_weights, quantized_gradients: settings of ZeRO++.
        frozen_weights: quantization format of frozen matrices.
        lr, weight_decay, betas, eps: arguments of the optimizer.
        warmup_num_steps, total_num_steps: optimizer steps of the schedule.
        training: True if the caller passes an optimizer, which requires batch sizes.
        more: facts of further settings of a launch, by the name in `setting_table`.
    """

    hidden_size: Fact[int] | None = None
    world_size: Fact[int] | None = None
    micro_batch_size: Fact[int] | None = None
    accumulation: Fact[int] | None = None
    clipping: Fact[float] | None = None
    precision: Fact[Literal["fp32", "fp16", "bf16"]] | None = None
    stage: Fact[int] | None = None
    offload_param_device: Fact[str] | None = None
    offload_param_path: Fact[str] | None = None
    offload_optimizer_device: Fact[str] | None = None
    offload_optimizer_path: Fact[str] | None = None
    save_16bit_weights: Fact[bool] | None = None
    hpz_partition_size: Fact[int] | None = None
    quantized_weights: Fact[bool] | None = None
    quantized_gradients: Fact[bool] | None = None
    frozen_weights: Fact[str] | None = None
    lr: Fact[float] | None = None
    weight_decay: Fact[float] | None = None
    betas: Fact[tuple[float, float]] | None = None
    eps: Fact[float] | None = None
    warmup_num_steps: Fact[int] | None = None
    total_num_steps: Fact[int] | None = None
    training: bool = False
    more: Mapping[str, Fact[Any]] = field(default_factory=dict)

    @classmethod
    def named(cls, facts: Mapping[str, Any]) -> Facts:
        """Returns these facts; those without a field become `more`."""
        known = {name: fact for name, fact in facts.items() if name in cls.__dataclass_fields__}
        return cls(**known, more={name: fact for name, fact in facts.items() if name not in known})

    def by_name(self) -> dict[str, Any]:
        """Returns every fact by its name."""
        return {**{name: fact for name, fact in vars(self).items() if name != "more"}, **self.more}


@dataclass(frozen=True)
class RuleInputs:
    """Inputs of a rule: the facts, and the values of the config that are given or already filled."""

    facts: Facts
    tree: Mapping[str, Any]

    def at(self, path: str) -> Any:
        """Returns the value at a dotted path in the schema's names, or None."""
        return at(self.tree, path)

    def count(self, path: str) -> int | None:
        """Returns the value at a path if it is a positive integer, else None: the schema reports wrong values."""
        value = self.at(path)
        return value if type(value) is int and value > 0 else None


Filler = Callable[[RuleInputs], "Fact[Any] | None"]


def shown(value: object) -> str:
    """Formats a value as JSON, for messages."""
    return str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else str(value)


def _unknown(inputs: RuleInputs) -> Fact[Any] | None:
    return None


@dataclass(frozen=True)
class Rule:
    """Rule for filling one key.

    Attributes:
        path: dotted path of the key, in the schema's names.
        fill: returns the value for "auto", or None if it is unknown. Its source is the formula, or that of the fact.
        stated: returns the fact with the key's meaning, as a value of the key; an explicit fact must equal a given
            value.
        otherwise: note for an "auto" that stays unknown and takes the key's default.
        needed: returns True if an unknown "auto" is an error instead.
        fix: remedy for that error.
        completes: True if an explicit fact also fills an absent key.
        reverse: returns, as text, the fact that would agree with the config's value.
    """

    path: str
    fill: Filler
    stated: Filler = _unknown
    otherwise: str = ""
    needed: Callable[[RuleInputs], bool] = lambda inputs: False
    fix: str = ""
    completes: bool = True
    reverse: Callable[[Any], str] = shown


# -- sizes from the model's width


def _hidden(formula: str, size: Callable[[int], int]) -> Filler:
    def fill(inputs: RuleInputs) -> Fact[int] | None:
        hidden = inputs.facts.hidden_size
        if hidden is None:
            return None
        value = size(hidden.value)
        return Fact(value, f"{formula} = {value}, hidden {hidden.value} from {hidden.source}")

    return fill


def _sized(key: str, formula: str, size: Callable[[int], int]) -> Rule:
    return Rule(f"zero_optimization.{key}", _hidden(formula, size), otherwise="no hidden size is known")


# -- facts that are the key's value


def _fact(name: str, meaning: Callable[[Any], Any] = lambda value: value) -> Filler:
    def fill(inputs: RuleInputs) -> Fact[Any] | None:
        fact: Fact[Any] | None = inputs.facts.by_name().get(name)
        return None if fact is None else Fact(meaning(fact.value), fact.source, fact.explicit)

    return fill


def _stated(path: str, name: str, **how: Any) -> Rule:
    return Rule(path, _fact(name), _fact(name), **how)


def _always(inputs: RuleInputs) -> bool:
    return True


def _required(path: str, name: str, fix: str, **how: Any) -> Rule:
    return _stated(path, name, needed=_always, fix=fix, **how)


def _enabled(dtype: str) -> Rule:
    stated = _fact("precision", lambda precision: precision == dtype)

    def reverse(enabled: bool) -> str:
        return f'"{dtype}"' if enabled else f'a precision other than "{dtype}"'

    return Rule(f"{dtype}.enabled", stated, stated, otherwise="no precision is requested", reverse=reverse)


# -- batch sizes: train = micro * accumulation * ranks

_TRAIN, _MICRO, _STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def _ranks(inputs: RuleInputs) -> int | None:
    return inputs.facts.world_size.value if inputs.facts.world_size is not None else None


def _quotient(inputs: RuleInputs, what: str, factor: int | None) -> Fact[int] | None:
    """Returns train / (factor * ranks) if it is an integer; otherwise `solve_batch` reports all four numbers."""
    train, ranks = inputs.count(_TRAIN), _ranks(inputs)
    if train is None or factor is None or ranks is None or train % (factor * ranks):
        return None
    return Fact(train // (factor * ranks), f"{_TRAIN} {train} / ({what} {factor} * ranks {ranks})")


def _first(fact: Fact[int] | None, derived: Fact[int] | None) -> Fact[int] | None:
    """Returns an explicit fact if there is one, else the value derived from the config, else an inferred fact."""
    return fact if fact is not None and (fact.explicit or derived is None) else derived


def _micro(inputs: RuleInputs) -> Fact[int] | None:
    steps = inputs.facts.accumulation
    factor = inputs.count(_STEPS) or (steps.value if steps is not None else 1)
    return _first(inputs.facts.micro_batch_size, _quotient(inputs, _STEPS, factor))


def _steps(inputs: RuleInputs) -> Fact[int] | None:
    if inputs.count(_TRAIN) is None:
        return inputs.facts.accumulation or Fact(1, "default")
    return _first(inputs.facts.accumulation, _quotient(inputs, _MICRO, inputs.count(_MICRO)))


def _train(inputs: RuleInputs) -> Fact[int] | None:
    micro, steps, ranks = inputs.count(_MICRO), inputs.count(_STEPS) or 1, _ranks(inputs)
    if micro is None or ranks is None:
        return None
    return Fact(micro * steps * ranks, f"{_MICRO} {micro} * {_STEPS} {steps} * ranks {ranks}")


def _trains(inputs: RuleInputs) -> bool:
    return (inputs.facts.training or inputs.at("optimizer") is not None) and inputs.count(_TRAIN) is None


# -- schedules


def _peak(inputs: RuleInputs) -> Fact[float] | None:
    lr = inputs.at("optimizer.params.lr")
    return Fact(lr, f"optimizer.params.lr = {lr}") if lr is not None else inputs.facts.lr


RULES: tuple[Rule, ...] = (
    *(
        _stated(row.json_path, row.fact_name)
        for row in SETTINGS.values()
        if row.fact_name and row.json_path not in ("", _STEPS, "gradient_clipping")
    ),
    _sized("reduce_bucket_size", "hidden^2", lambda hidden: hidden * hidden),
    # Not 9 * hidden^2 // 10: libraries that write "auto" here truncate this floating-point product.
    _sized("prefetch_bucket_size", "int(0.9 * hidden^2)", lambda hidden: int(0.9 * hidden * hidden)),
    _sized("param_persistence_threshold", "10 * hidden", lambda hidden: 10 * hidden),
    Rule(
        _MICRO,
        _micro,
        _fact("micro_batch_size"),
        otherwise="it follows from the other sizes, and only training requires it",
        needed=_trains,
        fix="write a number, or pass a training loader that has a batch size",
    ),
    Rule(_STEPS, _steps, _fact("accumulation"), otherwise="it follows from the other sizes"),
    Rule(_TRAIN, _train, otherwise=f"{_MICRO} * {_STEPS} * ranks"),
    _stated("gradient_clipping", "clipping", otherwise="0 disables clipping"),
    _enabled("fp16"),
    _enabled("bf16"),
    Rule("optimizer.type", _unknown, needed=_always, fix="name the optimizer, or remove the section"),
    _required("optimizer.params.lr", "lr", "write a number, or pass lr to the optimizer's placeholder"),
    _stated("optimizer.params.weight_decay", "weight_decay"),
    _stated("optimizer.params.betas", "betas"),
    _stated("optimizer.params.eps", "eps"),
    Rule("scheduler.type", _unknown, needed=_always, fix="name the schedule, or remove the section"),
    Rule("scheduler.params.warmup_max_lr", _peak, otherwise="each param group's own lr"),
    _required(
        "scheduler.params.warmup_num_steps",
        "warmup_num_steps",
        "write a number of optimizer steps, or pass warmup_num_steps to the scheduler's placeholder",
        completes=False,  # not every schedule has it
    ),
    _required(
        "scheduler.params.total_num_steps",
        "total_num_steps",
        "write a number of optimizer steps, or pass total_num_steps to the scheduler's placeholder",
        completes=False,
    ),
)
"""The rules, in order: each reads only values that rules before it fill."""


_OPTIONAL = ("optimizer", "scheduler")
"""Sections that facts complete but never create: if the section exists, the engine builds the object."""


@dataclass(frozen=True)
class Resolved:
    """A config tree in which every value is known.

    Attributes:
        tree: the plain dict in the given spelling, except that older forms of a key become current ones.
        sources: dotted path in `tree` -> source of the value, or the formula that filled it. Includes each "auto" whose
            key is now absent because JSON cannot express its default.
    """

    tree: dict[str, Any]
    sources: Mapping[str, str]


@dataclass
class Filled:
    """Result of applying the rules to a tree in the schema's names.

    Attributes:
        tree: the tree with the filled values; an "auto" without facts is absent or has its default.
        sources: path -> source of the value, for every key that was "auto" or came from a fact.
        notes: a note for each "auto" that took its default.
        problems: contradictions, and each "auto" without a value.
    """

    tree: dict[str, Any]
    sources: dict[KeyPath, str] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def resolve(tree: Mapping[str, Any], facts: Facts, *, sources: Mapping[str, str] | None = None) -> Resolved:
    """Fills every "auto" of a config tree.

    Args:
        tree: a config in the DeepSpeed JSON format, which stays unchanged.
        facts: facts from model, loaders, launcher and code.
        sources: dotted path as written -> source of its value, for messages and for the result.

    Returns:
        The result, whose `tree` and `sources` can be passed to `load_config`.

    Raises:
        ConfigError: a fact contradicts a value, an "auto" that needs a value stays unknown, or a key is unknown; the
            message lists all of them, one per line.
    """
    document = read_document(tree)
    normalized, filled, as_given, origin = translate(document, sources, facts)
    problems = [*normalized.problems, *filled.problems]
    if problems:
        raise report(problems, as_given, key_paths(document.tree))
    known = {path: source for path, source in origin.resolved_sources.items() if source != document.name}
    return Resolved(dict(origin.resolved), known)


def translate(
    document: Document, sources: Mapping[str, str] | None, facts: Facts | None, unknown_keys: UnknownKeys = "standard"
) -> tuple[NormalizedConfig, Filled, Provenance, Provenance]:
    """Translates a config to the schema's names and fills every "auto".

    Returns the translation, the filled tree, and the provenance of the given values and of the filled ones.

    Args:
        sources: as for `resolve`.
        facts: None fills nothing.
        unknown_keys: as for `load_config`.
    """
    places = dict(document.places)
    if sources is not None:
        places |= {path: sources[dotted(path)] for path in key_paths(document.tree) if dotted(path) in sources}
    normalized = NormalizedConfig(Config, document.tree, unknown_keys)
    filled = Filled(normalized.tree) if facts is None else fill(normalized.tree, normalized.unresolved, facts)
    written = {path: path for path in filled.sources} | normalized.written
    as_given = Provenance(name=document.name, places=dict(places), written=normalized.written)
    places |= {written[path]: after(places.get(written[path]), how) for path, how in filled.sources.items()}
    origin = Provenance(
        name=document.name,
        raw=document.tree,
        places=places,
        written=written,
        unresolved=tuple(dotted(path) for path in normalized.unresolved if path not in filled.sources),
        resolved=as_written(filled.tree, (), normalized.written),
        resolved_sources={
            dotted(spelled(path, normalized.written)): places.get(place, document.name)
            for path, place in written.items()
        },
    )
    return normalized, filled, as_given, origin


def after(place: str | None, how: str) -> str:
    """Returns the source of a filled value: the place of its "auto", if known, and the source that filled it."""
    return how if place is None else f"{place} ({how})"


def fill(tree: dict[str, Any], unresolved: Collection[KeyPath], facts: Facts) -> Filled:
    """Applies `RULES`.

    Args:
        tree: a tree in the schema's names, without "auto"; the rules fill it in place.
        unresolved: paths whose value is "auto".
        facts: facts from model, loaders, launcher and code.
    """
    filled, inputs = Filled(tree), RuleInputs(facts, tree)
    for rule in RULES:
        _apply_rule(rule, inputs, filled, unresolved)
    ruled = {rule.path for rule in RULES}
    for path in unresolved:
        if any(key[: len(path)] == path for key in filled.sources if key != path):
            filled.sources[path] = "filled key by key"
        elif dotted(path) not in ruled:
            _leave(path, "", filled)
    return filled


def _apply_rule(rule: Rule, inputs: RuleInputs, filled: Filled, unresolved: Collection[KeyPath]) -> None:
    path: KeyPath = tuple(rule.path.split("."))
    stated, value = rule.stated(inputs), inputs.at(rule.path)
    if value is not None:
        if stated is not None and stated.explicit and not _same(value, stated.value):
            filled.problems.append(_contradiction(rule, value, stated))
        return
    is_auto = path in unresolved or (path[0] not in _OPTIONAL and any(path[:end] in unresolved for end in (1, 2)))
    if is_auto:
        fact = rule.fill(inputs)
    else:
        has_section = path[0] not in _OPTIONAL or inputs.at(str(path[0])) is not None
        fact = stated if stated is not None and stated.explicit and rule.completes and has_section else None
    if fact is not None:
        _put(filled, path, fact)
    elif path in unresolved and rule.needed(inputs):
        filled.problems.append(Problem(path, text='"auto", but no value for it is known', fix=rule.fix))
    elif path in unresolved:
        _leave(path, rule.otherwise, filled)


def _contradiction(rule: Rule, value: object, stated: Fact[Any]) -> Problem:
    return Problem(
        tuple(rule.path.split(".")),
        text=f"{shown(value)} here, but {shown(stated.value)} from {stated.source}",
        fix=f'write {shown(stated.value)} or "auto" here, or {rule.reverse(value)} there',
    )


def _same(value: object, stated: object) -> bool:
    if isinstance(value, (list, tuple)) and isinstance(stated, (list, tuple)):
        return list(value) == list(stated)
    if isinstance(value, str) and isinstance(stated, str):
        return value.lower() == stated.lower()  # words are valid in any case
    return value == stated


def _put(filled: Filled, path: KeyPath, fact: Fact[Any]) -> None:
    if put(filled.tree, path, fact.value):  # else another value is in place of the section, which the schema reports
        filled.sources[path] = fact.source


def _leave(path: KeyPath, why: str, filled: Filled) -> None:
    """Gives an "auto" its default, and stores the default in the tree if it is a plain value."""
    default = _default(path)
    source = "default" if default is None else f"default {shown(default)}"
    if len(path) > 2 and path[0] in _OPTIONAL:
        source = f"default of {filled.tree[str(path[0])].get('type', 'its type')}"
    source += f", {why}" if why else ""
    if default is not None:
        _put(filled, path, Fact(default, source))
    filled.sources[path] = source
    filled.notes.append(Note(path, f'"auto" takes its {source}', in_schema=True))


def _default(path: KeyPath) -> Any:
    """Returns the schema's default of a key if it is a plain value, else None."""
    section: type[ConfigSection] | None = Config
    default: Any = None
    for key in path:
        declared = section.model_fields.get(str(key)) if section is not None else None
        if declared is None:
            return None
        default, section = declared.default, nested_section(declared)
    return default if isinstance(default, (bool, int, float, str)) else None


# -- back to the user's spelling


def as_written(tree: Mapping[str, Any], path: KeyPath, written: Mapping[KeyPath, KeyPath]) -> dict[str, Any]:
    """Converts a tree in the schema's names (or its part at `path`) to a plain dict in the user's spelling."""
    return {
        str(spelled((*path, name), written)[-1]): (
            as_written(value, (*path, name), written) if isinstance(value, dict) else value
        )
        for name, value in tree.items()
    }


def spelled(path: KeyPath, written: Mapping[KeyPath, KeyPath]) -> KeyPath:
    """Returns the path with every key in the user's spelling, unless that is an older form."""
    section: type[ConfigSection] | None = Config
    spelled: list[str | int] = []
    for depth, key in enumerate(path, 1):
        declared = section.model_fields.get(str(key)) if section is not None else None
        others = {mark.name for mark in spellings(declared) if not mark.deprecated} if declared is not None else set()
        name = written.get(path[:depth], (key,))[-1]
        spelled.append(name if name in others else key)
        section = nested_section(declared) if declared is not None else None
    return tuple(spelled)
