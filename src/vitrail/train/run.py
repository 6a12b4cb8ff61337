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

from vitrail.errors import CheckpointError, one_line
from vitrail.files import KINDS, is_temporary, make_folder, read_lines, read_text, remove, write_text
from vitrail.locks import LOCK, locked
from vitrail.parsing import CHECKSUM, parse_json, with_checksum, without_checksum
from vitrail.train.state import DamagedError, State, read_state, write_state

PLAN, LOG, STATES, MODEL, CURVES, BOARD = "run.json", "log.jsonl", "checkpoints", "model", "curves.png", "tensorboard"
FOLDERS = (STATES, MODEL, BOARD)
NAME = re.compile(r"step-([0-9]{8,18})\.safetensors")
CUT_OFF = re.compile(r"\.tmp[A-Za-z0-9]{6}")  # temporary names of safetensors
LARGEST = 1e300  # of a number in the log
LARGEST_LOG = 2**27  # characters; in memory the values take ten times as much
Record = dict[str, float]  # a line of the log


@dataclass(frozen=True)
class Run:
    folder: Path

    @classmethod
    def begun(cls, folder: Path, plan: Mapping[str, Any]) -> "Run":
        """A new run: the folder with its plan, before anything else happens."""
        run = cls(folder)
        cls.check_free(folder)
        make_folder(folder)
        with run.owned():
            cls.check_free(folder)  # another process may have started one in between
            make_folder(folder / STATES)
            write_text(folder / PLAN, json.dumps(with_checksum(plan), indent=2, ensure_ascii=False) + "\n")
        return run

    @classmethod
    def check_free(cls, folder: Path) -> None:
        """Nobody's work is written over: a run that has taken a step, a folder with other things in it, a file."""
        run = cls(folder)
        if folder.exists() and not folder.is_dir():
            raise CheckpointError(f"{folder} is a file; expected a new folder")
        inside = {each.name for each in folder.iterdir()} if folder.exists() else set[str]()
        if PLAN in inside and (run.states() or run.records() or MODEL in inside):
            raise CheckpointError(
                f"{folder} already holds a run; expected a new folder; to resume it: --resume {folder}"
            )
        if PLAN in inside and is_plan(folder / PLAN):
            inside -= {PLAN, LOG, STATES, BOARD}  # of a run that was killed before its first step
        others = [name for name in inside if name != LOCK and not is_temporary(folder / name, re.escape(PLAN))]
        if others:
            raise CheckpointError(f"{folder} holds other things; expected a new folder, or an empty one")

    @contextmanager
    def owned(self) -> Generator[None]:
        """Holds the lock of the folder: a second writer is refused, readers need no lock."""
        make_folder(self.folder)
        with locked(self.folder, "wait for it to finish, or start a new run with -o"):
            self.check_kinds()
            yield

    def check_kinds(self) -> None:
        """Refuses links and special files, so that nothing outside is changed and nothing blocks."""
        for name in (PLAN, LOG, CURVES, *FOLDERS):
            path = self.folder / name
            try:
                kind = stat.S_IFMT(path.lstat().st_mode)
            except FileNotFoundError:
                continue
            if kind == stat.S_IFLNK:
                raise CheckpointError(
                    f"{path} is a symbolic link; expected no links inside a run: link {self.folder} itself"
                )
            if kind != (stat.S_IFDIR if name in FOLDERS else stat.S_IFREG):
                expected = "a folder" if name in FOLDERS else "a regular file"
                raise CheckpointError(f"{path} is {KINDS.get(kind, 'a file')}; expected {expected}")

    def plan(self) -> dict[str, Any]:
        try:
            return read_plan(self.folder / PLAN)
        except FileNotFoundError:
            raise CheckpointError(f"{self.folder} holds no {PLAN}; expected the folder of a run") from None
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(
                f"{self.folder / PLAN} cannot be read: {one_line(error)}; expected what `vitrail train` wrote"
            ) from None

    def states(self) -> list[Path]:
        """The checkpoints, the oldest first."""
        return sorted(
            (path for path in (self.folder / STATES).glob("step-*") if NAME.fullmatch(path.name)), key=step_of
        )

    def newest(self) -> tuple[State | None, dict[Path, str]]:
        """The newest checkpoint that passes its checksum, and why the newer ones are damaged."""
        damaged = dict[Path, str]()
        for path in reversed(self.states()):
            try:
                return read_numbered(path), damaged
            except DamagedError as error:
                damaged[path] = error.reason
        return None, damaged

    def latest(self) -> State | None:
        """The checkpoint to resume from; damaged newer ones are renamed, with a warning."""
        state, damaged = self.newest()
        if state is None and damaged:
            reasons = ", ".join(f"{path.name} is damaged ({reason})" for path, reason in damaged.items())
            raise CheckpointError(f"no checkpoint of {self.folder} can be read: {reasons}; start a new run with -o")
        for path, reason in damaged.items():
            put_aside(path)
            where = "" if state is None or state.path is None else state.path.stem
            warnings.warn(f"{path.name} is damaged ({reason}); resuming from {where}", stacklevel=2)
        return state

    def save(self, state: State, step: int, keep: int = 2) -> Path:
        """The new checkpoint, and only once it is durable the old ones go."""
        folder = self.folder / STATES
        if folder.is_symlink():
            raise CheckpointError(f"{folder} is a symbolic link; expected a folder: old checkpoints are deleted in it")
        make_folder(folder)
        path = folder / f"step-{step:08}.safetensors"
        write_state(state, path)
        try:
            for old in [*self.states()[:-keep], *filter(is_cut_off, folder.glob(".*"))]:
                if old.is_file() and not old.is_symlink():
                    remove(old)
        except OSError as error:
            raise CheckpointError(f"cannot delete old checkpoints in {folder}: {one_line(error)}") from None
        return path

    def log(self, record: Mapping[str, float | int]) -> None:
        try:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
            with os.fdopen(os.open(self.folder / LOG, flags, 0o666), "a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:
            raise CheckpointError(f"cannot write {self.folder / LOG}: {one_line(error)}") from None

    def records(self) -> list[Record]:
        """The lines of the log; truncated and damaged ones are left out."""
        return [record for _, record in self.lines() if record is not None]

    def lines(self) -> list[tuple[str, Record | None]]:
        try:
            return list(read_log(self.folder / LOG))
        except FileNotFoundError:
            return []
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{self.folder / LOG} cannot be read: {one_line(error)}; expected what `vitrail train` wrote"
            ) from None

    def forget_after(self, step: int) -> None:
        """Removes from the log what a resumed run will write again; a log with damaged lines is copied first."""
        lines = self.lines()
        damaged = count_damaged(lines)
        if damaged:
            aside = copy_aside(self.folder / LOG)
            warnings.warn(
                f"{damaged} of {len(lines)} lines of {LOG} are damaged and left out; "
                f"the original is kept as {aside.name}",
                stacklevel=2,
            )
        if lines:
            kept = [line.rstrip("\n") for line, record in lines if record is not None and record["step"] <= step]
            write_text(self.folder / LOG, "".join(f"{line}\n" for line in kept))


