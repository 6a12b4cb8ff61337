"""Rows of an ablation differ in one ingredient each and are checked before anything is trained."""

import json
from pathlib import Path
from statistics import stdev
from typing import Any

import pytest
import torch
from PIL import Image
from support.figure_checks import check_texts
from support.toy_datasets import write_class_folders

import vitrail
from vitrail.base.errors import VitrailError
from vitrail.recipes.recipe import open_recipe
from vitrail.recipes.request import Request
from vitrail.study.ablation import INGREDIENT_OFF_VALUES, AblationPlanner
from vitrail.study.training_study import (
    AblationResults,
    AblationVariant,
    AblationVariantOutcomes,
    RunOutcome,
    draw_ablation,
    find_run_state,
    find_study_folder,
    list_ablation_runs,
)
from vitrail.tasks.metric import LOSS_METRIC, Metric
from vitrail.train.plan import plan_request
from vitrail.train.run_folder import RunFolder
from vitrail.train.run_list import RecordedTask

SMALL = {"depth": 1, "width": 12, "heads": 1}


def request(name: str = "fashion", changes: dict[str, Any] | None = None, **others: Any) -> Request:
    return Request(
        data="fashion", recipe=open_recipe(name).with_settings({"fields": SMALL, **(changes or {})}), **others
    )


def deit(**changes: Any) -> Request:
    gray = {"mean": [0.5], "std": [0.5]}
    fields = {**SMALL, "image_size": 28, "patch_size": 7, "stochastic_depth": 0.1}
    return request("deit", {"model": "DeiT-Ti", "fields": fields, "preprocessing": gray, **changes})


def test_each_ingredient_of_deit_gives_a_row() -> None:
    ablation = AblationPlanner(deit())
    rows = ablation.build_rows((), (), each=True)
    assert [row.name for row in rows] == ["full"] + [
        f"without-{name}"
        for name in (
            *("mixup", "cutmix", "erase", "flip", "policy", "repeats", "smoothing", "crop"),
            *("warmup", "weight-decay", "stochastic-depth"),
        )
    ]
    full = ablation.full_row.request.to_json()["recipe"]
    for row in rows[1:]:
        name = row.name.removeprefix("without-").replace("-", "_")
        assert list(row.changes) == [name]
        its = row.request.to_json()["recipe"]
        differing = {each for each in full if full[each] != its[each]}
        assert differing == {"fields" if name == "stochastic_depth" else name}
        assert row.changes[name][1] == INGREDIENT_OFF_VALUES[name]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("ema", r"^ema is already off in recipe deit; expected one of: mixup, cutmix, .*stochastic_depth$"),
        ("autoaugment", "autoaugment is already off in recipe deit"),
        ("distill", "distill is already off"),
        ("pretraining", "pretraining is already off"),
        ("mixupp", "unknown ingredient 'mixupp'; did you mean 'mixup'"),
        ("drop_path", "unknown ingredient 'drop_path'; did you mean 'stochastic_depth'"),
        ("color_jitter", "did you mean 'jitter'"),
    ],
)
def test_invalid_ingredients(words: str, message: str) -> None:
    with pytest.raises(VitrailError, match=message):
        AblationPlanner(deit()).row_without(words)


def test_randaugment_is_an_alias_of_policy() -> None:
    ablation = AblationPlanner(deit())
    row = ablation.row_without("randaugment")
    assert row.name == "without-randaugment"
    assert dict(row.changes) == {"policy": ("rand", "none")}
    with pytest.raises(VitrailError, match=r"without-policy is the same as without-randaugment \(policy rand → none\)"):
        ablation.build_rows(["randaugment", "policy"], ())
    assert len(ablation.build_rows(["randaugment"], (), each=True)) == len(ablation.list_ingredients()) + 1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lr": 5e-3}, "lr=0.005 is already the value in recipe fashion"),
        ({"depth": 1}, "depth=1 is already the value in recipe fashion"),
        ({"dephts": 2}, "unknown setting or model field 'dephts'; did you mean 'depth'"),
        ({"batch_size": 2}, "did you mean 'batch'"),
        ({"heads": 5}, "width 12 cannot be divided by 5 heads"),
        ({"optimizer": "adam"}, "unknown optimizer 'adam'"),
        ({"seed": 3}, "use `seeds`"),
        ({"distill": "soft"}, "distill=soft needs a teacher; set `teacher`"),
        ({"batch": 9999}, "`batch` 9999 is more than the 6000 training images"),
        ({"train_blocks": 7}, "train_blocks is 7"),
        ({"whiten": True}, "`whiten` is true"),
        ({"early_size": 14}, "`early_size` is 14"),
    ],
)
def test_invalid_replacements(values: dict[str, Any], message: str) -> None:
    with pytest.raises(VitrailError, match=message):
        AblationPlanner(request()).row_with(values)


