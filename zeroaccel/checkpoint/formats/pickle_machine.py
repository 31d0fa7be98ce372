"""An interpreter for pickles of plain data, with resource limits and without access to any Python object.

A pickle is a small program for a stack machine, and Python's own unpickler lets it import and call anything. This one
supports the instructions that protocols 2 to 5 write for plain data. The caller resolves a name in a pickle to an
`Admitted`, which supports only calls: a class never gets on the stack, so no instruction can change one.
`pickletools` reads the instructions and their arguments, which are not longer than the pickle. The machine charges all
other objects to a budget before it allocates them. `torch_pickle.py` defines the allowed names.
"""

from __future__ import annotations

import pickletools
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from zeroaccel.errors import CheckpointError

_BUDGET_NBYTES = 256 << 20
"""Limit of the memory for all objects of a pickle, by the estimates below."""
_LIST_NBYTES, _TUPLE_NBYTES, _DICT_NBYTES, _SET_NBYTES, _OBJECT_NBYTES = 96, 56, 160, 220, 200
_ITEM_NBYTES, _ENTRY_NBYTES, _NUMBER_NBYTES, _TEXT_NBYTES, _MEMO_NBYTES = 16, 100, 32, 64, 64

_MOST_LEVELS = 100
_LONGEST_NAME = 400
_LONGEST_INTEGER_NBYTES = 128
_MOST_UNUSUAL_KEYS = 10_000
"""Limit of the number of keys that are tuples or floats, whose hashes an attacker can make collide."""
_LARGEST_KEY = (1 << 61) - 2
"""Largest integer that is its own hash."""
_MOST_KEY_ITEMS = 64


class Admitted:
    """A name that a pickle may contain and call.

    Args:
        name: the dotted name in the pickle.
        make: returns the result of a call; it may raise CheckpointError or TypeError.
    """

    __slots__ = ("make", "name")

    def __init__(self, name: str, make: Callable[..., Any]) -> None:
        self.name = name
        self.make = make

    def __repr__(self) -> str:
        return f"<{self.name}>"


class StandIn:
    """Stands for an object of a class in a pickle: it has the object's attributes, but not its methods.

    Attributes:
        class_name: dotted name of the class.
        arguments: arguments of the constructor; for an enumeration, its number.
        state: state of an object whose attributes are not a dict.
    """

    def __init__(self, class_name: str, arguments: tuple[Any, ...] = ()) -> None:
        self.class_name = class_name
        self.arguments = arguments

    def take_state(self, state: Any) -> None:
        """Sets the attributes of a BUILD instruction; raises TypeError if they are invalid."""
        if type(state) is tuple and len(state) == 2 and state[0] is None:  # the class has slots
            state = state[1]
        if type(state) is not dict:
            state = {"state": state}
        if not all(type(name) is str for name in state):
            raise TypeError("expected attribute names that are strings")
        if reserved := state.keys() & {"class_name", "arguments"}:
            raise TypeError(f"{', '.join(reserved)} cannot be replaced")
        vars(self).update(state)

    def __repr__(self) -> str:
        return f"<{self.class_name}>"


