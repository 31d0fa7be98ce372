"""Hook of mkdocs: generates pages of the site from the code, and adapts links of pages outside docs/.

The reference comes from the data that the program uses: the help of the commands, the schema of the config with its
table of supported keys, and the settings of a launch. It therefore always matches the program.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click
from error_messages import FOREIGN, errors_page
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import zeroaccel
from zeroaccel.cli.main import SUB_COMMANDS
from zeroaccel.cli.main import main as main_command
from zeroaccel.compat.deepspeed_engine import DeepSpeedEngine
from zeroaccel.compat.surface import ABSENT, ABSENT_MEMBERS, QUESTIONS, SURFACE
from zeroaccel.config.launch.launch_sources import OTHER_VARIABLES
from zeroaccel.config.launch.setting_table import SETTINGS
from zeroaccel.config.schema import Config
from zeroaccel.config.section import field_paths, nested_section, spellings
from zeroaccel.config.support import KEYS, Kind, SupportStatus
from zeroaccel.engine import Engine

ROOT = Path(__file__).resolve().parents[2]
FROM_TREE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
"""Page of the tree -> page of the site; results of benchmarks keep their paths."""
_KEYWORDS = {
    "index.md": "quickstart, multi-GPU, Trainer",
    "install.md": "pip, CUDA 12, CUDA 13, CPU only, ROCm, versions",
    "does_not_fit.md": "OOM, CUDA out of memory, OutOfMemoryError, GPU memory",
    "estimate.md": "how much memory do I need, VRAM, GPU memory",
    "models.md": "how much memory do I need, which GPU, VRAM, 70B, 24 GB, 80 GB",
    "resume.md": "resume on another number of ranks, other world size, more GPUs, fewer GPUs, elastic",
    "checkpoints.md": "resume on another number of ranks, save_checkpoint, load_checkpoint",
    "consolidate.md": "zero_to_fp32, convert checkpoint to safetensors, merge weights, fp32 state dict",
    "hand_over.md": "convert checkpoint to safetensors, export, vLLM, llama.cpp, GGUF, merge LoRA",
    "training.md": "gradient accumulation stage, micro-batch, precision, learning rate schedule, clipping",
    "launch.md": "multi-GPU, GPUs, torchrun, deepspeed launcher, accelerate launch",
    "several_machines.md": "multi-node, nodes, hostfile, ssh",
    "clusters.md": "SLURM, sbatch, Kubernetes",
    "hangs.md": "NCCL timeout, NCCL watchdog, deadlock, stuck, hang",
    "config.md": "DeepSpeed config, ds_config.json, auto",
    "configure.md": "accelerate config, zeroaccel.yaml, wizard",
    "coming_from.md": "DeepSpeed config, accelerate config, FSDP, DDP, migrate",
    "huggingface.md": "Trainer, transformers, PEFT, TRL, SFT, DPO",
    "rollout.md": "GRPO, vLLM, RLHF, reinforcement learning, rollout engine",
    "sequence_parallel.md": "long context, context parallel, Ulysses, ring attention, million tokens",
    "mixture_of_experts.md": "mixture of experts, MoE, expert parallel",
    "tensor_parallel.md": "TP, tensor parallel",
    "pipeline_parallel.md": "PP, pipeline parallel, 1F1B",
    "qlora.md": "QLoRA, 4-bit, bitsandbytes, NF4, 70B, LoRA",
    "fp8_mxfp4.md": "FP8, MXFP4, gpt-oss, DeepSeek",
    "offload.md": "offload optimizer to CPU, NVMe, ZeRO-Offload, ZeRO-Infinity, SSD",
    "slow.md": "training is slow, throughput, speed, GPU utilization",
    "activations.md": "gradient checkpointing, recomputation",
    "tracking.md": "tensorboard, wandb, MFU, tokens per second",
    "reference/errors.md": "error message, exception, traceback, exit code",
    "releases.md": "upgrade, deprecated, version, migration from 0.2",
    "recipes.md": "axolotl, ms-swift, GRPO, FP8 base, examples",
    "faq.md": "gradient accumulation stage, questions",
}
"""Page -> words that people search for; a match of these counts more than any other."""
_RANKS = {"benchmarks/": 0.02, "changelog.md": 0.02, "contributing.md": 0.1, "design.md": 0.2}
_RANKS |= {"reference/errors.md": 0.6, "reference/": 0.2}
"""Start of a page's place -> its weight in search results, 1 for a guide."""
_CELL = re.compile(r"<td.*?</td>", re.DOTALL)
_WRAPS = re.compile(r"(_|[A-Za-z)\"'][./,=])(?=\w)(?![^<>]*>)")  # but not inside a tag
_PICTURE = re.compile(r'<picture>\s*<source [^>]*srcset="([^"]+)">\s*<img alt="([^"]+)" src="([^"]+)">\s*</picture>')
_LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that are not in docs/."""
    pages = {place: _from_tree(ROOT / path, path) for path, place in FROM_TREE.items()}
    for path in _results_linked_to():
        pages[path] = _from_tree(ROOT / path, path)
    pages |= {
        "reference/api.md": _api("zeroaccel", "The package", [name for name in zeroaccel.__all__ if name[0] != "_"]),
        "reference/parallel.md": "# Parallelism\n\n::: zeroaccel.parallel\n",
        "reference/zero.md": "# Parameters\n\n::: zeroaccel.zero\n",
        "reference/estimate.md": "# Memory\n\n::: zeroaccel.estimate\n",
        "reference/commands.md": "\n".join(_commands()),
        "reference/config_keys.md": "\n".join(_config_keys()),
        "reference/launch_keys.md": "\n".join(_launch_keys()),
        "reference/environment.md": "\n".join(_variables()),
        "reference/errors.md": "\n".join(errors_page(ROOT)),
        "reference/deepspeed.md": "\n".join(deepspeed_page()),
    }
    for place, text in pages.items():
        files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Sets the place of a page among search results, and points links out of docs/ to the pages of the site."""
    place = page.file.src_uri
    weight = next((weight for start, weight in _RANKS.items() if place.startswith(start)), 1)
    tags = _KEYWORDS.get(place, "").split(", ") + [message for message, *_ in FOREIGN if place == "reference/errors.md"]
    page.meta |= {"search": {"boost": weight}} | ({"tags": tags} if place in _KEYWORDS else {})
    if place in FROM_TREE.values() or not place.startswith(("reference/", "benchmarks/")):
        return _relinked(markdown, posixpath.join("docs", place), place)
    return markdown