def test_rows_with_replaced_settings() -> None:
    ablation = AblationPlanner(request())
    row = ablation.row_with({"optimizer": "sgd", "lr": 0.1})
    assert row.name == "optimizer-sgd-lr-0.1"
    assert row.description == "optimizer muon → sgd, lr 0.005 → 0.1"
    assert ablation.row_with({"area": [0.5, 1.0]}).name == "area-0.5-1.0"
    assert ablation.row_with({"epochs": 1}).request.recipe.loop.minutes is None
    long = ablation.row_with(
        {"positions": "sincos_2d", "optimizer": "sgd", "weight_decay": 0.123456, "lr": 0.0123456, "clip": 3}
    )
    assert len(long.name) <= 80


def test_row_without_pretraining_has_the_same_model(tmp_path: Path) -> None:
    photos = write_class_folders(tmp_path / "photos", ants=8, bees=8)
    model = vitrail.create("DeiT-Ti", image_size=32, width=24, depth=2, heads=2, classes=5)
    how = vitrail.Preprocessing(image_size=32, mean=(0.4, 0.4, 0.4), crop=1.0)
    vitrail.save(model, tmp_path / "init", preprocessing=how)
    recipe = open_recipe("finetune").with_settings({"batch": 4})
    ablation = AblationPlanner(Request(data=str(photos), recipe=recipe, init=str(tmp_path / "init")))
    row = ablation.row_without("pretraining")
    assert list(row.changes) == ["init"]
    tuned, fresh = plan_request(ablation.full_row.request), plan_request(row.request)
    assert tuned.model.config == fresh.model.config
    assert tuned.source.describe_model_input(tuned.model) == fresh.source.describe_model_input(fresh.model)
    name = "blocks.0.attn.qkv.weight"
    assert not torch.equal(tuned.model.state_dict()[name], fresh.model.state_dict()[name])


def test_unused_teacher_is_dropped() -> None:
    ablation = AblationPlanner(request(teacher="anything"))
    row = ablation.row_without("distill")
    assert dict(row.changes) == {"distill": ("hard", "none")}
    assert row.request.teacher is None
    silent = AblationPlanner(request(changes={"distill": "none"}, teacher="anything"))
    assert silent.full_row.request.teacher is None
    assert silent.row_with({"distill": "soft"}).request.teacher == "anything"


def test_folder_trained_with_other_settings_is_an_error(tmp_path: Path) -> None:
    mine, other = request(), request(changes={"mixup": 0.8})
    fewer = request(changes={"fields": {**SMALL, "registers": 1}})
    assert find_run_state(tmp_path / "row", mine) == "new"
    run = RunFolder.create(tmp_path / "row", {"request": mine.to_json()})
    assert find_run_state(tmp_path / "row", mine) == "stopped"
    assert find_run_state(tmp_path / "row", other) == "new"
    run.append_to_log({"step": 1})
    with pytest.raises(VitrailError, match=r"row was trained with other settings: mixup 0, now 0\.8; use the same"):
        find_run_state(tmp_path / "row", other)
    with pytest.raises(VitrailError, match="registers none, now 1"):
        find_run_state(tmp_path / "row", fewer)
    with pytest.raises(VitrailError, match="is a run itself"):
        list_ablation_runs([AblationVariant(name="full", request=mine)], [0], tmp_path / "row")


def test_default_folder_is_the_first_without_other_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    mine, other = (
        [AblationVariant(name="full", request=each)] for each in (request(), request(changes={"mixup": 0.8}))
    )
    assert find_study_folder("mine", mine, [0]) == Path("runs/mine")
    RunFolder.create(Path("runs/mine/full-0"), {"request": mine[0].request_for_seed(0).to_json()}).append_to_log(
        {"step": 1}
    )
    assert find_study_folder("mine", mine, [0]) == Path("runs/mine")
    assert find_study_folder("mine", other, [0]) == Path("runs/mine-2")


CLASSIFICATION = RecordedTask()
ERROR = RecordedTask(name="toy", metrics=(Metric(name="rmse", label="RMSE", higher_is_better=False), LOSS_METRIC))


def line(name: str, *values: float, failed: str = "", task: RecordedTask = CLASSIFICATION) -> AblationVariantOutcomes:
    outcomes = [
        RunOutcome(seed=n, folder=Path(f"{name}-{n}"), value=x, loss=2 * x, task=task) for n, x in enumerate(values)
    ]
    outcomes += [RunOutcome(seed=len(values), folder=Path(name), failed=failed)] if failed else []
    return AblationVariantOutcomes(row=AblationVariant(name=name, request=request()), outcomes=tuple(outcomes))


