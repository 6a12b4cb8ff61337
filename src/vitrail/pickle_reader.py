"""Untrusted pickles, evaluated step by step by our own reader: the unpicklers of Python and torch never see them.

A pickle is a program. Here it can make plain values and call the functions in a table given by the caller: each is a
stand-in written here, so nothing that the file chooses is imported or run. Every step, and every value that a stand-in
copies, is charged to a budget that grows with the size of the file. No tuple is hashed, compared or printed: with forty
levels, each holding the one below twice, that would take forever.
"""

import pickletools
from collections.abc import Callable, Mapping
from typing import IO, Any, Protocol

MAX_STEPS = 2**18  # plus one per BYTES_PER_STEP of the file: a step can make an object of some hundred bytes
BYTES_PER_STEP = 256
MAX_PICKLE_BYTES = 2**26  # bytes, without the values of the tensors
MAX_INTEGER_BITS = 2**11  # bits

CONSTANT_OPCODES = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
NUMBER_OPCODES = ("BININT", "BININT1", "BININT2", "INT", "LONG", "LONG1", "LONG4", "BINFLOAT", "FLOAT")
TEXT_OPCODES = ("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "UNICODE")
BYTES_OPCODES = ("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8")
ARGUMENT_OPCODES = {*NUMBER_OPCODES, *TEXT_OPCODES, *BYTES_OPCODES}
PYTHON2_STRING_OPCODES = {"STRING", "BINSTRING", "SHORT_BINSTRING"}  # of Python 2: bytes, often meant as text
PUT_OPCODES = {"PUT", "BINPUT", "LONG_BINPUT"}
GET_OPCODES = {"GET", "BINGET", "LONG_BINGET"}
TUPLE_OPCODES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
SAFE_KEY_TYPES = (str, bytes, bool, type(None))  # whose hashes nobody can choose


class PickleError(ValueError):
    """A pickle that is refused; the message follows the name of the file."""


class ForbiddenGlobalError(PickleError):
    """A pickle that refers to a function or class that is not in the table."""

    def __init__(self, name: str) -> None:
        super().__init__(f"is a pickle that wants to run {name}")
        self.name = name


class OpaqueValue:
    """Stands in for a value that is not needed. No two are equal, and hashing one is cheap."""

    def __repr__(self) -> str:
        return "…"


class OpaqueSet(OpaqueValue):
    """Stands in for a set, whose members would be hashed and are not needed."""


class OpaqueGlobal(OpaqueValue):
    """Stands in for a class or function that may be passed as an argument, but not called."""

    def __init__(self, name: str) -> None:
        self.name = name


class AllowedCall:
    """A function that a pickle may call: a stand-in that charges the budget for what it copies."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function


class SupportsSetState(Protocol):
    """An object whose state a pickle may set after making it."""

    def set_state(self, state: Any) -> None: ...


class StepBudget:
    """The number of steps that a pickle may take."""

    def __init__(self, size: int) -> None:
        self.most = self.left = MAX_STEPS + size // BYTES_PER_STEP

    def spend(self, steps: int) -> None:
        self.left -= steps
        if self.left < 0:
            raise PickleError(f"has more than {self.most} steps")


class BoundedStream:
    """A file of which at most `most` bytes can be read, whatever length a pickle claims."""

    def __init__(self, file: IO[bytes], max_bytes: int = MAX_PICKLE_BYTES) -> None:
        self.file, self.end = file, file.tell() + max_bytes

    def tell(self) -> int:
        return self.file.tell()

    def read(self, count: int) -> bytes:
        if count > self.end - self.file.tell():
            raise PickleError(f"claims a value of {count} bytes")
        return self.file.read(count)

    def readline(self) -> bytes:
        return self.file.readline(self.end - self.file.tell())


def evaluate_pickle(
    stream: Any,
    names: Mapping[str, object],
    budget: StepBudget,
    *,
    persistent: Callable[[Any], Any] | None = None,
    strings: str | None = None,
) -> Any:
    """The value of one pickle. `names` holds each known name with its `Call` or its value; all others are refused.

    `persistent` returns the object for a persistent id; `strings` is the encoding of Python 2 strings, None for bytes.
    """
    evaluation = PickleMachine(names, budget, persistent, strings)
    for operation, argument, _ in pickletools.genops(stream):
        budget.spend(1)
        if operation.name == "STOP":
            return evaluation.pop()
        evaluation.execute_opcode(operation.name, argument)
    raise PickleError("is a pickle without an end")


class PickleMachine:
    """The stack and the memo of one pickle."""

    def __init__(
        self,
        names: Mapping[str, object],
        budget: StepBudget,
        persistent: Callable[[Any], Any] | None,
        strings: str | None,
    ) -> None:
        self.names, self.budget, self.persistent, self.strings = names, budget, persistent, strings
        self.stack = list[Any]()
        self.stacks_below = list[list[Any]]()  # one stack per mark
        self.memo = dict[int, Any]()

    def execute_opcode(self, name: str, argument: Any) -> None:
        push = self.stack.append
        if name in ARGUMENT_OPCODES:
            if isinstance(argument, int) and argument.bit_length() > MAX_INTEGER_BITS:
                raise PickleError(f"has a number of {argument.bit_length()} bits")
            push(argument)
        elif name in CONSTANT_OPCODES:
            push(CONSTANT_OPCODES[name])
        elif name in PYTHON2_STRING_OPCODES:
            text = argument.encode("latin-1")
            push(text if self.strings is None else text.decode(self.strings))
        elif name in PUT_OPCODES:
            self.memo[argument] = self.top()
        elif name == "MEMOIZE":
            self.memo[len(self.memo)] = self.top()
        elif name in GET_OPCODES:
            if argument not in self.memo:
                raise PickleError(f"asks for value {argument}, which it did not store")
            push(self.memo[argument])
        elif name in TUPLE_OPCODES:
            push(tuple(reversed([self.pop() for _ in range(TUPLE_OPCODES[name])])))
        elif name in ("EMPTY_LIST", "EMPTY_DICT"):
            push([] if name == "EMPTY_LIST" else {})
        elif name == "MARK":
            self.stacks_below.append(self.stack)
            self.stack = []
        elif name in ("GLOBAL", "STACK_GLOBAL"):
            self.push_global(argument)
        elif name in ("REDUCE", "NEWOBJ"):
            arguments, function = self.pop(), self.pop()
            push(self.call(function, arguments))
        elif name == "BINPERSID" and self.persistent is not None:
            push(self.persistent(self.pop()))
        elif name not in ("PROTO", "FRAME"):
            self.execute_container_opcode(name)

    def execute_container_opcode(self, name: str) -> None:
        """The steps that put values into containers and objects, or drop them."""
        if name == "APPEND":
            self.extend([self.pop()])
        elif name == "APPENDS":
            self.extend(self.pop_to_mark())
        elif name == "SETITEM":
            value, key = self.pop(), self.pop()
            self.set_items([key, value])
        elif name == "SETITEMS":
            self.set_items(self.pop_to_mark())
        elif name == "TUPLE":
            parts = self.pop_to_mark()
            self.stack.append(tuple(parts))
        elif name in ("LIST", "DICT"):
            parts = self.pop_to_mark()
            self.stack.append([] if name == "LIST" else {})
            (self.extend if name == "LIST" else self.set_items)(parts)
        elif name in ("EMPTY_SET", "FROZENSET"):
            if name == "FROZENSET":
                self.pop_to_mark()
            self.stack.append(OpaqueSet())
        elif name == "ADDITEMS":
            self.pop_to_mark()
            if not isinstance(self.top(), OpaqueSet):
                raise PickleError(f"adds members to a {type(self.top()).__name__}")
        elif name == "BUILD":
            state, target = self.pop(), self.top()
            if not hasattr(type(target), "set_state"):
                raise PickleError(f"sets the state of a {type(target).__name__}")
            target.set_state(state)
        elif name == "POP" and self.stack:
            self.pop()
        elif name in ("POP", "POP_MARK"):
            self.pop_to_mark()
        elif name == "DUP":
            self.stack.append(self.top())
        else:
            raise PickleError(f"has a step {name}, which plain pickles do not have")

    def top(self) -> Any:
        if not self.stack:
            raise PickleError("takes a value from an empty stack")
        return self.stack[-1]

    def pop(self) -> Any:
        value = self.top()
        self.stack.pop()
        return value

    def pop_to_mark(self) -> list[Any]:
        if not self.stacks_below:
            raise PickleError("lacks a mark on its stack")
        values, self.stack = self.stack, self.stacks_below.pop()
        return values

    def push_global(self, argument: str | None) -> None:
        if argument is None:
            parts = self.pop(), self.pop()
            if not all(isinstance(part, str) for part in parts):
                raise PickleError("names a function by something that is not a string")
            argument = f"{parts[1]} {parts[0]}"
        name = argument.replace(" ", ".")
        if name not in self.names:
            raise ForbiddenGlobalError(name)
        self.stack.append(self.names[name])

    def call(self, function: Any, arguments: Any) -> Any:
        if isinstance(function, OpaqueGlobal):
            raise ForbiddenGlobalError(function.name)
        if not isinstance(function, AllowedCall) or not isinstance(arguments, tuple):
            raise PickleError(f"calls a {type(function).__name__}")
        self.budget.spend(len(arguments))  # Python copies them
        return function.function(*arguments)

    def extend(self, values: list[Any]) -> None:
        target = self.top()
        if not isinstance(target, list):
            raise PickleError(f"appends to a {type(target).__name__}")
        target.extend(values)

    def set_items(self, values: list[Any]) -> None:
        target = self.top()
        if not isinstance(target, dict) or len(values) % 2:
            raise PickleError(f"sets an item of a {type(target).__name__}")
        for key, value in zip(values[::2], values[1::2], strict=True):
            target[replace_unsafe_key(key)] = value


def replace_unsafe_key(key: Any) -> Any:
    """The key itself if hashing and comparing it is cheap; otherwise an Opaque in its place.

    Tuples may be nested without end, and tuples and numbers can be made to have equal hashes. Entries with a number
    as their key are not needed.
    """
    return key if type(key) in SAFE_KEY_TYPES else OpaqueValue()
