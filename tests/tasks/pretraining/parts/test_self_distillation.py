"""DINO continues from files in the authors' layout: student, teacher, heads and center."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.pretraining_cases import SMALL_HEAD
from support.toy_task import make_backbone
from torch import Tensor

from vitrail.base.errors import VitrailError
from vitrail.recipes.recipe import open_recipe
from vitrail.recipes.request import Request
from vitrail.recipes.task_settings import DinoSettings
from vitrail.tasks import find_task
from vitrail.tasks.pretraining.dino import Dino
from vitrail.tasks.pretraining.parts.projection_heads import PrototypeHead
from vitrail.tasks.pretraining.parts.self_distillation import SelfDistillation
from vitrail.tasks.task import BuildContext

pytestmark = pytest.mark.filterwarnings("ignore::vitrail.base.errors.CheckpointWarning")


@pytest.fixture(scope="module")
def contents() -> dict[str, Any]:
    """What the authors' script saves at the end of an epoch, at toy size."""
    torch.manual_seed(0)
    student, teacher = make_parts(), make_parts()
    return {
        "student": {f"module.{name}": tensor for name, tensor in student.items()},
        "teacher": teacher,
        "dino_loss": {"center": torch.randn(1, 16)},
        "optimizer": {"state": {}, "param_groups": []},
        "epoch": 3,
    }


def make_parts() -> dict[str, Tensor]:
    head = PrototypeHead(12, *SMALL_HEAD_WIDTHS).state_dict()
    backbone = {name: torch.randn_like(tensor) for name, tensor in make_backbone().state_dict().items()}
    return {**{f"backbone.{k}": v for k, v in backbone.items()}, **{f"head.{k}": v for k, v in head.items()}}


SMALL_HEAD_WIDTHS = (SMALL_HEAD["head_width"], SMALL_HEAD["bottleneck_width"], SMALL_HEAD["prototypes"])


def build_from(folder: Path, contents: dict[str, Any], name: str = "dino", **settings: Any) -> tuple[Any, str]:
    """The task of `vitrail pretrain dino --init FILE`, and what is reported."""
    torch.save(contents, folder / "checkpoint.pth")
    (folder / "images").mkdir()
    for number in range(9):
        pixels = np.random.default_rng(number).integers(0, 256, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "images" / f"{number}.png")
    task: dict[str, Any] = {**SMALL_HEAD, "global_size": None, "local_crops": 0, **settings}
    recipe = open_recipe(f"{name}-cpu").with_settings({"batch": 4, "task": task, "whiten": False})
    recipe = replace(recipe, model=None, fields={"heads": 2})
    request, lines = (
        Request(data=str(folder / "images"), recipe=recipe, init=str(folder / "checkpoint.pth")),
        list[str](),
    )
    setup = find_task(name).build(request, BuildContext(report=lines.append))
    assert isinstance(setup.task, SelfDistillation)
    return setup.task, " ".join(lines)


def test_every_part_of_an_authors_file_is_loaded(tmp_path: Path, contents: dict[str, Any]) -> None:
    task, said = build_from(tmp_path, contents)
    student = {**task.backbone.state_dict(prefix="backbone."), **task.heads["head"].state_dict(prefix="head.")}
    for name, tensor in student.items():
        assert torch.equal(tensor, contents["student"][f"module.{name}"]), name
    for name, tensor in task.teacher.state_dict().items():
        assert torch.equal(tensor, contents["teacher"][name]), name
    assert torch.equal(task.centres["head"].value, contents["dino_loss"]["center"][0])
    assert all(word in said for word in ("student", "teacher", "head", "center"))
    assert "new" not in said


def test_esvit_continues_from_a_dino_file_and_says_what_is_new(tmp_path: Path, contents: dict[str, Any]) -> None:
    task, said = build_from(tmp_path, contents, "esvit")
    assert torch.equal(task.teacher["head"].mlp[0].weight, contents["teacher"]["head.mlp.0.weight"])
    assert "new: head_dense" in said


def test_a_file_with_only_a_backbone_is_said_to_be_one(tmp_path: Path, contents: dict[str, Any]) -> None:
    backbone = {
        name.removeprefix("backbone."): each for name, each in contents["teacher"].items() if "head" not in name
    }
    task, said = build_from(tmp_path, backbone)
    assert "only the backbone" in said
    for model in (task.backbone, task.teacher["backbone"]):
        assert torch.equal(model.cls_token, backbone["cls_token"])


@pytest.mark.parametrize(
    ("setting", "value", "right"), [("prototypes", 8, 16), ("head_width", 11, 10), ("bottleneck_width", 4, 6)]
)
def test_a_head_of_another_size_is_refused(
    tmp_path: Path, contents: dict[str, Any], setting: str, value: int, right: int
) -> None:
    with pytest.raises(VitrailError) as error:
        build_from(tmp_path, contents, "dino", **{setting: value})
    assert f"`{setting}` is {value}" in str(error.value)
    assert f"use `{setting}` {right}" in str(error.value)


def test_a_student_of_another_width_is_refused(tmp_path: Path, contents: dict[str, Any]) -> None:
    wider = {name: tensor.repeat(2, *(1,) * (tensor.ndim - 1)) for name, tensor in contents["student"].items()}
    with pytest.raises(VitrailError) as error:
        build_from(tmp_path, {**contents, "student": wider})
    assert "\n" not in str(error.value)
    assert "backbone." in str(error.value)


def test_a_run_continues_with_its_heads_teacher_and_center() -> None:
    old, new = (Dino(make_backbone(), DinoSettings(**SMALL_HEAD, local_crops=0)) for _ in range(2))
    torch.nn.init.normal_(old.centres["head"].value)
    state = {name: tensor for name, tensor in old.state_dict().items() if not name.startswith("backbone.")}
    said = new.load_parts(state)
    assert all(torch.equal(new.state_dict()[name], tensor) for name, tensor in state.items())
    assert all(word in said for word in ("teacher", "head", "center"))
    assert "new" not in said
    settings: Any = {**SMALL_HEAD, "prototypes": 7, "local_crops": 0}
    other = Dino(make_backbone(), DinoSettings(**settings))
    with pytest.raises(VitrailError, match="`prototypes` is 7, but the head in the file has 16"):
        other.load_parts(state)
