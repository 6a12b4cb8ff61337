"""Every file with a checksum is verified: of a saved folder, a training checkpoint, a run and an export."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.saved_models import write_model_folder
from support.toy_datasets import write_class_folders
from support.toy_exports import ExportFinder

from vitrail.inspection.file_inspection import FileCheck, verify_checksums

TRAIN = "train --model ViT-Ti/16 --set depth=1 --set width=16 --set heads=2 --set patch_size=8 --image-size 16"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from vitrail.cli import build_app

    root = tmp_path_factory.mktemp("integrity")
    write_class_folders(root / "photos", a=4, b=4)
    words = [*TRAIN.split(), "--batch", "4", "--epochs", "2", "--save-every", "1"]
    build_app(["train"])(
        [*words, "--data", str(root / "photos"), "-o", str(root / "run")], result_action="return_value"
    )
    return root / "run"


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def damaged(checks: tuple[FileCheck, ...]) -> list[str]:
    return [each.file for each in checks if each.verdict == "damaged"]


def test_every_file_of_a_run_is_verified(run: Path, tmp_path: Path) -> None:
    names = [each.file for each in verify_checksums(run)]
    checkpoints = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert len(checkpoints) == 2
    expected = [
        "run.json",
        *(f"checkpoints/{name}" for name in checkpoints),
        "model/config.json",
        "model/model.safetensors",
    ]
    assert names == expected
    assert {each.verdict for each in verify_checksums(run)} == {"intact"}
    for name in expected:
        shutil.copytree(run, tmp_path / "run", dirs_exist_ok=True)
        flip(tmp_path / "run" / name, -20)
        assert damaged(verify_checksums(tmp_path / "run")) == [name]
        assert damaged(verify_checksums(tmp_path / "run" / name)) == [Path(name).name]


@pytest.mark.parametrize("kind", ["onnx", "int8", "program"])
def test_every_file_of_an_export_is_verified(kind: str, exported: ExportFinder, tmp_path: Path) -> None:
    shutil.copytree(exported(kind), tmp_path / "export")
    names = [each.file for each in verify_checksums(tmp_path / "export")]
    assert names == ["config.json", "model.pt2" if kind == "program" else "model.onnx"]
    assert not damaged(verify_checksums(tmp_path / "export"))
    flip(tmp_path / "export" / names[1], 1000)
    assert verify_checksums(tmp_path / "export")[1] == FileCheck(names[1], "damaged", "it does not match config.json")
    (tmp_path / "export" / names[1]).unlink()
    assert damaged(verify_checksums(tmp_path / "export")) == ["config.json"]


def test_public_files_have_no_checksum(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1)}, tmp_path / "a.pth")
    assert verify_checksums(tmp_path / "a.pth") == (FileCheck("a.pth", "no checksum"),)
    (tmp_path / "config.json").write_text("{}")
    assert verify_checksums(tmp_path) == (FileCheck("config.json", "no checksum"),)


def test_a_config_that_lists_files_elsewhere_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"files": {"../secret": "0" * 64}}))
    assert damaged(verify_checksums(tmp_path)) == ["config.json"]


def test_command_reports_checksums(
    run: Path,
    exported: ExportFinder,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vitrail.cli import main

    def say(*words: object) -> tuple[Any, str, str]:
        monkeypatch.setattr("sys.argv", ["vitrail", "summary", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        seen = capsys.readouterr()
        return ended.value.code, seen.out, seen.err

    write_model_folder(tmp_path / "model")
    shutil.copytree(run, tmp_path / "run")
    shutil.copytree(exported("onnx"), tmp_path / "export")
    for name, file in (("model", "model.safetensors"), ("run", "run.json"), ("export", "model.onnx")):
        code, out, _ = say(tmp_path / name)
        assert (code, "intact" in out, "damaged" in out) == (0, True, False)
        flip(tmp_path / name / file, -30)
        code, out, err = say(tmp_path / name)
        assert (code, "damaged" in out, err.count("\n")) == (2, True, 1)
        assert f"is damaged ({file}: " in err
        assert json.loads(say(tmp_path / name, "--json")[1])
    step = next((tmp_path / "run" / "checkpoints").iterdir())
    assert f"checksum       {step.name}: intact" in say(step)[1]
