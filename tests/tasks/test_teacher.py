"""Teachers: they receive the student's images in their own preprocessing and predict the student's classes."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from support.toy_datasets import write_class_folders
from test_train_fit import EVERYTHING, color_images, data, model
from torch import Tensor, nn

import vitrail
from vitrail.base.errors import CheckpointError, ConfigError, DataError
from vitrail.data.images.datasets import DatasetSplits
from vitrail.data.images.preprocessing import Preprocessing, preprocess_image
from vitrail.opening import open_model, open_timm_model
from vitrail.tasks.distillation import Distillation, make_distillation
from vitrail.tasks.image_source import ImageSource
from vitrail.tasks.teacher import Teacher, TeacherView

CPU = torch.device("cpu")
SEEN = Preprocessing(image_size=16, crop=0.8, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.25))
KNOWN = Preprocessing(image_size=16, crop=0.8, mean=(0.5, 0.5, 0.5), std=(0.5, 0.4, 0.3))


class Convnet(nn.Module):
    """Has batch norm and dropout, which differ in eval mode; records its inputs."""

    def __init__(self, classes: int = 4, channels: int = 3) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.body = nn.Sequential(nn.Conv2d(channels, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.5))
        self.head = nn.Linear(8, classes)
        self.shown = list[Tensor]()

    def forward(self, images: Tensor) -> Any:
        self.shown.append(images.detach().clone())
        return self.head(self.body(images).mean((2, 3)))


def teacher(net: nn.Module | None = None, preprocessing: Preprocessing = KNOWN, **fields: Any) -> Teacher:
    return Teacher(model=net or Convnet(), preprocessing=preprocessing, labels=color_images().classes, **fields)


def test_images_are_normalized_as_the_teacher_expects() -> None:
    view = TeacherView(teacher(), data(), SEEN, CPU)
    image, _ = color_images()[3]
    mine, its = (torch.from_numpy(preprocess_image(image, preprocessing))[None] for preprocessing in (SEEN, KNOWN))
    torch.testing.assert_close(view.adapt_images(mine), its, atol=1e-6, rtol=0)
    assert view.adapt_images(its) is not its
    alike = TeacherView(teacher(preprocessing=SEEN), data(), SEEN, CPU)
    assert alike.adapt_images(mine) is mine, "the same preprocessing: nothing is copied"


def test_images_are_resized_to_the_teachers_size() -> None:
    view = TeacherView(teacher(preprocessing=replace(KNOWN, image_size=(24, 20))), data(), SEEN, CPU)
    flat = torch.full((2, 3, 16, 16), 0.7)
    student_inputs = view.adapt_images(flat)
    assert student_inputs.shape == (2, 3, 24, 20)
    expected = view.adapt_images(F.interpolate(flat, (24, 20)))
    torch.testing.assert_close(student_inputs, expected, atol=1e-5, rtol=0)


def test_gray_images_are_expanded_for_a_color_teacher() -> None:
    gray = Preprocessing(image_size=16, crop=1.0, mean=(0.5,), std=(0.25,))
    view = TeacherView(teacher(), data(), gray, CPU)
    student_inputs = view.adapt_images(torch.ones(2, 1, 16, 16))
    expected = (0.75 - torch.tensor(KNOWN.mean)) / torch.tensor(KNOWN.std)
    torch.testing.assert_close(student_inputs[1, :, 3, 3], expected)
    with pytest.raises(ConfigError, match="takes 1 channels and the student 3"):
        TeacherView(teacher(Convnet(channels=1), replace(gray, std=(1.0,))), data(), SEEN, CPU)


def test_teacher_has_no_gradient_and_does_not_change() -> None:
    net = Convnet().train()
    before = {name: each.clone() for name, each in net.state_dict().items()}
    view = TeacherView(teacher(net), data(), SEEN, CPU)
    images = torch.randn(4, 3, 16, 16, requires_grad=True)
    logits = view(images)
    assert not logits.requires_grad
    assert torch.equal(logits, view(images)), "no dropout"
    for name, each in net.state_dict().items():
        assert torch.equal(each, before[name]), f"{name}: batch norm statistics must not change"


def test_classes_are_mapped_by_name() -> None:
    names = color_images().classes
    mixed = Teacher(model=Convnet(5), preprocessing=KNOWN, labels=[names[2], "other", names[0], names[3], names[1]])
    view, images = TeacherView(mixed, data(), SEEN, CPU), torch.randn(3, 3, 16, 16)
    logits = mixed.model(view.adapt_images(images))
    assert torch.equal(view(images), logits[:, [2, 4, 0, 3]])
    in_order = TeacherView(replace(mixed, model=Convnet(4), labels=None), data(), SEEN, CPU)
    assert "in order" in in_order.notes[0]
    assert in_order.class_order is None


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (Teacher(model=Convnet(7), preprocessing=KNOWN), "cannot teach colors: .*train the model on this data"),
        (Teacher(model=Convnet(4), preprocessing=KNOWN, labels=list("abcd")), "not among the model's 4"),
        (Teacher(model=Convnet(3), preprocessing=KNOWN, labels=[f"color {n}" for n in range(3)]), "1 of the data's 4"),
        (Teacher(model=nn.Flatten(0), preprocessing=KNOWN), "returned a tensor of .1536,.; expected logits"),
        (Teacher(model=nn.Conv2d(4, 4, 1), preprocessing=KNOWN, name="mine"), "mine failed: .*4 channels"),
        (Teacher(model=Convnet(5), preprocessing=KNOWN, labels=list("abcdefghij")), "has 10 labels for 5 classes"),
    ],
)
def test_teacher_that_does_not_fit_the_data_is_refused(wrong: Teacher, message: str) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        TeacherView(wrong, data(), SEEN, CPU)


def test_nan_logits_are_refused() -> None:
    net = Convnet()
    nn.init.constant_(net.head.bias, float("nan"))
    with pytest.raises(ConfigError, match="the teacher returned NaN or infinity"):
        TeacherView(teacher(net), data(), SEEN, CPU)


def test_wrong_types_are_refused() -> None:
    wrong: Any = None
    with pytest.raises(ConfigError, match="the teacher's model is a NoneType; expected a Module"):
        Teacher(model=wrong, preprocessing=KNOWN)
    with pytest.raises(ConfigError, match="the teacher's preprocessing is a NoneType; expected a Preprocessing"):
        Teacher(model=Convnet(), preprocessing=wrong)


def test_teacher_of_another_dtype_returns_float32() -> None:
    images = torch.randn(2, 3, 16, 16)
    exact = TeacherView(teacher(), data(), SEEN, CPU)(images)
    for number, close in ((torch.bfloat16, 0.05), (torch.float64, 1e-5)):
        found = TeacherView(teacher(Convnet().to(number)), data(), SEEN, CPU)(images)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, exact, atol=close, rtol=close)


def test_teacher_is_checked_on_the_first_readable_image(tmp_path: Path) -> None:
    folders = write_class_folders(tmp_path / "photos" / "train", ants=4, bees=4)
    for number in range(3):
        (folders / "ants" / f"{number}.png").write_bytes(b"broken")
    photos = vitrail.open_data(tmp_path / "photos")
    with pytest.raises(DataError, match="the teacher cannot teach photos"):
        TeacherView(Teacher(model=Convnet(5), preprocessing=KNOWN), photos, SEEN, CPU)
    for path in folders.rglob("*.png"):
        path.write_bytes(b"broken")
    with pytest.raises(DataError, match="no image of photos can be read"):
        TeacherView(Teacher(model=Convnet(2), preprocessing=KNOWN), photos, SEEN, CPU)


def test_data_without_images_is_refused() -> None:
    with pytest.raises(DataError, match="nothing has no images"):
        TeacherView(teacher(), DatasetSplits(name="nothing", train=None, val=None, classes=("a", "b")), SEEN, CPU)


def test_fingerprint_depends_on_weights_config_preprocessing_and_labels() -> None:
    one = teacher().fingerprint()
    assert one == teacher().fingerprint()
    assert one != teacher(preprocessing=SEEN).fingerprint()
    other = Convnet()
    other.head.bias.data[0] += 1e-3
    assert one != teacher(other).fingerprint()
    assert one != replace(teacher(), labels=color_images().classes[::-1]).fingerprint()
    heads = [teacher(model(heads=heads)) for heads in (1, 2)]
    heads[1].model.load_state_dict(heads[0].model.state_dict())
    assert heads[0].fingerprint() != heads[1].fingerprint(), "the same weights, but other logits"


def test_teacher_from_a_checkpoint(tmp_path: Path) -> None:
    net, preprocessing = model(), Preprocessing(image_size=16, crop=0.7)
    vitrail.save(net, tmp_path / "saved", preprocessing=preprocessing, labels=color_images().classes)
    found = Teacher.from_name(str(tmp_path / "saved"))
    assert found.preprocessing == preprocessing
    assert tuple(found.labels or ()) == color_images().classes
    assert found.name == str(tmp_path / "saved")
    with pytest.raises(CheckpointError, match="nowhere does not exist"):
        Teacher.from_name("nowhere")


def timm_folder(folder: Path, *, broken: bool = False) -> Any:
    """Write a model in timm's layout."""
    timm = pytest.importorskip("timm", reason="needs the extra `parity`")
    torch.manual_seed(2)
    net = timm.create_model("resnet18", num_classes=4)
    about = {"input_size": [3, 24, 24], "mean": [0.1, 0.2, 0.3], "std": [0.3, 0.2, 0.1], "crop_pct": 0.75}
    about |= {"interpolation": "bilinear", "label_names": list(color_images().classes)}
    folder.mkdir()
    config = {"architecture": "resnet18", "num_classes": 4, "pretrained_cfg": about}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({} if broken else net.state_dict(), folder / "model.safetensors")
    return net


