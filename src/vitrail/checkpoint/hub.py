"""Download models from the Hugging Face hub by name.

huggingface_hub does the work, with its cache, progress bars, offline mode and environment variables. If the hub cannot
be reached or refuses, a model that is complete in the cache is used, as in huggingface_hub itself. Whether it can be
reached is tried first, since huggingface_hub would repeat a failed request for half a minute.
"""

import hashlib
import re
import socket
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from threading import Thread
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from vitrail.base.errors import CheckpointError, describe_error, missing_package_error
from vitrail.base.files import file_checksum, get_cache_folder
from vitrail.checkpoint.weight_folders import (
    CONFIG_FILE,
    INDEX_SUFFIX,
    PREPROCESSOR_FILE,
    TOKENIZER_FILE,
    WEIGHT_FILES,
    find_weight_files,
    list_shards,
    read_json_if_exists,
)

HUB_PREFIX = "hf-hub:"
HUB_NAME = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@(\w[\w.+/-]*))?", re.ASCII)
PREFERRED_WEIGHT_FILES = tuple(name + end for name in WEIGHT_FILES for end in ("", INDEX_SUFFIX))
DIGEST = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")  # of a file on the hub
CONNECT_SECONDS = 2.0  # to look up the hub or a proxy and to connect to it


class HubUnreachableError(CheckpointError):
    """A model is not in the cache and the hub cannot be reached; `reason` says why."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name} is not in the cache and {reason}")
        self.reason = reason


def is_hub_name(path: str | Path) -> bool:
    return str(path).startswith(HUB_PREFIX)


def download_model(name: str, *, prefer_cache: bool = False) -> Path:
    """Download hf-hub:owner/model or hf-hub:owner/model@revision and return its folder in the cache.

    With `prefer_cache` a model in the cache is used without asking the hub for a newer one.
    """
    repository, revision = parse_hub_name(name)
    try:
        import huggingface_hub.errors
    except ImportError:
        raise missing_package_error(name, "huggingface_hub") from None
    if prefer_cache and (folder := find_cached_model(repository, revision)) is not None:
        return folder
    if reason := find_why_unreachable():
        if (folder := find_cached_model(repository, revision)) is None:
            raise HubUnreachableError(name, reason)
        return folder
    try:
        return download_revision(repository, revision)
    except CheckpointError as error:
        raise CheckpointError(f"{name}: {error}") from None
    except Exception as error:  # includes errors of its HTTP client, which differs between versions
        missing = isinstance(error, huggingface_hub.errors.RevisionNotFoundError)
        folder = None if missing else find_cached_model(repository, revision)
        if folder is None:
            raise CheckpointError(f"{name}: {explain_hub_error(error)}") from None
        return folder


def parse_hub_name(name: str) -> tuple[str, str | None]:
    """Repository and revision of hf-hub:owner/model[@revision]."""
    match = HUB_NAME.fullmatch(name.removeprefix(HUB_PREFIX))
    if match is None or ".." in name or not is_hub_name(name):
        raise CheckpointError(
            f"{name!r} is not the name of a model on the hub; expected {HUB_PREFIX}owner/model[@revision]"
        )
    return match[1], match[2]


def find_why_unreachable() -> str:
    """Why no connection to the hub, or to the proxy that leads to it, can be opened; empty if one can."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    hub = urlsplit(constants.ENDPOINT)
    proxies = {} if proxy_bypass(hub.hostname or "") else getproxies()
    proxy = proxies.get(hub.scheme) or proxies.get("all")
    place = urlsplit(proxy if proxy and "//" in proxy else f"//{proxy}") if proxy else hub
    host, port = place.hostname or "", place.port or (443 if place.scheme == "https" else 80)
    outcome = [f"no connection to {host} within {CONNECT_SECONDS:g} s"]

    def connect() -> None:
        try:
            socket.create_connection((host, port), CONNECT_SECONDS).close()
            outcome.append("")
        except OSError as error:
            outcome.append(f"{host}: {describe_error(error)}")

    thread = Thread(target=connect, daemon=True)  # a look-up of a name has no time limit of its own
    thread.start()
    thread.join(CONNECT_SECONDS)
    return f"there is no network ({outcome[-1]})" if outcome[-1] else ""


