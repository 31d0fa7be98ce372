"""The import finder that provides `deepspeed` and its distribution metadata, in this process and its child processes.

Only this file changes `sys.meta_path` and `sys.modules`; `uninstall` undoes the changes. The table in `surface` defines
the contents of the modules; entries are imported on first use. This module does not import torch.

Child processes get the finder through environment variables: the first folder on PYTHONPATH contains a `sitecustomize`,
which installs the finder and then runs the `sitecustomize` that it hides, if there is one.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.metadata import Distribution, DistributionFinder, version
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from zeroaccel.compat.surface import ABSENT, PACKAGE, SCRIPTS, SURFACE, nearest
from zeroaccel.errors import UsageError
from zeroaccel.logs import logger

VERSION = "0.19.5+zeroaccel"
"""Version of the import surface: libraries compare it with the oldest DeepSpeed release that they support."""

SHIM_MARK = "of-zeroaccel"
"""Marker file in the package that `zeroaccel compat install` writes; that package imports this one."""

SWITCH = "ZEROACCEL_COMPAT"
"""Environment variable: "1", or "shadow" to replace an installed DeepSpeed."""

_STARTUP = str(Path(__file__).parent / "startup")

_DECIDED_AT_IMPORT = ("accelerate", "transformers")  # look for deepspeed once, at their import

_SCRIPT = """\
import sys
from zeroaccel.errors import ZeroAccelError
from {name} import main
try:
    sys.exit(main())
except ZeroAccelError as error:
    sys.exit(f"{name}: {{error}}")
"""


class FacadeModule(ModuleType):
    """A module of the surface; imports its names from zeroaccel on first use."""

    def __getattr__(self, name: str) -> Any:
        target = SURFACE[self.__name__].get(name)
        if target is None and name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        qualified = f"{self.__name__}.{name}"
        if target is None and qualified in SURFACE:
            return import_module(qualified)
        if target is None:
            raise AttributeError(_absence(qualified))
        module, _, attribute = target.partition(":")
        value = getattr(import_module(module), attribute) if attribute else import_module(module)
        setattr(self, name, value)
        return value

    def __dir__(self) -> Iterable[str]:
        children = {child.rpartition(".")[2] for child in SURFACE if child.rpartition(".")[0] == self.__name__}
        return sorted({*super().__dir__(), *SURFACE[self.__name__], *children})


class _FacadeLoader(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return FacadeModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == PACKAGE:
            numbers = VERSION.partition("+")[0].split(".")
            parts = zip(("major", "minor", "patch"), map(int, numbers), strict=True)
            module.__dict__.update({f"__version_{name}__": number for name, number in parts}, __version__=VERSION)
            module.__dict__.update(__git_hash__="unknown", __git_branch__="unknown")  # like a release

    def get_code(self, fullname: str) -> CodeType | None:
        """Returns the code that `python -m` runs: it calls the module's `main`, if there is one."""
        if fullname not in SCRIPTS:
            return None
        return compile(_SCRIPT.format(name=fullname), f"<{fullname}>", "exec")


