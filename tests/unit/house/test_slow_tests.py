"""`tests/slow_tests.txt` names existing tests, and thinned parameters still cover each value."""

from __future__ import annotations

import re
from itertools import product
from types import SimpleNamespace
from typing import Any

from tests.conftest import not_covering, slow_tests
from tests.support.environment import ROOT


def test_every_line_names_a_test_that_is_there() -> None:
    slow, crossed = slow_tests()
    assert len(slow) > 200
    assert len(crossed) > 20
    missing = []
    for beginning in (*slow, *crossed):
        path, _, rest = beginning.partition("::")
        name = rest.partition("[")[0]
        if not re.search(rf"^def {name}\b", (ROOT / path).read_text(), re.MULTILINE):
            missing.append(beginning)
    assert missing == []


def test_thinned_parameters_cover_every_value() -> None:
    values = ["abcd", "xyz", "01"]
    items: list[Any] = [SimpleNamespace(callspec=SimpleNamespace(_idlist=ids)) for ids in product(*values)]
    for count in (len(items), 7, 1, 0):
        some = items[:count]
        rest = not_covering(some)
        left = [item.callspec._idlist for item in some if item not in rest]
        for place in range(3):
            assert {ids[place] for ids in left} == {item.callspec._idlist[place] for item in some}
    assert len(not_covering(items)) == len(items) - 4
