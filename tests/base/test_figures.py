"""Captioned figures: rendered in every format, saved atomically with their arrays."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from vitrail.base.errors import ConfigError, VitrailError
from vitrail.base.figures import CaptionedFigure, new_figure, sanitize_label, wrap_label

if TYPE_CHECKING:
    from matplotlib.figure import Figure

pytest.importorskip("matplotlib", reason="needs the extra `plot`")

ARRAYS = {"line": np.array([0.5, 2.0, 1.0]), "grid": np.arange(6, dtype=np.uint8).reshape(2, 3), "none": np.zeros(0)}


def line() -> "Figure":
    figure = new_figure(2, 1.5)
    figure.subplots().plot(ARRAYS["line"])
    return figure


def captioned(name: str = "a line", **fields: Any) -> CaptionedFigure:
    given: dict[str, Any] = {"title": "A line", "caption": "It rises and falls.", "arrays": ARRAYS, "draw": line}
    return CaptionedFigure(name=name, **(given | fields))


def test_formats() -> None:
    assert captioned().to_png().startswith(b"\x89PNG")
    assert captioned()._repr_png_() == captioned().to_png()  # pyright: ignore[reportPrivateUsage]
    assert ElementTree.fromstring(captioned().to_svg()).tag.endswith("svg")
    assert captioned().render("pdf").startswith(b"%PDF")
    assert "draw" not in repr(captioned())


def test_saved_files_and_arrays(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    written = captioned().save(folder, (".png", ".svg", ".pdf"), arrays=True)
    assert [path.name for path in written] == ["a line.png", "a line.svg", "a line.pdf", "a line.npz"]
    assert sorted(folder.iterdir()) == sorted(written), "and nothing else"
    for path, start in zip(written, (b"\x89PNG", b"<?xml", b"%PDF", b"PK"), strict=True):
        assert path.read_bytes().startswith(start)
    with np.load(folder / "a line.npz") as found:
        assert set(found) == set(ARRAYS)
        for name, values in ARRAYS.items():
            np.testing.assert_array_equal(found[name], values)
            assert found[name].dtype == values.dtype
    assert [path.name for path in captioned("numbers").save(folder, (), arrays=True)] == ["numbers.npz"]
    assert [path.name for path in captioned("dotted.rollout").save(tmp_path)] == ["dotted.rollout.png"]


def test_png_holds_title_and_caption(tmp_path: Path) -> None:
    caption = "Größe × 2 of photo\udcff.png\n& more."
    (path,) = captioned(caption=caption).save(tmp_path)
    with Image.open(path) as image:
        assert (image.info["Title"], image.info["Description"]) == (
            "A line",
            "Größe × 2 of photo\\udcff.png\\n& more.",
        )


def test_taken_names_get_a_number() -> None:
    taken = {"other"}
    names = [captioned(name).with_unique_name(taken).name for name in ("bee", "bee", "Bee", "bee-2", "ant", "bee")]
    assert names == ["bee", "bee-2", "Bee-3", "bee-2-2", "ant", "bee-4"]
    assert captioned().with_unique_name(set()) == captioned()


def test_unwritable_folders_are_errors(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here before")
    for kinds, arrays in (((".png",), False), ((), True)):
        with pytest.raises(VitrailError, match=r"^cannot make the folder [^\n]*file/inside: ") as caught:
            captioned().save(tmp_path / "file" / "inside", kinds, arrays=arrays)
        assert len(str(caught.value).splitlines()) == 1
    (tmp_path / "a line.png").mkdir()
    with pytest.raises(VitrailError, match=r"^cannot write [^\n]*a line\.png: "):
        captioned().save(tmp_path)
    with pytest.raises(ConfigError, match=r"a line\.gif; expected a name that ends in \.png, "):
        captioned().save(tmp_path, (".gif",))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a line.png", "file"]


def test_files_are_written_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the disk fills up, the previous files stay unchanged and no partial file is left."""
    first, *_ = captioned().save(tmp_path, arrays=True)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(path: Path, *_: object, **__: object) -> None:
        Path(path).write_bytes(b"\x89PNG half")
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(type(line()), "savefig", lambda _, path, **__: full(path))  # pyright: ignore[reportUnknownLambdaType]
    monkeypatch.setattr(np, "savez_compressed", lambda file, **_: full(Path(file.name)))  # pyright: ignore[reportUnknownLambdaType]
    for kinds in ((".png",), ()):
        with pytest.raises(VitrailError, match=r"No space left on device; the previous file is unchanged$"):
            captioned().save(tmp_path, kinds, arrays=True)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert before[first.name] != b"\x89PNG half"


def test_sanitize_label() -> None:
    assert sanitize_label("ants & bees") == "ants & bees"
    assert sanitize_label("蜂\n\udcff") == "□□□"
    assert sanitize_label("run-with-seed-0", 11) == "run-w…eed-0", "names differ at their ends"
    assert [sanitize_label("abcdef", length) for length in (6, 5, 2, 1)] == ["abcdef", "ab…ef", "a…", "…"]


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("", [""]),
        ("short", ["short"]),
        ("deit_tiny_patch16_224", ["deit_tiny_", "patch16_224"]),
        ("one of two words", ["one of two", "words"]),
        ("a" * 30, ["a" * 11, "…" + "a" * 10]),
    ],
)
def test_labels_are_wrapped_after_punctuation(text: str, lines: list[str]) -> None:
    assert wrap_label(text, 11).split("\n") == lines


@pytest.mark.parametrize("text", ["x" * 99, "many words " * 9, "path/to/a.file-of_any/kind" * 3, "…", "a " * 40])
def test_wrapped_labels_have_both_ends_and_fit(text: str) -> None:
    for width, most in ((3, 1), (7, 2), (20, 3)):
        found = wrap_label(text, width, most).split("\n")
        assert len(found) <= most
        assert max(map(len, found)) <= width
        assert found[0][0] == text[0]
        assert found[-1][-1] in (text.rstrip()[-1], "…")