def test_mean_and_standard_deviation(tmp_path: Path) -> None:
    lines = (line("full", 0.5, 0.6), line("worse", 0.2, 0.4), line("one", 0.7, failed="NaN"), line("bad", failed="NaN"))
    table = AblationResults(recipe="mine", data="toys", lines=lines)
    full, worse, one, bad = (tuple(row) for row in table.table.format_cells())
    assert full[2:] == ("55.00 ± 7.07", "", "1.1000 ± 0.1414", "2")  # 0.1 / √2
    assert worse[2:] == ("30.00 ± 14.14", "-25.00", "0.6000 ± 0.2828", "2")
    assert one[2:] == ("70.00", "+15.00", "1.4000", "1 of 2")
    assert bad[2:] == ("failed", "", "", "0 of 1")
    assert lines[0].std == stdev([0.5, 0.6])
    table.write(tmp_path)
    assert json.loads((tmp_path / "table.json").read_text())["rows"][1]["points"] == pytest.approx(-25)
    assert "| worse | the full recipe | 30.00 ± 14.14 | -25.00 |" in (tmp_path / "table.md").read_text("utf-8")
    pytest.importorskip("matplotlib", reason="needs the extra `plot`")
    assert draw_ablation(table) is not None
    with Image.open(tmp_path / "ablation.png") as drawn:
        assert min(drawn.size) > 200
    assert draw_ablation(AblationResults(recipe="mine", data="toys", lines=lines[:1])) is None


def test_values_are_next_to_their_bars() -> None:
    pytest.importorskip("matplotlib", reason="needs the extra `plot`")
    name = "without-stochastic-depth-and-without-warmup"
    lines = (line("full", 0.9, 0.91), line("worse", 0.7, 0.72), line(name, 0.95, 0.93), line("bad", failed="NaN"))
    figure: Any = draw_ablation(AblationResults(recipe="mine", data="toys", lines=lines))
    check_texts(figure)
    (axes,) = figure.axes
    assert [label.get_text().replace("\n", "") for label in axes.get_yticklabels()] == ["worse", name, "bad"]
    for bar, text, std in zip(axes.patches, axes.texts, (2**0.5, 2**0.5, 0), strict=True):
        end = bar.get_width() + std * (1 if bar.get_width() >= 0 else -1)  # of the whisker
        box, edge = text.get_window_extent(), axes.transData.transform((end, 0))[0]
        assert min(abs(box.x0 - edge), abs(box.x1 - edge)) < 10, text.get_text()  # pixels


def test_tables_of_other_tasks_have_their_metric(tmp_path: Path) -> None:
    """A lower RMSE is a gain; a value that is not a share is not in per cent."""
    lines = (line("full", 2.0, 4.0, task=ERROR), line("worse", 3.5, task=ERROR), line("bad", failed="NaN"))
    table = AblationResults(recipe="mine", data="toys", lines=lines)
    assert [each.heading for each in table.table.columns] == ["row", "what differs", "RMSE", "gain", "loss", "seeds"]
    full, worse, bad = (tuple(row) for row in table.table.format_cells())
    assert full[2:] == ("3.0000 ± 1.4142", "", "6.0000 ± 2.8284", "2")
    assert (worse[2:], bad[2:]) == (("3.5000", "-0.5000", "7.0000", "1"), ("failed", "", "", "0 of 1"))
    data = json.loads(json.dumps(table.to_json()))
    assert (data["task"], data["metric"]["name"], data["metric"]["higher_is_better"]) == ("toy", "rmse", False)
    assert {name: data["rows"][1][name] for name in ("rmse", "rmse_std", "gain", "loss")} == {
        "rmse": 3.5,
        "rmse_std": None,
        "gain": -0.5,
        "loss": 7,
    }
    assert data["rows"][1]["runs"][0]["rmse"] == 3.5
    assert "validation RMSE and loss, mean" in table.table.to_markdown()
    only_loss = RecordedTask(name="toy", metrics=(LOSS_METRIC,))
    losses = AblationResults(recipe="mine", data="toys", lines=(line("full", 2.0, task=only_loss),))
    assert [each.name for each in losses.table.columns] == ["row", "what differs", "loss", "gain", "seeds"]
    assert losses.table.format_cells()[0][2:] == ["2.0000", "", "1"]
    pytest.importorskip("matplotlib", reason="needs the extra `plot`")
    assert draw_ablation(table) is not None


def test_runs_of_different_metrics_are_not_compared() -> None:
    with pytest.raises(VitrailError, match=r"^full-0 was evaluated by top-1 and other-0 by RMSE; expected .*$"):
        AblationResults(recipe="mine", data="toys", lines=(line("full", 0.5), line("other", 2.0, task=ERROR)))
