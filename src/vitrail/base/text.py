"""Plain text for terminals and files: names with their unprintable characters escaped, lines of CSV, numbers."""

from collections.abc import Collection, Sequence
from math import floor, log10
from pathlib import Path

SMALLEST_PROBABILITY = 1e-6  # that is shown by its digits
FORMULA_STARTS = (*"=+-@\t\r\n＝＋－＠",)  # full-width forms, too: some spreadsheets treat them alike
CHARACTERS_TO_QUOTE = set(',;|\t"\r\n')
AMERICAN_NAMES = {  # of fields, settings and choices that had a British spelling, which is still read
    "centre": "center",
    "centred": "centered",
    "centre_momentum": "center_momentum",
    "colours": "colors",
    "grey": "gray",
    "mean_colour": "mean_color",
    "neighbours": "neighbors",
}
TableCells = tuple[Sequence[str], Sequence[Sequence[str]], str]  # heading, rows, alignments such as "llr"


def escape_unprintable(text: str, keep: str = "") -> str:
    """Write characters that are not printable as Python does: a line break is \\n, a surrogate \\udcff."""
    return "".join(each if each.isprintable() or each in keep else repr(each)[1:-1] for each in text)


def make_printable(text: str, max_length: int | None = None) -> str:
    """Replace characters that are not printable by ?, and shorten a text that is too long for a table."""
    shown = "".join(each if each.isprintable() else "?" for each in text)
    return shown if max_length is None or len(shown) <= max_length else f"{shown[: max_length - 1]}…"


def escape_formula_in_text(text: str) -> str:
    """Put an apostrophe before a text that a spreadsheet would take for a formula."""
    return f"'{text}" if text.startswith(FORMULA_STARTS) else text


def format_csv_line(fields: Sequence[str]) -> str:
    """Quote fields that contain separators, also those of other readers of CSV."""
    quoted = (f'"{each.replace(chr(34), 2 * chr(34))}"' if set(each) & CHARACTERS_TO_QUOTE else each for each in fields)
    return f"{','.join(quoted)}\n"


def format_table(heading: Sequence[str], lines: Sequence[Sequence[str]], alignments: str) -> list[str]:
    """Format lines in columns under a heading and a rule; `alignments` has l or r for each column: "llr"."""
    widths = [max(len(line[column]) for line in (heading, *lines)) for column in range(len(heading))]
    return [
        "  ".join(
            text.rjust(width) if side == "r" else text.ljust(width)
            for text, width, side in zip(line, widths, alignments, strict=True)
        ).rstrip()
        for line in (heading, ["─" * width for width in widths], *lines)
    ]


def format_probability(share: float) -> str:
    """In percent, with one decimal; below 0.1%, where one decimal would be 0.0, with two significant digits."""
    percent = float(f"{100 * share:.2g}")
    if share < SMALLEST_PROBABILITY:
        return f"<{100 * SMALLEST_PROBABILITY:.4f}%"
    return f"{share:.1%}" if percent >= 0.1 else f"{percent:.{1 - floor(log10(percent))}f}%"


def format_duration(seconds: float | None) -> str:
    """Hours, minutes and seconds, as 1:02:03; empty for None."""
    if seconds is None:
        return ""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


def format_bytes(count: float) -> str:
    """170.1 MB, or 5.0 GB from a billion."""
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"


def format_count(count: float, noun: str) -> str:
    """A number with its noun: 1 image, 2,000 images, 0.5 epochs."""
    number = f"{count:,}" if isinstance(count, int) else f"{count:.4g}"
    return f"{number} {noun}{'' if count == 1 else 'es' if noun.endswith('s') else 's'}"


def format_job_time(total: int, resumed: int, noun: str, seconds: float) -> str:
    """10,000 images, 5.3 s. The time of a resumed job is that of its last part."""
    count = format_count(total, noun)
    return f"{count}, {f'{total - resumed:,} of them now in ' if resumed else ''}{seconds:.1f} s"


def abbreviate_list(names: Collection[str], most: int = 4) -> str:
    """Join the first `most` names with commas, and say how many more there are."""
    return ", ".join([*names][:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def make_unique_path_ends(paths: Sequence[str], taken: Collection[str] = ()) -> list[str]:
    """The shortest unique end of each path; equal paths, and names that are `taken`, are numbered."""
    parts = [path.rstrip("/").split("/") for path in paths]
    parts = [list(Path(*words).resolve().parts) if words[-1] in ("", ".", "..") else words for words in parts]
    names = list[str]()
    for own in parts:
        others = [words for words in parts if words != own]
        length = 1
        while length < len(own) and any(words[-length:] == own[-length:] for words in others):
            length += 1
        names.append("/".join(own[-length:]))
    unique = list[str]()
    for name in names:
        candidates = (name if number == 1 else f"{name} ({number})" for number in range(1, len(names) + 2))
        unique.append(next(each for each in candidates if each not in (*taken, *unique)))
    return unique
