"""An unfinished output: finished rows are in OUT.partial, however the job ended, and it is resumed from there.

That folder has one owner at a time and holds only these files: job.json, the settings of the job; files that grow by
whole records; and at the end the empty file `whole`: all results are complete and only need to be renamed.
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
from vitrail.errors import ConfigError, VitrailError, describe_error
from vitrail.files import FILE_KINDS, is_temporary_name, make_writable_folder, read_text, sync_to_disk, write_text
from vitrail.json_yaml import CHECKSUM_KEY, add_checksum, parse_json, verify_and_remove_checksum
from vitrail.locks import LOCK_FILE_NAME, lock_folder
from vitrail.predict.model_checksums import compute_model_checksums, hash_texts

JOB_FILE, COMPLETE_MARKER_FILE, COMPLETION_LOG_FILE = "job.json", "whole", "done.bin"
RESULT_FILES = ("rows.csv", "rows.jsonl", "rows.json", "rows.parquet", "files.csv", "features.npy", "features.parquet")
PARTIAL_FOLDER_FILES = (
    JOB_FILE,
    COMPLETE_MARKER_FILE,
    COMPLETION_LOG_FILE,
    LOCK_FILE_NAME,
    *RESULT_FILES,
)  # all files that a job writes in its folder
FILES_WITHOUT_JOB = (
    COMPLETE_MARKER_FILE,
    LOCK_FILE_NAME,
)  # may exist without job.json, after a kill at the start or the end
WRITER_KEY = "written by"  # key in job.json
LEGACY_JOB_KEYS = {"model", "weights", "format", "output"}  # keys in a job.json of earlier versions, which have no mark
MAX_JOB_FILE_BYTES = 2**20  # bytes of job.json


class WritingError(VitrailError):
    """Results that could not be written; what is done is kept."""

    exit_code = 1


class PartialFolder:
    """The folder of an unfinished job; `finals` are the files that it becomes, by their names in it, the last OUT."""

    def __init__(self, out: Path, final_paths: Mapping[str, Path]) -> None:
        if out.name in ("", ".."):
            raise ConfigError(f"-o {out} is a folder; expected the name of a file for the results")
        self.out, self.final_paths = out, final_paths
        self.folder = out.with_name(f"{out.name}.partial")
        self.overwrite = True
        self.lock_stack: ExitStack | None = None

    @property
    def has_job(self) -> bool:
        return (self.folder / JOB_FILE).exists()

    @property
    def is_complete(self) -> bool:
        return (self.folder / COMPLETE_MARKER_FILE).exists()

    def start(self, *, resume: bool, overwrite: bool) -> bool:
        """Makes this process the owner and refuses to overwrite results; returns whether the job is already done."""
        if not os.path.lexists(self.folder) and self.check_existing_results(resume=resume, overwrite=overwrite):
            return True  # nothing is written: the disk may be read-only
        self.lock_folder()
        return self.check_existing_results(resume=resume, overwrite=overwrite)

    def check_existing_results(self, *, resume: bool, overwrite: bool) -> bool:
        """Refuses to lose what is there; whether the job is already done."""
        self.overwrite = overwrite
        self.check_paths()
        if self.is_complete and resume:
            self.lock_folder()
            self.move_results()
            return True
        stands = next((path for path in self.final_paths.values() if path.exists()), None)
        if self.has_job and not (resume or overwrite):
            raise ConfigError(
                f"{self.folder} is an unfinished job; expected --resume to go on with it, or --overwrite to begin anew"
            )
        if stands is not None and not overwrite:
            if resume and not self.has_job and self.out.exists():
                return True
            also = " beside --resume" if resume else ""
            raise ConfigError(f"{stands} already exists; expected a new name, or --overwrite{also} to replace it")
        make_writable_folder(self.out.parent)
        return False

    def check_paths(self) -> None:
        """Refuses to replace a device, a folder or a link, or to write in a folder with files of others."""
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
            raise ConfigError(f"{self.folder} is {kind}; {self.conflict_hint}")
        try:
            inside = {path.name: path for path in self.folder.iterdir()}
        except FileNotFoundError:  # its owner has just removed it
            return
        begun = JOB_FILE in inside and is_job_file(inside[JOB_FILE])
        for name, path in sorted(inside.items(), key=lambda each: each[0] in PARTIAL_FOLDER_FILES):
            known = (name in (PARTIAL_FOLDER_FILES if begun else FILES_WITHOUT_JOB)) or is_temporary_name(
                name, re.escape(JOB_FILE)
            )
            if not known or not is_regular_file_without_links(path, empty=name == COMPLETE_MARKER_FILE):
                raise ConfigError(
                    f"{self.folder} holds {name!r}, which was not written by a vitrail job; {self.conflict_hint}"
                )

    @property
    def conflict_hint(self) -> str:
        return "nothing in it is changed: move it away, or choose another name for -o"

    def lock_folder(self) -> None:
        """Makes this process the owner of the folder until `close`; InUseError if it has another owner."""
        if self.lock_stack is not None:
            return
        self.check_paths()
        make_writable_folder(self.out.parent)
        for attempt in range(100):
            with self.convert_write_errors():
                self.folder.mkdir(exist_ok=True)
            stack = ExitStack()
            stack.callback(self.remove_if_empty)
            try:
                stack.enter_context(lock_folder(self.folder))
            except VitrailError:
                stack.close()
                if attempt == 99 or os.path.lexists(self.folder):
                    raise
                continue  # its previous owner has just removed it
            self.lock_stack = stack
            break
        try:
            self.check_paths()  # again, now that no other process can change it
        except VitrailError:
            self.close()
            raise

    def remove_if_empty(self) -> None:
        with suppress(OSError):
            self.folder.rmdir()

    def open_job(self, job: Mapping[str, Any], *, resume: bool) -> None:
        """Begins the job, or makes sure that it is the one to go on with; no other process may do so meanwhile."""
        self.lock_folder()
        with self.convert_write_errors():
            if resume and self.has_job:
                self.check_same_job(job)
                return
            for name in (COMPLETE_MARKER_FILE, *self.list_result_files()):
                self.delete_file(name)
            about = add_checksum({WRITER_KEY: f"vitrail {__version__}", **job})
            write_text(self.folder / JOB_FILE, json.dumps(about, indent=2) + "\n")

    def check_same_job(self, job: Mapping[str, Any]) -> None:
        told = read_job_file(self.folder / JOB_FILE)
        for name in (*told, *job):
            if told.get(name) != job.get(name):
                self.close()
                was, now = (repr(each.get(name)) for each in (told, job))
                raise ConfigError(
                    f"{self.folder} was begun with {name} {was}, not {now}; expected the same to go on with it, "
                    "or --overwrite to begin anew"
                )

    def list_result_files(self) -> list[str]:
        """The files of rows, without job.json, `whole` and the lock."""
        names = [path.name for path in self.folder.iterdir()]
        return [
            name
            for name in names
            if name in (COMPLETION_LOG_FILE, *RESULT_FILES) or is_temporary_name(name, re.escape(JOB_FILE))
        ]

    def delete_file(self, name: str) -> None:
        with suppress(FileNotFoundError):
            if is_regular_file_without_links(self.folder / name):
                (self.folder / name).unlink()

    def move_results(self) -> None:
        """Gives the files their names; done again after a kill, it goes on."""
        with self.convert_write_errors():
            for name, final in self.final_paths.items():
                if not self.overwrite and os.path.lexists(self.folder / name) and os.path.lexists(final):
                    raise ConfigError(
                        f"{final} already exists; expected a new name; "
                        "to replace it, use --overwrite together with --resume"
                    )
                with suppress(FileNotFoundError):  # it has its name already
                    (self.folder / name).replace(final)
            sync_to_disk(self.out.parent)
            for name in (
                *self.list_result_files(),
                JOB_FILE,
                COMPLETE_MARKER_FILE,
            ):  # `whole` last, so that a kill in between can be resumed
                self.delete_file(name)
        self.close()

    def finish(self) -> None:
        """All is written: makes it durable, and gives it its name."""
        with self.convert_write_errors():
            for name in self.final_paths:
                sync_to_disk(self.folder / name)
            (self.folder / COMPLETE_MARKER_FILE).touch()
            sync_to_disk(self.folder)
        self.move_results()

    def close(self) -> None:
        """Lets another process go on with it."""
        if self.lock_stack is not None:
            owned, self.lock_stack = self.lock_stack, None
            owned.close()

    @contextmanager
    def convert_write_errors(self) -> Generator[None]:
        """What the disk refuses is told in one line, with what to do."""
        try:
            yield
        except OSError as error:
            hint = "what is done is kept: make room for it, then the same again with --resume"
            raise WritingError(f"{self.out} cannot be written: {describe_error(error)}; {hint}") from None


def is_regular_file_without_links(path: Path, *, empty: bool = False) -> bool:
    """Whether it is a regular file without other hard links, so that changing it changes nothing else."""
    try:
        found = path.lstat()
    except FileNotFoundError:  # its owner has just removed it
        return True
    return stat.S_ISREG(found.st_mode) and found.st_nlink == 1 and not (empty and found.st_size)


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
        raise ConfigError(f"{path} cannot be read: {reason}; use --overwrite to start over")
    return {name: value for name, value in rest.items() if name != WRITER_KEY}


def identify_model(model: str) -> dict[str, Any]:
    """Which model it is, by the contents of its files; a name on the hub is compared as a name."""
    if not os.path.exists(model):  # noqa: PTH110  # a name of the hub's may be too long for Path
        return {"model": model, "weights": None}
    return {"model": str(Path(model).resolve()), "weights": hash_texts(*compute_model_checksums(model))}
