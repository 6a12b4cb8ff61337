"""The docs as a reader uses them: page by page in an empty folder, commands and snippets in order, output checked."""

import re
import shlex
import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from support.doc_pages import (
    BLOCK,
    check_command,
    check_step_without_running,
    end_background_processes,
    find_difference,
    matches_line,
    read_steps,
    run_step,
    run_vitrail,
)
from support.noisy_weights import add_weight_noise
from support.toy_captions import write_toy_captioner

import vitrail
from vitrail.checkpoint import write
from vitrail.cli import COMMANDS, build_app, load_command
from vitrail.data.fashion import write_photos
from vitrail.data.images.decoding.model_input import decode_for_model
from vitrail.data.photos import PHOTO_FOLDER
from vitrail.export.description import ExportDescription

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
SLOW_EXAMPLES = (
    "bench",
    "report",
    "look",
    "distill",
    "pretrain",
    "ablate",
    "study",
    "train --data tatoeba",
    "train --epochs 1  ",
    "train --data photos --model ViT-Ti/16 --image-size 32",
    "train --data photos --init vit_fashion --batch 4 --dry-run",
    "eval vit_fashion --data fashion --wrong",
    "explain vit_fashion photos",
    "explain vit_fashion example:coffee --method neighbors",
    "explain cct_cifar10 example:cat --method attention",
    "explain runs/translation",
    "export",
    "train --task caption",
    "probe vit_fashion --data fashion",
    "models ViT-Ti/16 PVTv2-B0 --measure",
    "caption runs/captions photos -o words --arrays",
    "probe runs/demo vit_fashion --data fashion",
)  # the pages run these commands by default
UNRUN_EXAMPLES = ("serve", "data cifar10")  # it does not end: tests/serve runs it; it needs a network
SHELL_STARTS = (
    *("cd ", "git ", "make", "python3 -m venv ", "source ", "pip ", "for ", "done", "export ", "torchrun "),
    *("npm install ", "python -m http.server "),
)


def pages_with_steps() -> Iterator[Any]:
    for page in PAGES:
        marks = {step.mark for step in read_steps(page)}
        if marks - {"network"}:
            yield pytest.param(page, False, id=page.stem)
        if "slow" in marks:
            yield pytest.param(page, True, id=f"{page.stem}-slow", marks=pytest.mark.slow)


