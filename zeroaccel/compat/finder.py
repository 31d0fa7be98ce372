"""The import finder that provides `deepspeed` and its distribution metadata, in this process and those it starts.

The only file that touches `sys.meta_path` and `sys.modules`, and `uninstall` undoes it. The contents of the modules are
the table in `surface`, whose entries are imported when they are first used. Imports no torch.

Child processes get the finder by variables that Python reads at its start: a folder with a `sitecustomize` goes first
on PYTHONPATH, which installs the finder and then runs the `sitecustomize` that it hides, if there is one.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from zeroaccel.compat.surface import ABSENT, PACKAGE, SCRIPTS, SURFACE, nearest
from zeroaccel.errors import UsageError

VERSION = "0.19.5+zeroaccel"
"""Of the import surface: libraries compare it with the oldest release of DeepSpeed that has what they use."""

SHIM_MARK = "of-zeroaccel"
"""A file in the package that `zeroaccel compat install` writes, which is no DeepSpeed and imports this one."""

SWITCH = "ZEROACCEL_COMPAT"
"""Variable: "1", or "shadow" where a real DeepSpeed is to be replaced."""

_STARTUP = str(Path(__file__).parent / "startup")

_DECIDED_AT_IMPORT = ("accelerate", "transformers")  # these look for deepspeed once, when they are imported

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
    """A module of the surface; its names are imported from zeroaccel when they are first used."""

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
            module.__dict__.update({f"__version_{part}__": number for part, number in parts}, __version__=VERSION)
            module.__dict__.update(__git_hash__="unknown", __git_branch__="unknown")  # as of a release

    def get_code(self, fullname: str) -> CodeType | None:
        """What `python -m` runs: the module's `main`, where it has one."""
        if fullname not in SCRIPTS:
            return None
        return compile(_SCRIPT.format(name=fullname), f"<{fullname}>", "exec")


class _PatchingLoader(SourceFileLoader):
    """Of a module of transformers with a class of which zeroaccel replaces a method."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        name, method, change = _PATCHED[module.__name__]
        owner = getattr(module, name)
        _ORIGINALS[owner, method] = vars(owner)[method]
        setattr(owner, method, change(vars(owner)[method]))


_ORIGINALS: dict[tuple[type, str], Any] = {}


def _sharded_while_loading(original: Any) -> Any:
    """`from_pretrained` that builds a quantised base within `zero.Init`, where transformers leaves it whole."""

    @functools.wraps(original.__func__)
    def from_pretrained(cls: type, *args: Any, **kwargs: Any) -> Any:
        quantization = kwargs.get("quantization_config") or getattr(kwargs.get("config"), "quantization_config", None)
        if quantization is None:
            return original.__func__(cls, *args, **kwargs)
        with import_module("zeroaccel.compat.transformers_calls").init_of_quantized(quantization):
            return original.__func__(cls, *args, **kwargs)

    return classmethod(from_pretrained)


def _saving_states(original: Any) -> Any:
    """`train` with states in memory, in jobs whose launcher keeps memory."""

    @functools.wraps(original)
    def train(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        return import_module("zeroaccel.compat.trainer_states").train(original, trainer, *args, **kwargs)

    return train


_PATCHED: Mapping[str, tuple[str, str, Callable[[Any], Any]]] = {
    "transformers.modeling_utils": ("PreTrainedModel", "from_pretrained", _sharded_while_loading),
    "transformers.trainer": ("Trainer", "train", _saving_states),
}
"""Module -> class, method, its replacement."""


class _Distribution(Distribution):
    def read_text(self, filename: str) -> str | None:
        if filename in ("METADATA", "PKG-INFO"):
            return f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: {VERSION}\n"
        return None

    def locate_file(self, path: Any) -> Any:
        raise FileNotFoundError(f"{path}: {PACKAGE} is answered by zeroaccel and has no files")


class _Finder(DistributionFinder):
    """Comes before Python's own finders, so that `deepspeed` is never a mixture of two packages."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in SURFACE:
            # A script is no package: of one, `python -m` would look for a `__main__`.
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
    """Makes `import deepspeed` give zeroaccel; does nothing where it is installed already.

    Args:
        shadow: also where a real DeepSpeed is installed.

    Raises:
        UsageError: a real DeepSpeed is installed, or loaded already; or a library that decides at its import whether
            there is a DeepSpeed has been imported without one.

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
    # accelerate and transformers look for deepspeed once, so a finder that comes later would be without effect.
    loaded = sys.modules.get(PACKAGE)
    if loaded is not None or (location is not None and not shadow):
        raise UsageError(
            "zeroaccel.compat.install()",
            expected="no DeepSpeed in this environment" if loaded is None else "to come before `import deepspeed`",
            got=f"one in {location}",
            fix="pass shadow=True (zeroaccel launch --engine zeroaccel) to use zeroaccel in its place"
            if loaded is None
            else "call it first in the script, or start the script with zeroaccel launch",
        )
    if location is None and (early := [name for name in _DECIDED_AT_IMPORT if name in sys.modules]):
        raise UsageError(
            "zeroaccel.compat.install()",
            expected=f"to come before `import {early[0]}`, which looks for deepspeed once, when it is imported",
            got=f"{' and '.join(early)} imported already",
            fix="call it first in the script, or start the script with zeroaccel launch",
        )
    sys.meta_path.insert(0, _FINDER)


def uninstall() -> None:
    """Removes the finder and its modules; names that were imported from them stay what they are."""
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
    """The variables that give child processes the finder, where they have `environ` otherwise."""
    paths = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != _STARTUP]
    return {"PYTHONPATH": os.pathsep.join([_STARTUP, *paths]), SWITCH: "shadow" if shadow else "1"}


def is_installed() -> bool:
    """Whether `import deepspeed` gives zeroaccel."""
    return _FINDER in sys.meta_path


def real_location() -> str | None:
    """Where a real DeepSpeed would be imported from; None if there is none."""
    spec = PathFinder.find_spec(PACKAGE)
    if spec is None or spec.loader is None or Path(str(spec.origin)).with_name(SHIM_MARK).is_file():
        return None
    return str(spec.origin)


def _absence(name: str) -> str:
    rows = [prefix for prefix in ABSENT if name == prefix or name.startswith(f"{prefix}.")]
    reason = ABSENT[max(rows, key=len)] if rows else None
    if reason is None:
        similar = nearest(name)
        reason = f"the nearest it has is {similar}" if similar else "it is not part of what libraries use"
    return f"{name}: zeroaccel answers for deepspeed here and lacks this; {reason}"