def read_plan(path: Path) -> dict[str, Any]:
    """The plan of a run, once its checksum is verified."""
    found: Any = parse_json(read_text(path))
    if not isinstance(found, dict):
        raise ValueError("it is not a run's plan")  # noqa: TRY004  # what is in a file, not an argument
    return without_checksum(found)


def is_plan(path: Path) -> bool:
    """Whether a training may have written it, even if it was edited since; a run.json of other programs is kept."""
    try:
        found: Any = parse_json(read_text(path))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(found, dict) and (not found or not found.keys().isdisjoint((CHECKSUM, "request")))


def read_log(path: Path) -> Iterator[tuple[str, Record | None]]:
    """Each line with its finite values; None if it is damaged."""
    total = 0
    for line in read_lines(path):
        total += len(line)
        if total > LARGEST_LOG:
            raise ValueError(f"it has more than {LARGEST_LOG:,} characters; expected at most {LARGEST_LOG:,}")
        yield line, record_in(line)


def count_damaged(lines: list[tuple[str, Record | None]]) -> int:
    """The number of damaged lines; a truncated last line does not count: the run was killed while writing it."""
    cut_off = bool(lines) and lines[-1][1] is None and not lines[-1][0].endswith("\n")
    return sum(record is None for _, record in lines) - cut_off


def record_in(line: str) -> Record | None:
    try:
        values = parse_json(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, dict):
        return None
    record = {str(name): value for name, value in values.items() if is_number(value)}
    return record if type(record.get("step")) is int and record["step"] >= 0 else None


def is_number(value: object) -> bool:
    """Whether it is a finite number; Python's integers may be larger than any float."""
    return type(value) in (int, float) and -LARGEST < value < LARGEST  # pyright: ignore[reportOperatorIssue, reportUnknownVariableType]


def read_numbered(path: Path) -> State:
    """Reads a checkpoint and checks that it has the step in its name."""
    state = read_state(path)
    if state.numbers.get("step") != step_of(path):
        raise DamagedError(path, ValueError(f"it has step {str(state.numbers.get('step'))[:20]}"))
    return state


def put_aside(path: Path) -> Path:
    """Renames a damaged file to NAME.damaged."""
    aside = free_name(path)
    try:
        path.rename(aside)
    except OSError as error:
        raise CheckpointError(f"cannot rename the damaged {path}: {one_line(error)}") from None
    return aside


def copy_aside(path: Path) -> Path:
    """Copies a damaged file to NAME.damaged."""
    aside = free_name(path)
    try:
        shutil.copyfile(path, aside)
    except OSError as error:
        raise CheckpointError(f"cannot copy the damaged {path}: {one_line(error)}") from None
    return aside


def free_name(path: Path) -> Path:
    names = (path.with_name(f"{path.name}.damaged{number if number > 1 else ''}") for number in count(1))
    return next(each for each in names if not os.path.lexists(each))


def is_cut_off(path: Path) -> bool:
    """Whether it is the unfinished file of a checkpoint that a crash left behind."""
    return CUT_OFF.fullmatch(path.name) is not None or is_temporary(path, NAME.pattern)


def step_of(path: Path) -> int:
    match = NAME.fullmatch(path.name)
    return int(match[1]) if match else -1
