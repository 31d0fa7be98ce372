"""The rules of CONTRIBUTING.md that a program can check; each is a function from parsed files to violations.

`test_house_rules.py` runs them on the tree and on planted violations. Ruff checks the style of single files, such as
line length and a sorted `__all__`; the rules here concern the package: the responsibilities of its parts.
"""

from __future__ import annotations

import ast
import graphlib
import io
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache, cached_property
from pathlib import PurePosixPath

from tests.support.environment import ROOT

LAYERS = (
    ("errors", "logs", "nested", "templates"),
    ("config",),
    ("comm", "ops", "offload"),
    ("optim", "telemetry"),
    ("zero",),
    ("checkpoint",),
    ("activations", "data", "rollout"),
    ("engine",),
    ("setup",),
    ("parallel",),
    ("(faces)",),  # every other module directly in zeroaccel/, and the package itself
    ("compat",),
    ("cli",),
)

# Files that may read the environment, with the reason. All other files take arguments.
ENVIRONMENT_READERS = {
    "cli/launch/agent.py": "gives each attempt its own store in torch's elastic agent; CUDA_VISIBLE_DEVICES",
    "cli/config/config_command.py": "detects an interactive terminal and finds the user's files",
    "cli/doctor.py": "shows the machine and the settings in force, and passes the environment to its own job",
    "cli/verify.py": "passes the environment to its own jobs, with a variable for `verify`",
    "cli/launch/fork_server.py": "a fork becomes a rank, whose environment comes with the request",
    "cli/launch/forked_ranks.py": "the importing process has the environment that all ranks of the machine share",
    "cli/launch/launch_job.py": "the launcher's own switches, and the variables that its plan passes to ranks",
    "cli/launch/node.py": "variables from the launching machine, for the ranks that it starts",
    "cli/launch/runner.py": "inside a rank: the number of local ranks, and the path of its error report",
    "zeroaccel/comm/environment.py": "the job's variables from the launcher or a command, and the hang limit",
    "zeroaccel/ops/cupy_kernels.py": "CuPy's folder of compiled kernels",
    "zeroaccel/compat/deepspeed_config.py": "whether accelerate's launcher asked for no clipping",
    "zeroaccel/compat/__main__.py": "passes the facade on to the processes that a script starts",
    "zeroaccel/compat/startup/sitecustomize.py": "installs the facade if the parent process passes it on",
    "zeroaccel/accelerate/zero_plugin.py": "the launcher's training settings",
    "zeroaccel/initialization.py": "a mesh from the launcher, if the caller passes none",
    "zeroaccel/logging.py": "ACCELERATE_LOG_LEVEL, the level of a script's loggers",
    "zeroaccel/accelerate/script_calls.py": "functions about the environment, and the rank variables of forked ranks",
    "zeroaccel/logs.py": "RANK, which is known before the process group exists, and the log level",
}

