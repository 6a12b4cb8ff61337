"""An unfinished output: finished rows are in OUT.partial, however the job ended, and it is resumed from there.

The folder has one owner at a time and holds only these files: job.json, the settings of the job, which must be the
same when it is resumed; files that grow by complete records; and at the end the empty file `whole`: all results are
complete and only need to be renamed.
"""

import json
import os
import re
import stat
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from vitrail import __version__
from vitrail.base.errors import ConfigError, VitrailError, describe_error
from vitrail.base.files import FILE_KINDS, is_temporary_name, make_writable_folder, read_text, sync_to_disk, write_text
from vitrail.base.json_yaml import CHECKSUM_KEY, add_checksum, parse_json, verify_and_remove_checksum
from vitrail.base.locks import LOCK_FILE_NAME, lock_folder

JOB_FILE, COMPLETE_MARKER_FILE, COMPLETION_LOG_FILE = "job.json", "whole", "done.bin"
RESULT_FILES = (
    *("rows.csv", "rows.tsv", "rows.txt", "rows.jsonl", "rows.json", "rows.parquet"),
    *("files.csv", "features.npy", "features.parquet", "maps.npz"),
)
FILES_WITHOUT_JOB = (COMPLETE_MARKER_FILE, LOCK_FILE_NAME)  # may exist alone, after a kill at the start or the end
PARTIAL_FOLDER_FILES = (JOB_FILE, *FILES_WITHOUT_JOB, COMPLETION_LOG_FILE, *RESULT_FILES)
NOTHING_CHANGED = "nothing in it is changed: move it away, or choose another name for `out`"
WRITER_KEY = "written by"
LEGACY_JOB_KEYS = {"model", "weights", "format", "output"}  # in a job.json of earlier versions, which lack WRITER_KEY
MAX_JOB_FILE_BYTES = 2**20
MAX_LOCK_ATTEMPTS = 100  # a folder may disappear between creating and locking it, when its previous owner finishes


class WritingError(VitrailError):
    """Results that could not be written; finished rows are kept."""


class PartialFolder:
    """The folder of an unfinished job. `final_paths` maps the names of its results to their final paths, OUT last."""

    def __init__(self, out: Path, final_paths: Mapping[str, Path]) -> None:
        if out.name in ("", ".."):
            raise ConfigError(f"`out` {out} is a folder; expected the name of a file for the results")
        self.out, self.final_paths = out, final_paths
        self.folder = out.with_name(f"{out.name}.partial")
        self.held: ExitStack | None = None  # the lock
        self.overwrite = True

    @property
    def has_job(self) -> bool:
        return (self.folder / JOB_FILE).exists()

    @property
    def is_complete(self) -> bool:
        return (self.folder / COMPLETE_MARKER_FILE).exists()

    def start(self, *, resume: bool, overwrite: bool) -> bool:
        """Lock the folder and refuse to overwrite results; return whether the job is already complete."""
        self.overwrite = overwrite
        self.check_paths()
        if not os.path.lexists(self.folder) and self.check_existing_results(resume=resume):
            return True  # nothing is written: the disk may be read-only
        self.lock()
        return self.check_existing_results(resume=resume)

    def check_existing_results(self, *, resume: bool) -> bool:
        """Refuse to lose existing results; return whether the job is already complete."""
        if self.is_complete and resume:
            self.move_results()
            return True
        existing = next((path for path in self.final_paths.values() if path.exists()), None)
        if self.has_job and not (resume or self.overwrite):
            raise ConfigError(
                f"{self.folder} is an unfinished job; use `resume` to continue it, or `overwrite` to start over"
            )
        if existing is not None and not self.overwrite:
            if resume and not self.has_job and self.out.exists():
                return True
            raise file_exists_error(existing, resume=resume)
        return False

    def check_paths(self) -> None:
        """Refuse to replace a device, a folder or a link, or to write in a folder with files of others."""
        for path in self.final_paths.values():
            if path.is_symlink():
                raise ConfigError(
                    f"{path} is a symbolic link; expected the name of a regular file: pass the one it points to"
                )
            if path.exists() and not path.is_file():  # renaming would replace a device, too
                kind = FILE_KINDS.get(stat.S_IFMT(path.stat().st_mode), "not a file")
                raise ConfigError(f"{path} is {kind}; expected the name of a file for the results")
        if not os.path.lexists(self.folder):
            return
        if self.folder.is_symlink() or not self.folder.is_dir():
            kind = "a symbolic link" if self.folder.is_symlink() else "not a folder"
            raise ConfigError(f"{self.folder} is {kind}; {NOTHING_CHANGED}")
        try:
            inside = {path.name: path for path in self.folder.iterdir()}
        except FileNotFoundError:  # its owner has just removed it
            return
        expected = PARTIAL_FOLDER_FILES if JOB_FILE in inside and is_job_file(inside[JOB_FILE]) else FILES_WITHOUT_JOB
        for name, path in sorted(inside.items(), key=lambda each: each[0] in PARTIAL_FOLDER_FILES):
            ours = name in expected or is_temporary_job_file(name)
            if not ours or not is_regular_file(path, empty=name == COMPLETE_MARKER_FILE):
                raise ConfigError(
                    f"{self.folder} has {name!r}, which was not written by a vitrail job; {NOTHING_CHANGED}"
                )

    def lock(self) -> None:
        """Make this process the owner of the folder until `close`; InUseError if it has another owner."""
        if self.held is None:
            self.check_paths()
            make_writable_folder(self.out.parent)
            with self.convert_write_errors():
                self.held = create_and_lock(self.folder)

    def open_job(self, job: Mapping[str, Any], *, resume: bool) -> None:
        """Start the job, or check that it is the one to resume; the folder is unlocked if that fails."""
        self.lock()
        with self.close_on_error(), self.convert_write_errors():
            if resume and self.has_job:
                check_same_job(self.folder, job)
                return
            self.delete_files(COMPLETE_MARKER_FILE, *self.list_result_files())
            write_job_file(self.folder, job)

    def list_result_files(self) -> list[str]:
        """The files of rows, without job.json, `whole` and the lock."""
        names = [path.name for path in self.folder.iterdir()]
        return [name for name in names if name in (COMPLETION_LOG_FILE, *RESULT_FILES) or is_temporary_job_file(name)]

    def delete_files(self, *names: str) -> None:
        for name in names:
            (self.folder / name).unlink(missing_ok=True)

    def finish(self) -> None:
        """Make the complete results durable and rename them to their final paths."""
        with self.convert_write_errors():
            for name in self.final_paths:
                sync_to_disk(self.folder / name)
            (self.folder / COMPLETE_MARKER_FILE).touch()
            sync_to_disk(self.folder)
        self.move_results()

    def move_results(self) -> None:
        """Rename the results to their final paths; after a kill it continues where it stopped."""
        with self.convert_write_errors():
            for name, final in self.final_paths.items():
                if not self.overwrite and os.path.lexists(self.folder / name) and os.path.lexists(final):
                    raise file_exists_error(final, resume=True)
                with suppress(FileNotFoundError):  # it was renamed before the kill
                    (self.folder / name).replace(final)
            sync_to_disk(self.out.parent)
            self.delete_files(*self.list_result_files(), JOB_FILE, COMPLETE_MARKER_FILE)  # the marker last: see `start`
        self.close()

    def close(self) -> None:
        """Unlock the folder, so that another process can resume the job; an empty one is removed."""
        if self.held is not None:
            held, self.held = self.held, None
            held.close()

    @contextmanager
    def close_on_error(self) -> Generator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise

    @contextmanager
    def convert_write_errors(self) -> Generator[None]:
        try:
            yield
        except OSError as error:
            raise WritingError(
                f"{self.out} cannot be written: {describe_error(error)}; "
                "finished rows are kept: free some space, then run the same command with `resume`"
            ) from None


