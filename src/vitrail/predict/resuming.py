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
from vitrail.errors import ConfigError, VitrailError, one_line
from vitrail.files import KINDS, TEMPORARY, make_writable, read_text, synchronise, write_text
from vitrail.locks import LOCK, locked
from vitrail.parsing import CHECKSUM, parse_json, with_checksum, without_checksum
from vitrail.predict.identity import contents_of, short_key

JOB, WHOLE, LEDGER = "job.json", "whole", "done.bin"
ROWS = ("rows.csv", "rows.jsonl", "rows.json", "rows.parquet", "files.csv", "features.npy", "features.parquet")
OURS = (JOB, WHOLE, LEDGER, LOCK, *ROWS)  # all files that a job writes in its folder
BEFORE_JOB = (WHOLE, LOCK)  # may exist without job.json, after a kill at the start or the end
MARK = "written by"  # key in job.json
EARLIER = {"model", "weights", "format", "output"}  # keys in a job.json of earlier versions, which have no mark
LARGEST = 2**20  # bytes of job.json


class WritingError(VitrailError):
    """Results that could not be written; what is done is kept."""

    exit_code = 1


class Partial:
    """The folder of an unfinished job; `finals` are the files that it becomes, by their names in it, the last OUT."""

    def __init__(self, out: Path, finals: Mapping[str, Path]) -> None:
        if out.name in ("", ".."):
            raise ConfigError(f"-o {out} is a folder; expected the name of a file for the results")
        self.out, self.finals = out, finals
        self.folder = out.with_name(f"{out.name}.partial")
        self.overwrite = True
        self.owned: ExitStack | None = None

    @property
    def is_begun(self) -> bool:
        return (self.folder / JOB).exists()

    @property
    def is_whole(self) -> bool:
        return (self.folder / WHOLE).exists()

    def begin(self, *, resume: bool, overwrite: bool) -> bool:
        """Makes this process the owner and refuses to overwrite results; returns whether the job is already done."""
        if not os.path.lexists(self.folder) and self.check(resume=resume, overwrite=overwrite):
            return True  # nothing is written: the disk may be read-only
        self.own()
        return self.check(resume=resume, overwrite=overwrite)

    def check(self, *, resume: bool, overwrite: bool) -> bool:
        """Refuses to lose what is there; whether the job is already done."""
        self.overwrite = overwrite
        self.check_places()
        if self.is_whole and resume:
            self.own()
            self.name_results()
            return True
        stands = next((path for path in self.finals.values() if path.exists()), None)
        if self.is_begun and not (resume or overwrite):
            raise ConfigError(
                f"{self.folder} is an unfinished job; expected --resume to go on with it, or --overwrite to begin anew"
            )
        if stands is not None and not overwrite:
            if resume and not self.is_begun and self.out.exists():
                return True
            also = " beside --resume" if resume else ""
            raise ConfigError(f"{stands} already exists; expected a new name, or --overwrite{also} to replace it")
        make_writable(self.out.parent)
        return False

    def check_places(self) -> None:
        """Refuses to replace a device, a folder or a link, or to write in a folder with files of others."""
        for path in self.finals.values():
            if path.is_symlink():
                raise ConfigError(
                    f"{path} is a symbolic link; expected the name of a regular file: pass the one it points to"
                )
            if path.exists() and not path.is_file():  # renaming would replace a device, too
                kind = KINDS.get(stat.S_IFMT(path.stat().st_mode), "not a file")
                raise ConfigError(f"{path} is {kind}; expected the name of a file for the results")
        if not os.path.lexists(self.folder):
            return
        if self.folder.is_symlink() or not self.folder.is_dir():
            kind = "a symbolic link" if self.folder.is_symlink() else "not a folder"
            raise ConfigError(f"{self.folder} is {kind}; {self.elsewhere}")
        try:
            inside = {path.name: path for path in self.folder.iterdir()}
        except FileNotFoundError:  # its owner has just removed it
            return
        begun = JOB in inside and is_job(inside[JOB])
        for name, path in sorted(inside.items(), key=lambda each: each[0] in OURS):
            known = (name in (OURS if begun else BEFORE_JOB)) or is_temporary_name(name)
            if not known or not is_own(path, empty=name == WHOLE):
                raise ConfigError(
                    f"{self.folder} holds {name!r}, which was not written by a vitrail job; {self.elsewhere}"
                )

    @property
    def elsewhere(self) -> str:
        return "nothing in it is changed: move it away, or choose another name for -o"

    def own(self) -> None:
        """Makes this process the owner of the folder until `close`; InUseError if it has another owner."""
        if self.owned is not None:
            return
        self.check_places()
        make_writable(self.out.parent)
        for attempt in range(100):
            with self.faults():
                self.folder.mkdir(exist_ok=True)
            stack = ExitStack()
            stack.callback(self.remove_empty)
            try:
                stack.enter_context(locked(self.folder))
            except VitrailError:
                stack.close()
                if attempt == 99 or os.path.lexists(self.folder):
                    raise
                continue  # its previous owner has just removed it
            self.owned = stack
            break
        try:
            self.check_places()  # again, now that no other process can change it
        except VitrailError:
            self.close()
            raise

    def remove_empty(self) -> None:
        with suppress(OSError):
            self.folder.rmdir()

    def open(self, job: Mapping[str, Any], *, resume: bool) -> None:
        """Begins the job, or makes sure that it is the one to go on with; no other process may do so meanwhile."""
        self.own()
        with self.faults():
            if resume and self.is_begun:
                self.compare(job)
                return
            for name in (WHOLE, *self.rows_inside()):
                self.delete(name)
            about = with_checksum({MARK: f"vitrail {__version__}", **job})
            write_text(self.folder / JOB, json.dumps(about, indent=2) + "\n")

    def compare(self, job: Mapping[str, Any]) -> None:
        told = read_job(self.folder / JOB)
        for name in (*told, *job):
            if told.get(name) != job.get(name):
                self.close()
                was, now = (repr(each.get(name)) for each in (told, job))
                raise ConfigError(
                    f"{self.folder} was begun with {name} {was}, not {now}; expected the same to go on with it, "
                    "or --overwrite to begin anew"
                )

    def rows_inside(self) -> list[str]:
        """The files of rows, without job.json, `whole` and the lock."""
        names = [path.name for path in self.folder.iterdir()]
        return [name for name in names if name in (LEDGER, *ROWS) or is_temporary_name(name)]

    def delete(self, name: str) -> None:
        with suppress(FileNotFoundError):
            if is_own(self.folder / name):
                (self.folder / name).unlink()

    def name_results(self) -> None:
        """Gives the files their names; done again after a kill, it goes on."""
        with self.faults():
            for name, final in self.finals.items():
                if not self.overwrite and os.path.lexists(self.folder / name) and os.path.lexists(final):
                    raise ConfigError(
                        f"{final} already exists; expected a new name; "
                        "to replace it, use --overwrite together with --resume"
                    )
                with suppress(FileNotFoundError):  # it has its name already
                    (self.folder / name).replace(final)
            synchronise(self.out.parent)
            for name in (*self.rows_inside(), JOB, WHOLE):  # `whole` last, so that a kill in between can be resumed
                self.delete(name)
        self.close()

    def finish(self) -> None:
        """All is written: makes it durable, and gives it its name."""
        with self.faults():
            for name in self.finals:
                synchronise(self.folder / name)
            (self.folder / WHOLE).touch()
            synchronise(self.folder)
        self.name_results()

    def close(self) -> None:
        """Lets another process go on with it."""
        if self.owned is not None:
            owned, self.owned = self.owned, None
            owned.close()

    @contextmanager
    def faults(self) -> Generator[None]:
        """What the disk refuses is told in one line, with what to do."""
        try:
            yield
        except OSError as error:
            hint = "what is done is kept: make room for it, then the same again with --resume"
            raise WritingError(f"{self.out} cannot be written: {one_line(error)}; {hint}") from None