# Folder -> its limit of code lines. A commit that raises a limit states the reason.
MAX_CODE_LINES: Mapping[str, int] = {
    "": 1220,
    "accelerate": 4260,
    "checkpoint": 7008,
    "cli": 7365,
    "comm": 3914,
    "compat": 4350,
    "config": 4583,
    "data": 1005,
    "estimate": 2148,
    "offload": 981,
    "ops": 2316,
    "optim": 1344,
    "parallel": 4592,
    "rollout": 1207,
    "setup": 1483,
    "telemetry": 1589,
    "utils": 57,
    "zero": 10025,
}
LOOSE_LINES = 100
MAX_FUNCTION_LINES, LONG_FUNCTION_LINES, MAX_LONG_FUNCTIONS = 100, 60, 7
MAX_LINES = 900
MAX_METHODS = 40
# Files that name CUDA, with the reason. Others use the device's type and torch.get_device_module(device).
CUDA_FILES = {
    "zeroaccel/accelerate/script_calls.py": "after CUDA's initialization, forks cannot use devices",
    "zeroaccel/compat/deepspeed_calls.py": "as DeepSpeed's function of this name",
    "zeroaccel/compat/deepspeed_comm.py": "scripts pass nccl on machines without CUDA",
    "zeroaccel/compat/deepspeed_engine.py": "as DeepSpeed's methods of these names",
    "zeroaccel/compat/device_accelerator.py": "DeepSpeed's own name for torch.cuda",
    "zeroaccel/offload/page_locked.py": "locks pages through the CUDA runtime",
    "zeroaccel/ops/device_kernels.py": "kernels in CUDA C++",
    "zeroaccel/seeds.py": "its argument takes accelerate's names for generators",
    "zeroaccel/ops/cupy_kernels.py": "compiles and launches the kernels",
    "cli/doctor.py": "tests NCCL, kernels and copies on CUDA devices",
    "cli/machine.py": "lists GPUs",
    "cli/launch/fork_server.py": "after CUDA's initialization, forks cannot use devices",
}
# Files that may be longer, with the reason.
LONG_FILES = {
    "zeroaccel/checkpoint/zero_to_fp32.py": "a whole program, copied next to checkpoints; it may import no other file",
}
# Files besides zero/hooks.py that register hooks, with the reason.
HOOKS_ELSEWHERE = {
    "zeroaccel/zero/access/state_dicts.py": "reads and writes of state dicts",
    "zeroaccel/zero/access/deferred_init.py": "registrations of parameters while constructors run",
    "zeroaccel/zero/step_trace.py": "exist only while a recording runs",
    "zeroaccel/zero/sharded_optimizer.py": "a program's own step of the optimizer",
    "zeroaccel/telemetry/performance.py": "counts the tokens of a mixture's experts on the reporting rank",
    "zeroaccel/parallel/sequence_layers.py": "inputs of layers of one model, also before an engine exists",
    "zeroaccel/parallel/ulysses.py": "arguments of one model's forward, also before an engine exists",
    "zeroaccel/parallel/tensor.py": "hooks that torch's tensor-parallel styles make for split layers",
    "zeroaccel/parallel/tensor_modules.py": "inputs and outputs of modules whose parameters ranks share",
}
MESH_AXES = frozenset({"pp", "dp_replicate", "dp_shard", "sp", "tp", "ep"})
STORAGE_FOLDER = "zeroaccel/zero/storage"
# Attributes that distinguish storages, and the number of functions outside their folder that may read them.
STORAGE_KINDS = {"aliases_weights", "is_replicated", "is_swapped", "reads_weights"}
MAX_STORAGE_QUESTIONS = 15
# Modules with public names, besides packages and the modules directly in zeroaccel/. Others mark private names by `_`.
PUBLIC_MODULES = {
    "zeroaccel.checkpoint.consolidate",
    "zeroaccel.comm.collectives",
    "zeroaccel.comm.recording",
    "zeroaccel.comm.topology",
    "zeroaccel.ops.coupled",
    "zeroaccel.config.launch.launch_file",
}
MAX_LOOSE_MODULES = 8
# Modules and packages named as in accelerate, so that scripts change only the package's name. They do not count as
# loose, and may be called `utils`.
NAMED_BY_ACCELERATE = {"data_loader", "local_sgd", "logging", "state", "tracking", "utils"}
SMALL_MODULE_LINES = 60
# Modules with one importer and under 60 code lines that remain separate, with the reason.
SMALL_MODULES = {
    "zeroaccel/ops/changed.py": "a compiled loop, next to the others whose files its cache depends on",
    "zeroaccel/accelerate/beside_accelerate.py": "the one file that changes another library's modules, and undoes it",
    "cli/launch/launch_memory.py": "files that outlive processes; `agent.py` handles processes",
}
# Modules of zeroaccel/zero/ from the bottom; a module imports from its own row and below.
ENGINE_LAYERS: tuple[tuple[str, ...], ...] = (
    (
        "compiled",
        "layout",
        "module_names",
        "precision",
        "prefetch",
        "grad_norm",
        "tensor_subclasses",
        "quantized_weights",
        "wrap_policy",
        "access.safetensors_file",
        "access.coded_weights",
        "access.lazy_tensors",
    ),
    ("changed_bits",),
    ("storage.copy_stream", "storage.shards"),
    ("storage.code_shards",),
    ("storage.masters", "storage.swapped_masters", "storage.placement"),
    ("param_unit",),
    ("coordinator", "grad_reducer", "module_copies", "param_check", "weight_writer"),
    ("sharded_optimizer",),
    ("update_thread",),
    ("early_update",),
    ("weight_update", "storage.state_offload", "access.param_registry"),
    ("step_boundary", "access.full_params", "access.safe_get_set", "model_check"),
    ("build_units", "from_config", "hooks", "access.state_dicts"),
    ("step_trace",),
    ("engine_core",),
    ("access.deferred_init", "access.load_safetensors"),
)
# Former metaphors, and people as subjects in place of components. The rule reads comments, docstrings and names, but
# not messages.
OLD_WORDS = re.compile(
    r"\b(keepers?|couriers?|farewell|whereabouts|errands?|outings?|lend(s|ers?|ing)?|lent|borrow(s|ed|ers?|ing)?"
    r"|somebody|someone|anybody|anyone|nobody|whoever)\b",
    re.IGNORECASE,
)
# Names of variables that do not say what they are.
NO_NOUNS = {"given", "held", "kept", "one", "own", "part", "told"}
NAMELESS = {"util", "utils", "helper", "helpers", "manager", "misc", "common"}
COLLECTIVES = re.compile(
    r"(all_reduce|all_gather|reduce_scatter|all_to_all|broadcast|reduce|gather|scatter|i?send|i?recv|batch_isend|barrier"
    r"|monitored_barrier)(_|$)"
)
GROUP_MAKERS = re.compile(r"(init_process_group|new_group|new_subgroups\w*|init_device_mesh|split_group)$")
OPEN_ENDS = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK")) + r")\b")