class _PatchingLoader(SourceFileLoader):
    """Loads a module of a library and replaces functions and methods of its classes."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        for name, method, change in _PATCHED[module.__name__]:
            owner = getattr(module, name, None) if name else module
            if owner is None or method not in vars(owner):
                _name_moved(module.__name__, f"{name}.{method}".lstrip("."))
                continue
            _ORIGINALS[owner, method] = vars(owner)[method]
            setattr(owner, method, change(vars(owner)[method]))


def _name_moved(module: str, name: str) -> None:
    """Warns about a part of a library that a release has moved; earlier releases may not have it yet."""
    library = module.partition(".")[0]
    found = version(library)
    if _release(found) >= _release(_NOT_BEFORE.get(name, "0")):
        logger.warning(
            "%s %s: expected %s.%s, which zeroaccel replaces for scripts that import deepspeed, got none: they run "
            "without this change; docs/releases.md names the versions that ran the tests",
            *(library, found, module, name),
        )


def _release(version: str) -> list[int]:
    return [int(number) for number in version.split(".")[:2] if number.isdigit()]


_ORIGINALS: dict[tuple[type | ModuleType, str], Any] = {}


def _sharded_while_loading(original: Any) -> Any:
    """Returns a `from_pretrained` that builds a quantized base within `zero.Init`; transformers would not shard it.

    Its models remember the conversions of weights that a save has to reverse, and no others.
    """

    @functools.wraps(original.__func__)
    def from_pretrained(cls: type, *args: Any, **kwargs: Any) -> Any:
        quantization = kwargs.get("quantization_config") or getattr(kwargs.get("config"), "quantization_config", None)
        calls = import_module("zeroaccel.compat.transformers_calls")
        path = args[0] if args else kwargs.get("pretrained_model_name_or_path")
        loading = import_module("zeroaccel.compat.transformers_loading")
        loading.check_folder(path, kwargs.get("subfolder", ""), kwargs.get("variant"))
        if quantization is None:
            with import_module("zeroaccel.zero.access.deferred_init").values_from_files():
                return calls.with_own_conversions(original.__func__(cls, *args, **kwargs))
        with calls.init_of_quantized(quantization):
            return calls.with_own_conversions(original.__func__(cls, *args, **kwargs))

    return classmethod(from_pretrained)


def _with_places(original: Any) -> Any:
    """Returns a reader of configs that remembers the place of each key, and accepts all that `load_config` accepts."""

    @functools.wraps(original)
    def read(config: Any, config_file_or_dict: Any) -> None:
        original(config, import_module("zeroaccel.compat.deepspeed_config").read(config_file_or_dict))

    return read


def _saving_states(original: Any) -> Any:
    """Returns a `train` that keeps states in memory, in jobs whose launcher preserves memory."""

    @functools.wraps(original)
    def train(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        import_module("zeroaccel.compat.transformers_calls").warn_of_dropped_optimizer(trainer)
        return import_module("zeroaccel.compat.trainer_states").train(original, trainer, *args, **kwargs)

    return train


def _rows_on_any_device(original: Any) -> Any:
    """Returns a method that reads rows of a sharded weight; PEFT's own requires CUDA at stage 3."""

    @functools.wraps(original)
    def collect(layer: Any, weight: Any, rows: Any, embed_dim: int) -> Any:
        return weight.detach()[rows].clone()

    return collect


