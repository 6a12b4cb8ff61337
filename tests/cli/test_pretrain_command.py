"""vitrail pretrain: tasks as commands, what follows a run, extending it, and one-line errors before any step."""

import json
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.toy_datasets import write_class_folders, write_image

import vitrail
from vitrail.base.errors import VitrailError
from vitrail.cli import build_app
from vitrail.data.batch import Batch
from vitrail.train.run_folder import RunFolder
from vitrail.train.trainer import Trainer

Run = Callable[..., Any]
SIZE = "--model vit_tiny_patch16_224 --set image_size=16 --set patch_size=8 --set width=12 --set depth=1 --set heads=1"
DECODER = "--decoder-width 8 --decoder-depth 1 --decoder-heads 1"
MAE = f"mae --data photos {SIZE} --set pool=class {DECODER} --batch 4 --eval-every 0"


def vitrail_command(words: str) -> None:
    build_app()(shlex.split(words), exit_on_error=False, print_error=False, result_action="return_value")


def pretrain(words: str) -> None:
    vitrail_command(f"pretrain {words}")


def skip_figures(patch: pytest.MonkeyPatch) -> None:
    """They take most of the time of a short run."""

    def skip(*_: object) -> tuple[()]:
        return ()

    for name in ("train.run.plot_training_curves", "tasks.pretraining.mae.MaskedAutoencoder.draw_figures"):
        patch.setattr(f"vitrail.{name}", skip)
    patch.setattr("vitrail.train.run.find_spec", skip)  # no TensorBoard


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photos of two classes, images without classes, and a pre-trained run."""
    folder = tmp_path_factory.mktemp("workplace")
    write_class_folders(folder / "photos" / "train", ants=8, bees=8)
    write_class_folders(folder / "photos" / "val", ants=2, bees=2)
    for number in range(8):
        write_image(folder / "images" / f"{number}.png", number)
    with pytest.MonkeyPatch.context() as patch:
        skip_figures(patch)
        patch.chdir(folder)
        pretrain(f"{MAE} --epochs 1 --mask-ratio 0.5 --out run")
    return folder


@pytest.fixture(autouse=True)
def current_folder(workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(workplace, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    skip_figures(monkeypatch)


def read_plan(folder: str = "run") -> dict[str, Any]:
    return RunFolder(Path(folder)).load_plan()


def test_the_settings_of_the_task_are_recorded_and_the_model_is_the_backbone_alone() -> None:
    plan = read_plan()
    assert plan["task"]["name"] == "mae"
    assert plan["recipe"]["name"] == "mae-cpu"
    assert {"mask_ratio": 0.5, "decoder_width": 8}.items() <= plan["recipe"]["task"].items()
    assert "then" not in plan["request"]
    model = vitrail.load("run/model")
    assert model.config.classes == 0
    assert not [name for name in model.state_dict() if "decoder" in name or "mask" in name]
    assert "relative_loss" in RunFolder(Path("run")).read_records()[0]


@pytest.mark.filterwarnings("ignore:.*cannot store", "ignore:.*does not specify")
def test_the_backbone_works_in_other_commands_at_once(vitrail_: Run) -> None:
    for words in (
        "train --data photos --init run --batch 4 --epochs 1 --out tuned",
        "embed run photos/val -o features.npy",
        "explain run photos/val/ants/0.png -o why.png",
        "export run exported",
        "convert run timm.safetensors --to timm",
        "convert run hf --to hf",
        "convert run mae.pth --to mae",
        "convert run dino.pth --to dino",
    ):
        done = vitrail_(*words.split())
        assert done.code == 0, (words, done.err)
    assert vitrail.load("tuned/model").config.classes == 2
    assert json.loads(Path("exported/config.json").read_text())["output"] == "class"
    ours = vitrail.load("run/model").state_dict()["blocks.0.mlp.fc1.weight"]
    for name in ("timm.safetensors", "hf", "mae.pth", "dino.pth"):
        assert torch.equal(vitrail.load(name, heads=1).state_dict()["blocks.0.mlp.fc1.weight"], ours), name


def test_next_steps_of_a_run_are_those_of_pre_training(capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree("run/model")
    pretrain("--resume run")
    out = capsys.readouterr().out
    assert "vitrail probe run, vitrail train --init run --data photos" in out
    pretrain("--resume run")
    out = capsys.readouterr().out
    assert "run is finished; evaluate it with: vitrail probe run" in out
    assert "vitrail train --resume run --epochs N" in out


def test_a_finished_run_is_extended_and_a_killed_extension_resumes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree("run", "killed")
    pretrain("--resume run --epochs 3")
    out = capsys.readouterr().out
    assert "length 1 epoch, now 3 epochs (12 steps)" in out
    assert "resuming from step-00000004 of 12 steps" in out
    plan = read_plan()
    assert (plan["steps"], plan["epochs"], plan["request"]["recipe"]["epochs"]) == (12, 3, 3)
    assert [(each["steps"], each["epochs"]) for each in plan["lengths"]] == [(4, 1)]
    records = RunFolder(Path("run")).read_records()
    assert [each["step"] for each in records if "loss" in each] == list(range(1, 13))
    lr = {each["step"]: each["lr"] for each in records if "lr" in each}
    assert lr[5] > lr[4], "the schedule is that of the longer run"

    def stop(self: Trainer, batches: Iterator[Batch]) -> set[str]:
        if self.steps_done == 7:
            raise VitrailError("enough")
        return real_step(self, batches)

    real_step = Trainer.step
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", stop)
        with pytest.raises(VitrailError, match="enough"):
            pretrain("--resume killed --epochs 3")
    assert vitrail.load("killed/model").config.classes == 0, "the model of the shorter run is kept"
    pretrain("mae --resume killed")
    one, other = (vitrail.load(f"{name}/model").state_dict() for name in ("run", "killed"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_fine_tuning_follows_and_is_resumed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = Path("short.yaml")
    recipe.write_text("task: {name: mae}\nepochs: 1\nsave_every: 1\n")

    def stop(self: Trainer, batches: Iterator[Batch]) -> set[str]:
        if self.task.metrics[0].name == "top1" and self.steps_done == stop_at:
            raise VitrailError("enough")
        return real_step(self, batches)

    real_step = Trainer.step
    monkeypatch.setattr(Trainer, "step", stop)
    stop_at = 0
    with pytest.raises(VitrailError, match="enough"):
        pretrain(f"{MAE} --recipe short.yaml --then finetune --out both")
    out = capsys.readouterr().out
    line = "then   fine-tune for 5 epochs with the recipe finetune\n"
    assert line in out
    assert out.index(line) < out.index("run    both: 4 steps"), "said before anything starts"
    assert read_plan("both")["request"]["then"] == "finetune"
    stop_at = 3
    with pytest.raises(VitrailError, match="enough"):
        pretrain("--resume both")
    stop_at = -1
    pretrain("--resume both")
    assert vitrail.load("both-finetune/model").config.classes == 2
    assert read_plan("both-finetune")["init"] == str(Path("both").resolve())
    capsys.readouterr()
    pretrain("--resume both")
    assert "both-finetune is finished" in capsys.readouterr().out


def test_probes_follow_and_are_resumed(capsys: pytest.CaptureFixture[str]) -> None:
    pretrain(f"{MAE} --epochs 1 --then probe --out probed")
    out = capsys.readouterr().out
    assert "then   probe the features" in out
    assert "raw pixels" in out
    (table,) = json.loads(Path("probed/probe.json").read_text())["tables"]
    assert [row["name"] for row in table["rows"]] == ["probed", "raw pixels", "untrained"]
    Path("probed/probe.png").unlink()
    pretrain("--resume probed")
    assert Path("probed/probe.png").exists()
    assert "raw pixels" in capsys.readouterr().out
    pretrain("--resume probed")
    out = capsys.readouterr().out
    assert "raw pixels" not in out
    assert "probed/probe.png" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "pretrain needs a task: mae, simmim"),
        ("mea --mask-ratio 0.5", "Did you mean vitrail pretrain mae?"),
        ("mae --mask-ratio 1.5", "mask_ratio is 1.5"),
        ("mae --recipe deit", "--recipe deit is for the task classification; expected one for mae: mae-cpu"),
        ("mae --recipe simclr-cpu", "--recipe simclr-cpu is for the task simclr"),
        ("mae --prototypes 3", "Unknown option --prototypes"),
        ("byol --teacher-momentum high", "--teacher-momentum 'high'; expected a number, or START:END"),
        (
            f"{MAE.replace('photos', 'images')} --then probe",
            "--then is probe, which needs images of at least two classes",
        ),
        (f"{MAE.replace('photos', 'images')} --then finetune", "but images has none"),
        (f"{MAE} --then finetune --out images/0.png", "0.png is a file"),
        ("--resume run --epochs 0.5", "--epochs is 0.5: 2 steps, but run has 4 steps (1 epoch)"),
        ("--resume run --epochs 1", "--epochs is 1.0: 4 steps, but run has 4 steps"),
        ("--resume run --epochs 2 --minutes 1", "either --minutes or --epochs"),
        ("--resume run --minutes 0.00001", "--minutes is 1e-05, but run has taken"),
        ("mae --resume run --then probe", "with --then; expected it alone"),
        ("mae --resume run --mask-ratio 0.5", "with --mask-ratio; expected it alone"),
        (f"simclr --data photos {SIZE} --batch 4 --view-size 4096", "4096"),
        (f"simclr --data photos {SIZE} --view-size 16 --batch 1", "batch"),
    ],
)
def test_wrong_calls_are_one_line(vitrail_: Run, words: str, message: str) -> None:
    before = Path("run/run.json").read_text()
    done = vitrail_("pretrain", *shlex.split(words))
    assert (done.code, done.err.count("\n")) == (2, 1), done.err
    assert message in done.err
    assert not Path("runs").exists()
    assert Path("run/run.json").read_text() == before


def test_schedules_are_options(vitrail_: Run) -> None:
    page = vitrail_("pretrain", "byol", "--help").out
    assert "--teacher-momentum START:END" in page
    assert "--mask-ratio" not in page
    assert "--smoothing" not in page
    page = vitrail_("pretrain", "mae", "--help").out
    assert "--mask-ratio FLOAT" in page
    assert "--teacher-momentum" not in page


def test_unreadable_images_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    Path("photos/train/ants/text.jpg").write_text("this is not an image")
    pretrain(f"{MAE} --epochs 2 --out skipping")
    assert "skipped 1 image that could not be read" in capsys.readouterr().out
    assert json.loads(Path("skipping/run.json").read_text())["data"]["train"] == 17


@pytest.mark.parametrize("words", ["--dry-run", "--epochs 1", "--minutes 1"])
def test_a_palette_with_more_colors_than_the_images_is_an_error_before_a_run_exists(words: str) -> None:
    size = "--set image_size=4 --set width=8 --set depth=1 --set heads=1 --set colors=1000"
    with pytest.raises(VitrailError, match=r"`colors` is 1000, but .* have only"):
        pretrain(f"igpt --data photos {size} --batch 4 --threads 1 {words}")
    assert not Path("runs").exists()
