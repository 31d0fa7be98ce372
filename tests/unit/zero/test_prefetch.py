"""The prefetch trace alone: units gathered ahead, units kept unsharded, and changes of order."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroaccel.zero.prefetch import PrefetchLimits, PrefetchTrace

SIZES = {"root": 5, "a": 10, "b": 20, "c": 30}
FORWARD = ["root", "a", "b", "c"]
PASS = [*FORWARD, "root", "c", "b", "a"]
KEEP_NOTHING = {"max_reuse_distance": 0}


class Player:
    """Acts as a residency: fetches, uses and releases units in turn, with the root around all others in forward."""

    def __init__(self, sizes: dict[str, int] = SIZES, **limits: Any) -> None:
        self.sizes = sizes
        self.schedule = PrefetchTrace(sizes, PrefetchLimits(**limits))
        self.live: dict[str, int] = {}
        self.most_live = 0

    def use(self, name: str, give_up: bool = True) -> list[str]:
        self.live[name] = self.sizes[name]
        ahead = self.schedule.need(name, self.live)
        self.live |= {fetched: self.sizes[fetched] for fetched in ahead}
        self.most_live = max(self.most_live, sum(self.live.values()))
        if give_up:
            self.give_up(name)
        return ahead

    def give_up(self, name: str) -> None:
        if not self.schedule.keep(name, self.live):
            self.live.pop(name, None)

    def play(self, order: list[str] = PASS, kind: str = "train") -> list[list[str]]:
        self.schedule.begin(kind)
        forward = order[: len(order) // 2] if kind == "train" else order
        seen = []
        for index, name in enumerate(order):
            seen.append(self.use(name, give_up=name != "root"))
            if index == len(forward) - 1:
                self.give_up("root")
        self.live.clear()
        self.schedule.end()
        return seen


def _played(**limits: int) -> Player:
    """Returns a player that has recorded a pass."""
    player = Player(**limits)
    player.play()
    return player


def test_the_first_pass_fetches_nothing_ahead_and_keeps_nothing() -> None:
    player = Player(prefetch_bucket_size=1, **KEEP_NOTHING)
    assert player.play() == [[]] * 8
    assert not any(action.startswith(("PREFETCH", "KEEP")) for action in player.schedule.actions)
    player.play()
    assert player.schedule.actions[:4] == ["UNSHARD root", "PREFETCH a", "UNSHARD a", "PREFETCH b"]


@pytest.mark.parametrize(
    ("budget", "expected"),
    [(0, ""), (1, "a"), (10, "a"), (11, "a b"), (30, "a b"), (31, "a b c"), (60, "a b c")],
)
def test_the_prefetch_budget(budget: int, expected: str) -> None:
    assert _played(prefetch_bucket_size=budget, **KEEP_NOTHING).play()[0] == expected.split()


def test_pending_units_count_against_the_budget() -> None:
    ahead = _played(prefetch_bucket_size=20, **KEEP_NOTHING).play()
    # a takes 10 of the 20 elements, and b exceeds them; at a, b alone uses the whole budget.
    assert ahead[:3] == [["a", "b"], [], ["c"]]


@pytest.mark.parametrize("budget", [1, 15_000_000, 50_000_000])
def test_the_next_layer_is_always_fetched_ahead(budget: int) -> None:
    """The layers are larger than the default bucket, and than that of "auto" at a width of 4096."""
    layer = 202_000_000
    layers = [f"layers.{index}" for index in range(6)]
    order = [*layers, *reversed(layers)]
    player = Player(dict.fromkeys(layers, layer), prefetch_bucket_size=budget, **KEEP_NOTHING)
    player.play(order)
    ahead = player.play(order)
    turn = len(layers) - 1  # the last layer ends the forward and begins the backward
    assert ahead[:turn] == [[name] for name in layers[1:]]
    assert ahead[turn + 1 : -1] == [[name] for name in reversed(layers[:-1])]
    assert player.most_live == 2 * layer
    without_room = Player(dict.fromkeys(layers, layer), max_live_parameters=2 * layer - 1, **KEEP_NOTHING)
    without_room.play(order)
    assert without_room.play(order) == [[]] * len(order)


def test_the_next_layer_is_fetched_however_large_unless_the_program_sets_the_limit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    layer = 850_000_000  # a layer of a 70B model; two exceed the default limit
    layers = [f"layers.{index}" for index in range(6)]
    sizes, order = dict.fromkeys(layers, layer), [*layers, *reversed(layers)]
    by_default = Player(sizes, next_always=True, **KEEP_NOTHING)
    by_default.play(order)
    ahead = by_default.play(order)
    assert ahead[:5] == [[name] for name in layers[1:]]
    assert by_default.most_live == 2 * layer
    assert not caplog.records
    limited = Player(sizes, **KEEP_NOTHING)
    for _ in range(3):
        ahead = limited.play(order)
    assert ahead == [[]] * len(order)
    [warning] = caplog.messages  # one in total, not one per unit
    assert "layers.1 is not gathered ahead" in warning
    assert "its 850000000 elements plus the 850000000 in use exceed" in warning
    assert "zero_optimization.stage3_max_live_parameters, 1000000000; remove the key, or raise it" in warning


def test_nothing_is_fetched_past_a_unit_that_is_given_up_first() -> None:
    ahead = _played(**KEEP_NOTHING).play()
    assert ahead[3] == []  # the next units, root and c, are unsharded but will be released first
    assert ahead[4] == ["c", "b", "a"]


def test_no_more_than_the_live_limit_is_fetched_ahead_or_kept() -> None:
    player = _played(max_live_parameters=36, **KEEP_NOTHING)
    assert player.play()[0] == ["a", "b"]
    assert player.most_live <= 36
    player = _played(max_live_parameters=0)
    player.play()
    assert not any(action.startswith(("KEEP", "PREFETCH")) for action in player.schedule.actions)


def test_a_unit_that_is_needed_next_is_kept_beyond_the_limit() -> None:
    """Three micro-batches pass through a, then three through b, and the root is around each of them."""
    for next_always, kept in ((True, ["a", "root", "a", "root", "root", "b", "root", "b", "root"]), (False, [])):
        limits = PrefetchLimits(max_live_parameters=0, prefetch_bucket_size=0, next_always=next_always)
        schedule, live = PrefetchTrace(SIZES, limits), dict[str, int]()
        for _ in range(2):
            schedule.begin("train")
            for unit in "aaabbb":
                for name in ("root", unit):
                    live[name] = SIZES[name]
                    schedule.need(name, live)
                for name in (unit, "root"):
                    if not schedule.keep(name, live):
                        live.pop(name)
            schedule.end()
        assert [action.removeprefix("KEEP ") for action in schedule.actions if action.startswith("KEEP")] == kept


def test_a_unit_needed_soon_is_kept() -> None:
    player = _played(max_reuse_distance=35)
    player.play()
    # The reuse distance of c is root and c, 5 + 30; that of b is 30 + 5 + 30 + 20.
    assert {"KEEP c", "RESHARD b"} <= {*player.schedule.actions}
    assert player.schedule.actions.count("RESHARD a") == 2


def test_a_changed_order_warns_once_and_is_recorded_anew(caplog: pytest.LogCaptureFixture) -> None:
    player = _played()
    other = ["root", "b", "a", "c", "root", "c", "a", "b"]
    assert player.play(other)[1:] == [[]] * 7
    assert any(player.play(other))
    player.play()
    (warning,) = caplog.messages
    assert "b came where a was expected" in warning


def test_passes_of_different_kinds_have_their_own_order() -> None:
    player = _played(**KEEP_NOTHING)
    assert player.play(FORWARD, "eval") == [[]] * 4
    assert player.play()[0] == player.play(FORWARD, "eval")[0] == ["a", "b", "c"]


def test_an_incomplete_pass_keeps_the_schedule_and_outside_a_pass_nothing_is_fetched() -> None:
    player = _played(**KEEP_NOTHING)
    player.schedule.begin("train")
    player.use("root")
    player.use("a")
    player.live.clear()
    assert player.play()[0] == ["a", "b", "c"]
    player.schedule.actions.clear()
    assert player.use("b") == []
    assert not player.schedule.in_pass


def test_forgetting_starts_over() -> None:
    player = _played()
    player.schedule.forget()
    assert player.play() == [[]] * 8
    assert any(player.play())


@given(
    st.lists(st.sampled_from(sorted(SIZES)), min_size=1, max_size=12),
    st.integers(0, 80),
    st.integers(0, 80),
    st.integers(0, 80),
)
def test_the_limits_hold_for_any_order(order: list[str], budget: int, live: int, reuse: int) -> None:
    schedule = PrefetchTrace(
        SIZES, PrefetchLimits(prefetch_bucket_size=budget, max_live_parameters=live, max_reuse_distance=reuse)
    )
    for _ in range(3):
        schedule.begin("train")
        whole: dict[str, int] = {}
        early: set[str] = set()
        for name in order:
            whole[name] = SIZES[name]
            ahead = schedule.need(name, whole)
            assert not set(ahead) & whole.keys()
            early = (early - {name}) | set(ahead)
            whole |= {unit: SIZES[unit] for unit in ahead}
            newest = SIZES[ahead[-1]] if ahead else 0
            assert not ahead or sum(SIZES[unit] for unit in early) - newest < budget
            assert sum(whole.values()) <= live or not ahead
            if not schedule.keep(name, whole):
                whole.pop(name)
        schedule.end()
