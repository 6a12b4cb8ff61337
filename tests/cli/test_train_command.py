"""vitrail train on the command line: folders with unreadable images, time budgets, resuming, one-line errors."""

import json
import re
import shlex
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from support.toy_datasets import random_array, write_class_folders

import vitrail
from vitrail.base.errors import VitrailError
from vitrail.cli import build_app
from vitrail.train.run_folder import RunFolder
from vitrail.train.throughput import Throughput

TINY = "--model vit_tiny_patch16_224 --set image_size=16 --set patch_size=8 --set width=12 --set depth=1 --set heads=1"


def train(words: str) -> None:
    build_app()(["train", *shlex.split(words)], exit_on_error=False, print_error=False, result_action="return_value")


@pytest.fixture(autouse=True)
def temporary_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    write_class_folders(tmp_path / "photos" / "train", ants=8, bees=8)
    write_class_folders(tmp_path / "photos" / "val", ants=2, bees=2)
    return tmp_path / "photos"


def test_training_on_a_folder_of_photos(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(f"--data photos {TINY} --batch 4 --epochs 2 --ema 0.9 --out run")
    out = capsys.readouterr().out
    for text in ("16 training images, 4 validation images, 2 classes", "8 steps, 2 epochs", "validation top-1", "eval"):
        assert text in out
    about = vitrail.describe("run/model")
    assert about.labels == ("ants", "bees")
    assert about.provenance["data"] == "photos"
    assert vitrail.Predictor("run/model").predict(photos / "val" / "ants" / "0.png").top[0].label in ("ants", "bees")
    with Image.open("run/curves.png") as curves:
        assert min(curves.size) > 200
    assert list(Path("run/tensorboard").iterdir())
    plan = json.loads(Path("run/run.json").read_text())
    assert plan["recipe"]["ema"] == 0.9
    assert plan["steps"] == 8
    assert RunFolder(Path("run")).read_records()[-1]["step"] == 8
    size = sum(path.stat().st_size for path in Path("run/model").iterdir()) / 1e6
    assert out.splitlines()[-1] == f"send   run/model ({size:.1f} MB): all that others need to use the model"
    Path("run/model").rename("sent")
    shutil.rmtree("run")
    assert vitrail.Predictor("sent").predict(photos / "val" / "ants" / "0.png").top[0].label in ("ants", "bees")


def test_plan_is_written_before_the_first_step(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[bool]()

    def no_step(self: object, batches: object) -> Any:
        seen.append((Path("run") / "run.json").exists())
        raise VitrailError("enough")

    monkeypatch.setattr("vitrail.train.trainer.Trainer.step", no_step)
    with pytest.raises(VitrailError, match="enough"):
        train(f"--data photos {TINY} --batch 4 --out run")
    assert seen == [True]


def test_recipe_overrides_preset_and_option_overrides_both(photos: Path) -> None:
    Path("mine.yaml").write_text("lr: 1e-4\nepochs: 1\nbatch: 4\nfields: {depth: 2, width: 24}\n")
    train(f"--data photos --recipe mine.yaml {TINY} --lr 2e-4 --dropout 0.1 --out run")
    plan = json.loads(Path("run/run.json").read_text())
    assert plan["recipe"]["lr"] == 2e-4, "the flag"
    assert plan["recipe"]["batch"] == 4, "the recipe"
    config = plan["model"]["config"]
    assert (config["width"], config["depth"], config["heads"]) == (12, 1, 1), "the flags"
    assert config["dropout"] == 0.1
    assert config["mlp_width"] is None, "the preset"


def test_named_model_replaces_the_model_of_the_recipe(photos: Path) -> None:
    other = TINY.replace("vit_tiny", "vit_small")
    train(f"--recipe fashion --data photos {other} --batch 4 --epochs 1 --out run")
    config = json.loads(Path("run/run.json").read_text())["model"]["config"]
    assert config["mlp_width"] is None
    assert config["pool"] == "class"


def test_fine_tuning_at_another_size_starts_from_the_weights_and_a_zero_head(photos: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = vitrail.create("DeiT-Ti", image_size=32, width=24, depth=2, heads=2, classes=5)
    preprocessing = vitrail.Preprocessing(image_size=32, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    vitrail.save(model, "init", preprocessing=preprocessing)
    train("--data photos --init init --image-size 48 --epochs 1 --batch 4 --lr 1e-9 --out run")
    tuned = vitrail.load("run/model")
    assert tuned.config.image_size == (48, 48)
    assert tuned.config.classes == 2
    assert tuned.pos_embed.shape[1] == 1 + 9
    assert tuned.head.weight.abs().max() < 1e-6
    assert torch.allclose(tuned.blocks[0].mlp.fc1.weight, model.blocks[0].mlp.fc1.weight, atol=1e-6)
    about = vitrail.describe("run/model")
    assert about.preprocessing is not None
    assert about.preprocessing.mean == (0.485, 0.456, 0.406)
    train("--data photos --init run --recipe linear-probe --epochs 1 --batch 4 --out further")
    assert vitrail.load("further/model").config.image_size == (48, 48), "a run can be the start of another"


def test_dry_run_reports_the_time_and_writes_nothing(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(f"--data photos {TINY} --batch 4 --epochs 3 --dry-run")
    out = capsys.readouterr().out
    assert "images/s" in out
    assert re.search(r"^time   about \S+ for 12 steps, 3 epochs$", out, re.MULTILINE)
    assert "GB" in out
    assert [path.name for path in Path().iterdir()] == ["photos"]


def test_time_budget_fixes_the_number_of_steps(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with 200 seconds per step: the seconds that this test takes make no difference."""
    speed = Throughput(step_seconds=200.0, evaluation_seconds=100.0, peak_bytes=0)
    monkeypatch.setattr("vitrail.train.run.measure_throughput", lambda _: speed)  # pyright: ignore[reportUnknownLambdaType]
    train(f"--data photos {TINY} --batch 4 --minutes 60 --out run --eval-every 0")
    plan = json.loads(Path("run/run.json").read_text())
    assert plan["steps"] == (3600 * 0.97 - 100) // 200
    assert plan["recipe"]["minutes"] == 60
    records = RunFolder(Path("run")).read_records()
    assert records[-1]["step"] == plan["steps"]
    with pytest.raises(VitrailError, match=r"add at least .* to `minutes`"):
        train(f"--data photos {TINY} --batch 4 --minutes 0.001")


def test_resume_is_bit_identical(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"--data photos {TINY} --batch 4 --epochs 2 --mixup 0.8 --dropout 0.1 --save-every 3"
    train(f"{words} --out uninterrupted")
    train(f"{words} --out stopped")
    run = RunFolder(Path("stopped"))
    for path in run.list_checkpoints():
        if "8" in path.stem:
            path.unlink()  # as if it had been killed after step 6
    shutil.rmtree("stopped/model")
    train("--resume stopped")
    assert "resuming from step-00000006 of 8 steps" in capsys.readouterr().out
    uninterrupted, resumed = (
        vitrail.load("uninterrupted/model").state_dict(),
        vitrail.load("stopped/model").state_dict(),
    )
    assert all(torch.equal(uninterrupted[name], resumed[name]) for name in uninterrupted)
    train("--resume stopped")
    assert "is finished" in capsys.readouterr().out


def add_images_of_all_kinds(folder: Path) -> int:
    """Write images of every kind to a folder; returns how many of them cannot be read."""
    good = Image.fromarray(random_array(40, 30, 3))
    good.save(folder / "good.jpg")
    data = (folder / "good.jpg").read_bytes()
    (folder / "truncated.jpg").write_bytes(data[: len(data) // 2])
    (folder / "empty.jpg").write_bytes(b"")
    (folder / "text.jpg").write_text("this is not an image")
    good.convert("CMYK").save(folder / "cmyk.jpg")
    good.convert("P").save(folder / "palette.png")
    good.convert("LA").save(folder / "transparent.png")
    Image.fromarray(random_array(40, 30).astype("uint16") * 200).save(folder / "16bit.png")
    good.save(folder / "moving.gif", save_all=True, append_images=[good.rotate(90)])
    exif = good.getexif()
    exif[0x0112] = 6
    good.save(folder / "rotated.jpg", exif=exif)
    good.save(folder / "蟻 ünï.jpg")
    Image.new("1", (20_000, 20_000)).save(folder / "gigantic.png")
    return 4


@pytest.mark.parametrize("cache", [0, 1])
@pytest.mark.parametrize("workers", [0, 2])
def test_unreadable_images_are_listed_and_training_continues(
    photos: Path, cache: int, workers: int, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = add_images_of_all_kinds(photos / "train" / "ants") + add_images_of_all_kinds(photos / "val" / "bees")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(f"--data photos {TINY} --batch 9 --epochs 3 --out run --cache {cache} --workers {workers}")
    out = capsys.readouterr().out
    assert f"skipped {bad} images that could not be read:" in out
    for name in ("truncated.jpg", "empty.jpg", "text.jpg", "gigantic.png"):
        assert out.count(name) == 2
    assert "good.jpg" not in out
    assert RunFolder(Path("run")).read_records()[-1]["step"] == 9


def test_strict_makes_an_unreadable_image_an_error(photos: Path) -> None:
    (photos / "train" / "ants" / "text.jpg").write_text("this is not an image")
    with pytest.raises(VitrailError, match=r"text\.jpg.*is not an image"):
        train(f"--data photos {TINY} --batch 16 --epochs 2 --strict")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--data photos --epochs 1", "no model is named"),
        (f"--data photos {TINY} --batch 64", "`batch` 64 is more than the 16 training images; use 16 or less"),
        (f"--data photos {TINY} --batch 4 --epochs 0", "epochs is 0"),
        (f"--data photos {TINY} --batch 4 --epochs 1 --minutes 1", "either `minutes` or `epochs`"),
        (f"--data '' {TINY} --batch 4", "does not exist"),
        (f"--data photos/train/.. {TINY} --batch 4 --out photos", "photos holds other files"),
        (f"--data photos {TINY} --batch 4 --out photos/val/ants/0.png", "0.png is a file; expected a new folder"),
        (f"--data photos {TINY} --batch 4 --device meta", "meta is not a device. Use cpu, cuda, cuda:1 or mps."),
        (f"--data photos {TINY} --batch 5 --accumulate 2", "batch 5 in 2 micro-batches"),
        (f"--data photo {TINY}", "did you mean 'photos'"),
        (f"--data photos {TINY} --recipe deitt", "did you mean 'deit'"),
        (f"--data photos {TINY} --device gpu", "gpu is not a device"),
        (f"--data photos {TINY} --batch 4 --workers -1", "`workers` is -1"),
        (f"--data photos {TINY} --batch 4 --cache -1", "`cache` -1"),
        (f"--data photos {TINY} --set classes=7 --batch 4", "classes is 7; expected 2"),
        ("--data photos --init missing.pth", "missing.pth"),
        ("--resume missing", "missing does not exist; expected a folder that `vitrail train` wrote"),
        (
            "--resume photso",
            "photso does not exist; expected a folder that `vitrail train` wrote: did you mean 'photos'?",
        ),
        ("--resume photos", "is not a run: it has no run.json"),
        ("--data tatoebaa --pair de-en", ": did you mean 'tatoeba'?"),
        ("--resume run --model ViT-B/16", "with --model; expected it alone"),
        ("--resume run --lr 1", "with --lr; expected it alone"),
        ("--resume run --set depth=1", "with --set; expected it alone"),
        ("--resume run --dry-run", "with --dry-run; expected it alone"),
    ],
)
def test_invalid_requests_are_one_line_errors(photos: Path, words: str, message: str) -> None:
    with pytest.raises(VitrailError) as caught:
        train(words)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not Path("runs").exists()


def test_resume_is_refused_if_plan_model_or_data_changed(photos: Path) -> None:
    train(f"--data photos {TINY} --batch 4 --epochs 1 --out run")
    with pytest.raises(VitrailError, match="already holds a run"):
        train(f"--data photos {TINY} --batch 4 --epochs 1 --out run")
    shutil.rmtree("run/model")
    plan = json.loads(Path("run/run.json").read_text())
    plan["request"]["recipe"]["fields"]["depth"] = 2
    Path("run/run.json").write_text(json.dumps(plan))
    with pytest.raises(VitrailError, match=r'it is damaged or was edited; if you edited it, delete its "checksum"'):
        train("--resume run")
    del plan["checksum"]
    Path("run/run.json").write_text(json.dumps(plan))
    with pytest.raises(VitrailError, match=r"the model has changed \(depth 1, now 2"):
        train("--resume run")
    plan["request"]["recipe"]["fields"]["depth"] = 1
    Path("run/run.json").write_text(json.dumps(plan))
    Image.fromarray(random_array(6, 5, 3)).save(photos / "train" / "ants" / "new.png")
    with pytest.raises(VitrailError, match=r"the data has changed \(train 16, now 17"):
        train("--resume run")


def test_gray_images_give_a_model_of_one_channel() -> None:
    train("--epochs 0.1 --set depth=1 --set width=12 --out run")
    assert vitrail.load("run/model").config.channels == 1
    assert len(vitrail.describe("run/model").labels or ()) == 10


def test_epochs_option_replaces_the_minutes_of_a_recipe(photos: Path) -> None:
    Path("mine.yaml").write_text("minutes: 60\nbatch: 4\n")
    train(f"--data photos --recipe mine.yaml {TINY} --epochs 1 --out run")
    plan = json.loads(Path("run/run.json").read_text())
    assert plan["steps"] == 4
    assert plan["recipe"]["minutes"] is None


def test_run_is_resumed_from_another_folder(photos: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    train(f"--data photos {TINY} --batch 4 --epochs 1 --out run")
    shutil.rmtree("run/model")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    train("--resume ../run")
    assert vitrail.describe(tmp_path / "run" / "model").provenance["validation"]["top1"] >= 0


def test_recipe_with_three_means_turns_gray_images_into_rgb(tmp_path: Path) -> None:
    Path("mine.yaml").write_text("preprocessing: {mean: [0.4, 0.5, 0.6], std: [0.2, 0.2, 0.2]}\nbatch: 100\n")
    train(f"--recipe mine.yaml --data fashion {TINY.replace('=16', '=24')} --epochs 0.1 --out run")
    assert vitrail.load("run/model").config.channels == 3


def test_one_class_is_refused(tmp_path: Path) -> None:
    write_class_folders(tmp_path / "above", photos=6)
    with pytest.raises(VitrailError, match=r"has one class \(photos\); expected at least two"):
        train(f"--data above {TINY} --batch 4")


def test_run_without_a_step_may_be_started_again(photos: Path) -> None:
    with pytest.raises(VitrailError, match="train_blocks is 9"):
        train(f"--data photos {TINY} --batch 4 --epochs 1 --train-blocks 9 --out run")
    train(f"--data photos {TINY} --batch 4 --epochs 1 --out run")
    shutil.rmtree("run/model")
    shutil.rmtree("run/checkpoints")
    train("--resume run")
    states = RunFolder(Path("run")).list_checkpoints()
    states[-1].write_bytes(b"damaged")
    shutil.rmtree("run/model")
    with pytest.raises(VitrailError, match="start a new run with `out`"):
        train("--resume run")
    assert states[-1].read_bytes() == b"damaged"
