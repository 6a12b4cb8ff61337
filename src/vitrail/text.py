"""Tables as plain text, the same in a terminal, a pipe and a file."""

from collections.abc import Sequence

TableCells = tuple[Sequence[str], Sequence[Sequence[str]], str]  # heading, rows, alignments such as "llr"


def format_table(heading: Sequence[str], lines: Sequence[Sequence[str]], alignments: str) -> list[str]:
    """Lines in columns under a heading and a rule; `sides`, such as "llr", says which side each column is set to."""
    widths = [max(len(line[column]) for line in (heading, *lines)) for column in range(len(heading))]
    return [
        "  ".join(
            text.rjust(width) if side == "r" else text.ljust(width)
            for text, width, side in zip(line, widths, alignments, strict=True)
        ).rstrip()
        for line in (heading, ["─" * width for width in widths], *lines)
    ]