def _with_token_counts(original: Any) -> Any:
    """Returns a `get_batch_samples` whose micro-batches weigh as many tokens as they have, if ranks share sequences."""

    @functools.wraps(original)
    def get(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        batches, items = original(trainer, *args, **kwargs)
        mesh = getattr(trainer.accelerator, "parallelism_config", None)
        if batches and mesh is not None and mesh.sp_enabled:
            import_module("zeroaccel.compat.ulysses_sp").weigh_tokens(trainer, batches)
        return batches, items

    return get


def _with_all_ranks(original: Any) -> Any:
    """Returns a check of a mesh that first fills it up: with `sp_size` alone, the other ranks train other samples."""

    @functools.wraps(original)
    def validate(mesh: Any, accelerator: Any) -> None:
        rest, left = divmod(accelerator.num_processes, mesh.total_size)
        if mesh.sp_size > 1 and not left and mesh.data_parallel_size == 1:
            mesh._set_size("dp_shard", rest)
        original(mesh, accelerator)

    return validate


def _left_to_the_engine(original: Any) -> Any:
    """Returns a check that refuses no layers: the engine's sequence parallelism knows them, or refuses them by name."""
    return functools.wraps(original)(lambda model: None)


def _by_ranges(original: Any) -> Any:
    """Returns a `_load_pretrained_model` that reads each rank's shards from the files at stage 3."""
    if not isinstance(original, staticmethod):  # transformers 4, whose method has other arguments
        return original

    @functools.wraps(original.__func__)
    def load(*args: Any, **kwargs: Any) -> Any:
        return import_module("zeroaccel.compat.transformers_loading").load(original.__func__, *args, **kwargs)

    return staticmethod(load)


def _dequantizing(original: Any) -> Any:
    """Returns a quantizer's constructor, which prepares weights that stay codes in the model's own layers."""

    @functools.wraps(original)
    def init(quantizer: Any, *args: Any, **kwargs: Any) -> None:
        original(quantizer, *args, **kwargs)
        import_module("zeroaccel.compat.transformers_loading").dequantize(quantizer)

    return init


def _pinned_if_possible(original: Any) -> Any:
    """Returns torch's `save_on_cpu`, which transformers asks for pinned memory also where no device could use it."""

    @functools.wraps(original)
    def save_on_cpu(pin_memory: bool = False, device_type: str = "cuda") -> Any:
        return original(pin_memory and device_type != "cpu", device_type)

    return save_on_cpu


def _in(module: str, name: str) -> Callable[[Any], Any]:
    """Returns a patch, and imports it on its first use."""
    return lambda original: getattr(import_module(f"zeroaccel.compat.{module}"), name)(original)


_PATCHED: Mapping[str, Sequence[tuple[str, str, Callable[[Any], Any]]]] = {
    "accelerate.accelerator": [("", "_refuse_recurrent_layers_under_sequence_parallelism", _left_to_the_engine)],
    "accelerate.parallelism_config": [("ParallelismConfig", "_validate_accelerator", _with_all_ranks)],
    "accelerate.checkpointing": [
        ("", "save_accelerator_state", _in("loader_positions", "saving")),
        ("", "load_accelerator_state", _in("loader_positions", "loading")),
    ],
    "accelerate.data_loader": [
        ("DataLoaderShard", "__iter__", _in("loader_positions", "follow")),
        ("DataLoaderDispatcher", "__iter__", _in("loader_positions", "follow")),
        ("", "skip_first_batches", _in("loader_positions", "skipping")),
    ],
    "accelerate.state": [("AcceleratorState", "__init__", _in("transformers_calls", "telling_of_a_dropped_plugin"))],
    "accelerate.utils.deepspeed": [("HfDeepSpeedConfig", "__init__", _with_places)],
    "transformers.integrations.deepspeed": [
        ("", "deepspeed_load_checkpoint", _in("trainer_states", "naming_ranks")),
    ],
    "transformers.modeling_utils": [
        ("PreTrainedModel", "from_pretrained", _sharded_while_loading),
        ("PreTrainedModel", "_load_pretrained_model", _by_ranges),
        ("", "save_on_cpu", _pinned_if_possible),
    ],
    "transformers.quantizers.base": [("HfQuantizer", "__init__", _dequantizing)],
    "transformers.trainer": [
        ("Trainer", "train", _saving_states),
        ("Trainer", "get_batch_samples", _with_token_counts),
    ],
    "trl.models.activation_offloading": [
        ("", "get_act_offloading_ctx_manager", _in("activation_checkpointing", "offloading_from_devices")),
        ("OffloadActivations", "__enter__", _in("parameters", "sparing_weights")),
    ],
    "trl.trainer.utils": [("", "maybe_gather_lm_head_ctx", _in("parameters", "gathering_saved"))],
    "peft.mapping_func": [("", "get_peft_model", _in("transformers_calls", "noting_dtypes"))],
    "peft.tuners.trainable_tokens.layer": [("TrainableTokensLayer", "_collect_token_weights", _rows_on_any_device)],
}
"""Module -> (class, method, function that returns its replacement), for each patch; "" for the module's functions."""

_NOT_BEFORE = {
    "_refuse_recurrent_layers_under_sequence_parallelism": "1.15",
    "save_on_cpu": "5.23",
    "OffloadActivations.__enter__": "1.16",
    "maybe_gather_lm_head_ctx": "1.16",
}
"""Name -> a version of its library that has it, for names that the oldest supported one lacks."""


class _Distribution(Distribution):
    def read_text(self, filename: str) -> str | None:
        if filename in ("METADATA", "PKG-INFO"):
            return f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: {VERSION}\n"
        return None

    def locate_file(self, path: Any) -> Any:
        raise FileNotFoundError(f"{path}: zeroaccel provides {PACKAGE}, which has no files here")


class _Finder(DistributionFinder):
    """Precedes Python's own finders, so that `deepspeed` is never a mixture of two packages."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in SURFACE:
            # A script must not be a package: `python -m` would look for its `__main__`.
            spec = ModuleSpec(fullname, _FacadeLoader(), origin="zeroaccel", is_package=fullname not in SCRIPTS)
            return spec
        if fullname in _PATCHED:
            found = PathFinder.find_spec(fullname, path)
            if found is not None and type(found.loader) is SourceFileLoader:
                found.loader = _PatchingLoader(fullname, found.loader.path)
            return found
        parent, _, name = fullname.rpartition(".")
        if fullname.partition(".")[0] != PACKAGE or name in SURFACE.get(parent, {}):
            return None
        raise ModuleNotFoundError(_absence(fullname), name=None)

    def find_distributions(
        self,
        context: DistributionFinder.Context = DistributionFinder.Context(),  # noqa: B008 - as declared there
    ) -> Iterator[Distribution]:
        if context.name is None or context.name.lower() == PACKAGE:
            yield _Distribution()


_FINDER = _Finder()


def install(*, shadow: bool = False) -> None:
    """Makes `import deepspeed` import zeroaccel; does nothing if already installed.

    Args:
        shadow: also replace an installed DeepSpeed.

    Raises:
        UsageError: a real DeepSpeed is installed or already imported; or accelerate or transformers, which look for
            DeepSpeed only at their import, was imported before.

    Example:
        >>> import zeroaccel.compat
        >>> zeroaccel.compat.install()
        >>> import deepspeed
        >>> deepspeed.__version__ == zeroaccel.compat.VERSION
        True
        >>> zeroaccel.compat.uninstall()
    """
    if is_installed():
        return
    location = real_location()
    # accelerate and transformers look for deepspeed once, so a later finder would have no effect.
    loaded = sys.modules.get(PACKAGE)
    if loaded is not None or (location is not None and not shadow):
        raise UsageError(
            "zeroaccel.compat.install()",
            expected="no DeepSpeed in this environment" if loaded is None else "a call before `import deepspeed`",
            got=f"one in {location}",
            fix="pass shadow=True (zeroaccel launch --engine zeroaccel) to use zeroaccel instead"
            if loaded is None
            else "call it first in the script, or start the script with zeroaccel launch",
        )
    if location is None and (early := [name for name in _DECIDED_AT_IMPORT if name in sys.modules]):
        raise UsageError(
            "zeroaccel.compat.install()",
            expected=f"a call before `import {early[0]}`, which looks for deepspeed only at its import",
            got=f"{' and '.join(early)} imported already",
            fix="call it first in the script, or start the script with zeroaccel launch",
        )
    sys.meta_path.insert(0, _FINDER)


def uninstall() -> None:
    """Removes the finder and its modules; names already imported from them stay valid."""
    if not is_installed():
        return
    sys.meta_path.remove(_FINDER)
    parameters = sys.modules.get("zeroaccel.compat.parameters")
    if parameters is not None:
        parameters.detach()
    calls = sys.modules.get("zeroaccel.compat.transformers_calls")
    if calls is not None:
        calls.detach()
    while _ORIGINALS:
        (owner, method), original = _ORIGINALS.popitem()
        setattr(owner, method, original)
    for name in [name for name, module in sys.modules.items() if isinstance(module, FacadeModule)]:
        del sys.modules[name]


def inherited_environment(environ: Mapping[str, str], *, shadow: bool = False) -> dict[str, str]:
    """Returns the variables that install the finder in child processes with the environment `environ`."""
    paths = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != _STARTUP]
    return {"PYTHONPATH": os.pathsep.join([_STARTUP, *paths]), SWITCH: "shadow" if shadow else "1"}


def is_installed() -> bool:
    """True if `import deepspeed` imports zeroaccel."""
    return _FINDER in sys.meta_path


def real_location() -> str | None:
    """Returns the location of a real DeepSpeed; None if there is none."""
    spec = PathFinder.find_spec(PACKAGE)
    if spec is None or spec.loader is None or Path(str(spec.origin)).with_name(SHIM_MARK).is_file():
        return None
    return str(spec.origin)


def _absence(name: str) -> str:
    rows = [prefix for prefix in ABSENT if name == prefix or name.startswith(f"{prefix}.")]
    reason = ABSENT[max(rows, key=len)] if rows else None
    if reason is None:
        similar = nearest(name)
        reason = f"the most similar name is {similar}" if similar else "no supported library uses it"
    return f"{name}: zeroaccel provides deepspeed here, but not this name; {reason}"
