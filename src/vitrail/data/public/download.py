"""Download a public data set once: resumed after an interruption, checked by its checksum, unpacked, then renamed.

Nothing of a data set is visible in the cache before all of it is there. A file that a user has put next to its folder
is used instead of a download.
"""

import errno
import hashlib
import os
import shutil
import tarfile
import zipfile
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from socket import gaierror
from time import sleep
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from vitrail.base.errors import DataError, describe_error
from vitrail.base.files import CHUNK_BYTES, make_folder
from vitrail.base.locks import wait_for_entry_lock
from vitrail.base.progress import Advance, progress_bar
from vitrail.base.text import format_bytes
from vitrail.data.public.catalog import PublicDataset, PublicFile, find_dataset_folder

ARCHIVE_SUFFIXES = (".tar.gz", ".tgz", ".zip")
UNPACKED_RATIO = 1.3  # of an archive of compressed images, relative to its size
TIMEOUT = 20.0  # seconds without a byte
ATTEMPTS = 4  # in a row without a new byte
WAIT = 1.0  # seconds before the second attempt, then twice as long each time
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES)
AGENT = {"User-Agent": "vitrail"}  # some servers refuse urllib's


def fetch_dataset(dataset: PublicDataset, advance: Advance | None = None) -> Path:
    """The folder of the data set in the cache, downloaded if it is not there. `advance` counts bytes."""
    folder = find_dataset_folder(dataset)
    if folder.is_dir():
        return folder
    make_folder(folder.parent)
    with wait_for_entry_lock(folder):
        if not folder.is_dir():  # another process may have downloaded it
            if advance is not None:
                download_dataset(dataset, folder, advance)
            else:
                with progress_bar(dataset.size, f"{dataset.name} (bytes)") as shown:
                    download_dataset(dataset, folder, shown)
    return folder


def download_dataset(dataset: PublicDataset, folder: Path, advance: Advance) -> None:
    partial = folder.with_name(f".{folder.name}.download")  # kept after an interruption
    make_folder(partial)
    check_free_space(dataset, partial)
    found = [fetch_file(dataset, file, partial, advance) for file in dataset.files]
    unpacked = folder.with_name(f".{folder.name}.unpacked")
    shutil.rmtree(unpacked, ignore_errors=True)  # of a killed process
    try:
        unpacked.mkdir()
        for path in found:
            unpack(path, unpacked)
        unpacked.rename(folder)
    except (OSError, tarfile.TarError, zipfile.BadZipFile, EOFError) as error:
        shutil.rmtree(unpacked, ignore_errors=True)
        raise DataError(
            f"{dataset.name} cannot be unpacked into {folder.parent}: {describe_error(error)}; the downloaded files "
            "are kept: free some space, or set VITRAIL_HOME to another folder, and try again"
        ) from None
    shutil.rmtree(partial, ignore_errors=True)


def check_free_space(dataset: PublicDataset, folder: Path) -> None:
    """Refuse before the download what would not fit on the disk after it."""
    present = sum(path.stat().st_size for path in folder.iterdir())
    archives = sum(file.size for file in dataset.files if file.name.endswith(ARCHIVE_SUFFIXES))
    needed = dataset.size - present + int(UNPACKED_RATIO * archives)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise DataError(
            f"{dataset.name} needs {format_bytes(needed)} in {folder.parent}, which has {format_bytes(free)} free; "
            "free some space, or set VITRAIL_HOME to another folder"
        )