_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


class Source:
    """One Python file of the tree, parsed.

    Args:
        path: relative to the root of the tree, with forward slashes.
        text: its contents.
    """

    def __init__(self, path: str, text: str) -> None:
        self.path = PurePosixPath(path)
        self.text = text

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, str(self.path))

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All nodes of the tree, cached because a dozen rules read them."""
        return tuple(ast.walk(self.tree))

    @cached_property
    def import_nodes(self) -> tuple[ast.Import | ast.ImportFrom, ...]:
        """All imports, including those in functions and for typing, cached for three rules."""
        return tuple(node for node in self.nodes if isinstance(node, (ast.Import, ast.ImportFrom)))

    @property
    def folder(self) -> str:
        """The file's folder: "comm" for zeroaccel/comm/..., "" for zeroaccel/*.py, "cli" for cli/..."""
        parts = self.path.parts
        return parts[0] if parts[0] != "zeroaccel" else "/".join(parts[1:-1]).split("/")[0]

    @cached_property
    def tokens(self) -> tuple[tokenize.TokenInfo, ...]:
        """All tokens of the text, cached for three rules."""
        return tuple(tokenize.generate_tokens(io.StringIO(self.text).readline))

    @cached_property
    def code_lines(self) -> int:
        """Number of lines with code, without docstrings, comments and blank lines; cached for two rules."""
        bearing: set[int] = set()
        for token in self.tokens:
            if token.type not in _NO_CODE:
                bearing.update(range(token.start[0], token.end[0] + 1))
        for node in self.nodes:
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                bearing -= set(range(node.lineno, (node.end_lineno or 0) + 1))
        return len(bearing)

    def prose(self) -> Iterator[tuple[int, str]]:
        """Yields comments, docstrings and names with their lines."""
        for token in self.tokens:
            if token.type in (tokenize.COMMENT, tokenize.NAME):
                yield token.start[0], token.string.replace("_", " ")
        for node in self.nodes:
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                yield from enumerate(node.value.value.splitlines(), start=node.lineno)

    def at(self, node: ast.AST | int, complaint: str) -> str:
        line = node if isinstance(node, int) else getattr(node, "lineno", 1)
        return f"{self.path}:{line}: {complaint}"


