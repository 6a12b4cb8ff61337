"""A training's folder: what it was told (run.json), what it saw (log.jsonl), where it stands (checkpoints/).

Everything in it is whole at any moment: run.json and checkpoints appear by renaming, and a line of the log that a crash
cut off, or that a later resume goes through again, is removed when the run is resumed. One process at a time
writes in it (`owned`), and only files written here are ever deleted. Files are read within limits and verified.
"""

import json
import os
import re
import shutil
import stat
import warnings
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

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
from vitrail.errors import CheckpointError, describe_error
from vitrail.files import FILE_KINDS, is_temporary_file, make_folder, read_lines, read_text, remove_file, write_text
from vitrail.json_yaml import CHECKSUM_KEY, add_checksum, parse_json
from vitrail.locks import LOCK_FILE_NAME, lock_folder
from vitrail.train.training_state import (
    DamagedCheckpointError,
    TrainingState,
    read_training_state,
    write_training_state,
)

CHECKPOINT_NAME = re.compile(r"step-([0-9]{8,18})\.safetensors")
TEMPORARY_NAME = re.compile(r"\.tmp[A-Za-z0-9]{6}")  # temporary names of safetensors
MAX_LOG_VALUE = 1e300  # of a number in the log
MAX_LOG_CHARACTERS = 2**27  # characters; in memory the values take ten times as much
LogRecord = dict[str, float]  # a line of the log


@dataclass(frozen=True)
class RunFolder:
    folder: Path

    @classmethod
    def create(cls, folder: Path, plan: Mapping[str, Any]) -> "RunFolder":
        """A new run: the folder with its plan, before anything else happens."""
        run = cls(folder)
        cls.check_folder_is_free(folder)
        make_folder(folder)
        with run.hold_lock():
            cls.check_folder_is_free(folder)  # another process may have started one in between
            make_folder(folder / CHECKPOINTS_FOLDER)
            write_text(folder / PLAN_FILE, json.dumps(add_checksum(plan), indent=2, ensure_ascii=False) + "\n")
        return run

    @classmethod
    def check_folder_is_free(cls, folder: Path) -> None:
        """Nobody's work is written over: a run that has taken a step, a folder with other things in it, a file."""
        run = cls(folder)
        if folder.exists() and not folder.is_dir():
            raise CheckpointError(f"{folder} is a file; expected a new folder")
        inside = {each.name for each in folder.iterdir()} if folder.exists() else set[str]()
        if PLAN_FILE in inside and (run.list_checkpoints() or run.read_records() or MODEL_FOLDER in inside):
            raise CheckpointError(
                f"{folder} already holds a run; expected a new folder; to resume it: --resume {folder}"
            )
        if PLAN_FILE in inside and is_plan_file(folder / PLAN_FILE):
            inside -= {
                PLAN_FILE,
                LOG_FILE,
                CHECKPOINTS_FOLDER,
                TENSORBOARD_FOLDER,
            }  # of a run that was killed before its first step
        others = [
            name
            for name in inside
            if name != LOCK_FILE_NAME and not is_temporary_file(folder / name, re.escape(PLAN_FILE))
        ]
        if others:
            raise CheckpointError(f"{folder} holds other things; expected a new folder, or an empty one")

    @contextmanager
    def hold_lock(self) -> Generator[None]:
        """Holds the lock of the folder: a second writer is refused, readers need no lock."""
        make_folder(self.folder)
        with lock_folder(self.folder, "wait for it to finish, or start a new run with -o"):
            self.check_file_kinds()
            yield

    def check_file_kinds(self) -> None:
        """Refuses links and special files, so that nothing outside is changed and nothing blocks."""
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
            raise CheckpointError(f"{self.folder} holds no {PLAN_FILE}; expected the folder of a run") from None
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(
                f"{self.folder / PLAN_FILE} cannot be read: {describe_error(error)}; expected what `vitrail "
                "train` wrote"
            ) from None

    def list_checkpoints(self) -> list[Path]:
        """The checkpoints, the oldest first."""
        return sorted(
            (
                path
                for path in (self.folder / CHECKPOINTS_FOLDER).glob("step-*")
                if CHECKPOINT_NAME.fullmatch(path.name)
            ),
            key=step_from_file_name,
        )

    def find_newest_checkpoint(self) -> tuple[TrainingState | None, dict[Path, str]]:
        """The newest checkpoint that passes its checksum, and why the newer ones are damaged."""
        damaged = dict[Path, str]()
        for path in reversed(self.list_checkpoints()):
            try:
                return read_checkpoint_with_step(path), damaged
            except DamagedCheckpointError as error:
                damaged[path] = error.reason
        return None, damaged

    def load_checkpoint_to_resume(self) -> TrainingState | None:
        """The checkpoint to resume from; damaged newer ones are renamed, with a warning."""
        state, damaged = self.find_newest_checkpoint()
        if state is None and damaged:
            reasons = ", ".join(f"{path.name} is damaged ({reason})" for path, reason in damaged.items())
            raise CheckpointError(f"no checkpoint of {self.folder} can be read: {reasons}; start a new run with -o")
        for path, reason in damaged.items():
            rename_damaged_file(path)
            where = "" if state is None or state.path is None else state.path.stem
            warnings.warn(f"{path.name} is damaged ({reason}); resuming from {where}", stacklevel=2)
        return state

    def save_checkpoint(self, state: TrainingState, step: int, keep: int = 2) -> Path:
        """The new checkpoint, and only once it is durable the old ones go."""
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
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
            with os.fdopen(os.open(self.folder / LOG_FILE, flags, 0o666), "a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:
            raise CheckpointError(f"cannot write {self.folder / LOG_FILE}: {describe_error(error)}") from None

    def read_records(self) -> list[LogRecord]:
        """The lines of the log; truncated and damaged ones are left out."""
        return [record for _, record in self.read_log_lines() if record is not None]

    def read_log_lines(self) -> list[tuple[str, LogRecord | None]]:
        try:
            return list(iterate_log(self.folder / LOG_FILE))
        except FileNotFoundError:
            return []
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{self.folder / LOG_FILE} cannot be read: {describe_error(error)}; expected what `vitrail train` wrote"
            ) from None

    def truncate_log(self, step: int) -> None:
        """Removes from the log what a resumed run will write again; a log with damaged lines is copied first."""
        lines = self.read_log_lines()
        damaged = count_damaged_lines(lines)
        if damaged:
            aside = copy_damaged_file(self.folder / LOG_FILE)
            warnings.warn(
                f"{damaged} of {len(lines)} lines of {LOG_FILE} are damaged and left out; "
                f"the original is kept as {aside.name}",
                stacklevel=2,
            )
        if lines:
            kept = [line.rstrip("\n") for line, record in lines if record is not None and record["step"] <= step]
            write_text(self.folder / LOG_FILE, "".join(f"{line}\n" for line in kept))