def create_and_lock(folder: Path) -> ExitStack:
    """Create and lock a folder; InUseError if another process or thread owns it. An empty one is removed at the end."""
    attempts = 0
    while True:
        attempts += 1
        folder.mkdir(exist_ok=True)
        stack = ExitStack()
        stack.callback(remove_if_empty, folder)
        try:
            stack.enter_context(lock_folder(folder))
        except VitrailError:
            stack.close()
            if attempts == MAX_LOCK_ATTEMPTS or os.path.lexists(folder):
                raise
        else:
            return stack


def remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def file_exists_error(path: Path, *, resume: bool) -> ConfigError:
    how = "`overwrite` together with `resume`" if resume else "`overwrite`"
    return ConfigError(f"{path} already exists; use {how} to replace it, or choose another name")


def is_regular_file(path: Path, *, empty: bool = False) -> bool:
    try:
        found = path.lstat()
    except FileNotFoundError:  # its owner has just removed it
        return True
    return stat.S_ISREG(found.st_mode) and not (empty and found.st_size)


def write_job_file(folder: Path, job: Mapping[str, Any]) -> None:
    about = add_checksum({WRITER_KEY: f"vitrail {__version__}", **job})
    write_text(folder / JOB_FILE, json.dumps(about, indent=2) + "\n")


def read_job_file(path: Path) -> dict[str, Any]:
    try:
        found = parse_json(read_text(path, MAX_JOB_FILE_BYTES))
        rest = verify_and_remove_checksum(found) if isinstance(found, dict) else {}
        reason = (
            "" if rest and CHECKSUM_KEY in found else "it has no checksum: it is damaged, or from an earlier version"
        )
    except (OSError, ValueError) as error:
        rest, reason = {}, describe_error(error)
    if reason:
        raise ConfigError(f"{path} cannot be read: {reason}; use `overwrite` to start over")
    return {name: value for name, value in rest.items() if name != WRITER_KEY}


def check_same_job(folder: Path, job: Mapping[str, Any]) -> None:
    """Refuse to resume a job with other settings than it was started with."""
    started_with = read_job_file(folder / JOB_FILE)
    for name in (*started_with, *job):
        before, now = started_with.get(name), job.get(name)
        if before != now:
            raise ConfigError(
                f"cannot resume {folder}: it was started with {name} {before!r}, not {now!r}. "
                "Use the same settings, or `overwrite` to start over."
            )


def is_job_file(path: Path) -> bool:
    """Whether a vitrail job wrote it, in this or an earlier version, even if it is damaged."""
    try:
        text = read_text(path, MAX_JOB_FILE_BYTES, errors="replace")
    except OSError:
        return False
    if f'"{WRITER_KEY}": "vitrail' in text:
        return True
    with suppress(ValueError):
        found = parse_json(text)
        return isinstance(found, dict) and set(found) >= LEGACY_JOB_KEYS
    return False


def is_temporary_job_file(name: str) -> bool:
    return is_temporary_name(name, re.escape(JOB_FILE))