def download_revision(repository: str, revision: str | None) -> Path:
    from huggingface_hub import HfApi, constants, hf_hub_download, try_to_load_from_cache

    timeout = constants.HF_HUB_ETAG_TIMEOUT  # without it, only this request would wait forever
    info = HfApi().model_info(repository, revision=revision, files_metadata=True, timeout=timeout)
    files = {file.rfilename: file for file in info.siblings or ()}

    def download(file: str) -> Path:
        cached = isinstance(try_to_load_from_cache(repository, file, revision=info.sha), str)
        path = Path(hf_hub_download(repository, file, revision=revision))
        if path.parent.name != info.sha:
            raise CheckpointError("it changed while it was downloaded; try again")
        expected = files[file].lfs
        if expected is not None and not cached:  # huggingface_hub compares only the size
            with path.open("rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
            if digest != expected.sha256:
                path.resolve().unlink()
                path.unlink(missing_ok=True)
                raise CheckpointError(
                    f"{file} was damaged by the download: its SHA-256 differs from that on the hub; try again"
                )
        if expected is not None:
            record_digest(repository, file, expected.sha256)
        return path

    weights = choose_weight_file(files)
    if weights is None:
        raise CheckpointError(
            f"it has no weights; expected one of {', '.join(PREFERRED_WEIGHT_FILES)}, or a single .npz or .pth"
        )
    for file in (CONFIG_FILE, PREPROCESSOR_FILE):
        if file in files:
            found = download(file)
            if TOKENIZER_FILE in files and "tokenizer" in (read_json_if_exists(found) or ()):
                download(TOKENIZER_FILE)
    path = download(weights)
    for shard in list_index_shards(path):
        if shard not in files:
            raise CheckpointError(f"{weights} refers to {shard!r}, which is missing; expected all shards next to it")
        download(shard)
    return path.parent


def record_digest(repository: str, file: str, digest: str) -> None:
    """Keep the SHA-256 that the hub states for a file. One empty file each, so that processes need no lock."""
    with suppress(OSError, CheckpointError):
        folder = digest_folder(repository, file)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / digest).touch()


def digest_folder(repository: str, file: str) -> Path:
    return get_cache_folder() / "hub" / repository.replace("/", "--") / file


def verify_weights(folder: Path, repository: str) -> str:
    """Compare the weights with their digests on the hub; return the first file whose digest is not known, or ""."""
    unknown = ""
    for path in find_weight_files(folder):
        known = list_known_digests(path, repository)
        if known and not any(compute_digest(path, len(each)) == each for each in known):
            raise CheckpointError(
                f"{path} is not the file of {repository} on the hub: its SHA-256 differs, so it is damaged or was "
                "replaced; delete it to download it again"
            )
        unknown = unknown or ("" if known else path.name)
    return unknown


def list_known_digests(path: Path, repository: str) -> list[str]:
    """The digest that names the file in the cache of huggingface_hub, else those of earlier downloads."""
    blob = path.resolve()
    if blob.parent == blob.parents[1] / "blobs" and blob.parents[1].name == f"models--{repository.replace('/', '--')}":
        return [blob.name] if DIGEST.fullmatch(blob.name) else []
    with suppress(OSError, CheckpointError):
        return [each.name for each in digest_folder(repository, path.name).iterdir() if DIGEST.fullmatch(each.name)]
    return []


def compute_digest(path: Path, length: int) -> str:
    """SHA-256, or the SHA-1 with a header that git, and so the hub, has for small files."""
    if length == 64:
        return file_checksum(path)
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def find_cached_model(repository: str, revision: str | None) -> Path | None:
    """Folder of a model in the cache, if its weights are complete; otherwise None."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(repository, revision=revision, allow_patterns=[], local_files_only=True))
        weights = choose_weight_file(path.name for path in folder.iterdir() if path.is_file())
        if weights is not None and all((folder / shard).is_file() for shard in list_index_shards(folder / weights)):
            return folder
    except (OSError, ValueError, CheckpointError):
        pass
    return None


def choose_weight_file(files: Iterable[str]) -> str | None:
    """Choose the preferred file of weights; a file of another format only if there is a single one."""
    names = set(files)
    others = [name for name in names if name.endswith((".npz", ".pth")) and "/" not in name]
    return next((name for name in PREFERRED_WEIGHT_FILES if name in names), others[0] if len(others) == 1 else None)


def list_index_shards(path: Path) -> list[str]:
    """Files that an index of weights refers to; empty for a file that is not an index."""
    shards = list_shards(path) if path.name.endswith(INDEX_SUFFIX) else []
    suffix = Path(path.name.removesuffix(INDEX_SUFFIX)).suffix
    if shards is None or not all(shard.endswith(suffix) for shard in shards):
        raise CheckpointError(f"{path.name} is not an index of weights; expected a weight_map to {suffix} files")
    return shards


def explain_hub_error(error: BaseException) -> str:
    """One line that says what went wrong and what to do."""
    from huggingface_hub import errors

    while isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ is not None:
        error = error.__cause__
    log_in = "log in with `hf auth login`"
    explanations: dict[type[Exception], str] = {  # the first match is used
        errors.HFValidationError: f"not a valid repository name; expected {HUB_PREFIX}owner/model[@revision]",
        errors.RevisionNotFoundError: "no such revision; expected a branch, a tag or a commit of the repository",
        errors.GatedRepoError: f"it is gated; accept its terms on its page and {log_in}",
        errors.RepositoryNotFoundError: f"no such repository, or a private one; check the name, or {log_in}",
    }
    for kind, explanation in explanations.items():
        if isinstance(error, kind):
            return explanation
    if isinstance(error, errors.HfHubHTTPError):
        status = error.response.status_code
        return f"the hub returned status {status}; {log_in if status in (401, 403) else 'try again later'}"
    if isinstance(error, OSError) and error.strerror and not isinstance(error, ConnectionError):
        return f"cannot write the cache: {error.strerror}; free some space, or set HF_HOME to another folder"
    return f"the download failed: {describe_error(error)}; check the connection and try again"
