"""Every snippet of the README and the docs runs, every link leads somewhere, and so do the examples in --help."""

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from support.noisy_weights import add_weight_noise
from support.toy_datasets import write_class_folders

import vitrail
from vitrail.checkpoint import write
from vitrail.cli import COMMANDS, build_app, load_command

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(language: str) -> Iterator[Any]:
    for page in PAGES:
        for number, block in enumerate(re.findall(rf"```{language}\n(.*?)```", page.read_text("utf-8"), re.DOTALL)):
            yield pytest.param(block, id=f"{page.relative_to(ROOT)}-{number}")


def commands() -> dict[str, str]:
    """`$ vitrail …` in the pages, and the indented examples in the help of every command: each once, and from where."""
    found = dict[str, str]()
    for name in COMMANDS:
        found |= dict.fromkeys(
            re.findall(r"^ +vitrail (.+)$", load_command(name).__doc__ or "", re.MULTILINE), "--help: "
        )
    for page in PAGES:
        found |= dict.fromkeys(re.findall(r"^\$ vitrail (.+)$", page.read_text("utf-8"), re.MULTILINE), "")
    return found


@pytest.mark.parametrize("block", list(blocks("python")))
def test_python_snippets_run(
    block: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    if "shipped/" in block:
        shutil.copytree(request.getfixturevalue("workplace"), tmp_path, symlinks=True, dirs_exist_ok=True)
    exec(compile(block, "snippet", "exec"), {})


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a command in the docs may name: examples/, a model of ours, a file of facebook's, a photo."""
    folder = tmp_path_factory.mktemp("workplace")
    (folder / "examples").symlink_to(ROOT / "examples")
    model = add_weight_noise(vitrail.create("DeiT-Ti", image_size=64, depth=2, classes=10))
    labels = [f"class {n}" for n in range(10)]
    vitrail.save(model, folder / "my_model", labels=labels, preprocessing=vitrail.Preprocessing(image_size=64))
    write(model, folder / "weights.pth", to="deit")
    (folder / "labels.txt").write_text("\n".join(labels))
    Image.radial_gradient("L").convert("RGB").save(folder / "photo.jpg")
    for part, count in (("train", 8), ("val", 2)):
        write_class_folders(folder / "photos" / part, ants=count, bees=count)
    how = vitrail.Preprocessing(image_size=32)
    convnet = vitrail.create("ResNet-18", image_size=32, stages=(1, 1), width=8, classes=2)
    vitrail.save(convnet, folder / "convnet", labels=("ants", "bees"), preprocessing=how)
    student = vitrail.create("DeiT-Ti-distilled", image_size=32, depth=2, classes=2)
    vitrail.save(student, folder / "student", labels=("ants", "bees"), preprocessing=how)
    photos = f"train --data {folder / 'photos'} --epochs 1 --batch 4"
    for words in (
        f"train --epochs 1 --set depth=1 --set width=12 --out {folder / 'runs' / 'demo'}",
        f"{photos} --init {folder / 'convnet'} --out {folder / 'runs' / 'teacher'}",
        f"{photos} --init {folder / 'student'} --out {folder / 'runs' / 'student'}",
        f"export {folder / 'my_model'} {folder / 'shipped'}",
    ):
        build_app()(shlex.split(words), exit_on_error=False, print_error=False, result_action="return_value")
    return folder


@pytest.mark.filterwarnings("ignore:.*cannot store")  # what a layout has no place for is said
@pytest.mark.parametrize("words", [pytest.param(words, id=place + words) for words, place in commands().items()])
def test_commands_run(
    words: str,
    workplace: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    shutil.copytree(workplace, tmp_path, symlinks=True, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    build_app()(shlex.split(words), exit_on_error=False, print_error=False, result_action="return_value")
    assert capsys.readouterr().out


@pytest.mark.parametrize("block", list(blocks("sh")))
def test_shell_snippets_name_real_targets(block: str) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    lines = [line for line in block.splitlines() if line]
    assert lines
    for line in lines:
        assert line.startswith("make "), line
        assert line.split()[1] in targets, line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text("utf-8")):
        assert (page.parent / target).exists(), target


def test_the_readme_counts_the_presets() -> None:
    from vitrail.models.catalog import list_models

    assert f"| {len(list_models())} presets" in (ROOT / "README.md").read_text("utf-8")
