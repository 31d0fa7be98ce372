"""The flight recorder: sequence numbers, hashes that ranks compare, and the facts that a watchdog reads."""

from __future__ import annotations

from zeroaccel.comm.hangs.flight_recorder import Call, CollectiveRecord, FlightRecorder, Kind

TAG_OF_THREE_GATHERS = 493260237


def _issue(recorder: FlightRecorder, kind: Kind, label: str, numel: int = 8) -> CollectiveRecord:
    return recorder.issue(kind, "all_gather", label, numel, "float32")


def test_calls_are_numbered_within_their_kind() -> None:
    recorder = FlightRecorder()
    calls = [_issue(recorder, kind, "x").call for kind in ("gather", "reduce", "gather", "control")]
    assert [(call.kind, call.seq) for call in calls] == [("gather", 1), ("reduce", 1), ("gather", 2), ("control", 1)]
    assert recorder.issued() == {"gather": 2, "reduce": 1, "control": 1}


def test_equal_histories_have_equal_digests_and_tags_in_every_process() -> None:
    recorders = FlightRecorder(), FlightRecorder()
    entries = [[_issue(recorder, "gather", f"unshard {i}") for i in range(3)] for recorder in recorders]
    assert recorders[0].digest() == recorders[1].digest()
    assert [entry.tag for entry in entries[0]] == [entry.tag for entry in entries[1]]
    # A constant, because a hash with a salt per process would pass the checks above.
    assert entries[0][-1].tag == TAG_OF_THREE_GATHERS


def test_every_fact_of_a_call_changes_the_digest() -> None:
    call = ("gather", "all_gather", "a", 8, "float32")
    changes = [(0, "reduce"), (1, "broadcast"), (2, "b"), (3, 9), (4, "bfloat16")]
    variants = [call, *((*call[:place], other, *call[place + 1 :]) for place, other in changes)]
    digests = set()
    for variant in variants:
        recorder = FlightRecorder()
        recorder.issue(*variant)  # type: ignore[arg-type]
        digests.add(recorder.digest())
    assert len(digests) == len(variants)


def test_order_matters_within_a_kind_and_not_between_kinds() -> None:
    def digest_of(*calls: tuple[Kind, str]) -> int:
        recorder = FlightRecorder()
        for kind, label in calls:
            _issue(recorder, kind, label)
        return recorder.digest()

    assert digest_of(("gather", "a"), ("gather", "b")) != digest_of(("gather", "b"), ("gather", "a"))
    assert digest_of(("gather", "a"), ("reduce", "b")) == digest_of(("reduce", "b"), ("gather", "a"))


def test_the_common_order_of_gathers_and_reductions_has_its_own_digest() -> None:
    recorders = [FlightRecorder() for _ in range(3)]
    for kinds, recorder in zip(("gather reduce", "reduce gather", "gather control reduce"), recorders, strict=True):
        for kind in kinds.split():
            _issue(recorder, kind, "a")  # type: ignore[arg-type]
    one, other, more = (recorder.order_digest() for recorder in recorders)
    assert one != other
    assert one == more, "control messages are on another communicator"
    assert 0 <= one < 2**52


def test_a_difference_stays_in_the_digest() -> None:
    recorders = FlightRecorder(), FlightRecorder()
    for recorder, label in zip(recorders, "ab", strict=True):
        _issue(recorder, "gather", label)
        for _ in range(1000):
            _issue(recorder, "gather", "same")
    assert recorders[0].digest() != recorders[1].digest()


def test_digests_are_exact_in_a_double() -> None:
    recorder = FlightRecorder()
    for number in range(200):
        _issue(recorder, "gather", str(number))
        assert 0 <= recorder.digest() < 2**52
        assert int(float(-recorder.digest())) == -recorder.digest()


def test_the_phase_is_remembered_but_not_compared() -> None:
    forward, backward = FlightRecorder(), FlightRecorder()
    forward.phase, backward.phase = "forward", "backward"
    calls = [_issue(recorder, "gather", "a").call for recorder in (forward, backward)]
    assert [call.phase for call in calls] == ["forward", "backward"]
    assert calls[0].same_as(calls[1])
    assert forward.digest() == backward.digest()


def test_the_longest_wait_began_first_and_the_last_finished_call_is_the_last_to_finish() -> None:
    recorder = FlightRecorder()
    assert (recorder.longest_wait, recorder.last_finished) == (None, None)
    first, second = _issue(recorder, "gather", "a"), _issue(recorder, "reduce", "b")
    recorder.begin_wait(second)
    recorder.begin_wait(first)
    assert recorder.longest_wait is second
    recorder.end_wait(second)
    assert recorder.longest_wait is first
    recorder.finish(second)
    recorder.finish(first)
    assert recorder.last_finished is first


def test_recent_calls_are_kept_per_kind_and_bounded() -> None:
    recorder = FlightRecorder(capacity=10)
    for number in range(20):
        _issue(recorder, "gather", str(number))
    _issue(recorder, "control", "c")
    expected = [("gather", "17"), ("gather", "18"), ("gather", "19"), ("control", "c")]
    assert [(call.kind, call.label) for call in recorder.recent(per_kind=3)] == expected
    assert len(recorder.recent(per_kind=100)) == 10


def test_the_text_of_a_call() -> None:
    call = Call("gather", 412, "all_gather", "unshard layers.3", 4096, "bfloat16", "backward")
    assert str(call) == 'gather #412 all_gather "unshard layers.3" (4096 x bfloat16, backward)'
