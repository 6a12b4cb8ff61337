"""What a pickle would do, from its steps without taking them.

torch.load(weights_only=True) runs no code, and is what keeps us safe. But it takes harmless steps however many there
are, and some cost memory or time without end: those are refused here before torch sees the file, and what a pickle
wants to run is found here by name.
"""

import pickletools
import re
from pathlib import Path
from typing import IO

from vitrail.errors import CheckpointError

MOST_STEPS = 2**16  # and one for so many bytes of the file, since a step can make an object of some hundred bytes
BYTES_A_STEP = 256
LARGEST_TUPLE = 2**12  # with those inside it: of one that holds itself twice, forty times over, no hash is ever done
USELESS = ("bytearray", "encode")  # torch allows both: one makes memory of any size, one has codecs that take days
USUAL = re.compile(
    r"torch\.\w+|torch\.(_utils|_tensor|storage|serialization)\..*|.*\.Parameter|collections\..*|.*\.Namespace"
)
ADDED = ("APPEND", "APPENDS", "BUILD", "SETITEM", "SETITEMS")  # to what lies below
POPPED = dict(TUPLE1=1, TUPLE2=2, TUPLE3=3, BINPERSID=1, REDUCE=2, NEWOBJ=2, BUILD=2, APPEND=2, SETITEM=3)  # noqa: C408
PUSHED = (
    *("NONE", "NEWFALSE", "NEWTRUE", "EMPTY_TUPLE", "EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET", "GLOBAL"),
    *("BININT", "BININT1", "BININT2", "BINFLOAT", "BINUNICODE", "SHORT_BINSTRING", "LONG1"),
)


def check_pickle(path: Path, stream: IO[bytes], size: int) -> list[str]:
    """What a pickle in a file of so many bytes would call; refused if torch would be long about it, or not take it."""
    wanted, texts, odd, most = list[str](), ["", ""], "", MOST_STEPS + size // BYTES_A_STEP
    stack = Stack(path)
    for step, (operation, argument, _) in enumerate(pickletools.genops(stream)):
        if step > most:
            raise CheckpointError(f"{path} has more than {most} steps beside its tensors; expected weights")
        if isinstance(argument, str):
            texts = [texts[-1], argument]
        if operation.name in ("GLOBAL", "STACK_GLOBAL"):
            wanted.append(str(argument or " ".join(texts)).replace(" ", "."))
            if wanted[-1].endswith(USELESS):
                raise CheckpointError(f"{path} wants to run {wanted[-1]}, which no tensor needs; refused")
        odd = odd or stack.take(operation.name, argument)
    strange = [name for name in wanted if not USUAL.fullmatch(name)]
    if odd and strange:
        raise runs_code(path, strange[0])
    if odd:
        raise CheckpointError(
            f"{path} has a step {odd} that torch does not take; expected pickle protocol 2, as is usual"
        )
    return strange or wanted


def runs_code(path: Path, wanted: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is a pickle that wants to run {wanted}; refused: expected tensors only, "
        "such as torch.save(model.state_dict(), path) writes"
    )


class Stack:
    """What torch's unpickler would have on its stack: the names of what can be called, and the sizes of all else."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.top = list[str | int]()
        self.below = list[list[str | int]]()
        self.memo = dict[int, str | int]()

    def take(self, name: str, argument: object) -> str:
        """Takes a step; gives its name if torch would not take it."""
        if name in PUSHED:
            self.top.append(str(argument) if name == "GLOBAL" else 1)
        elif name in ("BINPUT", "LONG_BINPUT") and isinstance(argument, int):
            self.memo[argument] = self.top[-1]
        elif name in ("BINGET", "LONG_BINGET") and isinstance(argument, int):
            self.top.append(self.memo[argument])
        elif name == "MARK":
            self.below.append(self.top)
            self.top = []
        elif name in ("TUPLE", "APPENDS", "SETITEMS"):
            parts, self.top = self.top, self.below.pop()
            self.push(name, parts if name == "TUPLE" else [self.top.pop()])
        elif name in POPPED:
            parts = self.top[-POPPED[name] :]
            del self.top[-POPPED[name] :]
            if name in ("REDUCE", "NEWOBJ") and not isinstance(parts[0], str):
                return name  # torch would say what it is instead, however long that takes
            self.push(name, parts)
        elif name not in ("PROTO", "STOP"):
            return name
        return ""

    def push(self, name: str, parts: list[str | int]) -> None:
        size = 1 + sum(part if isinstance(part, int) else 1 for part in parts) if name.startswith("TUPLE") else 1
        if size > LARGEST_TUPLE:
            raise CheckpointError(f"{self.path} has tuples in tuples, of {size} parts; expected weights")
        self.top.append(parts[0] if name in ADDED else size)
