"""LayerDrop with a draw per rank: correct below stage 3 and with one unit; otherwise an error with the remedy."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

from tests import time_limits
from tests.multi.zero import layer_drop
from tests.support.job import run_job
from tests.support.pool import IMPORTS, Pool


def test_ranks_may_drop_other_layers(ranks: Callable[[int], Pool]) -> None:
    leaf = {"leaf_module": {"names": ["wav2vec2.encoder"]}}
    expected = ranks(2).run(layer_drop.train, 0)
    for stage, changes in ((2, {}), (3, leaf)):
        for own, (norms, weights) in zip(expected, ranks(2).run(layer_drop.train, stage, **changes), strict=True):
            assert norms == own[0]
            assert all(torch.equal(weight, own[1][name]) for name, weight in weights.items())


def test_at_stage_3_the_error_names_block_ranks_and_cure() -> None:
    limit = {"ZEROACCEL_COLLECTIVE_TIMEOUT": f"{time_limits.seconds(8.0):g}"}
    result = run_job(2, "tests/multi/zero/layer_drop.py", [], timeout=60, env=limit, imports=IMPORTS)
    assert result.returncodes == (75, 75), result.stderr
    message = (
        r"Rank [01] skipped wav2vec2\.encoder\.layers\.\d in (forward|backward), which rank [01] runs; .*LayerDrop"
        r'.*leaf_module\.names \["wav2vec2\.encoder"\]'
    )
    assert re.search(message, result.stderr), result.stderr