def is_own(path: Path, *, empty: bool = False) -> bool:
    """Whether it is a regular file without other hard links, so that changing it changes nothing else."""
    try:
        found = path.lstat()
    except FileNotFoundError:  # its owner has just removed it
        return True
    return stat.S_ISREG(found.st_mode) and found.st_nlink == 1 and not (empty and found.st_size)


def is_temporary_name(name: str) -> bool:
    return re.fullmatch(TEMPORARY.format(name=re.escape(JOB)), name) is not None


def is_job(path: Path) -> bool:
    """Whether a vitrail job wrote it, in this or an earlier version, even if it is damaged."""
    try:
        text = read_text(path, LARGEST, errors="replace")
    except OSError:
        return False
    if f'"{MARK}": "vitrail' in text:
        return True
    with suppress(ValueError):
        found = parse_json(text)
        return isinstance(found, dict) and set(found) >= EARLIER
    return False


def read_job(path: Path) -> dict[str, Any]:
    try:
        found = parse_json(read_text(path, LARGEST))
        rest = without_checksum(found) if isinstance(found, dict) else {}
        reason = "" if rest and CHECKSUM in found else "it has no checksum: it is damaged, or from an earlier version"
    except (OSError, ValueError) as error:
        rest, reason = {}, one_line(error)
    if reason:
        raise ConfigError(f"{path} cannot be read: {reason}; use --overwrite to start over")
    return {name: value for name, value in rest.items() if name != MARK}


def stamp_of(model: str) -> dict[str, Any]:
    """Which model it is, by the contents of its files; a name on the hub is compared as a name."""
    if not os.path.exists(model):  # noqa: PTH110  # a name of the hub's may be too long for Path
        return {"model": model, "weights": None}
    return {"model": str(Path(model).resolve()), "weights": short_key(*contents_of(model))}