def is_plan_file(path: Path) -> bool:
    """Whether a training may have written it, even if it was edited since; a run.json of other programs is kept."""
    try:
        found: Any = parse_json(read_text(path))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(found, dict) and (not found or not found.keys().isdisjoint((CHECKSUM_KEY, "request")))


def iterate_log(path: Path) -> Iterator[tuple[str, LogRecord | None]]:
    """Each line with its finite values; None if it is damaged."""
    total = 0
    for line in read_lines(path):
        total += len(line)
        if total > MAX_LOG_CHARACTERS:
            raise ValueError(
                f"it has more than {MAX_LOG_CHARACTERS:,} characters; expected at most {MAX_LOG_CHARACTERS:,}"
            )
        yield line, parse_log_line(line)


def count_damaged_lines(lines: list[tuple[str, LogRecord | None]]) -> int:
    """The number of damaged lines; a truncated last line does not count: the run was killed while writing it."""
    cut_off = bool(lines) and lines[-1][1] is None and not lines[-1][0].endswith("\n")
    return sum(record is None for _, record in lines) - cut_off


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


def read_checkpoint_with_step(path: Path) -> TrainingState:
    """Reads a checkpoint and checks that it has the step in its name."""
    state = read_training_state(path)
    if state.metadata.get("step") != step_from_file_name(path):
        raise DamagedCheckpointError(path, ValueError(f"it has step {str(state.metadata.get('step'))[:20]}"))
    return state


def rename_damaged_file(path: Path) -> Path:
    """Renames a damaged file to NAME.damaged."""
    aside = find_free_damaged_name(path)
    try:
        path.rename(aside)
    except OSError as error:
        raise CheckpointError(f"cannot rename the damaged {path}: {describe_error(error)}") from None
    return aside


def copy_damaged_file(path: Path) -> Path:
    """Copies a damaged file to NAME.damaged."""
    aside = find_free_damaged_name(path)
    try:
        shutil.copyfile(path, aside)
    except OSError as error:
        raise CheckpointError(f"cannot copy the damaged {path}: {describe_error(error)}") from None
    return aside


def find_free_damaged_name(path: Path) -> Path:
    names = (path.with_name(f"{path.name}.damaged{number if number > 1 else ''}") for number in count(1))
    return next(each for each in names if not os.path.lexists(each))


def is_unfinished_checkpoint(path: Path) -> bool:
    """Whether it is the unfinished file of a checkpoint that a crash left behind."""
    return TEMPORARY_NAME.fullmatch(path.name) is not None or is_temporary_file(path, CHECKPOINT_NAME.pattern)


def step_from_file_name(path: Path) -> int:
    match = CHECKPOINT_NAME.fullmatch(path.name)
    return int(match[1]) if match else -1