def sources(*folders: str) -> Mapping[str, Source]:
    """Returns the Python files of folders by path; the tests of a process share them, and so what they parse."""
    paths = (path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))
    return {name: _source(name) for path in paths for name in [path.relative_to(ROOT).as_posix()]}


@cache
def _source(name: str) -> Source:
    return Source(name, (ROOT / name).read_text())


Rule = Callable[[Mapping[str, Source]], Iterable[str]]  # from files by module name (or path) to "path:line: complaint"


def module_name(path: PurePosixPath) -> str:
    """Returns the module name of a file in the package; cli/main.py is zeroaccel.cli.main."""
    parts = path.with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    return ".".join(parts if parts[0] == "zeroaccel" else ("zeroaccel", *parts))


def _layer(module: str) -> int:
    """Returns the module's row in `LAYERS`; a module may import from its own row and those before it."""
    part = module.split(".")[1] if "." in module else "(faces)"
    return next((height for height, parts in enumerate(LAYERS) if part in parts), LAYERS.index(("(faces)",)))


def _imports(source: Source, modules: Collection[str]) -> Iterator[tuple[ast.stmt, str]]:
    """Yields the package's modules that a file imports, including imports in functions and for typing."""
    here = module_name(source.path)
    package = here if source.path.name == "__init__.py" else here.rpartition(".")[0]
    for node in source.import_nodes:
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        else:
            base = node.module or ""
            if node.level:
                parent = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parent, base] if base else parent)
            # `from package import name` refers to the module of that name if it exists.
            targets = [f"{base}.{alias.name}" if f"{base}.{alias.name}" in modules else base for alias in node.names]
        for target in targets:
            if target == "zeroaccel" or target.startswith("zeroaccel."):
                yield node, target


def imports_point_down(package: Mapping[str, Source]) -> Iterator[str]:
    for name, source in package.items():
        for node, target in _imports(source, package):
            if _layer(target) > _layer(name):
                yield source.at(node, f"{name} imports {target}, which is above it")


FACADES = ("accelerate", "compat", "cli")


def core_knows_no_facade(package: Mapping[str, Source]) -> Iterator[str]:
    """The core has no base class for a facade, and facades set only attributes of engines that they define."""
    for source in package.values():
        classes = [node for node in source.nodes if isinstance(node, ast.ClassDef)]
        if source.folder not in FACADES:
            for node in classes:
                if "AssertionError" in map(_last_name, node.bases):
                    yield source.at(node, f"{node.name} is an AssertionError; define it in compat/assertions.py")
            continue
        own = {_last_name(item.target) for node in classes for item in node.body if isinstance(item, ast.AnnAssign)}
        for node in source.nodes:
            if not isinstance(node, ast.Attribute) or isinstance(node.ctx, ast.Load) or node.attr in own:
                continue
            if _last_name(node.value).lstrip("_") == "engine":
                yield source.at(node, f"sets engine.{node.attr}; add a field to the engine's JobSpec")


def imports_have_no_circle(package: Mapping[str, Source]) -> Iterator[str]:
    edges = {name: {target for _, target in _imports(source, package)} - {name} for name, source in package.items()}
    try:
        graphlib.TopologicalSorter(edges).prepare()
    except graphlib.CycleError as error:
        yield "modules import each other: " + " -> ".join(reversed(error.args[1]))


def hooks_are_registered_in_one_file(package: Mapping[str, Source]) -> Iterator[str]:
    for source in _outside(package, "zeroaccel/zero/hooks.py"):
        if str(source.path) in HOOKS_ELSEWHERE:
            continue
        for node in source.nodes:
            if isinstance(node, ast.Attribute) and re.fullmatch(r"register_\w*hook", node.attr):
                yield source.at(node, f"{node.attr} belongs in zero/hooks.py")


def collectives_are_called_in_comm(package: Mapping[str, Source]) -> Iterator[str]:
    for source in package.values():
        if source.folder != "comm":
            for node, name in _names_of_torch_distributed(source):
                if COLLECTIVES.match(name):
                    yield source.at(node, f"torch.distributed.{name} belongs in comm/")


