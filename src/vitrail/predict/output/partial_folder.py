"""An unfinished output: finished rows are in OUT.partial, however the job ended, and it is resumed from there.

The folder has one owner at a time and holds only these files: job.json, the settings of the job; files that grow by
complete records; and at the end the empty file `whole`: all results are complete and only need to be renamed.
"""

import os
import stat
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from vitrail.base.errors import ConfigError, VitrailError, describe_error
from vitrail.base.files import FILE_KINDS, make_writable_folder, sync_to_disk
from vitrail.base.locks import LOCK_FILE_NAME
from vitrail.predict.output.folder_ownership import FolderOwnership
from vitrail.predict.output.job_file import (
    JOB_FILE,
    check_same_job,
    is_job_file,
    is_temporary_job_file,
    write_job_file,
)

COMPLETE_MARKER_FILE, COMPLETION_LOG_FILE = "whole", "done.bin"
RESULT_FILES = (
    *("rows.csv", "rows.tsv", "rows.txt", "rows.jsonl", "rows.json", "rows.parquet"),
    *("files.csv", "features.npy", "features.parquet"),
)
FILES_WITHOUT_JOB = (COMPLETE_MARKER_FILE, LOCK_FILE_NAME)  # may exist alone, after a kill at the start or the end
PARTIAL_FOLDER_FILES = (JOB_FILE, *FILES_WITHOUT_JOB, COMPLETION_LOG_FILE, *RESULT_FILES)
NOTHING_CHANGED = "nothing in it is changed: move it away, or choose another name for `out`"


class WritingError(VitrailError):
    """Results that could not be written; finished rows are kept."""


class PartialFolder:
    """The folder of an unfinished job. `final_paths` maps the names of its results to their final paths, OUT last."""

    def __init__(self, out: Path, final_paths: Mapping[str, Path]) -> None:
        if out.name in ("", ".."):
            raise ConfigError(f"`out` {out} is a folder; expected the name of a file for the results")
        self.out, self.final_paths = out, final_paths
        self.folder = out.with_name(f"{out.name}.partial")
        self.ownership = FolderOwnership(self.folder)
        self.overwrite = True

    @property
    def has_job(self) -> bool:
        return (self.folder / JOB_FILE).exists()

    @property
    def is_complete(self) -> bool:
        return (self.folder / COMPLETE_MARKER_FILE).exists()

    def start(self, *, resume: bool, overwrite: bool) -> bool:
        """Lock the folder and refuse to overwrite results; return whether the job is already complete."""
        if not os.path.lexists(self.folder) and self.check_existing_results(resume=resume, overwrite=overwrite):
            return True  # nothing is written: the disk may be read-only
        self.lock()
        return self.check_existing_results(resume=resume, overwrite=overwrite)

    def check_existing_results(self, *, resume: bool, overwrite: bool) -> bool:
        """Refuse to lose existing results; return whether the job is already complete."""
        self.overwrite = overwrite
        self.check_paths()
        if self.is_complete and resume:
            self.lock()
            self.move_results()
            return True
        existing = next((path for path in self.final_paths.values() if path.exists()), None)
        if self.has_job and not (resume or overwrite):
            raise ConfigError(
                f"{self.folder} is an unfinished job; use `resume` to continue it, or `overwrite` to start over"
            )
        if existing is not None and not overwrite:
            if resume and not self.has_job and self.out.exists():
                return True
            raise file_exists_error(existing, resume=resume)
        make_writable_folder(self.out.parent)
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
            if not ours or not is_regular_file_without_links(path, empty=name == COMPLETE_MARKER_FILE):
                raise ConfigError(
                    f"{self.folder} has {name!r}, which was not written by a vitrail job; {NOTHING_CHANGED}"
                )

    def lock(self) -> None:
        """Make this process the owner of the folder until `close`; InUseError if it has another owner."""
        if self.ownership.held is not None:
            return
        self.check_paths()
        make_writable_folder(self.out.parent)
        with self.convert_write_errors():
            self.ownership.acquire()
        with self.close_on_error():
            self.check_paths()  # again, now that no other process can change it

    def open_job(self, job: Mapping[str, Any], *, resume: bool) -> None:
        """Start the job, or check that it is the one to resume; the folder is unlocked if that fails."""
        self.lock()
        with self.close_on_error(), self.convert_write_errors():
            if resume and self.has_job:
                check_same_job(self.folder, job)
                return
            for name in (COMPLETE_MARKER_FILE, *self.list_result_files()):
                self.delete_file(name)
            write_job_file(self.folder, job)

    def list_result_files(self) -> list[str]:
        """The files of rows, without job.json, `whole` and the lock."""
        names = [path.name for path in self.folder.iterdir()]
        return [name for name in names if name in (COMPLETION_LOG_FILE, *RESULT_FILES) or is_temporary_job_file(name)]

    def delete_file(self, name: str) -> None:
        with suppress(FileNotFoundError):
            if is_regular_file_without_links(self.folder / name):
                (self.folder / name).unlink()

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
            for name in (*self.list_result_files(), JOB_FILE, COMPLETE_MARKER_FILE):  # the marker last: see `start`
                self.delete_file(name)
        self.close()

    def close(self) -> None:
        """Unlock the folder, so that another process can resume the job."""
        self.ownership.release()

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


def file_exists_error(path: Path, *, resume: bool) -> ConfigError:
    how = "`overwrite` together with `resume`" if resume else "`overwrite`"
    return ConfigError(f"{path} already exists; use {how} to replace it, or choose another name")


def is_regular_file_without_links(path: Path, *, empty: bool = False) -> bool:
    """Whether it is a regular file without other hard links, so that changing it changes nothing else."""
    try:
        found = path.lstat()
    except FileNotFoundError:  # its owner has just removed it
        return True
    return stat.S_ISREG(found.st_mode) and found.st_nlink == 1 and not (empty and found.st_size)
