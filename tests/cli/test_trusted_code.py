"""External code runs only if the command names it; a run, a recipe or an alias in a file is not enough."""

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.toy_datasets import write_class_folders

from vitrail.base.errors import VitrailError
from vitrail.base.json_yaml import add_checksum
from vitrail.cli import build_app
from vitrail.models.catalog.families import find_preset

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_family.py"
SMALL = "--set image_size=16 --set patch_size=8 --set width=12 --set depth=1 --batch 4 --epochs 1"
RAN = "import pathlib\npathlib.Path({path!r}).write_text('ran')\n"


def vitrail_(words: str) -> None:
    build_app()(shlex.split(words), exit_on_error=False, print_error=False, result_action="return_value")


@pytest.fixture(autouse=True)
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_class_folders(tmp_path / "photos" / "train", ants=8, bees=8)
    write_class_folders(tmp_path / "photos" / "val", ants=2, bees=2)
    code = EXAMPLE.read_text() + RAN.format(path=str(tmp_path / "ran"))
    (tmp_path / "own.py").write_text(code)
    (tmp_path / "own_module.py").write_text(code)
    (tmp_path / "linked.py").symlink_to(tmp_path / "own.py")
    return tmp_path / "photos"


def has_run() -> bool:
    ran = Path("ran").exists()
    Path("ran").unlink(missing_ok=True)
    return ran


def write_plan(folder: Path, **changes: Any) -> None:
    """Write a run folder as received from someone else, with a valid checksum."""
    recipe = {"name": "scratch", **{name: changes.pop(name) for name in ("model",) if name in changes}}
    request = {"data": "photos", "recipe": recipe, **changes}
    folder.mkdir(exist_ok=True)
    (folder / "run.json").write_text(json.dumps(add_checksum({"request": request, "steps": 4})))


NAMES = ("own.py:resmlp_tiny", "./own.py:resmlp_tiny", " own.py:resmlp_tiny", "linked.py:resmlp_tiny", "own.py")
MODULES = ("own_module:resmlp_tiny", "OWN_MODULE:resmlp_tiny", "own_module.:x", ":resmlp_tiny", "own.py:a:resmlp_tiny")


@pytest.mark.parametrize("name", [*NAMES, *MODULES])
@pytest.mark.parametrize("command", ["train", "distill"])
def test_code_named_only_in_a_run_is_not_executed(name: str, command: str) -> None:
    write_plan(Path("theirs"), model=name)
    with pytest.raises(
        VitrailError, match=r"^theirs names the model .*which runs the code of .*trust.code.?"
    ) as caught:
        vitrail_(f"{command} --resume theirs")
    assert "\n" not in str(caught.value)
    assert not has_run()
    assert [path.name for path in Path("theirs").iterdir()] == ["run.json"]


@pytest.mark.parametrize("name", [NAMES[0], MODULES[0]])
@pytest.mark.parametrize("command", ["train --recipe mine.yaml", "ablate mine.yaml --without flip", "study positions"])
def test_code_named_only_in_a_recipe_is_not_executed(name: str, command: str) -> None:
    Path("mine.yaml").write_text(f"model: '{name}'\nbatch: 4\n")
    more = "--recipe mine.yaml" if command.startswith("study") else ""
    with pytest.raises(VitrailError, match=r"^the recipe mine names the model .*trust.code.?"):
        vitrail_(f"{command} {more} --data photos -o out")
    assert not has_run()
    assert not Path("out").exists()


def test_code_named_by_the_user_is_imported(capsys: pytest.CaptureFixture[str]) -> None:
    vitrail_(f"train --data photos --model own.py:resmlp_tiny {SMALL} -o run")
    code = f"{Path('own.py').resolve()}:resmlp_tiny"
    assert f"vitrail eval run --trust-code {code}, vitrail predict run --trust-code {code}" in capsys.readouterr().out
    recorded = json.loads(Path("run/run.json").read_text())["request"]["recipe"]["model"]
    assert recorded == code, "so that it can be resumed from anywhere"
    assert has_run()
    shutil.rmtree("run/model")
    for words, message in (
        ("", "trust.code.? .*own.py:resmlp_tiny$"),
        ("--trust-code own.py:other", "expected one that ends in :resmlp_tiny"),
        (
            "--trust-code own.py:resmlp_tiny --trust-code linked.py:resmlp_tiny",
            "expected one that ends in :resmlp_tiny",
        ),
        ("--trust-code own.py:resmlp_tiny --trust-code timm:hf-hub:a/b", "timm:hf-hub:a/b is not named in run"),
    ):
        with pytest.raises(VitrailError, match=message):
            vitrail_(f"train --resume run {words}")
    shutil.copy("own.py", "moved.py")
    Path("own.py").write_text("raise SystemError('the file that run.json names')")
    vitrail_("train --resume run --trust-code moved.py:resmlp_tiny")
    assert Path("run/model/config.json").exists()
    assert has_run()


def test_unneeded_trust_code_is_refused() -> None:
    with pytest.raises(VitrailError, match=r"trust.code.? own\.py:resmlp_tiny is not named in the recipe scratch"):
        vitrail_(f"train --data photos --model ViT-Ti/16 --trust-code own.py:resmlp_tiny {SMALL} -o run")
    assert not has_run()


@pytest.mark.parametrize("name", ["hf-hub:somebody/model", "local-dir:/tmp/x", "hf_hub:a/b", " resnet18", "a b", ""])
def test_recorded_timm_teacher_must_be_in_timms_registry(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: str) -> None:
        pytest.fail("timm was called")

    monkeypatch.setattr("vitrail.opening.open_timm_model", fail)
    write_plan(Path("theirs"), model="DeiT-Ti", teacher=f"timm:{name}")
    with pytest.raises(VitrailError, match=r"theirs names the teacher .*trust.code.?"):
        vitrail_("distill --resume theirs")


def test_file_cannot_declare_itself_trusted() -> None:
    write_plan(Path("theirs"), model="own.py:resmlp_tiny", trusted="own.py:resmlp_tiny")
    with pytest.raises(VitrailError, match=r"trust.code.?"):
        vitrail_("train --resume theirs")
    assert not has_run()


def test_names_import_nothing_by_default() -> None:
    with pytest.raises(VitrailError, match=r"trust.code.? own_module:resmlp_tiny"):
        find_preset("own_module:resmlp_tiny")
    assert not has_run()


def test_external_module_does_not_import_other_files_of_the_current_folder() -> None:
    Path("own_other.py").write_text("import own_sibling\n" + EXAMPLE.read_text())
    Path("own_sibling.py").write_text(RAN.format(path="ran"))
    with pytest.raises(VitrailError, match="No module named 'own_sibling'"):
        vitrail_("summary own_other:resmlp_tiny")
    assert not has_run()