def process_groups_are_made_in_one_file(package: Mapping[str, Source]) -> Iterator[str]:
    for source in _outside(package, "zeroaccel/comm/topology.py"):
        for node, name in _names_of_torch_distributed(source):
            if GROUP_MAKERS.match(name):
                yield source.at(node, f"torch.distributed.{name} belongs in comm/topology.py")


def threads_are_started_in_one_file(package: Mapping[str, Source]) -> Iterator[str]:
    """A thread without an explicit device works on GPU 0."""
    for source in _outside(package, "zeroaccel/ops/device_threads.py"):
        if source.folder != "cli" and source.path.name != "zero_to_fp32.py":  # no CUDA; a separate program
            for node in source.nodes:
                if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in _THREAD_MAKERS:
                    yield source.at(node, f"{ast.unparse(node.func)} belongs in ops/device_threads.py")


_THREAD_MAKERS = {"Thread", "Timer", "ThreadPool", "ThreadPoolExecutor", "start_new_thread"}


def the_environment_is_read_where_the_table_says(package: Mapping[str, Source]) -> Iterator[str]:
    for source in package.values():
        for node in source.nodes:
            if _reads_environment(node) and str(source.path) not in ENVIRONMENT_READERS:
                yield source.at(node, "reads the environment; take an argument, or add the file to ENVIRONMENT_READERS")


def every_environment_reader_in_the_table_is_one(package: Mapping[str, Source]) -> Iterator[str]:
    readers = {str(source.path) for source in package.values() if any(map(_reads_environment, source.nodes))}
    for path in sorted(set(ENVIRONMENT_READERS) - readers):
        yield f"{path}: does not read the environment; remove it from ENVIRONMENT_READERS"


def devices_are_asked_for_their_type(package: Mapping[str, Source]) -> Iterator[str]:
    """Only the files of `CUDA_FILES` use `torch.cuda` or compare with "cuda"."""
    for source in package.values():
        for node in source.nodes:
            compared = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
            names = {each.value for each in compared if isinstance(each, ast.Constant)}
            meant = "cuda" in names or (isinstance(node, ast.Attribute) and _dotted(node) == "torch.cuda")
            if meant and str(source.path) not in CUDA_FILES:
                yield source.at(node, "names CUDA; use torch.get_device_module(device), or add the file to CUDA_FILES")


def public_modules_have_all(package: Mapping[str, Source]) -> Iterator[str]:
    for name, source in package.items():
        lists = [node for node in source.tree.body if _assigned(node) == "__all__"]
        if not lists:
            package_with_names = source.path.stem == "__init__" and len(source.tree.body) > 1
            loose = str(source.path.parent) == "zeroaccel" and not source.path.stem.startswith("_")
            if package_with_names or loose or name in PUBLIC_MODULES:
                yield source.at(1, "has no __all__")
            continue
        if isinstance(lists[-1].value, ast.Call):  # type: ignore[attr-defined]  # computed from a table
            continue
        names = ast.literal_eval(lists[-1].value)  # type: ignore[attr-defined]
        if len(names) != len(set(names)):
            yield source.at(lists[-1], "__all__ has a name twice")
        if private := [name for name in names if name.startswith("_") and not name.startswith("__")]:
            yield source.at(lists[-1], f"__all__ has private names: {private}")


def stages_are_compared_in_config_only(package: Mapping[str, Source]) -> Iterator[str]:
    for source in package.values():
        if source.folder not in ("zero", "comm", "ops", "offload", "checkpoint"):
            continue
        for node in source.nodes:
            operands: list[ast.expr] = []
            if isinstance(node, ast.Compare):
                operands = [node.left, *node.comparators]
            elif isinstance(node, ast.Match):
                operands = [node.subject]
            if any(re.search(r"(^|_)stage$", _last_name(operand)) for operand in operands):
                yield source.at(node, "compares the stage; a stage is data: use ShardPlan or TierPlan")