class PickleMachine:
    """Interprets one pickle.

    Args:
        content: the complete pickle.
        where: the file, for messages.
        admit: returns an `Admitted` or a plain value for a dotted name; raises CheckpointError for other names.
        persistent: returns the object for a persistent id.
    """

    def __init__(
        self, content: bytes, where: str, admit: Callable[[str], Any], persistent: Callable[[Any], Any]
    ) -> None:
        self._content, self._at = content, 0  # the current byte
        self._where = where
        self._admit, self._persistent = admit, persistent
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._room = _BUDGET_NBYTES
        self._unusual_keys = 0
        self._instructions = self._table()

    def load(self) -> Any:
        """Returns the object, no part of which contains itself.

        Raises:
            CheckpointError: the pickle is damaged or cut off, exceeds a limit, or has a forbidden name or an
                instruction that plain data does not need.
        """
        for opcode, argument in self._opcodes():
            if opcode.name == "STOP":
                break
            step = self._instructions.get(opcode.name)
            if step is None:
                raise self._damaged(f"instruction {opcode.code!r}, which plain data does not need")
            step() if opcode.arg is None else step(argument)
        result = self._pop()
        self._check_tree(result)
        return result

    def _opcodes(self) -> Iterator[tuple[pickletools.OpcodeInfo, Any]]:
        try:
            for opcode, argument, at in pickletools.genops(self._content):
                self._at = at or 0
                yield opcode, argument
        except ValueError as error:
            raise self._damaged(str(error)) from error

    def charge(self, nbytes: int) -> None:
        """Takes `nbytes` from the budget; raises CheckpointError if it is exhausted."""
        self._room -= nbytes
        if self._room < 0:
            raise CheckpointError(
                f"{self._where}: its pickle, at byte {self._at}",
                expected=f"objects of at most {_BUDGET_NBYTES >> 20} MiB in memory",
                got="more",
                fix="save large data as tensors; do not load a file you do not trust",
            )

    # -- the program

    def _damaged(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._where}: its pickle is damaged at byte {self._at}: {what}")

    # -- the stack

    def _pop(self) -> Any:
        if len(self._stack) <= (self._marks[-1] if self._marks else 0):
            raise self._damaged("it takes an item from an empty stack")
        return self._stack.pop()

    def _top(self, kinds: tuple[type, ...]) -> Any:
        value = self._pop()
        if type(value) not in kinds:
            raise self._damaged(f"expected {' or '.join(kind.__name__ for kind in kinds)}, got {type(value).__name__}")
        return value

    def _push(self, value: Any, nbytes: int = 0) -> None:
        self.charge(nbytes + _ITEM_NBYTES)
        self._stack.append(value)

    def _mark(self) -> None:
        self.charge(_NUMBER_NBYTES)
        self._marks.append(len(self._stack))

    def _since_mark(self) -> list[Any]:
        if not self._marks:
            raise self._damaged("it goes back to a missing mark")
        start = self._marks.pop()
        items = self._stack[start:]
        del self._stack[start:]
        return items

    def _drop(self) -> None:
        if self._marks and self._marks[-1] == len(self._stack):
            self._marks.pop()
        else:
            self._pop()

    def _duplicate(self) -> None:
        value = self._pop()
        self._stack.append(value)
        self._push(value)

    def _put(self, index: int) -> None:
        self.charge(_MEMO_NBYTES)
        value = self._pop()
        self._stack.append(value)
        self._memo[index] = value

    def _get(self, index: int) -> None:
        if index not in self._memo:
            raise self._damaged(f"it reads memo {index}, which is empty")
        self._push(self._memo[index])

    # -- values

    def _number(self, value: float) -> None:
        self._push(value, _NUMBER_NBYTES)

    def _long(self, value: int) -> None:
        if (nbytes := value.bit_length() // 8 + 1) > _LONGEST_INTEGER_NBYTES:
            raise self._damaged(f"an integer of {nbytes} bytes, expected at most {_LONGEST_INTEGER_NBYTES}")
        self._push(value, _NUMBER_NBYTES + nbytes)

    def _text(self, text: str) -> None:
        self._push(text, _TEXT_NBYTES + (len(text) if text.isascii() else 4 * len(text)))

    def _bytes(self, data: bytes) -> None:
        self._push(data, _TEXT_NBYTES + len(data))

    def _tuple(self, items: Sequence[Any]) -> None:
        self._push(tuple(items), _TUPLE_NBYTES + _ITEM_NBYTES * len(items))

    def _tuple_of(self, count: int) -> None:
        items = [self._pop() for _ in range(count)]
        self._tuple(items[::-1])

    def _append(self, items: Sequence[Any]) -> None:
        self.charge(_ITEM_NBYTES * len(items))
        target = self._top((list,))
        target.extend(items)
        self._stack.append(target)

    def _set_items(self, items: Sequence[Any]) -> None:
        if len(items) % 2:
            raise self._damaged("a key without a value")
        target = self._top((dict, OrderedDict, Counter))
        self.charge(_ENTRY_NBYTES * (len(items) // 2) * (1 if type(target) is dict else 2))
        for key, value in zip(items[::2], items[1::2], strict=True):
            self.check_key(key)
            target[key] = value
        self._stack.append(target)

    def _set_item(self) -> None:
        value, key = self._pop(), self._pop()
        self._set_items((key, value))

    def _add_items(self, items: Sequence[Any]) -> None:
        target = self._top((set,))
        target.update(self.keys(items))
        self._stack.append(target)

    def _frozenset(self, items: Sequence[Any]) -> None:
        self._push(frozenset(self.keys(items)), _SET_NBYTES)

    def keys(self, items: Sequence[Any]) -> Sequence[Any]:
        """Checks and charges items that become keys; returns them."""
        self.charge(_ENTRY_NBYTES * len(items))
        for item in items:
            self.check_key(item)
        return items

    def check_key(self, key: Any, items_left: int = _MOST_KEY_ITEMS) -> int:
        """Raises CheckpointError unless a value is hashable and cheap to look up; returns the number of items left.

        Sets and dicts of keys with the same hash take quadratic time, so the machine limits values whose hash an
        attacker can choose: it rejects long integers, and limits the number of tuples and floats. Python salts the
        hashes of text.
        """
        if type(key) is tuple:
            items_left = self._unusual_key(items_left - len(key))
            for item in key:
                items_left = self.check_key(item, items_left)
        elif type(key) is float:
            self._unusual_key(items_left)
        elif type(key) is int and not -_LARGEST_KEY <= key <= _LARGEST_KEY:
            raise self._damaged("a key of a dict is an integer of more than 61 bits")
        elif not (key is None or isinstance(key, (str, bytes, int, StandIn))):
            raise self._damaged(f"a key of a dict is of type {type(key).__name__}")
        return items_left

    def _unusual_key(self, items_left: int) -> int:
        self._unusual_keys += 1
        if self._unusual_keys > _MOST_UNUSUAL_KEYS or items_left < 0:
            raise self._damaged(
                f"expected at most {_MOST_UNUSUAL_KEYS} tuples or floats as keys, of at most {_MOST_KEY_ITEMS} items"
            )
        return items_left

    # -- names and calls

    def _global(self, module: str, name: str) -> None:
        if len(module) + len(name) > _LONGEST_NAME:
            raise self._damaged("a name that is too long")
        self._push(self._admit(f"{module}.{name}"))

    def _stack_global(self) -> None:
        name, module = self._top((str,)), self._top((str,))
        self._global(module, name)

    def _call(self) -> None:
        arguments = self._top((tuple,))
        named = self._top((Admitted,))
        self.charge(_OBJECT_NBYTES)
        try:
            result = named.make(*arguments)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise self._damaged(f"a call of {named.name} failed ({error})") from error
        self._push(result)

    def _call_with_keywords(self) -> None:
        if self._top((dict,)):
            raise self._damaged("a call with keyword arguments")
        self._call()

    def _build(self) -> None:
        state, target = self._pop(), self._pop()
        if isinstance(target, StandIn):
            try:
                target.take_state(state)
            except (TypeError, ValueError) as error:
                raise self._damaged(f"attributes of {target!r} ({error})") from error
        elif type(target) is not OrderedDict:  # ignore a state dict's attribute `_metadata`
            raise CheckpointError(
                f"{self._where}: its pickle, at byte {self._at}",
                expected="attributes for an object that supports them",
                got=f"attributes of {target!r}"[:100],
                fix="do not load a file you do not trust",
            )
        self._stack.append(target)

    def _table(self) -> Mapping[str, Callable[..., None]]:
        """Returns name of an instruction -> function that executes it; takes the argument if there is one."""
        push = self._push
        return {
            "PROTO": self._protocol,
            "FRAME": self._frame,
            "MARK": self._mark,
            "POP": self._drop,
            "POP_MARK": lambda: self._since_mark().clear(),
            "DUP": self._duplicate,
            "NONE": lambda: push(None),
            "NEWTRUE": lambda: push(True),
            "NEWFALSE": lambda: push(False),
            "BININT1": push,
            **dict.fromkeys(("BININT", "BININT2", "BINFLOAT"), self._number),
            **dict.fromkeys(("LONG1", "LONG4"), self._long),
            **dict.fromkeys(("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"), self._text),
            **dict.fromkeys(("SHORT_BINBYTES", "BINBYTES", "BINBYTES8"), self._bytes),
            "EMPTY_TUPLE": lambda: push(()),
            "TUPLE": lambda: self._tuple(self._since_mark()),
            "TUPLE1": lambda: self._tuple_of(1),
            "TUPLE2": lambda: self._tuple_of(2),
            "TUPLE3": lambda: self._tuple_of(3),
            "EMPTY_LIST": lambda: push([], _LIST_NBYTES),
            "APPEND": lambda: self._append((self._pop(),)),
            "APPENDS": lambda: self._append(self._since_mark()),
            "EMPTY_DICT": lambda: push({}, _DICT_NBYTES),
            "SETITEM": self._set_item,
            "SETITEMS": lambda: self._set_items(self._since_mark()),
            "EMPTY_SET": lambda: push(set(), _SET_NBYTES),
            "ADDITEMS": lambda: self._add_items(self._since_mark()),
            "FROZENSET": lambda: self._frozenset(self._since_mark()),
            **dict.fromkeys(("BINPUT", "LONG_BINPUT"), self._put),
            "MEMOIZE": lambda: self._put(len(self._memo)),
            **dict.fromkeys(("BINGET", "LONG_BINGET"), self._get),
            "GLOBAL": lambda name: self._global(*name.split(" ", 1)),
            "STACK_GLOBAL": self._stack_global,
            **dict.fromkeys(("REDUCE", "NEWOBJ"), self._call),
            "NEWOBJ_EX": self._call_with_keywords,
            "BUILD": self._build,
            "BINPERSID": lambda: push(self._persistent(self._pop()), _OBJECT_NBYTES),
        }

    def _protocol(self, version: int) -> None:
        if version > 5:
            raise self._damaged(f"protocol {version}, expected at most 5")

    def _frame(self, nbytes: int) -> None:
        if nbytes > len(self._content) - self._at:
            raise self._damaged(f"a frame of {nbytes} bytes, but only {len(self._content) - self._at} are left")

    # -- the result

    def _check_tree(self, result: Any) -> None:
        """Raises CheckpointError if an object contains itself, has too many levels, or has too many shared parts.

        A list of two references to a list of two references, and so on, is short as a pickle, but takes exponential
        time to walk or encode. So this adds up sizes as if every reference were a copy. It walks depth first without
        recursion: it enters a container, visits its items, and leaves it with the sum of their sizes.
        """
        most = 100_000 + 4 * len(self._content)
        sizes: dict[int, tuple[int, int]] = {}  # id of a container -> (number of items with copies, levels)
        open_ids: set[int] = set()
        todo: list[tuple[Any, bool]] = [(result, False)]
        while todo:
            value, entered = todo.pop()
            items = _items_of(value)
            if not items or (not entered and id(value) in sizes):
                continue
            if not entered:
                if id(value) in open_ids:
                    raise self._damaged("an object that contains itself")
                open_ids.add(id(value))
                if len(open_ids) > _MOST_LEVELS:
                    raise self._damaged(f"objects nested more than {_MOST_LEVELS} levels deep")
                todo.append((value, True))
                todo.extend((item, False) for item in items if isinstance(item, _CONTAINERS))
                continue
            open_ids.discard(id(value))
            total, levels = 1, 0
            for item in items:
                size, below = sizes.get(id(item), (1, 0))
                if isinstance(item, (str, bytes)):
                    size += len(item) // 16
                total, levels = total + size, max(levels, below)
            if levels >= _MOST_LEVELS:
                raise self._damaged(f"objects nested more than {_MOST_LEVELS} levels deep")
            if total > most:
                raise self._damaged("too many references to the same objects")
            sizes[id(value)] = total, levels + 1


def _items_of(value: Any) -> Sequence[Any]:
    if isinstance(value, (list, tuple)):
        return value
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    if isinstance(value, (set, frozenset)):
        return [*value]
    return [*vars(value).values()] if isinstance(value, StandIn) else ()


_CONTAINERS = (list, tuple, dict, set, frozenset, StandIn)
