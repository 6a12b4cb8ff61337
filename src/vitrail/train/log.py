"""The log of a run, log.jsonl: one JSON object of finite numbers per line."""

from dataclasses import dataclass
from pathlib import Path

from vitrail.base.files import read_lines
from vitrail.base.json_yaml import parse_json

MAX_LOG_VALUE = 1e300
MAX_STEP = 2**53  # a larger number would fill the table of runs with its digits
MAX_LOG_CHARACTERS = 2**26  # in memory the values take ten times as much
MAX_DAMAGED_LINES = 2**12
MIN_LINE_CHARACTERS = 128  # that a shorter line counts as: a line costs time and memory, even if it is empty
LogRecord = dict[str, float]


@dataclass(frozen=True)
class ParsedLog:
    """The intact lines of a log with their finite values, and the number of all lines but empty ones."""

    lines: tuple[tuple[str, LogRecord], ...] = ()
    line_count: int = 0
    truncated: bool = False  # the last line: the run was killed while writing it

    @classmethod
    def read(cls, path: Path) -> "ParsedLog":
        """Empty if there is no such file; OSError or ValueError if it cannot be read."""
        lines, count, total, line, record = list[tuple[str, LogRecord]](), 0, 0, "", None
        try:
            for line in read_lines(path):
                total += max(len(line), MIN_LINE_CHARACTERS)
                if total > MAX_LOG_CHARACTERS:
                    most = MAX_LOG_CHARACTERS // MIN_LINE_CHARACTERS
                    raise ValueError(f"it has more than {MAX_LOG_CHARACTERS:,} characters or {most:,} lines")
                if line.isspace():
                    continue
                count, record = count + 1, parse_log_line(line)
                if record is not None:
                    lines.append((line, record))
                elif count - len(lines) > MAX_DAMAGED_LINES:
                    raise ValueError(f"it has more than {MAX_DAMAGED_LINES:,} damaged lines")
        except FileNotFoundError:
            return cls()
        return cls(tuple(lines), count, bool(count) and record is None and not line.endswith("\n"))

    @property
    def records(self) -> list[LogRecord]:
        return [record for _, record in self.lines]

    @property
    def damaged_lines(self) -> int:
        """How many lines are damaged. A truncated last line is not."""
        return self.line_count - len(self.lines) - self.truncated


def parse_log_line(line: str) -> LogRecord | None:
    try:
        values = parse_json(line)
    except ValueError:
        return None
    if not isinstance(values, dict):
        return None
    record = {str(name): value for name, value in values.items() if is_finite_number(value)}
    return record if is_step(record.get("step")) else None


def is_step(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX_STEP


def is_finite_number(value: object) -> bool:
    """Whether it is a finite number; Python's integers may be larger than any float."""
    return type(value) in (int, float) and -MAX_LOG_VALUE < value < MAX_LOG_VALUE  # pyright: ignore[reportOperatorIssue, reportUnknownVariableType]