def axes_are_named_in_parallel_only(package: Mapping[str, Source]) -> Iterator[str]:
    for source in package.values():
        for node in source.nodes if source.folder in ("zero", "checkpoint", "setup") else ():
            name = getattr(node, "value" if isinstance(node, ast.Constant) else "attr", None)
            if name in MESH_AXES:
                yield source.at(node, f"names the axis {name}; use the `Axis`, or the groups of the ParallelConfig")


def storages_are_asked_for_their_kind_rarely(package: Mapping[str, Source]) -> Iterator[str]:
    asking: list[str] = []
    for source in package.values():
        if source.path.is_relative_to(STORAGE_FOLDER):
            continue
        for node in source.nodes:
            if isinstance(node, ast.FunctionDef) and any(map(_asks_for_a_storage_kind, ast.walk(node))):
                asking.append(source.at(node, node.name))
    if len(asking) > MAX_STORAGE_QUESTIONS:
        listed = "; ".join(asking)
        yield f"{len(asking)} functions ask for the kind of storage, more than {MAX_STORAGE_QUESTIONS}: {listed}"


def _asks_for_a_storage_kind(node: ast.AST) -> bool:
    if isinstance(node, ast.Call) and _last_name(node.func) == "isinstance":
        return bool(re.search(r"[a-z0-9](Shard|Masters)\b", ast.unparse(node.args[-1])))
    return isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and node.attr in STORAGE_KINDS


def no_name_is_used_twice(package: Mapping[str, Source]) -> Iterator[str]:
    files: dict[str, list[Source]] = defaultdict(list)
    classes: dict[str, list[tuple[Source, ast.ClassDef]]] = defaultdict(list)
    for source in package.values():
        if not source.path.stem.startswith("__"):
            files[source.path.name].append(source)
        for node in source.tree.body:
            if isinstance(node, ast.ClassDef):
                classes[node.name].append((source, node))
    for first, *others in files.values():
        for source in others:
            yield source.at(1, f"{first.path} has the same file name")
    for (first, _), *places in classes.values():
        for source, node in places:
            yield source.at(node, f"class {node.name} is in {first.path}, too: rename one")


def few_modules_are_loose(package: Mapping[str, Source]) -> Iterator[str]:
    loose = [source for source in package.values() if str(source.path.parent) == "zeroaccel"]
    others = [source for source in loose if source.path.stem not in {"__init__", *NAMED_BY_ACCELERATE}]
    for source in others[MAX_LOOSE_MODULES:]:
        yield source.at(1, f"the {MAX_LOOSE_MODULES + 1}th module directly in zeroaccel/: it belongs in a folder")


def small_modules_have_several_importers(package: Mapping[str, Source]) -> Iterator[str]:
    importers: dict[str, set[str]] = defaultdict(set)
    for name, source in package.items():
        for _, target in _imports(source, package):
            if target != name:
                importers[target].add(name)
    for name, source in package.items():
        small = len(importers[name]) == 1 and source.code_lines < SMALL_MODULE_LINES
        if source.path.stem.startswith("__") or small == (str(source.path) in SMALL_MODULES):
            continue
        if small:
            (importer,) = importers[name]
            yield source.at(1, f"small, and imported by {importer} alone: merge it, or add it to SMALL_MODULES")
        else:
            yield source.at(1, "is not a small module with one importer: remove it from SMALL_MODULES")


def the_engine_imports_downwards(package: Mapping[str, Source]) -> Iterator[str]:
    rows = {f"zeroaccel.zero.{module}": row for row, modules in enumerate(ENGINE_LAYERS) for module in modules}
    for name, source in package.items():
        if not name.startswith("zeroaccel.zero.") or source.path.stem == "__init__":
            continue
        if name not in rows:
            yield source.at(1, "is in no row of ENGINE_LAYERS")
            continue
        for node, target in _imports(source, package):
            if rows.get(target, -1) > rows[name]:
                yield source.at(node, f"{name} imports {target}, which is above it")


