"""A Dockerfile that serves the model with `vitrail serve`: without torch, as another user than root."""

import json
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from shutil import copytree, ignore_patterns

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import vitrail
from vitrail.base.errors import CheckpointError, missing_package_error
from vitrail.export.targets.deployment import Deployment

PORT, USER_ID = 8000, 10001
SERVED_PACKAGES = (  # of `vitrail serve` with an exported model
    *("onnxruntime", "numpy", "pillow", "cyclopts"),
    *("starlette", "uvicorn", "httptools", "uvloop", "prometheus-client"),
)
BASE_MEGABYTES = 125  # of the slim image of Python, unpacked
PROBE = f"import urllib.request as web; web.urlopen('http://127.0.0.1:{PORT}/v2/health/ready', timeout=2)"
DOCKERFILE = """# docker build -t {tag} .
# docker run -p {port}:{port} -e VITRAIL_TOKEN=$(openssl rand -hex 16) {tag}
FROM python:{python}-slim
WORKDIR /app
COPY requirements.txt ./
RUN pip install --no-cache-dir -r requirements.txt
COPY vitrail ./vitrail
RUN python -m compileall -q vitrail
COPY model ./model
ENV PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1
USER {user}:{user}
EXPOSE {port}
HEALTHCHECK --interval=10s --timeout=3s --start-period=20s CMD {probe}
ENTRYPOINT {command}
"""
INSTRUCTIONS = ["FROM", "WORKDIR", "COPY", "RUN", "ENV", "USER", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT"]


def write_container(made: Deployment) -> list[str]:
    """The image has this vitrail itself, and the versions of the packages that the export was checked with."""
    pins = pin_packages(SERVED_PACKAGES)
    made.write("requirements.txt", "".join(f"{name}=={version}\n" for name, version in pins.items()))
    copy_vitrail(made.folder / "vitrail")
    command = ["python", "-m", "vitrail", "serve", f"{made.name}=model", "--host", "0.0.0.0", "--port", str(PORT)]
    text = DOCKERFILE.format(
        tag=made.tag,
        port=PORT,
        user=USER_ID,
        python=f"{sys.version_info.major}.{sys.version_info.minor}",
        probe=json.dumps(["python", "-c", PROBE]),
        command=json.dumps(command),
    )
    check_dockerfile(text, made.folder)
    made.write("Dockerfile", text)
    made.write(".dockerignore", "**/__pycache__\n")
    size = BASE_MEGABYTES + measure_packages(pins) + measure_folder(made.folder)
    return [f"image: about {size:.0f} MB unpacked, without torch"]


def pin_packages(names: Iterable[str]) -> dict[str, str]:
    """The installed versions of these packages and of all that they require, by name."""
    found, left = dict[str, str](), list(names)
    while left:
        name = canonicalize_name(left.pop())
        if name in found:
            continue
        try:
            package = distribution(name)
        except PackageNotFoundError:
            raise missing_package_error("`for_target`", name, "export,serve") from None
        found[name] = package.version
        wanted = map(Requirement, package.requires or ())
        left += [each.name for each in wanted if each.marker is None or each.marker.evaluate({"extra": ""})]
    return dict(sorted(found.items()))


def copy_vitrail(folder: Path) -> None:
    copytree(Path(vitrail.__file__).parent, folder, ignore=ignore_patterns("__pycache__", ".*"))


def measure_packages(names: Iterable[str]) -> float:
    """Megabytes of installed packages, without bytecode."""
    files = (file for name in names for file in distribution(name).files or () if file.suffix != ".pyc")
    return sum(each.size or 0 for each in files) / 1e6


def measure_folder(folder: Path) -> float:
    return sum(each.stat().st_size for each in folder.rglob("*") if each.is_file()) / 1e6


def check_dockerfile(text: str, folder: Path) -> list[tuple[str, str]]:
    """The instructions with their arguments; an error for one that a builder would refuse."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    parsed = [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines)]
    faults = [f"unknown instruction {word}" for word, _ in parsed if word not in INSTRUCTIONS]
    if parsed[0][0] != "FROM":
        faults.append("it does not begin with FROM")
    for word, rest in parsed:
        if word == "COPY" and not (folder / rest.split()[0]).exists():
            faults.append(f"{rest.split()[0]} is missing")
        if word in ("ENTRYPOINT", "HEALTHCHECK"):
            try:
                json.loads(rest.rpartition("CMD ")[2])
            except ValueError:
                faults.append(f"{word} is not a JSON list")
    if [rest for word, rest in parsed if word == "USER"][-1:] in ([], ["root"], ["0"]):
        faults.append("it runs as root")
    if faults:
        raise CheckpointError(f"Dockerfile: {'; '.join(faults)}; this is a bug, so nothing is written")
    return parsed
