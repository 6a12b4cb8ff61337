"""The Dockerfile, and that the folder has what the image needs: it is run without Docker, as the image would run it."""

import json
import re
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest
from support.target_folders import WriteTarget

from vitrail.base.errors import CheckpointError
from vitrail.export.targets.container import check_dockerfile, pin_packages


def test_the_folder(write_target: WriteTarget) -> None:
    folder, lines = write_target("container")
    parsed = check_dockerfile((folder / "Dockerfile").read_text(), folder)
    words = dict(parsed)
    assert words["USER"] == "10001:10001"
    assert words["EXPOSE"] == "8000"
    assert "8000/v2/health/ready" in words["HEALTHCHECK"]
    command = json.loads(words["ENTRYPOINT"])
    assert command[:5] == ["python", "-m", "vitrail", "serve", "toy-2=model"]
    pins = dict(line.split("==") for line in (folder / "requirements.txt").read_text().split())
    assert {"onnxruntime", "numpy", "pillow", "starlette", "uvicorn", "rich"} <= set(pins)
    assert "torch" not in pins
    assert pins["numpy"] == version("numpy")
    size = re.fullmatch(r"image: about (\d+) MB unpacked, without torch", lines[0])
    assert size
    assert 200 < int(size[1]) < 800
    assert not list(folder.rglob("__pycache__"))


@pytest.mark.slow  # starts a process
def test_it_serves_from_the_folder_alone(write_target: WriteTarget, tmp_path: Path) -> None:
    """The command of the image, with the packages that it installs and nothing else."""
    import os
    import sys
    from importlib.metadata import distribution

    folder, _ = write_target("container")
    packages = tmp_path / "packages"
    packages.mkdir()
    for name in (line.partition("==")[0] for line in (folder / "requirements.txt").read_text().split()):
        found = distribution(name)
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            source = Path(str(found.locate_file(top)))
            if source.exists() and not (packages / top).exists():
                (packages / top).symlink_to(source)
    words = dict(check_dockerfile((folder / "Dockerfile").read_text(), folder))
    command = json.loads(words["ENTRYPOINT"])
    command[command.index("0.0.0.0")], command[command.index("8000")] = "127.0.0.1", "0"
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(packages)}
    with subprocess.Popen(
        [sys.executable, "-S", "-s", *command[1:]], stdout=subprocess.PIPE, text=True, cwd=folder, env=env
    ) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        import requests

        assert requests.get(f"{address}v2/health/ready", timeout=10).status_code == 200
        process.terminate()
        assert process.wait(20) == 0


def test_faults_are_found(tmp_path: Path) -> None:
    text = "RUN true\nCOPPY a b\nCOPY model ./model\nENTRYPOINT python -m vitrail\nUSER root\n"
    with pytest.raises(CheckpointError) as caught:
        check_dockerfile(text, tmp_path)
    for fault in ("COPPY", "begin with FROM", "model is missing", "ENTRYPOINT is not a JSON list", "runs as root"):
        assert fault in str(caught.value)


def test_a_missing_package_is_an_error_with_its_extra() -> None:
    with pytest.raises(Exception, match=r"`for_target` needs no-such-package, .*\[export,serve\]"):
        pin_packages(["no-such-package"])
