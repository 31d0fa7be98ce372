"""The behaviour of transformers' Trainer when it saves on a signal on several ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from zeroaccel.compat.transformers_calls import _beside_other_ranks


@pytest.mark.parametrize(("name", "fails"), [("checkpoint-is-incomplete.txt", False), ("model.safetensors", True)])
def test_another_rank_may_remove_the_mark_first(tmp_path: Path, name: str, fails: bool) -> None:
    def execute_jit_checkpoint(saver: Any) -> None:
        os.remove(tmp_path / name)

    save = _beside_other_ranks(execute_jit_checkpoint)
    if not fails:
        save(None)
        return
    with pytest.raises(FileNotFoundError, match=name):
        save(None)
