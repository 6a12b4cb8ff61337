import json
import os
from pathlib import Path

import pytest
import torch

from vitrail.base.errors import ConfigError
from vitrail.cli.options.values import parse_field
from vitrail.models.catalog.families import build_preset, find_preset
from vitrail.recipes.recipe import (
    SECTIONS,
    Recipe,
    choose_recipe,
    list_builtin_recipe_names,
    list_settings,
    open_recipe,
)
from vitrail.recipes.schedule import Schedule
from vitrail.tasks import PRETRAINING_TASKS


def test_builtin_recipes() -> None:
    pretraining = {f"{task}{suffix}" for task in PRETRAINING_TASKS for suffix in ("", "-cpu")}
    assert [name for name in list_builtin_recipe_names() if name not in pretraining] == [
        *("caption", "caption-cpu", "cifar10-cpu", "cifar10-distill", "deit", "fashion", "finetune", "linear-probe"),
        *("lstm-cpu", "positions", "reversal", "scratch", "translate-cpu", "translate-demo", "vit"),
        *("vit-21k", "vit-finetune", "vit-jft"),
    ]
    with pytest.raises(ConfigError, match="unknown recipe 'probe'; did you mean 'linear-probe'"):  # its earlier name
        open_recipe("probe")


@pytest.mark.parametrize("name", list_builtin_recipe_names())
def test_every_recipe_starts_with_its_command_and_its_model_builds(name: str) -> None:
    found = open_recipe(name)
    assert found.name == name
    path = Path(__file__).parents[2] / "src" / "vitrail" / "recipes" / f"{name}.yaml"
    head = path.read_text("utf-8").split("\n\n")[0].splitlines()
    assert head[0].startswith(("# vitrail train", "# vitrail distill", "# vitrail study", "# vitrail pretrain"))
    assert len(head) > 2, "and with its measured result, or why there is none"
    if found.model:
        with torch.device("meta"):
            build_preset(found.model, **found.fields)
    else:
        find_preset("ViT-B/16")[0].configure(None, **found.fields)


def test_json_round_trip() -> None:
    for name in list_builtin_recipe_names():
        found = open_recipe(name)
        data = json.loads(json.dumps(found.to_json()))
        assert Recipe(name=data.pop("name")).with_settings(data).to_json() == found.to_json()


def test_settings_of_a_task_are_in_their_own_section() -> None:
    recipe = Recipe().with_settings({"task": {"name": "toy", "temperature": 0.1, "lr": 3}})
    assert recipe.task == {"name": "toy", "temperature": 0.1, "lr": 3}
    assert recipe.optimization.lr != 3, "names of different sections do not collide"
    assert recipe.with_settings({"task": {"lr": 4}}).task == {"name": "toy", "temperature": 0.1, "lr": 4}
    assert recipe.with_settings({"task": {"name": "other"}}).task == {"name": "other"}, (
        "another task has other settings"
    )


def test_old_recipes_name_the_settings_of_distillation_without_a_section() -> None:
    old, new = Recipe().with_settings({"distill": "soft"}), Recipe().with_settings({"task": {"distill": "soft"}})
    assert old == new
    assert new.distillation.distill == "soft"
    with pytest.raises(ConfigError, match="'harder'"):
        Recipe().with_settings({"task": {"distill": "harder"}})


def test_schedules_are_checked() -> None:
    recipe = Recipe().with_settings({"schedules": {"weight_decay": {"start": 0.04, "end": 0.4}}})
    assert recipe.to_json()["schedules"] == {"weight_decay": {"start": 0.04, "end": 0.4}}
    for wrong in (
        {"weight_decy": 1},
        {"clip": {"end": 1}},
        {"clip": {"start": "x"}},
        {"clip": {"start": 1, "by": 0}},
        {"weight_decay": -1},
    ):
        with pytest.raises(ConfigError, match=r"clip|weight_decay"):
            Recipe().with_settings({"schedules": wrong})
    with pytest.raises(ConfigError, match="momentum is 1; expected at least 0 and less than 1"):
        Recipe().with_settings({"schedules": {"momentum": {"start": 0.9, "end": 1}}})
    given = Recipe().with_settings(
        {"schedules": {"clip": Schedule(start=1)}, "task": {"name": "x", "a": Schedule(start=1)}}
    )
    assert Recipe().with_settings(json.loads(json.dumps(given.to_json()))).to_json() == given.to_json()


def test_deit_has_the_settings_of_the_paper() -> None:
    """Touvron 2020, table 9."""
    flat = open_recipe("deit").to_flat_dict()
    paper = {
        "epochs": 300, "batch": 1024, "optimizer": "adamw", "lr": 5e-4, "lr_batch": 512, "schedule": "cosine",
        "weight_decay": 0.05, "warmup": 5, "smoothing": 0.1, "fields": {"stochastic_depth": 0.1}, "repeats": 3,
        "policy": "rand", "magnitude": 9, "magnitude_std": 0.5, "mixup": 0.8, "cutmix": 1.0, "erase": 0.25, "clip": 0,
    }  # fmt: skip
    assert {name: flat[name] for name in paper} == paper


