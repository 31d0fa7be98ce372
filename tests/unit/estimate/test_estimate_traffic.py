"""Traffic between machines, as `zeroaccel estimate` prints it."""

from __future__ import annotations

import pytest

from zeroaccel.estimate import Workload, traffic_table


def test_rows_in_units_of_the_model() -> None:
    rows = {row.name: row for row in traffic_table(10**9, Workload(ranks=32, ranks_per_machine=8))}
    unit = 2e9 * (32 - 8) / 32
    across = {name: row.across / unit for name, row in rows.items()}
    assert across["stage 3"] == pytest.approx(3, rel=1e-4)
    assert across["hpZ"] == pytest.approx(2, rel=1e-4)
    assert across["qwZ + hpZ"] == pytest.approx(1.5, rel=0.01)
    assert across["qwZ + hpZ + qgZ"] == pytest.approx(0.5 + 0.25 / 8, rel=0.01)
    assert across["replicas of one machine"] == pytest.approx(3 / 8, rel=1e-4)


def test_one_machine_sends_nothing() -> None:
    assert traffic_table(10**9, Workload(ranks=8)) == []
    alone = {row.name: row.across for row in traffic_table(10**6, Workload(ranks=2, ranks_per_machine=1))}
    assert alone["hpZ"] == alone["stage 3"]
