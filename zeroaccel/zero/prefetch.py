"""The prefetch trace: the order in which one pass uses the units, recorded once and then replayed.

A pass is one forward and the backward after it (or one forward without gradients). The first pass only records: the
coordinator prefetches nothing and reshards every unit after use. From then on it gathers the next units ahead, and
keeps a unit unsharded that is needed again soon. (DeepSpeed traces modules in the same way, for its `stage3_*` limits.)

Pure Python: units are names with sizes, and decisions are printable actions, so that a trace can be read, compared
between ranks and tested without a process group. `coordinator.py` carries the actions out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from zeroaccel.logs import logger


@dataclass(frozen=True)
class PrefetchLimits:
    """Bounds on unsharded and prefetched parameters, in elements (the `stage3_*` keys of the same names).

    Attributes:
        prefetch_bucket_size: number of elements to gather ahead; the last unit may exceed it. 0 gathers nothing ahead.
        max_live_parameters: bound on all unsharded units; a unit that would exceed it is not gathered ahead.
        max_reuse_distance: a unit that is needed again within this many elements stays unsharded.
        next_always: gather the next needed unit ahead, and keep a unit that is needed next, even if they exceed
            `max_live_parameters`.
    """

    prefetch_bucket_size: int = 50_000_000
    max_live_parameters: int = 1_000_000_000
    max_reuse_distance: int = 1_000_000_000
    next_always: bool = False


@dataclass
class _Recording:
    """The uses of one pass, in order."""

    order: list[str] = field(default_factory=list)
    complete: bool = False
    next_use: list[int | None] = field(default_factory=list)
    """Number of elements needed from position i until the unit of position i is needed again, that unit included."""

    def seal(self, numels: Mapping[str, int]) -> None:
        """Computes the reuse distances, back to front: `ahead` is the number of elements used after position i."""
        ahead = 0
        last: dict[str, int] = {}
        self.next_use = [None] * len(self.order)
        for index in range(len(self.order) - 1, -1, -1):
            name = self.order[index]
            if name in last:
                self.next_use[index] = ahead - last[name]
            last[name] = ahead
            ahead += numels[name]
        self.complete = True


class PrefetchTrace:
    """Decides which units to prefetch and which to keep unsharded, from the recorded order and the limits.

    1. `begin(kind)` at the start of a pass, 2. `need(unit)` each time a unit must be unsharded; returns the units to
    prefetch, 3. `keep(unit)` after each use; returns True to leave the unit unsharded, 4. `end()`.

    Example:
        >>> trace = PrefetchTrace({"a": 10, "b": 10}, PrefetchLimits(max_reuse_distance=0))
        >>> for _ in range(2):  # the first pass records, the second prefetches
        ...     trace.begin("eval")
        ...     ahead = [trace.need("a", {"a": 10}), trace.need("b", {"b": 10})]
        ...     trace.end()
        >>> ahead
        [['b'], []]
        >>> trace.actions
        ['UNSHARD a', 'PREFETCH b', 'UNSHARD b']
    """

    def __init__(self, numels: Mapping[str, int], limits: PrefetchLimits) -> None:
        self._numels = dict(numels)
        self._limits = limits
        self._traces: dict[str, _Recording] = {}
        self._kind = ""
        self._trace = _Recording()
        self._position = -1
        self._last_use: dict[str, int] = {}
        self._warned = False
        self._warned_of_room = False
        self._prefetched: set[str] = set()  # units gathered ahead and not needed yet
        self._prefetched_numel = 0
        self.actions: list[str] = []
        """The actions of the pass so far, e.g. ``"UNSHARD layers.3"``."""

    @property
    def in_pass(self) -> bool:
        """True between `begin` and `end`."""
        return bool(self._kind)

    def begin(self, kind: str) -> None:
        """Starts a pass; passes of one kind ("train", "eval") share a recording."""
        self._kind = kind
        self._trace = self._traces.setdefault(kind, _Recording())
        if not self._trace.complete:
            self._trace.order.clear()
        self._position = -1
        self._last_use.clear()
        self._prefetched.clear()
        self._prefetched_numel = 0
        self.actions = []

    def need(self, name: str, live: Mapping[str, int]) -> list[str]:
        """Records that `name` must be unsharded now; returns the units to prefetch, in order.

        Args:
            live: the units that are unsharded or gathering, including `name`, with their sizes.
        """
        self.actions.append(f"UNSHARD {name}")
        if name in self._prefetched:
            self._prefetched.remove(name)
            self._prefetched_numel -= self._numels[name]
        if not self.in_pass:
            return []  # a module called directly, outside the model's forward
        if not self._trace.complete:
            self._trace.order.append(name)
            return []
        if not self._advance_to(name):
            return []
        ahead = self._ahead(live)
        self.actions.extend(f"PREFETCH {unit}" for unit in ahead)
        return ahead

    def keep(self, name: str, live: Mapping[str, int]) -> bool:
        """Returns True if a unit that was just used should stay unsharded because it is needed again soon enough.

        Args:
            live: the units that are unsharded or gathering, with their sizes.
        """
        position = self._last_use.get(name)
        if not self.in_pass or not self._trace.complete or position is None:
            return False
        keeps = self._is_needed_soon(position) and (
            sum(live.values()) <= self._limits.max_live_parameters
            or (self._limits.next_always and self._is_next(name, live))
        )
        self.actions.append(f"{'KEEP' if keeps else 'RESHARD'} {name}")
        return keeps

    def end(self) -> None:
        """Ends the pass; later passes replay a first recording."""
        if self._kind and not self._trace.complete and self._trace.order:
            self._trace.seal(self._numels)
        self._kind = ""

    def forget(self) -> None:
        """Discards all recordings, e.g. after an exception in the middle of a pass."""
        self._traces.clear()
        self._trace = _Recording()
        self._kind = ""

    def _advance_to(self, name: str) -> bool:
        """Moves to the next recorded use; starts a new recording and returns False if the order differs."""
        order = self._trace.order
        if self._position + 1 < len(order) and order[self._position + 1] == name:
            self._position += 1
            self._last_use[name] = self._position
            return True
        if order[0] == name:  # a pass that was cut short (a forward without its backward) starts over
            self._position = 0
            self._last_use = {name: 0}
            return True
        # The order differs: gathers in flight stay valid, only prefetching stops until the new order has been recorded.
        # Warn once per engine: a model with random depth would log a warning per step.
        expected = order[self._position + 1] if self._position + 1 < len(order) else "the end of the pass"
        if not self._warned:
            self._warned = True
            logger.warning(
                "the order of modules changed: %s came where %s was expected, so the engine stops prefetching until an "
                "order repeats; results stay the same, but steps are slower",
                name,
                expected,
            )
        self._trace = self._traces[self._kind] = _Recording(order=[*order[: self._position + 1], name])
        return False

    def _is_needed_soon(self, position: int) -> bool:
        distance = self._trace.next_use[position]
        return distance is not None and distance <= self._limits.max_reuse_distance

    def _is_next(self, name: str, live: Mapping[str, int]) -> bool:
        """Returns True if nothing is gathered before the unit's next use, so keeping it does not raise the peak."""
        order, following = self._trace.order, self._position + 1
        return all(unit in live for unit in order[following : order.index(name, following)])

    def _ahead(self, live: Mapping[str, int]) -> list[str]:
        """Returns the next units in recorded order, up to both limits."""
        # Prefetched units that are still unused count against the bucket: it bounds the memory gathered ahead at any
        # time, not the amount that one call adds.
        room = self._limits.max_live_parameters - sum(live.values())
        budget = self._limits.prefetch_bucket_size - self._prefetched_numel
        ahead: list[str] = []
        for name in self._trace.order[self._position + 1 :]:
            # Continue until the bucket is exceeded, not only while units fit: a unit is a layer, larger than buckets
            # that DeepSpeed programs set, and without the next one ahead no gather overlaps with computation.
            if budget <= 0:
                break
            if name in self._prefetched:
                continue
            if name in live:
                used = self._last_use.get(name)
                if used is None or self._is_needed_soon(used):
                    continue
                break  # it is resharded first; gathering later units before that would only hold memory longer
            numel = self._numels[name]
            # Do not skip a unit that has no room: a smaller one further on would take its memory.
            if numel > room and (not self._limits.next_always or self._prefetched):
                if not self._prefetched and not self._warned_of_room:
                    self._warned_of_room = True
                    logger.warning(
                        "%s is not gathered ahead, so its gather does not overlap with computation: its %d elements "
                        "plus the %d in use exceed zero_optimization.stage3_max_live_parameters, %d; remove the key, "
                        "or raise it if memory allows",
                        name,
                        numel,
                        sum(live.values()),
                        self._limits.max_live_parameters,
                    )
                break
            budget, room = budget - numel, room - numel
            ahead.append(name)
            self._prefetched.add(name)
            self._prefetched_numel += numel
        return ahead
