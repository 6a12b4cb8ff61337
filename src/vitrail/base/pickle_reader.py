"""Evaluate untrusted pickles opcode by opcode; the unpicklers of Python and torch are never used on them.

A pickle is a program. Here it can build plain values and call the functions in a table given by the caller. Each of
these is a stand-in of this package, so nothing that the file chooses is imported or run. Every step, and every value
that a stand-in copies, is charged to a budget that grows with the size of the file. No tuple is hashed, compared or
printed: for a tuple nested 40 levels deep, each level holding the next one twice, that would take forever.
"""

import pickletools
from collections.abc import Callable, Mapping
from typing import IO, Any, Protocol, TypeVar, runtime_checkable

T = TypeVar("T")
MAX_STEPS = 2**18  # plus one per BYTES_PER_STEP of the file: a step can make an object of several hundred bytes
BYTES_PER_STEP = 256
MAX_PICKLE_BYTES = 2**26  # without the values of the tensors
MAX_INTEGER_BITS = 2**11
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
LITERAL_OPCODES = {
    *("BININT", "BININT1", "BININT2", "INT", "LONG", "LONG1", "LONG4", "BINFLOAT", "FLOAT"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "UNICODE"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
}
SAFE_KEY_TYPES = (str, bytes, bool, type(None))  # the file cannot choose their hashes


class PickleError(ValueError):
    """A pickle that is refused. Callers put the name of the file before the message."""


class ForbiddenGlobalError(PickleError):
    """A pickle that refers to a function or class that is not in the table of allowed names."""

    def __init__(self, name: str) -> None:
        super().__init__(f"is a pickle that wants to run {name}")


class OpaqueValue:
    """Stand-in for a value that is not needed. No two are equal, and hashing is cheap."""

    def __repr__(self) -> str:
        return "…"


class OpaqueSet(OpaqueValue):
    """Stand-in for a set; its members are not needed and would have to be hashed."""


class OpaqueGlobal(OpaqueValue):
    """Stand-in for a class or function that may be passed as an argument but not called."""

    def __init__(self, name: str) -> None:
        self.name = name


class AllowedCall:
    """A function that a pickle may call. It charges the budget for what it copies."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function


@runtime_checkable
class StatefulStandIn(Protocol):
    """A stand-in for an object whose state a pickle sets."""

    def set_state(self, state: Any, /) -> None: ...


class StepBudget:
    """The number of steps that the pickles of a file of `size` bytes may take."""

    def __init__(self, size: int) -> None:
        self.max_steps = self.steps_left = MAX_STEPS + size // BYTES_PER_STEP

    def spend(self, steps: int) -> None:
        self.steps_left -= steps
        if self.steps_left < 0:
            raise PickleError(f"has more than {self.max_steps} steps")


class BoundedStream:
    """A file of which at most `max_bytes` can be read, whatever length a pickle claims."""

    def __init__(self, file: IO[bytes], max_bytes: int = MAX_PICKLE_BYTES) -> None:
        self.file, self.tell, self.end = file, file.tell, file.tell() + max_bytes

    def read(self, count: int) -> bytes:
        if count > self.end - self.tell():
            raise PickleError(f"claims a value of {count} bytes")
        return self.file.read(count)

    def readline(self) -> bytes:
        return self.file.readline(self.end - self.tell())


def evaluate_pickle(
    stream: Any,
    names: Mapping[str, object],
    budget: StepBudget,
    *,
    load_persistent: Callable[[Any], Any] | None = None,
    encoding: str | None = None,
) -> Any:
    """Evaluate one pickle. `names` maps each allowed name to an `AllowedCall` or a value; other names are refused.

    `load_persistent` returns the object for a persistent id. `encoding` decodes Python 2 strings; None keeps bytes.
    """
    machine = PickleMachine(names, budget, load_persistent, encoding)
    for opcode, argument, _ in pickletools.genops(stream):
        budget.spend(1)
        if opcode.name == "STOP":
            return machine.pop()
        machine.execute_opcode(opcode.name, argument)
    raise PickleError("is a pickle without a STOP opcode")


class PickleMachine:
    """The stack and the memo of one pickle."""

    def __init__(
        self,
        names: Mapping[str, object],
        budget: StepBudget,
        load_persistent: Callable[[Any], Any] | None,
        encoding: str | None,
    ) -> None:
        self.names, self.budget, self.load_persistent, self.encoding = names, budget, load_persistent, encoding
        self.stack = list[Any]()
        self.outer_stacks = list[list[Any]]()  # one per mark
        self.memo = dict[int, Any]()

    def execute_opcode(self, name: str, argument: Any) -> None:
        match name:
            case "PROTO" | "FRAME":
                pass
            case "MARK":
                self.outer_stacks.append(self.stack)
                self.stack = []
            case "PUT" | "BINPUT" | "LONG_BINPUT" | "MEMOIZE":
                self.memo[len(self.memo) if name == "MEMOIZE" else argument] = self.top()
            case "POP" | "POP_MARK":
                (self.pop if name == "POP" and self.stack else self.pop_to_mark)()
            case "APPEND" | "APPENDS":
                values = [self.pop()] if name == "APPEND" else self.pop_to_mark()
                self.top(list, "appends to").extend(values)
            case "SETITEM" | "SETITEMS":
                values = [self.pop(), self.pop()][::-1] if name == "SETITEM" else self.pop_to_mark()
                self.top(dict, "sets an item of").update(make_safe_dict(values))
            case "ADDITEMS":
                self.pop_to_mark()
                self.top(OpaqueSet, "adds members to")
            case "BUILD":
                state = self.pop()
                self.top(StatefulStandIn, "sets the state of").set_state(state)
            case _:
                value = self.make_value(name, argument)
                self.stack.append(value)

    def make_value(self, name: str, argument: Any) -> Any:
        """The value that an opcode puts on the stack."""
        match name:
            case _ if name in CONSTANTS:
                return CONSTANTS[name]
            case _ if name in LITERAL_OPCODES:
                if isinstance(argument, int) and argument.bit_length() > MAX_INTEGER_BITS:
                    raise PickleError(f"has an integer of {argument.bit_length()} bits")
                return argument
            case "STRING" | "BINSTRING" | "SHORT_BINSTRING":  # bytes in Python 2, often meant as text
                text = argument.encode("latin-1")
                return text if self.encoding is None else text.decode(self.encoding)
            case "GET" | "BINGET" | "LONG_BINGET":
                if argument not in self.memo:
                    raise PickleError(f"reads value {argument} of its memo, which it did not store")
                return self.memo[argument]
            case "DUP":
                return self.top()
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                return tuple([self.pop() for _ in range(int(name[-1]))][::-1])
            case "EMPTY_LIST" | "EMPTY_DICT":
                return [] if name == "EMPTY_LIST" else {}
            case "EMPTY_SET":
                return OpaqueSet()
            case "TUPLE" | "LIST" | "DICT" | "FROZENSET":
                values = self.pop_to_mark()
                makers = {"TUPLE": tuple, "LIST": list, "DICT": make_safe_dict}
                return makers[name](values) if name in makers else OpaqueSet()
            case "GLOBAL" | "STACK_GLOBAL":
                return self.find_global(argument)
            case "REDUCE" | "NEWOBJ":
                arguments, function = self.pop(), self.pop()
                return self.call(function, arguments)
            case "BINPERSID" if self.load_persistent is not None:
                return self.load_persistent(self.pop())
            case _:
                raise PickleError(f"has the opcode {name}, which plain pickles do not have")

    def top(self, kind: type[T] = object, use: str = "") -> T:
        """The last value; what the pickle does with it needs a value of this kind."""
        if not self.stack:
            raise PickleError("takes a value from an empty stack")
        if not isinstance(self.stack[-1], kind):
            raise PickleError(f"{use} a {type(self.stack[-1]).__name__}")
        return self.stack[-1]

    def pop(self) -> Any:
        self.top()
        return self.stack.pop()

    def pop_to_mark(self) -> list[Any]:
        if not self.outer_stacks:
            raise PickleError("has no mark on its stack")
        values, self.stack = self.stack, self.outer_stacks.pop()
        return values

    def find_global(self, argument: str | None) -> object:
        if argument is None:
            last, module = self.pop(), self.pop()
            if not isinstance(last, str) or not isinstance(module, str):
                raise PickleError("names a function by something that is not a string")
            argument = f"{module} {last}"
        name = argument.replace(" ", ".")
        if name not in self.names:
            raise ForbiddenGlobalError(name)
        return self.names[name]

    def call(self, function: Any, arguments: Any) -> Any:
        if isinstance(function, OpaqueGlobal):
            raise ForbiddenGlobalError(function.name)
        if not isinstance(function, AllowedCall) or not isinstance(arguments, tuple):
            raise PickleError(f"calls a {type(function).__name__}")
        self.budget.spend(len(arguments))  # Python copies them
        return function.function(*arguments)


def make_safe_dict(values: list[Any]) -> dict[Any, Any]:
    """A dict of keys and values in turn."""
    if len(values) % 2:
        raise PickleError("sets an item of a dict")
    return {replace_unsafe_key(key): value for key, value in zip(values[::2], values[1::2], strict=True)}


def replace_unsafe_key(key: Any) -> Any:
    """Return the key if hashing and comparing it is cheap; otherwise an OpaqueValue, since no such entry is needed.

    Tuples may be nested to any depth, and a file can choose tuples and numbers with equal hashes.
    """
    return key if type(key) in SAFE_KEY_TYPES else OpaqueValue()