def on_post_page(output: str, *, page: Page, config: MkDocsConfig) -> str:
    """Lets names in table cells wrap after a dot, an underscore or a slash; the search index keeps them whole."""
    return _CELL.sub(lambda cell: _WRAPS.sub(r"\1<wbr>", cell[0]), output)


def _from_tree(path: Path, name: str) -> str:
    # The theme of a page chooses a picture by the end of its address.
    text = _PICTURE.sub(r"![\2](\3#only-light)\n![\2](\1#only-dark)", path.read_text())
    return _relinked(text, name, FROM_TREE.get(name, name))


def _relinked(text: str, path: str, place: str) -> str:
    """Returns the text of a page at `path` in the tree with its links adapted to `place` on the site."""

    def link(match: re.Match[str]) -> str:
        label, target, anchor = match[1], match[2], match[3] or ""
        if "://" in target or target.startswith("mailto:"):
            return match[0]
        there = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
        if there in FROM_TREE:
            there = FROM_TREE[there]
        elif there.startswith("docs/"):
            there = there.removeprefix("docs/")
        elif not (there.startswith("benchmarks/") and there.endswith(".md")):
            return match[0] if not (ROOT / there).exists() else f"`{there}`"
        return f"[{label}]({posixpath.relpath(there, posixpath.dirname(place) or '.')}{anchor})"

    return _LINK.sub(link, text)


def _results_linked_to() -> list[str]:
    """Returns the pages below benchmarks/ that pages of docs/ and of the root link to, directly or indirectly."""
    found: set[Path] = set()
    pages = [*sorted((ROOT / "docs").glob("*.md")), *(ROOT / name for name in FROM_TREE)]
    while pages:
        page = pages.pop()
        linked = {(page.parent / match[2]).resolve() for match in _LINK.finditer(page.read_text())}
        new = {each for each in linked - found if each.is_relative_to(ROOT / "benchmarks") and each.suffix == ".md"}
        new = {each for each in new if each.is_file()}
        pages += new
        found |= new
    return sorted(each.relative_to(ROOT).as_posix() for each in found)


# -- the reference


def _api(module: str, title: str, names: list[str]) -> str:
    return "\n".join([f"# {title}", "", *(f"::: {module}.{name}\n" for name in names)])


def _commands() -> Iterator[str]:
    yield "# Commands"
    for name in ("", *SUB_COMMANDS):
        command: click.Command = main_command if not name else _command(name)
        yield from _help(f"zeroaccel {name}".strip(), command)


