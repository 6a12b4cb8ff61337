"""The eight cells of ViT's table 8: rows that differ in positions alone, and their statistics."""

import json
from math import sqrt
from pathlib import Path

import pytest
from PIL import Image
from support.figure_checks import check_texts

from vitrail.base.errors import VitrailError
from vitrail.recipes.recipe import open_recipe
from vitrail.recipes.request import Request
from vitrail.study.position_study import (
    POSITION_CELLS,
    PositionStudyResults,
    draw_position_study,
    plan_position_ablation,
)
from vitrail.study.training_study import AblationResults, AblationVariant, AblationVariantOutcomes, RunOutcome
from vitrail.train.plan import plan_request

WIDTH, DEPTH, SIDE = 12, 3, 4  # 28 pixels in patches of 7
SMALL = {"depth": DEPTH, "width": WIDTH, "heads": 2, "mlp_width": 12}


def request(model: str | None = None) -> Request:
    changes = {"fields": SMALL} if model is None else {"model": model, "fields": {"image_size": 32}}
    return Request(data="fashion", recipe=open_recipe("fashion" if model is None else "vit").with_settings(changes))


def test_rows_differ_in_positions_alone() -> None:
    ablation, rows = plan_position_ablation(request())
    assert ablation.data.name == "fashion"
    names = "none 1d-stem 1d-layers 1d-shared 2d-stem 2d-layers 2d-shared relative"
    assert [row.name for row in rows] == names.split()
    line = WIDTH * (SIDE**2 + 1)  # a row for each patch and for the class token
    axes = WIDTH // 2 * SIDE * 2
    offsets = (2 * SIDE - 1) ** 2 * WIDTH // 2  # per layer, for heads of half the width
    expected = [0, line, DEPTH * line, line, axes, DEPTH * axes, axes, DEPTH * offsets]
    models = [plan_request(row.request).model for row in rows]
    sizes = [sum(weight.numel() for weight in model.parameters()) for model in models]
    assert [size - sizes[0] for size in sizes] == expected
    where = [model.config.positions_at for model in models]
    assert where == ["stem", *("stem", "layers", "shared") * 2, "stem"]
    first = rows[0].request.to_json()["recipe"]
    for row in rows:
        its = row.request.to_json()["recipe"]
        assert {name for name in its if its[name] != first[name]} <= {"fields"}
        assert {name for name in its["fields"] if its["fields"][name] != first["fields"][name]} == set(row.changes)
        assert set(row.changes) <= {"positions", "positions_at"}
    assert rows[0].description == "no positions"
    assert rows[3].description == "positions none → learned, positions_at stem → shared"


@pytest.mark.parametrize("name", ["DeiT-Ti", "cct_cpu_32", "ResNet-18"])
def test_models_without_a_choice_of_positions_are_errors(name: str) -> None:
    with pytest.raises(
        VitrailError, match=rf"^`model` is {name}, which has no choice of positions; use a ViT, such as .*$"
    ):
        plan_position_ablation(request(name))


def test_odd_width_is_an_error_before_training() -> None:
    odd = request().recipe.with_settings({"fields": {"width": 9, "heads": 1}})
    with pytest.raises(VitrailError, match="width 9; expected a multiple of 2 for positions 'learned_2d'"):
        plan_position_ablation(Request(data="fashion", recipe=odd))


def test_table_of_the_paper() -> None:
    """Dosovitskiy 2020, table 8."""
    paper = dict(zip([cell.name for cell in POSITION_CELLS], [cell.paper for cell in POSITION_CELLS], strict=True))
    assert paper == {
        "none": 0.61382, "1d-stem": 0.64206, "1d-layers": 0.63964, "1d-shared": 0.64292,
        "2d-stem": 0.64001, "2d-layers": 0.64046, "2d-shared": 0.64022, "relative": 0.64032,
    }  # fmt: skip
    found = PositionStudyResults(
        AblationResults(recipe="mine", data="toys", lines=tuple(line(cell.name) for cell in POSITION_CELLS))
    ).describe_findings()
    assert found == [
        "paper (ViT-B/16, ImageNet, 5-shot linear): 7 of 7 are above none, from +2.58 points (1-D every "
        "layer) to +2.91 (1-D every layer, shared), a range of 0.33"
    ]