@pytest.mark.timeout(900)  # a page is many commands, on a machine that may be busy
@pytest.mark.parametrize(("page", "slow"), list(pages_with_steps()))
def test_page_works_as_copied(page: Path, slow: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    with end_background_processes():
        for step in read_steps(page):
            if step.mark == "network" or (step.mark == "slow" and not slow):
                check_step_without_running(step)
                continue
            printed = run_step(step)
            difference = None if step.shown is None else find_difference(step.shown, printed)
            assert difference is None, f"{step.text}\n{difference}\nall of it:\n{printed}"


@pytest.mark.parametrize(("size", "crop"), [(224, 0.9), (224, 0.875), (33, 0.95), (32, 1.0)])
def test_prediction_without_vitrail_has_the_same_input(
    size: int, crop: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The snippet of docs/prediction.md that needs only Pillow and ONNX Runtime resizes and crops as vitrail does."""
    snippet = next(step for step in read_steps(ROOT / "docs" / "prediction.md") if "InferenceSession" in step.text)
    session = Mock(run=Mock(return_value=[np.zeros((1, 2))]))
    monkeypatch.setitem(sys.modules, "onnxruntime", Mock(InferenceSession=Mock(return_value=session)))
    monkeypatch.chdir(tmp_path)
    how = vitrail.Preprocessing(image_size=size, crop=crop)
    about = ExportDescription(precision="fp32", output="logits", classes=2, preprocessing=how, labels=("a", "b"))
    Path("shipped").mkdir()
    about.write(Path("shipped"))
    shutil.copy(PHOTO_FOLDER / "cat.jpg", "cat.jpg")
    run_step(snippet)
    pixels = session.run.call_args.args[1]["pixels"]
    assert np.array_equal(pixels[0], decode_for_model("example:cat", how))


def help_examples() -> list[str]:
    """The indented examples in the help of every command."""
    found = list[str]()
    for name in COMMANDS:
        found += re.findall(r"^ +vitrail (.+)$", load_command(name).__doc__ or "", re.MULTILINE)
    return list(dict.fromkeys(found))


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an example in --help may name, since a help text is not a page: photos, sentences, weights and runs."""
    folder = tmp_path_factory.mktemp("workplace")
    write_photos(folder / "photos", ("Bag", "Dress"), train=4, val=1)
    model = vitrail.create("DeiT-Ti", image_size=64, depth=2, classes=10)
    write(add_weight_noise(model), folder / "weights.pth", to="deit")
    run_vitrail(
        ["train", "--epochs", "0.1", "--set", "depth=1", "--set", "width=12", "-o", str(folder / "runs" / "demo")]
    )
    translator = ["--data", "reversal", "--epochs", "1", "--set", "encoder_depth=2", "--set", "decoder_depth=2"]
    run_vitrail(["train", *translator, "-o", str(folder / "runs" / "translation")])
    (folder / "sentences.de").write_text("4 2\n1 2 3\n")
    write_toy_captioner(folder / "runs" / "captions")
    return folder


def mark_slow_examples() -> Iterator[Any]:
    for words in help_examples():
        if words.startswith(UNRUN_EXAMPLES):
            continue
        yield pytest.param(words, marks=pytest.mark.slow) if words.startswith(SLOW_EXAMPLES) else words


def test_slow_help_examples_have_valid_options() -> None:
    for words in help_examples():
        if words.startswith((*SLOW_EXAMPLES, *UNRUN_EXAMPLES)):
            check_command(f"vitrail {words.partition('  #')[0]}")


@pytest.mark.parametrize("words", list(mark_slow_examples()))
def test_help_examples_run(words: str, workplace: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shutil.copytree(workplace, tmp_path, symlinks=True, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    assert run_vitrail(shlex.split(words, comments=True))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_shell_blocks_name_what_exists(page: Path) -> None:
    """Blocks that install, or that need data from elsewhere, are not run: their targets, extras and options exist."""
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    for _, language, block in BLOCK.findall(page.read_text("utf-8")):
        if language != "sh":
            continue
        for line in expand_shell_variables(block).splitlines():
            line = line.partition(" #")[0].strip()
            if line.startswith("make"):
                assert line.removeprefix("make ").split()[0] in (*targets, "make"), line
            elif line.startswith("pip "):
                for extra in re.findall(r"\[([\w,]+)\]", line):
                    assert set(extra.split(",")) <= set(extras), line
            elif "vitrail " in line:
                check_command("vitrail " + line.partition("vitrail ")[2].rstrip(";"))
            else:
                assert not line or line.startswith(SHELL_STARTS), line


def expand_shell_variables(block: str) -> str:
    """Assignments and the first value of each loop, put where they are used."""
    block = block.replace("\\\n", " ")
    values = dict(re.findall(r'(\w+)="([^"]*)"', block)) | dict(re.findall(r"for (\w+) in (\S+)", block))
    block = re.sub(r'^(?:\w+="[^"]*";? ?)+$', "", block, flags=re.MULTILINE)
    return re.sub(r"\$(\w+)", lambda match: values[match[1]], block)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_options_in_the_text_exist(page: Path) -> None:
    app, words = build_app(), "|".join(f" {name.split()[1]}" for name in COMMANDS if " " in name)  # of two words
    for command, rest in re.findall(rf"`vitrail ([a-z][a-z-]*(?:{words})?)((?: [^`]*)?)`", page.read_text("utf-8")):
        known, place = {"--help"}, app
        for word in command.split():
            place = place[word]
        for argument in place.assemble_argument_collection():
            known |= set(argument.names)
        for option in re.findall(r"(?<!\S)(--?[a-z][\w-]*)", rest):
            assert option in known, f"vitrail {command} {option}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([\w-]+))?\)", page.read_text("utf-8")):
        file = page.parent / target if target else page
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", file.read_text("utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}, anchor


def test_the_tree_of_the_readme_lists_only_what_exists() -> None:
    tree = (ROOT / "README.md").read_text("utf-8").partition("## The tree")[2]
    listed = re.findall(r"[├└]── (\S+)", tree)
    assert len(set(listed)) == len(listed)
    for path in (*(f"src/vitrail/{name}" for name in listed), *re.findall(r"^(\w+)/", tree, re.MULTILINE)):
        assert (ROOT / path).exists(), path


def test_the_files_that_contributing_lists_exist() -> None:
    listed = (ROOT / "CONTRIBUTING.md").read_text("utf-8").partition("## The files")[2].partition("\n## ")[0]
    package = ROOT / "src" / "vitrail"
    known = {path.stem for path in package.rglob("*.py")} | {"open_model"}
    assert set(re.findall(r"\w+_\w+", listed)) <= known
    for folder in re.findall(r"^\| `(\w+)/`", listed, re.MULTILINE):
        assert (package / folder).is_dir(), folder


def test_the_readme_counts_the_presets() -> None:
    from vitrail.models.catalog.families import list_models

    assert f"| {len(list_models())} presets" in (ROOT / "README.md").read_text("utf-8")


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("90.0%  tabby", "91.2%  tabby", True),
        ("90.0%  tabby", "80.0%  tabby", False),
        ("90.0%  tabby", "90.0%  tiger cat", False),
        ("7 s, loss 0.51", "93 s, loss 0.52", True),
        ("loss 0.51", "loss 0.61", False),
        ("wrote … to out", "wrote a.png and b.png to out", True),
        ("6,000 images", "6,000 images", True),
        ("6,000 images", "600 images", False),
    ],
)
def test_numbers_are_compared_loosely(shown: str, printed: str, same: bool) -> None:
    assert matches_line(shown, printed) is same


def test_shown_lines_are_all_the_lines_unless_elided() -> None:
    printed = "one\ntwo\nthree\n"
    assert find_difference("one\ntwo\nthree", printed) is None
    assert find_difference("one\n…", printed) is None
    assert find_difference("one\n…\nthree", printed) is None
    assert "two" in str(find_difference("one\nthree", printed))
    assert "three" in str(find_difference("one\ntwo", printed))
    assert "four" in str(find_difference("one\n…\nfour", printed))
