"""Which files of a folder are a DeepSpeed checkpoint, and whether all of them are there.

Looks at names only; what is in the files is `deepspeed_format.py`'s matter. No torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from zeroaccel.checkpoint.latest import read_latest
from zeroaccel.checkpoint.manifest import MANIFEST_NAME, check_tag
from zeroaccel.errors import CheckpointError

__all__ = ["CheckpointFiles", "find_files", "has_files", "is_deepspeed_checkpoint", "resolve_folder"]

_MODEL = re.compile(r"(?:zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<mp>\d+)_model_states\.pt")
_OPTIM = re.compile(r"(?P<bf16>bf16_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<mp>\d+)_?optim_states\.pt")
_MOST_NAMES = 50
_OTHER_PARALLELISM = re.compile(r"(expp_rank_|layer_).*\.pt")


@dataclass(frozen=True)
class CheckpointFiles:
    """The files of one tag.

    Attributes:
        whole_model: the model file of stages 0 to 2, or None.
        models: rank -> model file, stage 3.
        optims: rank -> optimizer file.
        universal: the folder with a folder for each parameter, or None.
    """

    folder: Path
    whole_model: Path | None
    models: dict[int, Path]
    optims: dict[int, Path]
    universal: Path | None

    def require_ranks(self, world_size: int, *, models: bool) -> None:
        """CheckpointError unless each of `world_size` ranks has its files, and there are no others."""
        kinds = [("optim_states.pt", self.optims)] + ([("model_states.pt", self.models)] if models else [])
        for kind, found in kinds:
            example = next(iter(found.values())).name if found else f"zero_pp_rank_0_mp_rank_00_{kind}"
            absent = islice((rank for rank in range(world_size) if rank not in found), _MOST_NAMES)
            missing = [re.sub(r"pp_rank_\d+", f"pp_rank_{rank}", example) for rank in absent]
            extra = [path.name for rank, path in sorted(found.items()) if rank >= world_size]
            if missing:
                raise CheckpointError(
                    f"{self.folder}: incomplete, a file of each of {world_size} ranks is needed; "
                    f"missing: {', '.join(missing)}{', ...' if len(missing) == _MOST_NAMES else ''}",
                    fix="copy them from the machines that wrote them",
                )
            if extra:
                raise CheckpointError(
                    f"{self.folder}: saved by {world_size} ranks; of another save: {', '.join(extra)}",
                    fix="move them elsewhere",
                )


def is_deepspeed_checkpoint(root: Path, tag: object = None) -> bool:
    """Whether a folder, or the tag in it, looks as DeepSpeed writes it (and not as we do)."""
    try:
        folder, _ = resolve_folder(root, tag)
    except CheckpointError:
        return False
    return not (folder / MANIFEST_NAME).exists() and has_files(folder)


def has_files(folder: Path) -> bool:
    """Whether a folder holds files with the names that DeepSpeed gives."""
    return any(form.fullmatch(path.name) for path in folder.iterdir() for form in (_MODEL, _OPTIM, _OTHER_PARALLELISM))


def resolve_folder(root: Path, tag: object = None) -> tuple[Path, str]:
    """(folder, tag) of a tag, of what `latest` (or `latest_universal`) names, or of a folder that is a tag's itself.

    Raises:
        CheckpointError: there is none; it names those there are.
    """
    if tag is None and root.is_dir() and has_files(root):
        return root, root.name
    if tag is None:
        for name in ("latest", "latest_universal"):
            if (root / name).exists():
                tag = read_latest(root, name)
                break
    there = sorted(path.name for path in root.iterdir() if path.is_dir() and has_files(path)) if root.is_dir() else []
    listed = ", ".join(there) or "none"
    if tag is None:
        raise CheckpointError(
            f"{root / 'latest'}: cannot be read", got=f"checkpoints in {root}: {listed}", fix="pass a tag"
        )
    folder = root / check_tag(tag)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such checkpoint", got=f"in {root}: {listed}")
    return folder, str(tag)


def find_files(folder: Path) -> CheckpointFiles:
    """Sorts the files of a tag's folder.

    Raises:
        CheckpointError: they are of a kind that cannot be read: tensor, pipeline or expert parallel, or of two saves.
    """
    whole: Path | None = None
    models: dict[int, Path] = {}
    optims: dict[int, Path] = {}
    prefixes: dict[str, str] = {}
    for path in sorted(folder.iterdir()):
        if _OTHER_PARALLELISM.fullmatch(path.name):
            raise CheckpointError(f"{path}: of pipeline or expert parallel training", expected="data parallel only")
        match = _MODEL.fullmatch(path.name) or _OPTIM.fullmatch(path.name)
        if match is None:
            continue
        if int(match["mp"]):
            raise CheckpointError(f"{path}: of tensor parallel training", expected="data parallel only")
        if match.re is _OPTIM:
            prefixes[match["bf16"] or ""] = path.name
            optims[int(match["rank"])] = path
        elif match["rank"] is None:
            whole = path
        else:
            models[int(match["rank"])] = path
    if len(prefixes) > 1:
        raise CheckpointError(
            f"{folder}: files of two saves, {' and '.join(sorted(prefixes.values()))}", fix="remove the older ones"
        )
    if whole is None and not models:
        raise CheckpointError(
            f"{folder}: incomplete, mp_rank_00_model_states.pt or zero_pp_rank_0_mp_rank_00_model_states.pt is missing"
        )
    universal = folder / "zero"
    return CheckpointFiles(folder, whole, models, optims, universal if universal.is_dir() else None)