def _command(name: str) -> click.Command:
    group = main_command
    command = group.get_command(click.Context(group), name)
    assert command is not None, name
    return command


def _help(name: str, command: click.Command) -> Iterator[str]:
    context = click.Context(command, info_name=name, terminal_width=90, max_content_width=90)
    yield from ("", f"## {name}", "", "```text", command.get_help(context), "```")
    if isinstance(command, click.Group) and name != "zeroaccel":
        for below in command.list_commands(context):
            sub = command.get_command(context, below)
            assert sub is not None, below
            yield from _help(f"{name} {below}", sub)


_KINDS = {Kind.WORKS: "works", Kind.IGNORED: "does nothing", Kind.REFUSED: "refused when on"}


def _config_keys() -> Iterator[str]:
    yield "# Keys of the JSON config"
    yield ""
    yield "The keys of DeepSpeed's format, and a few more. `zeroaccel config validate FILE` explains a file."
    yield from ("", "| key | default | what it sets | here |", "| --- | --- | --- | --- |")
    for path in field_paths(Config):
        *above, name = path
        section: Any = Config
        for part in above:
            section = nested_section(section.model_fields[part])
        field = section.model_fields[name]
        is_section = nested_section(field) is not None
        status = _status(".".join(path))
        also = [mark.name for mark in spellings(field)]
        about = " ".join((field.description or "").split()) + (f" Also spelled {', '.join(also)}." if also else "")
        here = _KINDS[status.kind] + (f": {status.reason}" if status.reason else "")
        default = "" if is_section else _default(field.get_default(call_default_factory=True))
        yield f"| `{'.'.join(path)}` | {default} | {_cell(about)} | {_cell(here)} |"


def _status(key: str) -> SupportStatus:
    """Returns the table entry of a key, or that of its section."""
    while key not in KEYS and "." in key:
        key = key.rpartition(".")[0]
    return KEYS[key]


def _launch_keys() -> Iterator[str]:
    yield "# Keys of the launch file"
    yield ""
    yield "Each setting as a key of the file, as a flag of `zeroaccel launch`, and in the environment. Flags override"
    yield "the environment, which overrides the file."
    yield from ("", "| key | flag | variables | what it sets | read by |", "| --- | --- | --- | --- | --- |")
    for row in SETTINGS.values():
        variables = ", ".join(f"`{variable}`" for variable in row.read_variables)
        key = ".".join(row.key)
        yield f"| `{key}` | `{row.flag_name}` | {variables} | {_cell(row.about)} | {row.read_by} |"


def _variables() -> Iterator[str]:
    yield "# Environment variables"
    yield ""
    yield "Variables other than the [settings of a launch](launch_keys.md). A variable that begins with `ZEROACCEL_`"
    yield "and that nothing reads is an error, which names the nearest one."
    yield from ("", "| variable | what it does |", "| --- | --- |")
    for name, about in OTHER_VARIABLES.items():
        yield f"| `{name}` | {about} |"


def deepspeed_page() -> Iterator[str]:
    """Yields the page of all names that `import deepspeed` provides or refuses, from the tables of the facade."""
    yield "# DeepSpeed's names"
    yield ""
    yield "The names that `import deepspeed` provides under zeroaccel ([behaviour](../deepspeed_names.md))."
    yield from ("", "## Modules", "", "| module | names |", "| --- | --- |")
    for module, provided in SURFACE.items():
        if provided:
            yield f"| `{module}` | {_names(provided)} |"
    yield from ("", "## Engine", "")
    own = sorted(name for name in dir(DeepSpeedEngine) if name[0] != "_" and not hasattr(Engine, name))
    yield f"Besides the members of zeroaccel's `Engine`: {_names(own)}."
    yield ""
    yield f"Members that return a value of the config or its default: {_names(QUESTIONS)}."
    yield from ("", "| missing member | instead |", "| --- | --- |")
    yield from (f"| `engine.{name}` | {_cell(instead)} |" for name, instead in ABSENT_MEMBERS.items())
    yield from (
        "",
        "## Missing names",
        "",
        "A module in this list covers all its names that the list of modules lacks.",
    )
    yield from ("", "| name | instead |", "| --- | --- |")
    yield from (f"| `{name}` | {_cell(instead)} |" for name, instead in ABSENT.items())


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _default(value: object) -> str:
    return "" if value in (None, "", (), {}) else f"`{str(value).replace('|', '/')}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