def test_vit_has_the_settings_of_the_paper() -> None:
    """Dosovitskiy 2020, table 3, ImageNet."""
    flat = open_recipe("vit").to_flat_dict()
    paper = {"batch": 4096, "lr": 3e-3, "weight_decay": 0.3, "momentum": 0.9, "beta2": 0.999, "clip": 1, "epochs": 300}
    assert {name: flat[name] for name in paper} == paper
    assert flat["fields"]["dropout"] == 0.1
    assert flat["warmup"] * (1_281_167 // 4096) == pytest.approx(10_000, rel=0.01)


def test_setting_names_are_unique_and_have_help() -> None:
    names = [each.name for _, each in list_settings()]
    assert len(set(names)) == len(names) == sum(len(section.__dataclass_fields__) for section in SECTIONS.values())
    assert all(each.metadata["help"] for _, each in list_settings())


def test_recipe_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("lr: 1e-4\nmixup: 0.8\nfields: {depth: 3}\n")
    found = open_recipe(str(path))
    assert found.optimization.lr == 1e-4
    assert found.augmentation.mixup == 0.8
    assert found.with_settings({"fields": {"width": 6}, "lr": 1}).fields == {"depth": 3, "width": 6}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr: [1]", "lr is"),
        ("lr: 0", "lr is 0; expected more than 0"),
        ("epochs: 0", "epochs is 0; expected more than 0"),
        ("batch: 10\naccumulate: 3", "batch 10 in 3 micro-batches"),
        ("learning_rate: 1", "unknown setting 'learning_rate'; did you mean 'lr'"),
        ("mixupp: 1", "did you mean 'mixup'"),
        ("schedule: cosin", "did you mean 'cosine'"),
        ("layer_decay: 2", "layer_decay is 2"),
        ("ema: 1", "ema is 1"),
        ("fields: 3", "fields is 3; expected a mapping of names to values"),
        ("- a", "has no settings"),
        ("{", "cannot be read"),
        ("", "has no settings"),
    ],
)
def test_invalid_recipe_is_named_in_the_error(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"mine\.yaml") as caught:
        open_recipe(str(path))
    assert message in str(caught.value)


@pytest.mark.parametrize("model", [None, "ViT-Ti/16"])
@pytest.mark.parametrize(
    ("data", "init", "name"), [(None, None, "fashion"), ("fashion", None, "fashion"), ("photos", None, "scratch")]
)
def test_the_usual_recipe_depends_on_the_data_not_on_the_model(
    data: str | None, init: str | None, name: str, model: str | None
) -> None:
    found = choose_recipe(None, {}, data=data, init=init, model=model)
    assert found.name == name
    assert found.model == (model or open_recipe(name).model)
    assert bool(found.fields) == (name == "fashion" and model is None), "they are for the recipe's own model"


def test_the_translation_demo_has_the_same_length_on_every_machine() -> None:
    loop = open_recipe("translate-demo").loop
    assert (loop.minutes, loop.epochs) == (None, 4)


def test_unknown_recipe_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"unknown recipe 'nope'; expected one of .*fashion, .*vit, .*vit-jft$"):
        open_recipe("nope")
    with pytest.raises(ConfigError, match="did you mean 'finetune'"):
        open_recipe("finetuning")
    with pytest.raises(ConfigError, match="cannot be read"):
        open_recipe("missing.yaml")


ALIASES = "a: &a [x, x]\nb: &b [*a, *a]\n" + "".join(
    f"c{number}: &c{number} [*{'b' if number == 0 else f'c{number - 1}'}, *b]\n" for number in range(30)
)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (ALIASES, r"it has anchors or aliases"),
        ("lr: " + "[" * 5000, r"it is nested too deep"),
        ("lr: 1" + "0" * 10**5, r"one of its values has"),
        ("x" * 10**6, r"expected at most"),
        ("lr: \x00", r"special characters"),
    ],
)
def test_recipe_that_expands_or_nests_too_far_is_refused(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(content)
    with pytest.raises(ConfigError, match=message):
        open_recipe(str(tmp_path / "mine.yaml"))
    if len(content) < 10**5:
        with pytest.raises(ConfigError, match="expected FIELD=VALUE"):
            parse_field(f"lr={content}" if "&" not in content else "lr=[&a [x], *a]")


@pytest.mark.timeout(60)
def test_recipe_that_is_a_named_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "mine.yaml")
    with pytest.raises(ConfigError, match="it is a named pipe"):
        open_recipe(str(tmp_path / "mine.yaml"))


def test_a_date_is_a_seed() -> None:
    assert Recipe().with_settings({"seed": 20240101}).loop.seed == 20240101
    with pytest.raises(ConfigError, match=r"seed is 2147483648; expected from 0 to 2,147,483,647"):
        Recipe().with_settings({"seed": 2**31})