def test_teacher_from_timm(tmp_path: Path) -> None:
    net = timm_folder(tmp_path / "net")
    found = open_model(f"timm:local-dir:{tmp_path / 'net'}")
    preprocessing = Preprocessing(
        image_size=24, crop=0.75, interpolation="bilinear", mean=(0.1, 0.2, 0.3), std=(0.3, 0.2, 0.1)
    )
    assert found.preprocessing == preprocessing
    assert (found.classes, found.labels) == (4, color_images().classes)
    images = torch.randn(2, 3, 24, 24)
    with torch.inference_mode():
        assert torch.equal(found.module(images), net.eval()(images))
    TeacherView(Teacher.from_name(f"timm:local-dir:{tmp_path / 'net'}"), data(), SEEN, CPU)


def test_unknown_or_broken_timm_model_is_refused(tmp_path: Path) -> None:
    timm_folder(tmp_path / "net", broken=True)
    for name in (f"local-dir:{tmp_path / 'net'}", "no_such_model"):
        with pytest.raises(
            CheckpointError, match=r"timm cannot open .*; expected a model name of timm that has weights"
        ):
            open_model(f"timm:{name}")


def test_a_teacher_can_see_images_of_the_students_size(tmp_path: Path) -> None:
    """As DeiT is fine-tuned at 384: positions of a named teacher are resampled; a convnet takes any size."""
    vit = vitrail.create("ViT-Ti/16", image_size=16, patch_size=8, width=16, depth=1, heads=2, classes=4)
    how = Preprocessing(image_size=16)
    vitrail.save(vit, tmp_path / "vit", labels=list("abcd"), preprocessing=how)
    raised = Teacher.from_name(str(tmp_path / "vit"), image_size=32)
    assert raised.at_size((32, 32)) is raised
    assert raised.model(torch.randn(1, 3, 32, 32)).shape == (1, 4)
    with pytest.raises(ConfigError, match="takes images of 16×16; expected a teacher for the student's 32×32, opened"):
        Teacher(model=vit, preprocessing=how).at_size((32, 32))
    convnet = vitrail.create("resnet20_cifar", classes=4)
    assert Teacher(model=convnet, preprocessing=how).at_size((24, 40)).preprocessing.image_size == (24, 40)


