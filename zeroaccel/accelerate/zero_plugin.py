"""`ZeroPlugin`: ZeRO settings from arguments, a config and the launcher, each value with its source.

The plugin collects settings and does not resolve them: `prepare` adds the facts of model and loaders and then fills
every "auto" (`config.resolve`). One plugin may serve several models. It needs no process group.

With `zero3_init_flag`, each parameter of a model is sharded as soon as it is created: in scripts inside
`zero3_init_context_manager`, and in transformers' `from_pretrained` and `from_config`. Once a stage 3 config is
registered with transformers (`HfDeepSpeedConfig`), these enter `zero.Init` of the `deepspeed` module that they import.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal, TypeVar

from zeroaccel.config import Fact, Facts, load_config
from zeroaccel.config.auto_values import after, shown
from zeroaccel.config.diagnostics import Provenance, at, dotted, names_meant, put
from zeroaccel.config.document import key_paths, read_document
from zeroaccel.config.launch.launch_sources import LaunchedSettings, from_environment
from zeroaccel.config.launch.setting import Setting
from zeroaccel.config.launch.setting_table import ROWS, SETTINGS
from zeroaccel.errors import ConfigError, UsageError
from zeroaccel.logs import log_note, log_once, logger
from zeroaccel.zero.access.deferred_init import Init

_Init = TypeVar("_Init", bound=Callable[..., None])
_BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")

_SETTINGS = {name: row for name, row in ROWS.items() if row.json_path and row.fact_name}
"""The settings that are arguments and facts of the config."""
# fact -> its name in messages
_KEYS = {row.fact_name: name for name, row in ROWS.items() if row.fact_name}
_PRECISION_PLACES = {"fp16": "fp16.enabled", "bf16": "bf16.enabled"}
# argument -> its place in a config, with accelerate's spelling of the key for saving weights
_PLACES = {
    name: row.json_path.replace("gather_16bit_weights", "stage3_gather_16bit_weights")
    for name, row in _SETTINGS.items()
    if name in SETTINGS
}


def _with_settings(init: _Init) -> _Init:
    """Adds the settings that the constructor does not name to its signature, as keyword arguments."""
    signature = inspect.signature(init)
    *named, _ = signature.parameters.values()
    more = [name for name in _SETTINGS if name not in signature.parameters]
    added = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Any) for name in more]
    init.__signature__ = signature.replace(parameters=[*named, *added])  # type: ignore[attr-defined]
    return init


class ZeroPlugin:
    """Settings of ZeRO for an `Accelerator`. Every argument may also come from the launcher, or from the config.

    Two sources with different values raise an error that names both. If no source sets an argument, the default in
    brackets applies.

    Args:
        hf_ds_config: the config: a dict, the path of a JSON file, JSON text, base64 text, or an HfDeepSpeedConfig.
        gradient_accumulation_steps: micro-steps per optimizer step. [1]
        gradient_clipping: maximum global L2 norm of the gradients; 0 disables clipping. [0]
        zero_stage: 0 to 3. [the config's stage, or 2 without a config]
        is_train_batch_min: if loaders have different batch sizes, True fills "auto" with the smallest, False with the
            largest.
        offload_optimizer_device, offload_param_device: "none", "cpu" or "nvme". ["none"]
        offload_optimizer_nvme_path, offload_param_nvme_path: folder for "nvme".
        zero3_init_flag: at stage 3, make transformers shard models while it builds them, once the accelerator exists.
            It works in processes of `zeroaccel launch`; build other models inside
            `zero3_init_context_manager(enable=True)`. [False]
        zero3_save_16bit_model: gather the weights when a checkpoint is saved. `save_model` and `get_state_dict` work
            with either value. [False]
        transformer_moe_cls_names: comma-separated class names of leaf modules, whose parameters are gathered together.
            The engine finds mixtures of experts without them.
        enable_msamp, msamp_opt_level: rejected; 8-bit training is not available.
        peer_checkpoints: number of steps between two states in the memory of the machines
            (`checkpoint.peer.interval`), from which a run resumes after it has lost a rank. "auto" measures an
            interval; False disables these states. [off]
        settings: the other settings of ZeRO with a key in the config, by their names in `zeroaccel launch`:
            `peak_tflops`, `frozen_weights`, `zero_hpz_partition_size`, `zero_quantized_weights`,
            `zero_quantized_gradients`; and `train_micro_batch_size_per_gpu`, samples per rank and micro-step, if no
            loader is prepared.

    Attributes:
        deepspeed_config: the config as a plain dict; it may be changed until `prepare`, and keeps its "auto" values.
        selected: True if `prepare` uses this plugin.

    Raises:
        ConfigError: an argument, the config or a launcher variable is invalid, or two of them disagree.

    Example:
        >>> from zeroaccel import Accelerator, ZeroPlugin
        >>> plugin = ZeroPlugin(zero_stage=3, gradient_accumulation_steps=4, offload_optimizer_device="cpu")
        >>> accelerator = Accelerator(zero_plugin=plugin, mixed_precision="bf16")
        >>> plugin.deepspeed_config["zero_optimization"]["offload_optimizer"]["device"]
        'cpu'
    """

    @names_meant
    @_with_settings
    def __init__(
        self,
        hf_ds_config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        gradient_accumulation_steps: int | str | None = None,
        gradient_clipping: float | str | None = None,
        zero_stage: int | None = None,
        is_train_batch_min: bool = True,
        offload_optimizer_device: str | None = None,
        offload_param_device: str | None = None,
        offload_optimizer_nvme_path: str | None = None,
        offload_param_nvme_path: str | None = None,
        zero3_init_flag: bool | None = None,
        zero3_save_16bit_model: bool | None = None,
        transformer_moe_cls_names: str | None = None,
        enable_msamp: bool | None = None,
        msamp_opt_level: str | None = None,
        *,
        peer_checkpoints: int | Literal["auto", False] | None = None,
        **settings: Any,
    ) -> None:
        typed = {**locals(), **settings}
        if enable_msamp or msamp_opt_level is not None:
            raise ConfigError(
                "ZeroPlugin(enable_msamp, msamp_opt_level): 8-bit training is not available",
                fix='remove them, and use mixed_precision="bf16"',
            )
        launch, sources = launched()
        hf_ds_config = getattr(hf_ds_config, "config", hf_ds_config)  # of an HfDeepSpeedConfig
        arguments = {name: value for name in _SETTINGS if (value := typed.get(name)) is not None and value != "auto"}
        for name, value in arguments.items():
            _check_argument(_SETTINGS[name], value)
        self.is_train_batch_min = is_train_batch_min
        self._facts = _merged(arguments, launch, sources)
        self._name = "config"
        self._is_own = False
        self._places: dict[str, str] = {}
        self.deepspeed_config: dict[str, Any] = {}
        self._read(hf_ds_config, launch, sources)
        self._original = {dotted(path): at(self.deepspeed_config, path) for path in key_paths(self.deepspeed_config)}
        self._leaf_classes(transformer_moe_cls_names, launch, sources)
        self._peer_states(peer_checkpoints)
        # Validated now, so that errors raise where the plugin is created; resolved only by `prepare`.
        load_config(self.deepspeed_config, sources=self.sources())
        self._zero3_init = bool(zero3_init_flag if zero3_init_flag is not None else launch.zero3_init_flag)
        self._transformers_config: object | None = None
        if self._zero3_init and self.zero_stage != 3:
            logger.warning("zero3_init_flag has no effect at stage %s; models are built unsharded", self.zero_stage)
        self.selected = False

    # -- settings

    @property
    def hf_ds_config(self) -> ZeroPlugin:
        """This object, which has `get_value`, `is_auto` and `config` like accelerate's HfDeepSpeedConfig."""
        return self

    @property
    def config(self) -> dict[str, Any]:
        """Same as `deepspeed_config`."""
        return self.deepspeed_config

    def get_value(self, path: str, default: Any = None) -> Any:
        """Returns the config's value at a dotted path, or `default` if there is none."""
        value = at(self.deepspeed_config, path)
        return default if value is None else value

    def is_auto(self, path: str) -> bool:
        """Returns True if the config's value at a dotted path is "auto"."""
        return bool(self.get_value(path) == "auto")

    @property
    def zero_stage(self) -> int:
        """ZeRO stage; 0 if only `prepare` can resolve it."""
        return int(self._known("zero_stage", 0))

    @property
    def gradient_accumulation_steps(self) -> int | str:
        """Micro-steps per optimizer step, or "auto"."""
        return self._known("gradient_accumulation_steps", "auto")  # type: ignore[no-any-return]

    @property
    def gradient_clipping(self) -> float | str:
        """Maximum norm of the gradients, or "auto"; 0 disables clipping."""
        return self._known("gradient_clipping", "auto")  # type: ignore[no-any-return]

    @property
    def offload_optimizer_device(self) -> str:
        """Device that holds master weights and optimizer states between steps."""
        return str(self._known("offload_optimizer_device", "none"))

    @property
    def offload_param_device(self) -> str:
        """Device that holds parameter shards between uses."""
        return str(self._known("offload_param_device", "none"))

    @property
    def zero3_save_16bit_model(self) -> bool:
        """True if saving a checkpoint also gathers the weights."""
        return bool(self._known("zero3_save_16bit_model", False))

    @property
    def zero3_init_flag(self) -> bool:
        """True if transformers shards models while it builds them."""
        return self._zero3_init and self.zero_stage == 3

    def is_zero3_init_enabled(self) -> bool:
        """Returns `zero3_init_flag`."""
        return self.zero3_init_flag

    @contextmanager
    def zero3_init_context_manager(self, enable: bool = False) -> Iterator[None]:
        """Shards models that are built inside, with `enable` and at stage 3; otherwise does nothing. (all ranks)

        Example:
            >>> from torch import nn
            >>> from zeroaccel import Accelerator, ZeroPlugin
            >>> plugin = ZeroPlugin(zero_stage=3)
            >>> accelerator = Accelerator(zero_plugin=plugin)
            >>> with plugin.zero3_init_context_manager(enable=True):
            ...     model = nn.Linear(1024, 1024)  # its weight exists in shards only
            >>> engine = accelerator.prepare(model)
        """
        before, self._zero3_init = self._zero3_init, enable
        offload = self.get_value("zero_optimization.offload_param", {})
        self._transformers_config = _register_with_transformers(offload) if self.zero3_init_flag else None
        try:
            with _init_of(offload) if self.zero3_init_flag else nullcontext():
                yield
        finally:
            self._zero3_init = before
            self._select(self.selected)

    def select(self, _from_accelerator_state: bool = False) -> None:
        """Raises an error: `accelerator.state.select_zero_plugin(name)` selects a plugin.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "ZeroPlugin.select()",
            expected="a selection by name through the accelerator",
            fix="call accelerator.state.select_zero_plugin(name)",
        )

    def facts(self) -> Facts:
        """Returns the settings from arguments and the launcher, without those of the config."""
        return self._facts

    def sources(self) -> dict[str, str]:
        """Returns dotted path as written -> source, for every explicit key of `deepspeed_config`."""
        sources: dict[str, str] = {}
        for path in key_paths(self.deepspeed_config):
            name = dotted(path)
            value = at(self.deepspeed_config, path)
            if self._is_own and value == "auto":
                continue  # from the plugin's own default config: no user has written it
            unchanged = name in self._original and self._original[name] == value
            sources[name] = self._places.get(name, self._name) if unchanged else "plugin.deepspeed_config in code"
        return sources

    def prescribe(self, place: str, value: Any, source: str) -> None:
        """Writes a key into the config before any model is prepared with it.

        Args:
            place: dotted path of the key.
            source: source of the value, for messages.
        """
        put(self.deepspeed_config, place.split("."), value)
        self._places[place] = source
        self._original[place] = value

    def document(self) -> dict[str, Any]:
        """Returns a copy of the config in which absent batch sizes, accumulation and clipping are "auto"."""
        tree = read_document(self.deepspeed_config).tree
        for key in _BATCH_KEYS:
            tree.setdefault(key, "auto")
        return tree

    def known(self, also: Facts) -> tuple[dict[str, Any], dict[str, str]]:
        """Returns the config and its sources, with every "auto" filled that does not depend on a model.

        Args:
            also: the accelerator's own facts.
        """
        tree, sources = read_document(self.deepspeed_config).tree, self.sources()
        facts = gather_facts(also, self._facts)
        fact_at = {place: facts.by_name().get(_SETTINGS[name].fact_name) for name, place in _PLACES.items()}
        if (precision := facts.precision) is not None:
            fact_at |= {
                place: Fact(precision.value == name, precision.source, precision.explicit)
                for name, place in _PRECISION_PLACES.items()
            }
        for place, fact in fact_at.items():
            if fact is not None and at(tree, place) == "auto":
                put(tree, place.split("."), fact.value)
                sources[place] = after(sources.get(place), fact.source)
        return tree, sources

    @property
    def title(self) -> str:
        """Name of the config in messages: the path of its file, or the argument with the config."""
        return self._name

    def __repr__(self) -> str:
        return f"ZeroPlugin({self._name}, stage {self.zero_stage}{', selected' if self.selected else ''})"

    # -- construction

    def _select(self, selected: bool) -> None:
        self.selected = selected
        self._transformers_config = None
        if not (selected and self.zero3_init_flag):
            return
        self._transformers_config = _register_with_transformers(self.get_value("zero_optimization.offload_param", {}))
        if self._transformers_config is None and (reason := _why_not_registered()):
            log_once(
                30,
                f"zero3_init_flag: no effect, because {reason}; build the model inside "
                "`with plugin.zero3_init_context_manager(enable=True):`",
            )

    def _read(self, argument: Any, launch: LaunchedSettings, sources: Mapping[str, str]) -> None:
        source = argument if argument is not None else launch.deepspeed_config_file
        if source is None:
            # Without a config: a default config of all facts, in which the other batch sizes are "auto".
            self._name, self._is_own = "ZeroPlugin", True
            self.deepspeed_config = dict.fromkeys(_BATCH_KEYS, "auto")
            for name, place in _PLACES.items():
                if (fact := self._facts.by_name().get(_SETTINGS[name].fact_name)) is not None:
                    put(self.deepspeed_config, place.split("."), fact.value)
                    self._places[place] = fact.source
            return
        try:
            document = read_document(source)
        except ConfigError as error:
            origin = "ZeroPlugin(hf_ds_config)" if argument is not None else sources["deepspeed_config_file"]
            raise ConfigError(f"{origin}: {error}") from None
        if document.problems:
            load_problems = "; ".join(f"{dotted(problem.path)} {problem.text}" for problem in document.problems)
            raise ConfigError(f"{document.name}: {load_problems}")
        for note in document.notes:
            log_note(logging.WARNING, note.line(Provenance()))
        self._name = "ZeroPlugin(hf_ds_config)" if document.name == "config" else document.name
        self.deepspeed_config = document.tree
        self._places = {dotted(path): place for path, place in document.places.items()}

    def _leaf_classes(self, argument: str | None, launch: LaunchedSettings, sources: Mapping[str, str]) -> None:
        text, source = argument, "ZeroPlugin(transformer_moe_cls_names)"
        if text is None and (text := launch.deepspeed_moe_layer_cls_names) is not None:
            source = sources["deepspeed_moe_layer_cls_names"]
        if names := [name.strip() for name in (text or "").split(",") if name.strip()]:
            place = "zero_optimization.leaf_module.classes"
            configured = self.get_value(place)
            if configured is not None and list(configured) != names:
                raise self._differs(place, place, f"{configured}", f"{names}", source)
            self.prescribe(place, names, source)

    def _peer_states(self, interval: int | Literal["auto", False] | None) -> None:
        if interval is None:
            return
        place, source = "checkpoint.peer", f"ZeroPlugin(peer_checkpoints={interval!r})"
        section = self.get_value(place)
        configured = section if not isinstance(section, Mapping) else section.get("interval", "auto")
        if isinstance(section, Mapping) and not section.get("enabled", True):
            configured = False
        if section is None:
            key, value = ("enabled", False) if interval is False else ("interval", interval)
            self.prescribe(f"{place}.{key}", value, source)
        elif configured != interval:
            raise self._differs(place, f"{place}.interval", repr(configured), repr(interval), source)

    def _differs(self, place: str, key: str, here: str, there: str, source: str) -> ConfigError:
        where = self._places.get(key, self._places.get(place, self._name))
        return ConfigError(f"{where}: {place}: {here} here, but {there} from {source}", fix="keep one of the two")

    def _known(self, name: str, default: Any) -> Any:
        """Returns the value of an argument from config, arguments or launcher; `default` if none sets it."""
        for key in (_PLACES[name], _PLACES[name].replace("stage3_", "")):
            value = at(self.deepspeed_config, key)
            if value is not None and value != "auto":
                return value
        fact = self._facts.by_name().get(_SETTINGS[name].fact_name)
        if fact is None:
            return default
        written = at(self.deepspeed_config, _PLACES[name]) is not None
        return fact.value if fact.explicit or written else default


DeepSpeedPlugin = ZeroPlugin
"""accelerate's name of `ZeroPlugin`."""


def launched() -> tuple[LaunchedSettings, dict[str, str]]:
    """Returns the launcher's training settings from the environment, and field -> source.

    Raises:
        ConfigError: a variable has an invalid value.
    """
    return from_environment(os.environ)


def gather_facts(*several: Facts) -> Facts:
    """Merges facts: an explicit one takes precedence over one that only fills "auto", then an earlier one over a later.

    Raises:
        ConfigError: two explicit facts differ; the message names both sources.
    """
    merged: dict[str, Any] = Facts().by_name()
    for facts in several:
        for name, fact in facts.by_name().items():
            first: Any = merged.get(name)
            if isinstance(fact, bool):
                merged[name] = first or fact
            elif fact is not None and (first is None or (fact.explicit and not first.explicit)):
                merged[name] = fact
            elif fact is not None and first.explicit and fact.explicit and first.value != fact.value:
                raise ConfigError(
                    f"{_KEYS.get(name, name)}: {shown(first.value)} from {first.source}, but {shown(fact.value)} "
                    f"from {fact.source}",
                    fix=f"write {shown(first.value)} in both places, or remove one of the two",
                )
    return Facts.named(merged)


def _merged(arguments: Mapping[str, Any], settings: LaunchedSettings, sources: Mapping[str, str]) -> Facts:
    in_code: dict[str, Any] = {}
    by_launcher: dict[str, Any] = {}
    default: dict[str, Any] = {}
    for name, row in _SETTINGS.items():
        if name in arguments:
            in_code[row.fact_name] = Fact(arguments[name], f"ZeroPlugin({name}={arguments[name]!r})")
        if (value := getattr(settings, name, None)) is not None:
            by_launcher[row.fact_name] = Fact(value, sources[name], sources[name] != "default")
        if row.unresolved is not None:
            default[row.fact_name] = Fact(row.unresolved, "default", False)
    return gather_facts(*map(Facts.named, (in_code, by_launcher, default)))


def _check_argument(row: Setting, value: Any) -> None:
    """Checks a value that the plugin itself reads; the config checks the others, with their source."""
    expected = ""
    if row.choices and row.unresolved is not None:
        if type(value) is not type(row.choices[0]) or value not in row.choices:
            expected = row.expected or "{}, {} or {}".format(*map(shown, row.choices))
    elif row.kind == "count" and (type(value) is not int or value < 1):
        expected = "a whole number of at least 1"
    elif row.kind == "number" and (isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0):
        expected = "a number of at least 0"
    if expected:
        raise ConfigError(f"ZeroPlugin({row.name})", expected=expected, got=value)


# -- models that are sharded while they are created


def _init_of(offload: Mapping[str, Any]) -> Init:
    """Returns a `zero.Init` that keeps shards on the `offload_param` device of the config until `prepare`."""
    device = offload.get("device", "none")
    return Init(remote_device=None if device in ("none", "auto") else device, nvme_path=offload.get("nvme_path"))


def _register_with_transformers(offload: Mapping[str, Any]) -> object | None:
    """Makes transformers shard models while it builds them, as long as the caller keeps the result alive.

    Returns:
        The registered config, to which transformers holds a weak reference. None if transformers or accelerate is not
        installed, or if `import deepspeed` does not import zeroaccel in this process.
    """
    if not _is_deepspeed_zeroaccel() or find_spec("transformers") is None or find_spec("accelerate") is None:
        return None
    keys = {key: value for key, value in offload.items() if value != "auto"}
    section: dict[str, Any] = {"stage": 3}
    if keys.get("device", "none") != "none":
        section["offload_param"] = keys
    config: object = import_module("transformers.integrations").HfDeepSpeedConfig({"zero_optimization": section})
    return config


def _why_not_registered() -> str:
    """Returns the reason for a warning; "" without transformers, whose models alone the flag concerns."""
    if find_spec("transformers") is None:
        return ""
    return "`import deepspeed` does not import zeroaccel here" if find_spec("accelerate") else "accelerate is missing"


def _is_deepspeed_zeroaccel() -> bool:
    try:
        spec = find_spec("deepspeed")
    except ValueError:  # a module without a spec that a program has added to sys.modules
        return False
    return spec is not None and spec.origin == "zeroaccel"
