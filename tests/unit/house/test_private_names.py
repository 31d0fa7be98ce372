"""Every private name of another library that the package uses is in a table, and exists in the installed version."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping
from importlib import import_module

import pytest

from tests.unit.house.house_rules import Source, sources
from tests.unit.house.private_names import OF_PYTHON, PRIVATE, SINCE
from zeroaccel.compat.finder import _PATCHED

PACKAGE = sources("zeroaccel", "cli", "templates")


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _defined(files: Mapping[str, Source]) -> Iterator[str]:
    """Yields the names that the package itself defines, as functions, classes, variables, arguments or attributes."""
    for node in (node for source in files.values() for node in source.nodes):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                yield name
            case ast.Attribute(attr=name, ctx=ast.Store()) | ast.Name(id=name, ctx=ast.Store()):
                yield name


def _used(source: Source) -> Iterator[tuple[int, str]]:
    """Yields (line, name) for each private attribute, also one that is looked up by a string, and private import."""
    for node in source.nodes:
        match node:
            case ast.Attribute(attr=name, lineno=line) if _is_private(name):
                yield line, name
            case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[_, ast.Constant(value=str(name)), *_]):
                if _is_private(name):
                    yield node.lineno, name
            case ast.ImportFrom(module=str(module), level=0) if module.partition(".")[0] != "zeroaccel":
                is_inside = any(map(_is_private, module.split(".")))
                yield from ((node.lineno, name.name) for name in node.names if is_inside or _is_private(name.name))


def _missing(files: Mapping[str, Source]) -> list[str]:
    """Returns the uses of names that neither the package nor the table has."""
    in_table = {part for module in PRIVATE for part in module.split(".")}
    in_table |= {name.rpartition(".")[2] for names in PRIVATE.values() for name in names.split()}
    known = in_table | OF_PYTHON | set(_defined(files))
    return [
        f"{path}:{at}: {name}"
        for path, source in files.items()
        for at, name in sorted(_used(source))
        if name not in known
    ]


def test_the_table_has_every_private_name_that_the_package_uses() -> None:
    assert _missing(PACKAGE) == []


def test_a_private_name_that_the_table_lacks_is_found() -> None:
    text = """
from torch._new import thing
from torch.nn import _thing
import torch
torch._quick(self._own)
getattr(torch, "_slow", None)
self._own = 1
"""
    assert _missing({"a.py": Source("a.py", text)}) == [
        "a.py:2: thing",
        "a.py:3: _thing",
        "a.py:5: _quick",
        "a.py:6: _slow",
    ]


def test_the_table_has_no_other_private_name() -> None:
    nodes = [node for source in PACKAGE.values() for node in source.nodes]
    used = {name for source in PACKAGE.values() for _, name in _used(source)} | set(_defined(PACKAGE))
    used |= {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    names = {name.rpartition(".")[2] for names in PRIVATE.values() for name in names.split()}
    assert {name for name in names if _is_private(name)} <= used


def _has(owner: object, name: str) -> bool:
    """True for an attribute of an object, or of the instances of a class, which its methods set."""
    if hasattr(owner, name):
        return True
    classes = (
        [kind for kind in inspect.getmro(owner) if kind.__module__ != "builtins"] if inspect.isclass(owner) else []
    )
    return any(f".{name}" in inspect.getsource(kind) or f'"{name}"' in inspect.getsource(kind) for kind in classes)


def test_the_table_has_all_that_the_import_finder_replaces() -> None:
    replaced = [(module, f"{kind}.{name}".lstrip(".")) for module, rows in _PATCHED.items() for kind, name, _ in rows]
    assert [f"{module}: {name}" for module, name in replaced if name not in PRIVATE.get(module, "").split()] == []


def _gone(module: str, names: str) -> list[str]:
    """Returns the names that the installed version of the module lacks."""
    owner: object = import_module(module.partition(".")[0])
    for place, part in enumerate(module.split(".")[1:], start=2):
        owner = getattr(owner, part, None) or import_module(".".join(module.split(".")[:place]))
    gone = []
    for name in names.split():
        outer, _, last = name.rpartition(".")
        kind = getattr(owner, outer, None) if outer else owner
        if not (kind is not None and _has(kind, last)) and last not in SINCE:
            gone.append(name)
    return gone


@pytest.mark.parametrize("module", PRIVATE)
def test_the_installed_version_has(module: str) -> None:
    library = pytest.importorskip(module.partition(".")[0])
    gone = _gone(module, PRIVATE[module])
    assert gone == [], f"{module} of {library.__name__} {library.__version__} lacks them"


@pytest.mark.parametrize(
    ("module", "owner", "name"),
    [
        ("torch.distributed.distributed_c10d", "", "_get_default_store"),
        ("torch.distributed.elastic.multiprocessing.subprocess_handler", "SubprocessHandler", "_popen"),
    ],
)
def test_a_private_part_that_moved_is_found(
    module: str, owner: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = import_module(module)
    monkeypatch.delattr(getattr(place, owner) if owner else place, name)
    monkeypatch.setattr(inspect, "getsource", lambda kind: "")
    assert _gone(module, f"{owner}.{name}".lstrip(".")) == [f"{owner}.{name}".lstrip(".")]
