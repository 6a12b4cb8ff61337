"""The folder of a run: its plan (run.json), its log (log.jsonl) and its checkpoints (checkpoints/).

Everything in it is complete at any moment: run.json and checkpoints appear by renaming, and a line of the log that a
crash truncated is removed when the run is resumed. One process at a time writes in it (`hold_lock`), and only files
written here are ever deleted. Files are read within limits and verified.
"""

import json
import os
import re
import stat
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from vitrail.base.errors import CheckpointError, describe_error
from vitrail.base.files import (
    FILE_KINDS,
    SAFE_OPEN_FLAGS,
    is_leftover_temporary_file,
    make_folder,
    read_lines,
    read_text,
    remove_file,
    write_text,
)
from vitrail.base.json_yaml import CHECKSUM_KEY, add_checksum, parse_json
from vitrail.base.locks import LOCK_FILE_NAME, lock_folder
from vitrail.checkpoint.run_files import (
    CHECKPOINTS_FOLDER,
    CURVES_FILE,
    LOG_FILE,
    MODEL_FOLDER,
    PLAN_FILE,
    RUN_SUBFOLDERS,
    TENSORBOARD_FOLDER,
    read_plan,
)
from vitrail.distributed import Ranks
from vitrail.train.training_state import TrainingState, write_training_state

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


RUNS_FOLDER = Path("runs")
USUAL_RECIPES = ("fashion", "finetune", "scratch")  # chosen if none is given
CHECKPOINT_NAME = re.compile(r"step-([0-9]{8,18})\.safetensors")
TEMPORARY_NAME = re.compile(r"\.tmp[A-Za-z0-9]{6}")  # temporary names of safetensors


