"""The header of .npy files of float32 numbers. The files are untrusted, so the header is not parsed by numpy."""

import re

HEADER_BYTES = 128  # as numpy writes it for up to four sizes
MAGIC = b"\x93NUMPY\x01\x00" + (HEADER_BYTES - 10).to_bytes(2, "little")
HEADER_PATTERN = re.compile(  # numpy writes a comma before the closing brace
    re.escape(MAGIC)
    + rb"{'descr': '<f4', 'fortran_order': False, 'shape': \((\d{1,18}(?:, \d{1,18}){0,3}),?\)(?:, )?} *\n"
)


def make_npy_header(shape: tuple[int, ...]) -> bytes:
    """The header of an array of that shape, always HEADER_BYTES long, so that it can be replaced after adding rows."""
    about = repr({"descr": "<f4", "fortran_order": False, "shape": shape}).encode()
    return MAGIC + about.ljust(HEADER_BYTES - len(MAGIC) - 1) + b"\n"


def parse_npy_header(start: bytes) -> tuple[int, ...] | None:
    """The shape in the first HEADER_BYTES of a file; None if it is not such a header."""
    found = HEADER_PATTERN.fullmatch(start) if len(start) == HEADER_BYTES else None
    return None if found is None else tuple(map(int, found[1].split(b", ")))
