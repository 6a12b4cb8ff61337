"""Maps cover the part of the photo that the model receives, and the photo keeps its aspect ratio and its details."""

from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.figure_checks import check_figure

from vitrail.base.figures import CaptionedFigure
from vitrail.inspection.explain.overlay import (
    MAX_PHOTO_SIDE,
    MAX_WIDE_PANELS,
    blend_map_with_photo,
    draw_overlay,
    find_strongest,
    shrink_photo_and_box,
)

pytest.importorskip("matplotlib", reason="needs the extra `plot`")


def photo(rows: int, columns: int) -> Any:
    return np.random.default_rng(0).integers(0, 256, (rows, columns, 3), dtype=np.uint8)


def maps(layers: int = 1, heads: int = 1, grid: tuple[int, int] = (2, 3)) -> Any:
    return np.random.default_rng(1).random((layers, heads, *grid))


def drawn(
    size: tuple[int, int], panels: Any, box: Any = None, heading: str = "a", *, checked: bool = True, **named: Any
) -> Any:
    titles = [[f"layer {row}, head {column}" for column in range(panels.shape[1])] for row in range(len(panels))]
    box = box or (0, 0, size[1], size[0])
    captioned = CaptionedFigure(
        name="a",
        title="a",
        caption="a.",
        arrays={"maps": panels},
        draw=lambda: draw_overlay(photo(*size), box, panels, titles, heading, "unit", **named),
    )
    if checked:
        check_figure(captioned, "unit")
    figure = captioned.draw()
    figure.draw_without_rendering()
    return figure


def test_small_photos_are_not_changed() -> None:
    found, box = shrink_photo_and_box(Image.fromarray(photo(50, 70)), (1.5, -2, 68, 52))
    assert np.array_equal(found, photo(50, 70))
    assert box == (1.5, -2, 68, 52)


@pytest.mark.parametrize("size", [(1024, 2048), (3000, 777), (513, 512), (1, 5000), (512, 512)])
def test_large_photos_are_shrunk_with_their_box(size: tuple[int, int]) -> None:
    rows, columns = size
    found, box = shrink_photo_and_box(
        Image.new("L", (columns, rows), 7), (0.25 * columns, 0.1 * rows, 0.75 * columns, 1.2 * rows)
    )
    assert max(found.shape[:2]) == min(MAX_PHOTO_SIDE, max(size))
    assert found.dtype == np.uint8
    assert found.shape[2] == 3
    assert (found == 7).all()
    across, down = found.shape[1], found.shape[0]
    assert abs(across / columns - down / rows) * max(size) <= max(size) / min(size)  # to one pixel of the new photo
    np.testing.assert_allclose(box, (0.25 * across, 0.1 * down, 0.75 * across, 1.2 * down))


@pytest.mark.parametrize("size", [(40, 60), (60, 40), (30, 400), (400, 30), (1, 1), (2, 500)])
@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (3, 1)])
def test_photo_keeps_its_aspect_ratio(size: tuple[int, int], shape: tuple[int, int]) -> None:
    figure = drawn(size, maps(*shape), checked=shape == (1, 1) and size in ((30, 400), (1, 1)))
    panels_with_photo = [axes for axes in figure.axes if axes.images]
    assert len(panels_with_photo) == 2 if shape == (1, 1) else 3
    for axes in panels_with_photo:
        assert axes.get_aspect() == 1
        assert axes.get_xlim() == (-0.5, size[1] - 0.5)
        assert axes.get_ylim() == (size[0] - 0.5, -0.5)  # the first row on top
        box = axes.get_window_extent()
        assert box.width / box.height == pytest.approx(size[1] / size[0], rel=0.02)
        (image,) = axes.images
        assert tuple(image.get_extent()) == (-0.5, size[1] - 0.5, size[0] - 0.5, -0.5)
        assert image.get_array().shape[0] * size[1] == image.get_array().shape[1] * size[0]