def old_words_are_gone(package: Mapping[str, Source]) -> Iterator[str]:
    for source in package.values():
        for number, line in source.prose():
            if found := OLD_WORDS.search(line):
                yield source.at(number, f"{found.group()!r}: use a standard term, and a component as the subject")


def variables_say_what_they_are(package: Mapping[str, Source]) -> Iterator[str]:
    for source in package.values():
        for node in source.nodes:
            if isinstance(node, ast.arg):
                name = node.arg
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                name = node.id
            else:
                continue
            if name.strip("_") in NO_NOUNS:
                yield source.at(node, f"{name!r} does not say what it is: name the variable by a noun")


def docstrings_name_their_parameters(package: Mapping[str, Source]) -> Iterator[str]:
    """Each name under `Args:` is a parameter of the function, or a field of the class."""
    for source in package.values():
        for node in source.nodes:
            if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                continue
            _, found, section = (ast.get_docstring(node) or "").partition("\nArgs:\n")
            parameters = {each.arg for item in (node, *node.body) for each in _parameters(item)}
            if not found or (not parameters and isinstance(node, ast.ClassDef)):  # the base class has the parameters
                continue
            for line in re.findall(r"^ {4}(\w+(?:, \w+)*):", re.split(r"\n(?=\S)", section)[0], re.MULTILINE):
                for name in set(line.split(", ")) - parameters:
                    yield source.at(node, f"{node.name}: {name} under Args is not a parameter")


def _parameters(node: ast.stmt) -> list[ast.arg]:
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [ast.arg(node.target.id)]
    if not isinstance(node, ast.FunctionDef):
        return []
    arguments = node.args
    listed = [*arguments.posonlyargs, *arguments.args, arguments.vararg, *arguments.kwonlyargs, arguments.kwarg]
    return [each for each in listed if each is not None]


def functions_stay_short(package: Mapping[str, Source]) -> Iterator[str]:
    """No function has more than `MAX_FUNCTION_LINES`, docstring included, and few more than `LONG_FUNCTION_LINES`."""
    found: list[tuple[int, str]] = []
    for source in package.values():
        for node in source.nodes:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > LONG_FUNCTION_LINES:
                    found.append((lines, source.at(node, f"{node.name} has {lines} lines")))
    found.sort()
    for lines, place in found:
        if lines > MAX_FUNCTION_LINES:
            yield f"{place}, more than {MAX_FUNCTION_LINES}"
    if len(found) > MAX_LONG_FUNCTIONS:
        places = "; ".join(place for _, place in found)
        yield f"{places}: at most {MAX_LONG_FUNCTIONS} functions may have more than {LONG_FUNCTION_LINES} lines"


def classes_stay_small(package: Mapping[str, Source]) -> Iterator[str]:
    """No class defines more than `MAX_METHODS` methods, properties included."""
    for source in package.values():
        for node in source.nodes:
            if not isinstance(node, ast.ClassDef):
                continue
            names = {item.name for item in node.body if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef))}
            if len(names) > MAX_METHODS:
                yield source.at(node, f"class {node.name} has {len(names)} methods, more than {MAX_METHODS}")


def folders_keep_their_size(package: Mapping[str, Source]) -> Iterator[str]:
    """No folder exceeds its limit in `MAX_CODE_LINES` or is more than `LOOSE_LINES` below it."""
    lines: Counter[str] = Counter()
    for source in package.values():
        lines[source.folder] += source.code_lines
    for folder, count in lines.items():
        most = MAX_CODE_LINES.get(folder, 0)
        if folder != "templates" and count > most:
            yield f"{folder or 'zeroaccel'}: {count} code lines, more than the {most} of MAX_CODE_LINES"
        if folder != "templates" and count < most - LOOSE_LINES:
            yield f"{folder or 'zeroaccel'}: {count} code lines: lower its {most} in MAX_CODE_LINES"


def files_stay_short(files: Mapping[str, Source]) -> Iterator[str]:
    for source in files.values():
        if (length := len(source.text.splitlines())) > MAX_LINES and str(source.path) not in LONG_FILES:
            yield source.at(1, f"{length} lines, more than {MAX_LINES}: split it by responsibility")


