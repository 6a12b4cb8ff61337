"""The log of a run, log.jsonl: one JSON object of finite numbers per line."""

from dataclasses import dataclass
from pathlib import Path

from vitrail.files import read_lines
from vitrail.json_yaml import parse_json

MAX_LOG_VALUE = 1e300
MAX_LOG_CHARACTERS = 2**27  # in memory the values take ten times as much
LogRecord = dict[str, float]


@dataclass(frozen=True)
class ParsedLog:
    """The lines of a log with their finite values; None for a damaged line."""

    lines: tuple[tuple[str, LogRecord | None], ...] = ()

    @classmethod
    def read(cls, path: Path) -> "ParsedLog":
        """Empty if there is no such file; OSError or ValueError if it cannot be read."""
        lines, total = list[tuple[str, LogRecord | None]](), 0
        try:
            for line in read_lines(path):
                total += len(line)
                if total > MAX_LOG_CHARACTERS:
                    raise ValueError(
                        f"it has more than {MAX_LOG_CHARACTERS:,} characters; expected at most {MAX_LOG_CHARACTERS:,}"
                    )
                lines.append((line, parse_log_line(line)))
        except FileNotFoundError:
            return cls()
        return cls(tuple(lines))

    @property
    def records(self) -> list[LogRecord]:
        return [record for _, record in self.lines if record is not None]

    @property
    def damaged_lines(self) -> int:
        """How many lines are damaged. A truncated last line is not: the run was killed while writing it."""
        truncated = bool(self.lines) and self.lines[-1][1] is None and not self.lines[-1][0].endswith("\n")
        return sum(record is None for _, record in self.lines) - truncated


def parse_log_line(line: str) -> LogRecord | None:
    try:
        values = parse_json(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, dict):
        return None
    record = {str(name): value for name, value in values.items() if is_finite_number(value)}
    return record if type(record.get("step")) is int and record["step"] >= 0 else None


def is_finite_number(value: object) -> bool:
    """Whether it is a finite number; Python's integers may be larger than any float."""
    return type(value) in (int, float) and -MAX_LOG_VALUE < value < MAX_LOG_VALUE  # pyright: ignore[reportOperatorIssue, reportUnknownVariableType]