def fetch_file(dataset: PublicDataset, file: PublicFile, folder: Path, advance: Advance) -> Path:
    """The complete file: put next to the data set's folder by the user, downloaded before, or downloaded now."""
    own = folder.parent / file.name
    if own.is_file():
        check_digest(own, file, f"{own} is not the {file.name} of {dataset.name}", "delete it to download it")
        advance(file.size)
        return own
    path = folder / file.name
    if path.is_file():
        advance(file.size)
        return path
    part = path.with_name(f"{file.name}.part")
    addresses = [url for url in (file.url, file.mirror) if url]
    reasons = list[str]()
    for url in addresses:
        try:
            advance(part.stat().st_size if part.is_file() else 0)
            download_file(url, part, file.size, advance)
        except DownloadError as error:
            if part.is_file() and part.stat().st_size > file.size:
                part.unlink()
            reasons.append(f"{urlsplit(url).hostname}: {error}")
            continue
        try:
            check_digest(part, file, f"{url} is not the published {file.name}", "try again later")
        except DataError:
            part.unlink()
            raise
        part.rename(path)
        return path
    kept = f" ({format_bytes(part.stat().st_size)} are kept)" if part.is_file() else ""
    raise DataError(
        f"{dataset.name} is not in the cache and cannot be downloaded ({'; '.join(reasons)}); try again{kept}, or get "
        f"{addresses[0]} in another way and put it into {folder.parent}"
    )


class DownloadError(Exception):
    """An address does not deliver the file; the message says why."""


def download_file(url: str, part: Path, size: int, advance: Advance) -> None:
    """Append to the part until it is complete. A broken connection is tried again as long as bytes arrive."""
    failures, reason = 0, ""
    while (done := part.stat().st_size if part.is_file() else 0) < size:
        if failures:
            if failures == ATTEMPTS:
                raise DownloadError(reason)
            sleep(WAIT * 2 ** (failures - 1))
        try:
            append_to_part(url, part, done, size, advance)
            reason = "the connection ended early"
        except HTTPError as error:
            reason = f"status {error.code}"
            error.close()
            if error.code not in (408, 429) and error.code < 500:
                raise DownloadError(reason) from None
        except URLError as error:
            reason = describe_error(error.reason) if isinstance(error.reason, BaseException) else error.reason
            if isinstance(error.reason, gaierror):  # no such host, or no network
                raise DownloadError(reason) from None
        except OSError as error:
            reason = describe_error(error)
            if error.errno in DISK_ERRORS:
                raise DataError(
                    f"cannot write {part}: {reason}; free some space, or set VITRAIL_HOME to another folder"
                ) from None
        except (HTTPException, ValueError) as error:
            reason = describe_error(error)
        new = part.stat().st_size if part.is_file() else 0
        failures = 1 if new > done else failures + 1


def append_to_part(url: str, part: Path, done: int, size: int, advance: Advance) -> None:
    headers = {**AGENT, **({"Range": f"bytes={done}-"} if done else {})}
    with urlopen(Request(url, headers=headers), timeout=TIMEOUT) as response:
        if done and response.status != 206:  # the server begins at the first byte
            with suppress(OSError):
                os.truncate(part, 0)
            advance(-done)
        with part.open("ab") as file:
            while data := response.read1(CHUNK_BYTES):  # as it arrives
                file.write(data)
                advance(len(data))
                if file.tell() > size:
                    raise DownloadError("the file there is longer than the published one")


def check_digest(path: Path, file: PublicFile, given: str, remedy: str) -> None:
    algorithm, expected = ("sha256", file.sha256) if file.sha256 else ("md5", file.md5)
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, algorithm).hexdigest()
    if digest != expected:
        raise DataError(f"{given}: its {algorithm.upper()} is {digest[:12]}…, expected {expected[:12]}…; {remedy}")


def unpack(path: Path, folder: Path) -> None:
    """Unpack an archive, whose checksum is known to be right; other files are linked, or copied where links fail."""
    if path.name.endswith(".zip"):
        with zipfile.ZipFile(path) as archive:
            archive.extractall(folder)
    elif path.name.endswith(ARCHIVE_SUFFIXES):
        with tarfile.open(path, "r:*") as archive:  # some are plain tar in spite of their name
            archive.extractall(folder, filter="data")
    else:
        try:
            (folder / path.name).hardlink_to(path)
        except OSError:
            shutil.copyfile(path, folder / path.name)