@pytest.mark.parametrize("size", [(40, 60), (400, 600)])
def test_map_covers_the_box(size: tuple[int, int]) -> None:
    """What is attended is bright, the rest of the box dark, and what is outside is a flat gray."""
    rows, columns = size
    gray, panel = np.full((rows, columns, 3), 128, np.uint8), np.zeros((4, 4))
    panel[0, 3] = 2
    found = blend_map_with_photo(gray, (columns / 6, 0, columns * 5 / 6, rows), panel, (0, 2)).mean(-1)
    h, w = found.shape
    assert min(h, w) >= 256, "small photos are enlarged, so that the map is smooth"
    assert found[:, : w // 6 - 1].min() > 0.6
    assert found[:, w * 5 // 6 + 1 :].min() > 0.6
    inside = found[:, w // 6 + 1 : w * 5 // 6 - 1]
    assert inside[: h // 8, -w // 12 :].min() > 0.5, "the first row of the map is on top"
    assert inside[h // 2 :].max() < 0.3
    assert len(np.unique(inside.round(2))) > 20, "a smooth transition"


@pytest.mark.parametrize("box", [(-10, 0, 70, 40), (0, -30, 60, 70), (20, 10, 20, 10)])
def test_boxes_larger_than_the_photo_or_empty(box: Any) -> None:
    found = blend_map_with_photo(photo(40, 60), box, maps()[0, 0], (0, 1))
    assert found.shape[0] * 60 == found.shape[1] * 40
    assert 0 <= found.min() <= found.max() <= 1


def test_attended_parts_of_the_photo_keep_their_details() -> None:
    noise = photo(40, 60)
    attended, ignored = (
        blend_map_with_photo(noise, (0, 0, 60, 40), np.full((2, 3), value), (0, 1)) for value in (1.0, 0.0)
    )
    assert attended.std() > 0.8 * (noise / 255).std()
    assert ignored.std() > 0.05, "dark, but recognisable"
    assert np.ptp(ignored, axis=-1).max() < 0.05, "and without colors"


def test_scale_of_several_maps() -> None:
    """One scale for all maps, which the bar shows; values beyond its end are marked by an arrow."""
    panels = maps(1, 2, (14, 14))
    figure = drawn((40, 60), panels, checked=False, lowest=0.0)
    assert [axes.get_title() for axes in figure.axes[:2]] == ["layer 0, head 0", "layer 0, head 1"]
    assert figure.axes[-1].get_ylim() == (0, np.quantile(panels, 0.95))


def test_predictions_next_to_a_single_map() -> None:
    top = [("tabby $x$", 0.9, True), ("tiger cat", 0.05, False)]
    figure = drawn((40, 60), maps(), predictions=top)
    (axes,) = [axes for axes in figure.axes if axes.get_title() == "prediction"]
    assert [each.get_text() for each in axes.texts] == ["tabby $x$", "90.0%", "tiger cat", "5.0%"]
    _, first, _, second = axes.patches
    assert (first.get_width(), second.get_width()) == (0.9, 0.05)
    assert first.get_facecolor() != second.get_facecolor()
    assert not any(axes.get_title() == "prediction" for axes in drawn((40, 60), maps(1, 2), predictions=top).axes)


def test_query_patch_is_outlined() -> None:
    figure = drawn((40, 60), maps(), box=(0, 10, 60, 30), patch=(1, 2), checked=False)
    photo_axes, axes = figure.axes[:2]
    for line in axes.lines:
        assert sorted(set(line.get_xdata())) == pytest.approx([39.5, 59.5])
        assert sorted(set(line.get_ydata())) == pytest.approx([19.5, 29.5])
    assert len(axes.lines) == 2  # black on white, visible on any background
    assert axes.lines[0].get_color() != axes.lines[1].get_color()
    assert sorted(set(photo_axes.lines[0].get_xdata())) == pytest.approx([-0.5, 59.5])  # the frame of the model's input
    assert photo_axes.get_title() == "dashed: what it sees"


@pytest.mark.parametrize("shade", [0, 255])
def test_strongest_patches_are_outlined_on_any_background(shade: int) -> None:
    """Of 20 patches, one has an outline, of its own four edges, in black and white."""
    panel = np.zeros((1, 1, 4, 5))
    panel[0, 0, 1, 3] = 1
    plain = np.full((40, 50, 3), shade, np.uint8)
    figure: Any = draw_overlay(plain, (0, 0, 50, 40), panel, [["map"]], "a", "attention")
    under, over = figure.axes[1].collections
    assert under.get_linewidths()[0] > over.get_linewidths()[0]
    assert {each.get_edgecolor()[0][:3].sum() for each in (under, over)} == {0, 3}
    points = np.concatenate(over.get_segments())
    assert (points.min(0).tolist(), points.max(0).tolist(), len(points)) == ([29.5, 9.5], [39.5, 19.5], 8)
    assert figure.axes[-1].get_ylabel() == "attention\noutlined: the strongest 5%"
    assert not find_strongest(np.ones((4, 5))).any()


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((1, 1), (1, 2)), ((3, 1), (1, 3)), ((12, 1), (3, MAX_WIDE_PANELS)), ((5, 1), (2, 4)), ((2, 7), (2, 7))],
)
def test_many_panels(shape: tuple[int, int], expected: tuple[int, int]) -> None:
    figure = drawn((30, 40), maps(*shape), checked=shape == (3, 1))
    grid = figure.axes[0].get_subplotspec().get_gridspec()
    assert (grid.nrows, grid.ncols) == expected
    panels_with_photo = [axes for axes in figure.axes if axes.images]
    assert len(panels_with_photo) == shape[0] * shape[1] + (shape == (1, 1))
    titles = [axes.get_title() for axes in panels_with_photo]
    wanted = [f"layer {row}, head {column}" for row in range(shape[0]) for column in range(shape[1])]
    assert titles[shape == (1, 1) :] == wanted
    empty = [axes for axes in figure.axes[: grid.nrows * grid.ncols] if not axes.images]
    assert not any(axes.axison for axes in empty)


@pytest.mark.parametrize("value", [0.0, 0.25])
def test_a_flat_map(value: float) -> None:
    drawn((30, 40), np.full((1, 1, 2, 3), value), checked=value == 0)


@pytest.mark.parametrize("heading", ["a$b$c_{x} 100 %", "\u732b \u0628 \x00\n\t", "many Words " * 30, "$", ""])
def test_headings_with_any_characters(heading: str) -> None:
    drawn((40, 30), maps(), heading=heading, checked=len(heading) > 5)


@pytest.mark.parametrize("letter", ["i", "W"])
def test_long_names_are_cut_but_not_what_follows(letter: str) -> None:
    figure = draw_overlay(photo(40, 60), (0, 0, 60, 40), maps(), (("",),), f"{letter * 300} 5.7% · rollout", "share")
    figure.draw_without_rendering()
    (line,) = [each for each in figure.texts if each.get_text().startswith(letter)]
    assert line.get_text().endswith(f"{letter} 5.7% · rollout")
    assert "…" in line.get_text()
    assert line.get_window_extent().x1 < figure.bbox.x1
