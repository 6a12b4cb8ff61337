"""Models by name from the Hugging Face hub: a name in, a folder of its files out.

huggingface_hub does the work, with its cache, progress bars, offline mode and environment. Where it cannot reach the
hub, or the hub refuses, a model that the cache holds whole is used, as huggingface_hub itself does.
"""

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

from vitrail.checkpoint.files.raw_contents import CONFIG_FILE, PREPROCESSOR_FILE, WEIGHT_FILES
from vitrail.errors import CheckpointError, describe_error
from vitrail.files import read_text
from vitrail.json_yaml import parse_json

HUB_PREFIX = "hf-hub:"
HUB_NAME = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@(\w[\w.+/-]*))?", re.ASCII)
INDEX_SUFFIX = ".index.json"
PREFERRED_WEIGHT_FILES = tuple(name + end for name in WEIGHT_FILES for end in ("", INDEX_SUFFIX))


def is_hub_name(path: str | Path) -> bool:
    return str(path).startswith(HUB_PREFIX)


def fetch_model(name: str) -> Path:
    """The cached folder with the weights and the description of hf-hub:owner/model or hf-hub:owner/model@revision."""
    match = HUB_NAME.fullmatch(name.removeprefix(HUB_PREFIX))
    if match is None or ".." in name or not is_hub_name(name):
        raise CheckpointError(f"{name!r} names no model of the hub; expected {HUB_PREFIX}owner/model[@revision]")
    repository, revision = match[1], match[2]
    try:
        import huggingface_hub.errors
    except ImportError:
        raise CheckpointError(f"{name} needs huggingface_hub; pip install 'vitrail[hub]'") from None
    try:
        return download_model(repository, revision)
    except CheckpointError as error:
        raise CheckpointError(f"{name}: {error}") from None
    except Exception as error:  # the errors of its HTTP client too, and that changes with its version
        gone = isinstance(error, huggingface_hub.errors.RevisionNotFoundError)
        folder = None if gone else find_cached_model(repository, revision)
        if folder is None:
            raise CheckpointError(f"{name}: {explain_hub_error(error)}") from None
        return folder


def download_model(repository: str, revision: str | None) -> Path:
    from huggingface_hub import HfApi, constants, hf_hub_download, try_to_load_from_cache

    patience = constants.HF_HUB_ETAG_TIMEOUT  # without it this one request would wait for ever
    info = HfApi().model_info(repository, revision=revision, files_metadata=True, timeout=patience)
    files = {file.rfilename: file for file in info.siblings or ()}

    def get(file: str) -> Path:
        known = isinstance(try_to_load_from_cache(repository, file, revision=info.sha), str)
        path = Path(hf_hub_download(repository, file, revision=revision))
        if path.parent.name != info.sha:
            raise CheckpointError("it changed while it was downloaded; try again")
        expected = files[file].lfs
        if expected is not None and not known:  # huggingface_hub compares the size only
            with path.open("rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
            if digest != expected.sha256:
                path.resolve().unlink()
                path.unlink(missing_ok=True)
                raise CheckpointError(f"{file} arrived damaged, its SHA-256 differs from the hub's; try again")
        return path

    weights = choose_weight_file(files)
    if weights is None:
        raise CheckpointError(
            f"no weights in it; expected one of {', '.join(PREFERRED_WEIGHT_FILES)}, or a single .npz or .pth"
        )
    for file in (CONFIG_FILE, PREPROCESSOR_FILE):
        if file in files:
            get(file)
    path = get(weights)
    for shard in list_shards(path):
        if shard not in files:
            raise CheckpointError(f"{weights} names {shard!r}, which is not there; expected every shard beside it")
        get(shard)
    return path.parent


def find_cached_model(repository: str, revision: str | None) -> Path | None:
    """The folder in the cache, if it holds weights, and all their shards."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(repository, revision=revision, allow_patterns=[], local_files_only=True))
        weights = choose_weight_file(path.name for path in folder.iterdir() if path.is_file())
        whole = weights is not None and all((folder / shard).is_file() for shard in list_shards(folder / weights))
    except (OSError, ValueError, CheckpointError):
        return None
    return folder if whole else None


def choose_weight_file(files: Iterable[str]) -> str | None:
    """The best file of weights; of other formats only where there is a single one."""
    names = set(files)
    others = [name for name in names if name.endswith((".npz", ".pth")) and "/" not in name]
    return next((name for name in PREFERRED_WEIGHT_FILES if name in names), others[0] if len(others) == 1 else None)


def list_shards(path: Path) -> list[str]:
    """The files that an index of weights names; none for a file that is no index."""
    if not path.name.endswith(INDEX_SUFFIX):
        return []
    suffix = Path(path.name.removesuffix(INDEX_SUFFIX)).suffix
    try:
        shards = sorted(set(parse_json(read_text(path))["weight_map"].values()))
        good = bool(shards) and all(Path(shard).name == shard and shard.endswith(suffix) for shard in shards)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        shards, good = [], False
    if not good:
        raise CheckpointError(f"{path.name} is no index of weights; expected a weight_map to {suffix} files beside it")
    return shards


def explain_hub_error(error: BaseException) -> str:
    """What went wrong and what to do, on one line."""
    from huggingface_hub import errors

    while isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ is not None:
        error = error.__cause__
    log_in = "log in with `hf auth login`"
    told: dict[type[Exception], str] = {  # the first that fits
        errors.OfflineModeIsEnabled: "not in the cache, and huggingface_hub is offline; set HF_HUB_OFFLINE=0 once",
        errors.HFValidationError: f"no name for a repository; expected {HUB_PREFIX}owner/model[@revision]",
        errors.RevisionNotFoundError: "no such revision; expected a branch, a tag or a commit of the repository",
        errors.GatedRepoError: f"it is gated; accept its terms on its page and {log_in}",
        errors.RepositoryNotFoundError: f"no such repository, or a private one; check the name, or {log_in}",
    }
    for kind, words in told.items():
        if isinstance(error, kind):
            return words
    if isinstance(error, errors.HfHubHTTPError):
        status = error.response.status_code
        return f"the hub answered {status}; {log_in if status in (401, 403) else 'try again later'}"
    if isinstance(error, OSError) and error.strerror and not isinstance(error, ConnectionError):
        return f"cannot write the cache: {error.strerror}; make room there, or set HF_HOME to another place"
    return f"the download failed: {describe_error(error)}; check the connection and try again"