def line(name: str, *shares: float, failed: str = "") -> AblationVariantOutcomes:
    outcomes = [RunOutcome(seed=n, folder=Path(f"{name}-{n}"), value=x, loss=1 - x) for n, x in enumerate(shares)]
    outcomes += [RunOutcome(seed=len(shares), folder=Path(name), failed=failed)] if failed else []
    return AblationVariantOutcomes(row=AblationVariant(name=name, request=request()), outcomes=tuple(outcomes))


def made(*shares: tuple[float, ...]) -> PositionStudyResults:
    lines = [
        line(cell.name, *each, failed="" if each else "NaN") for cell, each in zip(POSITION_CELLS, shares, strict=True)
    ]
    return PositionStudyResults(AblationResults(recipe="mine", data="toys", lines=tuple(lines)))


def test_gains_and_deviation_by_chance(tmp_path: Path) -> None:
    result = made((0.5, 0.52), (0.6, 0.62), (0.6, 0.6), (0.61, 0.61), (0.5, 0.5), (0.63, 0.63), (0.6, 0.6), ())
    assert [cell.name for cell in result.compute_gains()] == [cell.name for cell in POSITION_CELLS[1:-1]]
    assert list(result.compute_gains().values()) == pytest.approx([10, 9, 10, -1, 12, 9])
    # variances 2, 2, 0, 0, 0, 0, 0 in points², one degree of freedom each: the mean is 4/7; of two seeds √(2/2)
    assert result.pooled_deviation() == pytest.approx(sqrt(4 / 7))
    assert result.chance_deviation() == pytest.approx(sqrt(4 / 7))
    assert result.describe_findings()[1:] == [
        "here (validation top-1): 5 of 6 are above none, from -1.00 points (2-D at the stem) to +12.00 "
        "(2-D every layer), a range of 13.00",
        "by chance alone, the difference between two means varies by ± 0.76 points",
    ]
    cells = [tuple(row) for row in result.table.format_cells()]
    assert cells[0] == ("none", "", "51.00 ± 1.41", "", "2", "61.38", "")
    assert cells[1] == ("1-D", "at the stem", "61.00 ± 1.41", "+10.00", "2", "64.21", "+2.82")
    assert cells[7] == ("relative", "", "failed", "", "0 of 1", "64.03", "+2.65")
    assert str(result).splitlines()[3].endswith("  61.00 ± 1.41   +10.00       2  64.21          +2.82")
    assert result.write(tmp_path)[:2] == [tmp_path / "table.json", tmp_path / "table.md"]
    data = json.loads((tmp_path / "table.json").read_text("utf-8"))
    assert data["rows"][2]["positions_at"] == "layers"
    assert data["rows"][2]["paper_points"] == pytest.approx(2.582)
    assert data["rows"][2]["points"] == pytest.approx(9)
    assert data["findings"] == result.describe_findings()
    page = (tmp_path / "table.md").read_text("utf-8")
    assert "| --- | --- | ---: | ---: | ---: | ---: | ---: |\n| none |  | 51.00 ± 1.41 |" in page
    assert "\n- here (validation top-1): 5 of 6" in page


def test_deviation_by_chance_by_number_of_seeds() -> None:
    two, four = made(*[(0.5, 0.6)] * 8), made(*[(0.5, 0.6, 0.5, 0.6)] * 8)
    assert two.chance_deviation() == pytest.approx(10 / sqrt(2))
    assert four.chance_deviation() == pytest.approx(10 / sqrt(3) / sqrt(2))
    one = made(*[(0.5,)] * 8)
    assert one.chance_deviation() is None
    assert "one seed does not show" in one.describe_findings()[-1]


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra `plot`")
    result = made((0.5, 0.52), *[(0.6, 0.62)] * 6, ())
    figure = draw_position_study(result)
    assert figure is not None
    check_texts(figure)
    result.write(tmp_path)
    with Image.open(tmp_path / "positions.png") as drawn:
        assert min(drawn.size) > 400
    assert draw_position_study(made((), *[(0.6,)] * 7)) is None
