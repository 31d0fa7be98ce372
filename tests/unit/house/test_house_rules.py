"""The tree obeys the house rules, and each rule finds a planted violation."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import pytest

from tests.support.environment import ROOT
from tests.support.job import run_command
from tests.unit.house import house_rules as rules
from tests.unit.house.house_rules import PACKAGE_RULES, TREE_RULES, Rule, Source, module_name, sources

PACKAGE_FOLDERS = ("zeroaccel", "cli", "templates")


@pytest.fixture(scope="module")
def package() -> Mapping[str, Source]:
    return {module_name(source.path): source for source in sources(*PACKAGE_FOLDERS).values()}


@pytest.fixture(scope="module")
def tree() -> Mapping[str, Source]:
    return {**sources(*PACKAGE_FOLDERS), **sources("tests", "examples", "benchmarks")}


@pytest.mark.parametrize("rule", PACKAGE_RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps(rule: Rule, package: Mapping[str, Source]) -> None:
    assert not list(rule(package))


@pytest.mark.parametrize("rule", TREE_RULES, ids=lambda rule: rule.__name__)
def test_the_tree_keeps(rule: Rule, tree: Mapping[str, Source]) -> None:
    assert not list(rule(tree))


def _planted(files: Mapping[str, str]) -> Mapping[str, Source]:
    sources = [Source(path, text) for path, text in files.items()]
    return {module_name(source.path): source for source in sources}


def _name(value: object) -> str:
    return getattr(value, "__name__", "")


# Violations of each rule: path and text of a file, or a dict of files, and a part of the complaint.
BROKEN: dict[Rule, list[tuple[Any, ...]]] = {
    rules.imports_point_down: [
        ("zeroaccel/comm/a.py", "from zeroaccel.engine import Engine", "zeroaccel/comm/a.py:1"),
        ("zeroaccel/zero/a.py", "def f():\n    import zeroaccel.checkpoint.save", "a.py:2"),
        ("zeroaccel/config/a.py", "from ..ops import adam", "zeroaccel.config.a imports zeroaccel.ops"),
        ("zeroaccel/errors.py", "import zeroaccel", "zeroaccel/errors.py:1"),
        (
            "zeroaccel/accelerate/preparation.py",
            "from zeroaccel.cli import main",
            "zeroaccel/accelerate/preparation.py:1",
        ),
    ],
    rules.imports_have_no_circle: [
        (
            {
                "zeroaccel/zero/a.py": "from zeroaccel.zero import b",
                "zeroaccel/zero/b.py": "from zeroaccel.zero.c import x",
                "zeroaccel/zero/c.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .a import y",
            },
            "zeroaccel.zero.a",
        ),
    ],
    rules.core_knows_no_facade: [
        ("zeroaccel/errors.py", "class A(ValueError, AssertionError): pass", "errors.py:1: A is"),
        ("zeroaccel/accelerate/a.py", "engine.divides = 1", "accelerate/a.py:1: sets engine.divides"),
        ("zeroaccel/compat/a.py", "def f(self):\n    del self._engine.config", "compat/a.py:2"),
    ],
    rules.hooks_are_registered_in_one_file: [
        ("zeroaccel/zero/a.py", "m.register_forward_pre_hook(f)", "a.py:1"),
        ("cli/a.py", "p.register_post_accumulate_grad_hook(f)", "cli/a.py:1"),
        ("zeroaccel/a.py", "t.register_hook(f)", "a.py:1"),
    ],
    rules.collectives_are_called_in_comm: [
        ("zeroaccel/zero/a.py", "import torch\ntorch.distributed.barrier()", "a.py:2"),
        ("zeroaccel/a.py", "import torch.distributed as d\nd.all_reduce(t)", "a.py:2"),
        ("cli/a.py", "from torch import distributed as d\nd.isend(t)", "a.py:2"),
        ("zeroaccel/a.py", "from torch.distributed import all_gather_object as g", "a.py:1"),
        ("zeroaccel/a.py", "import torch.distributed as d\nd.nn.functional.reduce_scatter(o, i)", "a.py:2"),
    ],
    rules.process_groups_are_made_in_one_file: [
        (
            "zeroaccel/comm/groups.py",
            "import torch.distributed as dist\ndist.new_group([0])",
            "zeroaccel/comm/groups.py:2",
        ),
    ],
    rules.threads_are_started_in_one_file: [
        ("zeroaccel/zero/a.py", "import threading as t\nt.Thread(target=f)", "a.py:2"),
        ("zeroaccel/zero/a.py", "with ThreadPoolExecutor(2) as pool: pass", "a.py:1"),
    ],
    rules.folders_keep_their_size: [
        ("zeroaccel/utils/a.py", "x = 1\n" * 90, "utils: 90 code lines, more than"),
        ("zeroaccel/zero/a.py", "x = 1\n", "zero: 1 code lines: lower"),
        ("zeroaccel/fresh/a.py", "x = 1\n", "fresh: 1 code lines, more than the 0"),
    ],
    rules.functions_stay_short: [
        ("zeroaccel/a.py", "\ndef f():\n" + "    x = 1\n" * 100, "a.py:2: f has 101 lines, more"),
        ("cli/a.py", ("def f():\n" + "    x = 1\n" * 60) * 9, "f has 61 lines: at most 7"),
    ],
    rules.classes_stay_small: [
        (
            "cli/a.py",
            "class A:\n" + "".join(f"    def f{n}(self): pass\n" for n in range(41)),
            "class A has 41 methods",
        ),
    ],
    rules.the_environment_is_read_where_the_table_says: [
        ("zeroaccel/a.py", "import os\nos.environ['X']", "a.py:2"),
        ("zeroaccel/a.py", "import os\nos.getenv('X')", "a.py:2"),
        ("zeroaccel/a.py", "from os import environ", "a.py:1"),
    ],
    rules.every_environment_reader_in_the_table_is_one: [
        (
            dict.fromkeys(rules.ENVIRONMENT_READERS, "import os\nos.environ") | {"zeroaccel/logs.py": "import os"},
            "zeroaccel/logs.py",
        ),
    ],
    rules.devices_are_asked_for_their_type: [
        ("zeroaccel/zero/a.py", "if device.type == 'cuda': pass", "a.py:1"),
        ("zeroaccel/comm/a.py", "import torch\ntorch.cuda.synchronize()", "a.py:2"),
    ],
    rules.public_modules_have_all: [
        ("zeroaccel/a.py", "x = 1", "has no __all__"),
        ("zeroaccel/comm/topology.py", "x = 1", "has no __all__"),
        ("zeroaccel/zero/__init__.py", "'''Doc.'''\nfrom .a import x", "has no __all__"),
        ("zeroaccel/zero/a.py", "__all__ = ['x', 'x']", "twice"),
        ("zeroaccel/zero/a.py", "__all__ = ['_x']", "_x"),
    ],
    rules.stages_are_compared_in_config_only: [
        ("zeroaccel/zero/a.py", "if config.zero.stage >= 2: pass", "a.py:1"),
        ("zeroaccel/comm/a.py", "x = zero_stage in (1, 2)", "a.py:1"),
        ("zeroaccel/ops/a.py", "match stage:\n    case 3: pass", "a.py:1"),
    ],
    rules.axes_are_named_in_parallel_only: [
        ("zeroaccel/setup/a.py", 'x = axis.name != "sp"', "a.py:1"),
        ("zeroaccel/zero/a.py", "if mesh.dp_replicate > 1: pass", "a.py:1"),
    ],
    rules.storages_are_asked_for_their_kind_rarely: [
        (
            "zeroaccel/checkpoint/a.py",
            "\n".join(f"def f{n}(s): return s.is_swapped" for n in range(16)),
            "16 functions",
        ),
    ],
    rules.no_name_is_used_twice: [
        ({"zeroaccel/zero/a.py": "", "zeroaccel/comm/a.py": ""}, "zeroaccel/zero/a.py has the same"),
        (
            {"zeroaccel/a.py": "class Place: pass", "cli/b.py": "\nclass Place: pass"},
            "cli/b.py:2: class Place is in zeroaccel/a.py, too",
        ),
    ],
    rules.few_modules_are_loose: [
        ({f"zeroaccel/m{n}.py": "" for n in range(rules.MAX_LOOSE_MODULES + 1)}, "belongs in a folder"),
    ],
    rules.small_modules_have_several_importers: [
        (
            {"zeroaccel/zero/a.py": "x = 1", "zeroaccel/zero/b.py": "from zeroaccel.zero.a import x"},
            "imported by zeroaccel.zero.b alone",
        ),
    ],
    rules.the_engine_imports_downwards: [
        ("zeroaccel/zero/layout.py", "\nfrom zeroaccel.zero.hooks import Hooks", "zeroaccel/zero/layout.py:2"),
        ("zeroaccel/zero/new.py", "", "no row"),
    ],
    rules.old_words_are_gone: [
        ("zeroaccel/zero/a.py", "x = 1\n# " + "who" + "ever needs it", "a.py:2"),
    ],
    rules.variables_say_what_they_are: [
        ("cli/a.py", "def f(given): pass", "'given'"),
        ("cli/a.py", "_held = 1", "'_held'"),
        ("cli/a.py", "x = [one.y for one in z]", "'one'"),
    ],
    rules.docstrings_name_their_parameters: [
        ("cli/a.py", 'def f(a, *, b):\n    """F.\n\n    Args:\n        a, c: text.\n    """', "f: c under Args"),
        ("cli/a.py", 'class A:\n    """A.\n\n    Args:\n        x: text.\n    """\n\n    y: int', "A: x under Args"),
    ],
    rules.files_stay_short: [
        ("tests/a.py", "x = 1\n" * 901, "901 lines"),
    ],
    rules.names_say_something: [
        ("zeroaccel/zero/grad_utils.py", "", "grad_utils"),
        ("examples/common/a.py", "", "'common'"),
        ("zeroaccel/zero/a.py", "class NVMeBufferManager: pass", "NVMeBufferManager"),
    ],
    rules.nothing_is_left_open: [
        ("benchmarks/a.py", "x = 1\n# " + "TO" + "DO: two", "benchmarks/a.py:2"),
    ],
}


@pytest.mark.parametrize(("rule", "row"), [(rule, row) for rule, rows in BROKEN.items() for row in rows], ids=_name)
def test_a_broken_rule_is_noticed(rule: Rule, row: tuple[Any, ...]) -> None:
    *files, complaint = row
    (violation,) = rule(_planted(dict([files]) if len(files) == 2 else files[0]))
    assert complaint in violation


def test_every_rule_has_a_broken_tree() -> None:
    assert {*BROKEN} == {*PACKAGE_RULES, *TREE_RULES}


def test_documents_import_public_names_only() -> None:
    documents = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").rglob("*.py")]
    imported = set()
    for document in documents:
        for module, names in re.findall(
            r"^from (zeroaccel[\w.]*) import \(?([^)\n(]+|[^)(]+(?=\)))", document.read_text(), re.MULTILINE
        ):
            imported |= {(module, name.split()[0]) for name in names.split(",") if name.strip()}
    assert len(imported) > 20, "the documents were not read"
    packages = {("zeroaccel", "zero"), ("zeroaccel", "compat")}
    assert not [(module, name) for module, name in imported - packages if name not in import_module(module).__all__]


# Trees that a rule must accept.
SOUND: list[tuple[Rule, dict[str, str]]] = [
    (
        rules.imports_point_down,
        {"zeroaccel/zero/a.py": "from zeroaccel.comm.collectives import Collectives\nfrom . import b"},
    ),
    (rules.imports_point_down, {"cli/main.py": "import zeroaccel\nfrom .launch import launch"}),
    (rules.collectives_are_called_in_comm, {"zeroaccel/comm/a.py": "import torch.distributed as d\nd.all_reduce(t)"}),
    (rules.collectives_are_called_in_comm, {"zeroaccel/zero/a.py": "collectives.all_gather(out, shard, label)"}),
    (rules.collectives_are_called_in_comm, {"zeroaccel/zero/a.py": "import torch.distributed as d\nd.ReduceOp.SUM"}),
    (
        rules.public_modules_have_all,
        {"zeroaccel/zero/__init__.py": "'''Only a docstring.'''", "zeroaccel/_a.py": "x = 1"},
    ),
    (rules.axes_are_named_in_parallel_only, {"zeroaccel/parallel/a.py": 'name = "sp"'}),
    (rules.stages_are_compared_in_config_only, {"zeroaccel/config/shard_plan.py": "x = stage >= 1"}),
    (
        rules.storages_are_asked_for_their_kind_rarely,
        {"zeroaccel/zero/storage/a.py": "\n".join(f"def f{n}(s): return isinstance(s, NvmeShard)" for n in range(16))},
    ),
    (rules.names_say_something, {"zeroaccel/a.py": "class Commons: pass\nclass Miscount: pass"}),
]


@pytest.mark.parametrize(("rule", "files"), SOUND, ids=_name)
def test_sound_trees_pass(rule: Rule, files: dict[str, str]) -> None:
    assert not list(rule(_planted(files)))


COMMAND = "from zeroaccel.cli.main import main; main({!r}.split(), standalone_mode=False)"


@pytest.mark.parametrize(
    ("statement", "untouched"),
    [
        ("import zeroaccel", "torch cupy"),
        ("import zeroaccel.config", "torch"),
        (COMMAND.format("--help"), "torch pydantic zeroaccel.cli.launch.launch_command"),
        (COMMAND.format("--version"), "torch pydantic zeroaccel.cli.launch.launch_command"),
        (COMMAND.format("config --help"), "torch pydantic rich questionary"),
        (COMMAND.format("launch --help"), "torch pydantic zeroaccel.cli.launch.launch_job"),
    ],
)
def test_nothing_is_imported_before_it_is_needed(statement: str, untouched: str) -> None:
    check = f"import sys\n{statement}\nassert not [name for name in {untouched.split()} if name in sys.modules]"
    done = run_command([sys.executable, "-c", check], fresh=True)
    assert done.returncode == 0, done.stderr


def test_no_document_holds_the_marks_of_an_unfinished_merge() -> None:
    texts = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "templates").iterdir()]
    marks = [
        f"{path.name}:{number}"
        for path in texts
        if path.is_file()
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if line.startswith(("<<<<<<< ", "=======", ">>>>>>> "))
    ]
    assert len(texts) > 40
    assert not marks