@dataclass(frozen=True)
class RunFolder:
    folder: Path

    @classmethod
    def create(cls, folder: Path, plan: Mapping[str, Any]) -> "RunFolder":
        """Create the folder of a new run with its plan, before any other work."""
        run = cls(folder)
        cls.check_folder_is_free(folder)
        make_folder(folder)
        with run.hold_lock():
            cls.check_folder_is_free(folder)  # another process may have started one in between
            make_folder(folder / CHECKPOINTS_FOLDER)
            run.write_plan(plan)
        return run

    def write_plan(self, plan: Mapping[str, Any]) -> None:
        write_text(self.folder / PLAN_FILE, json.dumps(add_checksum(plan), indent=2, ensure_ascii=False) + "\n")

    @classmethod
    def open_or_create(cls, folder: Path, ranks: Ranks, plan: Mapping[str, Any]) -> "RunFolder":
        """The run in a folder, or a new one with this plan; only the first of several processes writes."""
        if ranks.is_first and not (folder / PLAN_FILE).exists():
            cls.create(folder, plan)
        return ranks.broadcast_object(cls(folder))

    @classmethod
    def check_folder_is_free(cls, folder: Path) -> None:
        """Refuse a folder that holds a run with at least one step, or anything else, so that nothing is overwritten."""
        run = cls(folder)
        if folder.exists() and not folder.is_dir():
            raise CheckpointError(f"{folder} is a file; expected a new folder")
        inside = {each.name for each in folder.iterdir()} if folder.exists() else set[str]()
        if PLAN_FILE in inside and (run.list_checkpoints() or run.read_records() or MODEL_FOLDER in inside):
            raise CheckpointError(f"{folder} already holds a run; continue it with `resume`, or choose a new folder")
        if PLAN_FILE in inside and may_be_plan_file(folder / PLAN_FILE):  # a run that was killed before its first step
            inside -= {PLAN_FILE, LOG_FILE, CHECKPOINTS_FOLDER, TENSORBOARD_FOLDER}
        others = [
            name
            for name in inside
            if name != LOCK_FILE_NAME and not is_leftover_temporary_file(folder / name, re.escape(PLAN_FILE))
        ]
        if others:
            raise CheckpointError(f"{folder} holds other files; expected a new or empty folder")

    @contextmanager
    def hold_lock(self) -> Generator[None]:
        """Hold the lock of the folder: a second writer is refused, readers need no lock."""
        make_folder(self.folder)
        with lock_folder(self.folder, "wait for it to finish, or start a new run in another folder"):
            self.check_file_kinds()
            yield

    def check_file_kinds(self) -> None:
        """Refuse links and special files, so that nothing outside is changed and nothing blocks."""
        for name in (PLAN_FILE, LOG_FILE, CURVES_FILE, *RUN_SUBFOLDERS):
            path = self.folder / name
            try:
                kind = stat.S_IFMT(path.lstat().st_mode)
            except FileNotFoundError:
                continue
            if kind == stat.S_IFLNK:
                raise CheckpointError(
                    f"{path} is a symbolic link; expected no links inside a run: link {self.folder} itself"
                )
            if kind != (stat.S_IFDIR if name in RUN_SUBFOLDERS else stat.S_IFREG):
                expected = "a folder" if name in RUN_SUBFOLDERS else "a regular file"
                raise CheckpointError(f"{path} is {FILE_KINDS.get(kind, 'a file')}; expected {expected}")

    def load_plan(self) -> dict[str, Any]:
        try:
            return read_plan(self.folder)
        except FileNotFoundError:
            raise CheckpointError(
                f"{self.folder} is not a run: it has no {PLAN_FILE}; expected a folder that `vitrail train` wrote"
            ) from None
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{self.folder / PLAN_FILE} cannot be read: {describe_error(error)}; expected what `vitrail "
                "train` wrote"
            ) from None

    def list_checkpoints(self) -> list[Path]:
        """The checkpoints, the oldest first."""
        paths = (self.folder / CHECKPOINTS_FOLDER).glob("step-*")
        return sorted((path for path in paths if CHECKPOINT_NAME.fullmatch(path.name)), key=step_from_file_name)

    def save_checkpoint(self, state: TrainingState, step: int, keep: int = 2) -> Path:
        """Write the new checkpoint, and delete old ones only once it is durable."""
        folder = self.folder / CHECKPOINTS_FOLDER
        if folder.is_symlink():
            raise CheckpointError(f"{folder} is a symbolic link; expected a folder: old checkpoints are deleted in it")
        make_folder(folder)
        path = folder / f"step-{step:08}.safetensors"
        write_training_state(state, path)
        try:
            for old in [*self.list_checkpoints()[:-keep], *filter(is_unfinished_checkpoint, folder.glob(".*"))]:
                if old.is_file() and not old.is_symlink():
                    remove_file(old)
        except OSError as error:
            raise CheckpointError(f"cannot delete old checkpoints in {folder}: {describe_error(error)}") from None
        return path

    def append_to_log(self, record: Mapping[str, float | int]) -> None:
        try:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | SAFE_OPEN_FLAGS
            with os.fdopen(os.open(self.folder / LOG_FILE, flags, 0o666), "a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:
            raise CheckpointError(f"cannot write {self.folder / LOG_FILE}: {describe_error(error)}") from None

    def read_log(self) -> ParsedLog:
        try:
            return ParsedLog.read(self.folder / LOG_FILE)
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{self.folder / LOG_FILE} cannot be read: {describe_error(error)}; expected what `vitrail train` wrote"
            ) from None

    def read_records(self) -> list[LogRecord]:
        """The records of the log; truncated and damaged lines are left out."""
        return self.read_log().records


def name_run(data: str, recipe: str) -> str:
    """The name of the data, and that of the recipe unless it is a usual one or begins with that of the data."""
    name = Path(data).name or "data"
    if recipe in USUAL_RECIPES or recipe == name:
        return name
    return recipe if recipe.startswith(f"{name}-") else f"{name}-{recipe}"


def create_numbered_folder(data: str, recipe: str) -> Path:
    """runs/NAME-1, or the next number that is free; created at once, so that no other process takes it."""
    make_folder(RUNS_FOLDER)
    for number in count(1):
        folder = RUNS_FOLDER / f"{name_run(data, recipe)}-{number}"
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        except (OSError, ValueError) as error:
            raise CheckpointError(f"cannot make the folder {folder}: {describe_error(error)}") from None
        return folder
    raise AssertionError("unreachable")


def may_be_plan_file(path: Path) -> bool:
    """Whether vitrail may have written it, even if it was edited since; a run.json of other programs is kept."""
    try:
        found: Any = parse_json(read_text(path))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and (not found or not found.keys().isdisjoint((CHECKSUM_KEY, "request")))


def is_unfinished_checkpoint(path: Path) -> bool:
    """Whether it is the unfinished file of a checkpoint that a crash left behind."""
    return TEMPORARY_NAME.fullmatch(path.name) is not None or is_leftover_temporary_file(path, CHECKPOINT_NAME.pattern)


def step_from_file_name(path: Path) -> int:
    match = CHECKPOINT_NAME.fullmatch(path.name)
    return int(match[1]) if match else -1