@pytest.mark.parametrize("size", ["trained", "student"])
def test_the_size_of_a_teacher_is_a_setting(size: str, tmp_path: Path) -> None:
    fashion = vitrail.open_data("fashion")
    vit = vitrail.create("ViT-Ti/16", image_size=14, patch_size=7, width=16, depth=1, heads=2, channels=1, classes=10)
    how = Preprocessing(image_size=14, mean=(0.5,), std=(0.5,))
    vitrail.save(vit, tmp_path / "vit", preprocessing=how, labels=fashion.classes)
    student = vitrail.create("resnet20_cifar", image_size=28, channels=1)
    recipe = vitrail.open_recipe("fashion").with_settings({"teacher_size": size})
    how = Preprocessing(image_size=28, mean=(0.5,), std=(0.5,))
    source = ImageSource(data=fashion, preprocessing=how, augmentation=recipe.augmentation, batch=4)
    task, _ = make_distillation(student, str(tmp_path / "vit"), source, recipe)
    assert isinstance(task, Distillation)
    opened: Any = task.teacher[0].model
    assert opened.config.image_size == ((28, 28) if size == "student" else (14, 14))


def test_teacher_receives_the_augmented_images_of_the_student() -> None:
    """Crops, erasing and mixing are the same for both; only the normalization differs."""
    net, student, student_inputs = Convnet(), model(), list[Tensor]()
    student.register_forward_pre_hook(
        lambda self, given: student_inputs.append(given[0].clone()) if self.training else None
    )
    vitrail.fit(student, data(), EVERYTHING, teacher=teacher(net), preprocessing=SEEN, device="cpu", steps=3)
    teacher_inputs = net.shown[1:]  # the first call checks the output
    assert len(teacher_inputs) == len(student_inputs) == 6
    for mine, its in zip(student_inputs, teacher_inputs, strict=True):
        pixels, others = (
            x * torch.tensor(preprocessing.std).reshape(3, 1, 1) + torch.tensor(preprocessing.mean).reshape(3, 1, 1)
            for x, preprocessing in ((mine, SEEN), (its, KNOWN))
        )
        torch.testing.assert_close(pixels, others, atol=1e-5, rtol=1e-5)
    assert not np.array_equal(student_inputs[0].numpy(), student_inputs[1].numpy())


def test_timm_that_cannot_be_imported_is_a_one_line_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "timm.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    with pytest.raises(ConfigError, match="timm cannot be imported: operator torchvision::nms does not exist"):
        open_timm_model("resnet18")
