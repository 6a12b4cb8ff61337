"""Tables as plain text, the same in a terminal, a pipe and a file."""

from collections.abc import Sequence


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


def format_duration(seconds: float | None) -> str:
    """Hours, minutes and seconds, as 1:02:03; empty for None."""
    if seconds is None:
        return ""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