_CLASS = re.compile(r"^\s*class (\w+)", re.MULTILINE)


def names_say_something(files: Mapping[str, Source]) -> Iterator[str]:
    for source in files.values():
        path = source.path.with_suffix("")
        if path.parts[0] == "zeroaccel" and path.parts[1] in NAMED_BY_ACCELERATE:
            path = PurePosixPath(*path.parts[2:])
        for part in path.parts:
            if NAMELESS & set(part.lower().split("_")):
                yield source.at(1, f"{part!r} does not describe the contents")
        for found in _CLASS.finditer(source.text):
            if NAMELESS & set(re.findall(r"[a-z]+", _spaced(found[1]))):
                line = source.text.count("\n", 0, found.start(1)) + 1
                yield source.at(line, f"class {found[1]}: the name does not describe the class")


def nothing_is_left_open(files: Mapping[str, Source]) -> Iterator[str]:
    for source in files.values():
        for number, line in enumerate(source.text.splitlines(), start=1):
            if found := OPEN_ENDS.search(line):
                yield source.at(number, f"{found.group()}: finish it, or open an issue")


def _outside(package: Mapping[str, Source], path: str) -> Iterator[Source]:
    return (source for source in package.values() if str(source.path) != path)


@cache
def _names_of_torch_distributed(source: Source) -> list[tuple[ast.AST, str]]:
    """Returns (node, name) for each use of torch.distributed or its submodules, under any alias."""
    found: list[tuple[ast.AST, str]] = []
    modules = {"torch.distributed"}  # expressions for modules of torch.distributed
    for node in source.nodes:
        if isinstance(node, ast.Import):
            modules |= {alias.asname for alias in node.names if alias.asname and _distributed(alias.name)}
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if _distributed(f"{node.module}.{alias.name}"):
                    modules.add(alias.asname or alias.name)
                    found.append((node, alias.name))
    for node in source.nodes:
        if isinstance(node, ast.Attribute):
            owner = _dotted(node.value)
            if any(f"{owner}.".startswith(f"{module}.") for module in modules):
                found.append((node, node.attr))
    return found


def _distributed(name: str) -> bool:
    return name == "torch.distributed" or name.startswith("torch.distributed.")


def _reads_environment(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return _dotted(node) in ("os.environ", "os.environb", "os.getenv")
    names = {alias.name for alias in node.names} if isinstance(node, ast.ImportFrom) and node.module == "os" else set()
    return bool(names & {"environ", "environb", "getenv"})


def _assigned(node: ast.stmt) -> str:
    if isinstance(node, ast.AnnAssign):
        return _last_name(node.target)
    return _last_name(node.targets[0]) if isinstance(node, ast.Assign) else ""


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute) and (owner := _dotted(node.value)):
        return f"{owner}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _spaced(camel: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z][a-z])", " ", camel).lower()


PACKAGE_RULES: tuple[Rule, ...] = (
    imports_point_down,
    core_knows_no_facade,
    imports_have_no_circle,
    hooks_are_registered_in_one_file,
    collectives_are_called_in_comm,
    process_groups_are_made_in_one_file,
    threads_are_started_in_one_file,
    the_environment_is_read_where_the_table_says,
    every_environment_reader_in_the_table_is_one,
    devices_are_asked_for_their_type,
    public_modules_have_all,
    stages_are_compared_in_config_only,
    axes_are_named_in_parallel_only,
    storages_are_asked_for_their_kind_rarely,
    no_name_is_used_twice,
    few_modules_are_loose,
    small_modules_have_several_importers,
    the_engine_imports_downwards,
    old_words_are_gone,
    variables_say_what_they_are,
    docstrings_name_their_parameters,
    functions_stay_short,
    classes_stay_small,
    folders_keep_their_size,
)
TREE_RULES: tuple[Rule, ...] = (files_stay_short, names_say_something, nothing_is_left_open)
