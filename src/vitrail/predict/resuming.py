"""A job on its way to a file: what is done lies in OUT.partial, whatever ends it, and is gone on with from there.

That folder holds job.json, what the job was told; files that only grow, by whole records; and at the very end `whole`,
which says that all is done and only the names are still to be given.
"""

import csv
import json
import os
from array import array
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.errors import ConfigError, VitrailError, one_line
from vitrail.files import make_writable, synchronise, write_whole

JOB, WHOLE = "job.json", "whole"
WEIGHTS = (".safetensors", ".onnx", ".data", ".pt2", ".bin", ".pth", ".pt", ".npz")


class WritingError(VitrailError):
    """Results that could not be written; what is done is kept."""

    exit_code = 1


class Partial:
    """The folder of an unfinished job; `finals` are the files that it becomes, by their names in it, the last OUT."""

    def __init__(self, out: Path, finals: Mapping[str, Path]) -> None:
        self.out, self.finals = out, finals
        self.folder = out.with_name(f"{out.name}.partial")
        self.lock = -1

    @property
    def is_begun(self) -> bool:
        return (self.folder / JOB).exists()

    @property
    def is_whole(self) -> bool:
        return (self.folder / WHOLE).exists()

    def check(self, *, resume: bool, overwrite: bool) -> bool:
        """Refuses to lose what is there; whether the job is already done."""
        if self.out.exists() and not self.out.is_file():  # a device would be replaced, too
            kind = "a folder" if self.out.is_dir() else "no file"
            raise ConfigError(f"{self.out} is {kind}; expected the name of a file for the results")
        if self.is_whole and resume:
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

    def open(self, job: Mapping[str, Any], *, resume: bool) -> None:
        """Begins the job, or makes sure that it is the one to go on with; no other process may do so meanwhile."""
        with self.faults():
            self.folder.mkdir(exist_ok=True)
            self.lock = locked(self.folder)
            if resume and self.is_begun:
                self.compare(job)
                return
            (self.folder / WHOLE).unlink(missing_ok=True)
            self.clear()
            text = json.dumps(job, indent=2) + "\n"
            write_whole(self.folder / JOB, lambda path: path.write_text(text, "utf-8"))

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

    def clear(self) -> None:
        """Last what says what the rest is, so that half of it is never taken for a job."""
        inside = {path.name: path for path in self.folder.iterdir()}
        for name in sorted(inside, key=lambda name: (name == WHOLE, name != JOB, name)):
            inside[name].unlink()

    def name_results(self) -> None:
        """Gives the files their names; done again after a kill, it goes on."""
        with self.faults():
            for name, final in self.finals.items():
                with suppress(FileNotFoundError):  # it has its name already
                    (self.folder / name).replace(final)
            synchronise(self.out.parent)
            self.clear()
            self.folder.rmdir()

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
        if self.lock >= 0:
            os.close(self.lock)
            self.lock = -1

    @contextmanager
    def faults(self) -> Generator[None]:
        """What the disk refuses is told in one line, with what to do."""
        try:
            yield
        except OSError as error:
            hint = "what is done is kept: make room for it, then the same again with --resume"
            raise WritingError(f"{self.out} cannot be written: {one_line(error)}; {hint}") from None


class Growing:
    """A file to which whole records are added, each there for good as soon as `add` returns."""

    def __init__(self, path: Path, size: int) -> None:
        """Whatever it holds beyond `size` was cut off in the middle."""
        self.handle = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
        os.ftruncate(self.handle, size)
        os.lseek(self.handle, 0, os.SEEK_END)

    def add(self, data: bytes | memoryview) -> None:
        left = memoryview(data)
        while left:
            left = left[os.write(self.handle, left) :]

    def replace_start(self, data: bytes) -> None:
        os.pwrite(self.handle, data, 0)

    def close(self) -> None:
        if self.handle >= 0:
            os.close(self.handle)
            self.handle = -1


class Done:
    """The pictures that are done, by name; eight bytes each, so that millions are no burden."""

    def __init__(self, names: Iterable[str]) -> None:
        self.digests = np.sort(np.array(array("Q", map(digest, names)), np.uint64))

    def __len__(self) -> int:
        return len(self.digests)

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str) or not len(self.digests):
            return False
        wanted = np.uint64(digest(name))
        place = int(np.searchsorted(self.digests, wanted))
        return place < len(self.digests) and bool(self.digests[place] == wanted)


def digest(name: str) -> int:
    return int.from_bytes(blake2b(os.fsencode(name), digest_size=8).digest(), "little")


def whole_lines(path: Path) -> Iterator[tuple[bytes, int]]:
    """Each line that ends, and where; a last one that was cut off is none."""
    if path.exists():
        end = 0
        with path.open("rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    end += len(line)
                    yield line, end


def json_records(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Each whole record of a file of JSON lines, and where it ends; up to the first that is damaged."""
    for line, end in whole_lines(path):
        try:
            row = json.loads(line)
        except ValueError:
            return
        yield row, end


def csv_records(path: Path, columns: int) -> Iterator[tuple[list[str], int]]:
    """Each whole record of a CSV file, its heading too, and where it ends; up to the first that is damaged."""
    record = b""
    for line, end in whole_lines(path):
        record += line  # a name may hold line ends, in quotes
        if record.count(b'"') % 2 == 0:
            try:
                fields = next(csv.reader([record.decode("utf-8", "surrogateescape")]))
            except (csv.Error, StopIteration):
                return
            if len(fields) != columns:
                return
            yield fields, end
            record = b""


def locked(folder: Path) -> int:
    """A handle that keeps other processes out for as long as this one lives, where the system knows locks."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise ConfigError(f"{folder} is being written by another process; expected to be alone: wait for it") from None
    except (ImportError, OSError):  # not on this system, or not on this disk
        pass
    return handle


def read_job(path: Path) -> dict[str, Any]:
    try:
        told = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {one_line(error)}; expected --overwrite to begin anew") from None
    return told if isinstance(told, dict) else {}


def stamp_of(model: str) -> dict[str, Any]:
    """Which model it is, and whether its files are still the same ones."""
    place = Path(model)
    if not os.path.exists(model):  # noqa: PTH110  # a name of the hub's may be too long for Path
        return {"model": model, "weights": None}
    files = [place] if place.is_file() else [*place.iterdir(), *(place / "model").glob("*")]
    about = [(each.name, each.stat().st_size, each.stat().st_mtime_ns) for each in files if is_weights(each, place)]
    seen = blake2b(repr(sorted(about)).encode("utf-8", "replace"), digest_size=8).hexdigest()
    return {"model": str(place.resolve()), "weights": seen}


def is_weights(path: Path, place: Path) -> bool:
    return path == place or path.suffix in WEIGHTS
