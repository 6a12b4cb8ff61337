"""vitrail distill on the command line: training, bit-identical resume, and one-line errors before any step."""

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.toy_datasets import write_class_folders

import vitrail
from vitrail.base.errors import VitrailError
from vitrail.cli import build_app
from vitrail.data.batch import Batch
from vitrail.train.run_folder import RunFolder
from vitrail.train.trainer import Trainer

SIZE = "--set image_size=16 --set patch_size=8 --set width=12 --set depth=1 --set heads=1"
STUDENT = f"--model deit_tiny_distilled_patch16_224 {SIZE} --batch 4"


def run(words: str) -> None:
    build_app()(shlex.split(words), exit_on_error=False, print_error=False, result_action="return_value")


@pytest.fixture(autouse=True)
def photos_and_teacher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Create photos, and a teacher with their classes."""
    monkeypatch.chdir(tmp_path)
    write_class_folders(tmp_path / "photos" / "train", ants=8, bees=8)
    write_class_folders(tmp_path / "photos" / "val", ants=2, bees=2)
    torch.manual_seed(0)
    fields = {"image_size": 24, "patch_size": 8, "width": 12, "depth": 1, "heads": 1, "classes": 2}
    teacher = vitrail.create("vit_tiny_patch16_224", **fields)
    torch.nn.init.normal_(teacher.head.weight)
    vitrail.save(teacher, "teacher", labels=("bees", "ants"), preprocessing=vitrail.Preprocessing(image_size=24))


def test_distillation_trains_a_student(capsys: pytest.CaptureFixture[str]) -> None:
    run(f"distill --teacher teacher --data photos {STUDENT} --epochs 2 --out run")
    out = capsys.readouterr().out
    assert "teacher, hard distillation" in out
    assert "validation top-1" in out
    plan = json.loads(Path("run/run.json").read_text())
    assert plan["teacher"]["name"] == str(Path("teacher").resolve())
    assert plan["recipe"]["task"]["distill"] == "hard"
    assert 0 <= RunFolder(Path("run")).read_records()[0]["agreement"] <= 1
    student = vitrail.load("run/model")
    assert student.config.distilled
    assert student.head_dist.weight.abs().max() > 0, "the head was trained"


def test_resume_is_bit_identical(monkeypatch: pytest.MonkeyPatch) -> None:
    words = f"distill --teacher teacher --data photos {STUDENT} --epochs 3 --distill soft --save-every 1 --eval-every 0"
    run(f"{words} --out uninterrupted")

    def step(self: Trainer, batches: Iterator[Batch]) -> set[str]:
        if self.steps_done == 5:
            raise VitrailError("enough")
        return real_step(self, batches)

    real_step = Trainer.step
    monkeypatch.setattr(Trainer, "step", step)
    with pytest.raises(VitrailError, match="enough"):
        run(f"{words} --out stopped")
    monkeypatch.setattr(Trainer, "step", real_step)
    run("distill --resume stopped")
    one, other = (vitrail.load(Path(name) / "model").state_dict() for name in ("uninterrupted", "stopped"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert [each["step"] for each in RunFolder(Path("stopped")).read_records()] == [*range(1, 13), 12]


def test_teacher_cache_is_shared_by_runs() -> None:
    still = "--flip 0 --crop center --mixup 0 --erase 0"
    for name in ("one", "two"):
        run(f"distill --teacher teacher --data photos {STUDENT} {still} --epochs 1 --teacher-cache cache --out {name}")
    assert sorted(each.name for each in Path("cache").glob("*/*")) == ["logits.npy", "teacher.json"]
    one, two = (vitrail.load(f"{name}/model").state_dict() for name in ("one", "two"))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_without_distillation_the_result_equals_train() -> None:
    plain = STUDENT.replace("--set depth=1", "--set depth=1 --set distilled=false")
    run(f"distill --distill none --data photos {plain} --epochs 1 --out one")
    run(f"train --data photos {plain} --epochs 1 --out two")
    one, two = (vitrail.load(f"{name}/model").state_dict() for name in ("one", "two"))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_recipe_may_disable_distillation() -> None:
    Path("alone.yaml").write_text("distill: none\nepochs: 1\n")
    run(f"distill --recipe alone.yaml --teacher photos --data photos {STUDENT} --out one")
    assert json.loads(Path("one/run.json").read_text())["teacher"] is None


def test_dry_run_writes_nothing() -> None:
    still = "--flip 0 --crop center --mixup 0 --erase 0"
    run(f"distill --teacher teacher --data photos {STUDENT} {still} --epochs 1 --teacher-cache cache --dry-run")
    assert not Path("cache").exists()
    assert not Path("runs").exists()


def test_resume_with_a_changed_teacher_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> set[str]:
        raise VitrailError("enough")

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", stop)
        with pytest.raises(VitrailError, match="enough"):
            run(f"distill --teacher teacher --data photos {STUDENT} --epochs 1 --out stopped")
    other = vitrail.load("teacher")
    torch.nn.init.zeros_(other.head.weight)
    vitrail.save(other, "teacher", labels=("ants", "bees"), preprocessing=vitrail.Preprocessing(image_size=24))
    with pytest.raises(VitrailError, match=r"the teacher has changed \(fingerprint .*\); restore it"):
        run("distill --resume stopped")


def test_fine_tuning_at_another_size_keeps_both_heads() -> None:
    run(f"distill --teacher teacher --data photos {STUDENT} --epochs 1 --out first")
    run("distill --teacher teacher --data photos --init first --image-size 32 --batch 4 --epochs 1 --out second")
    run("train --data photos --init first --image-size 32 --batch 4 --epochs 1 --out third")
    for name in ("second", "third"):
        tuned = vitrail.load(f"{name}/model")
        assert tuned.config.distilled
        assert tuned.config.image_size == (32, 32)
    assert vitrail.load("second/model").pos_embed.shape[1] == 2 + 16


def test_default_model() -> None:
    """The default is DeiT-Ti with a distillation token."""
    run("distill --teacher teacher --data photos --image-size 32 --set depth=1 --batch 4 --epochs 0.3 --out run")
    plan = json.loads(Path("run/run.json").read_text())
    assert plan["model"]["name"] == "deit_tiny_distilled_patch16_224"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "no --teacher; expected a trained model"),
        ("--teacher nowhere.pth", "nowhere.pth does not exist"),
        ("--teacher empty", "empty"),
        ("--teacher others", "cannot teach photos: .*are not among the model's 5 classes"),
        ("--teacher broken", "broken returned NaN or infinity"),
        ("--teacher timm:no_such_model", "timm cannot open 'no_such_model'"),
        ("--teacher teacher --temperature 0", "temperature is 0.0; expected more than 0"),
        ("--teacher teacher --temperature -3", "temperature is -3.0; expected more than 0"),
        ("--teacher teacher --teacher-weight 1.5", "teacher_weight is 1.5; expected at least 0 and at most 1"),
        ("--teacher teacher --teacher-weight -1", "teacher_weight is -1.0; expected at least 0 and at most 1"),
        ("--teacher teacher --set distilled=false --distill-token distill", "has no distillation token; expected one"),
        ("--teacher teacher --teacher-cache cache", "with random augmentation"),
        ("--teacher teacher --resume run", "expected it alone"),
    ],
)
def test_errors_are_raised_before_any_step(words: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_step(*_: object) -> None:
        raise AssertionError("a step was taken")

    monkeypatch.setattr("vitrail.train.trainer.Trainer.step", no_step)
    Path("empty").mkdir()
    fields = {"image_size": 16, "patch_size": 8, "width": 12, "depth": 1, "heads": 1}
    preprocessing = vitrail.Preprocessing(image_size=16)
    vitrail.save(vitrail.create("vit_tiny_patch16_224", **fields, classes=5), "others", preprocessing=preprocessing)
    broken = vitrail.create("vit_tiny_patch16_224", **fields, classes=2)
    torch.nn.init.constant_(broken.head.bias, float("nan"))
    vitrail.save(broken, "broken", preprocessing=preprocessing)
    with pytest.raises(VitrailError, match=message) as caught:
        run(f"distill {words} --data photos {STUDENT} --epochs 1 --out run")
    assert "\n" not in str(caught.value)
    assert not Path("run").exists()


def test_exit_code() -> None:
    words = [sys.executable, "-m", "vitrail", "distill", "--teacher", "nowhere", "--data", "photos"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr
