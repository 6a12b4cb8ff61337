"""vitrail look --lessons on the command line."""

from pathlib import Path

import numpy as np
import pytest

from vitrail.base.errors import CheckpointError, ConfigError
from vitrail.cli import build_app

pytest.importorskip("matplotlib", reason="needs the extra `plot`")

NAMES = ("gelu", "schedules", "positions")


def run(*words: object) -> None:
    build_app()(
        [str(word) for word in ("look", "--lessons", *words)],
        exit_on_error=False,
        print_error=False,
        result_action="return_value",
    )


def test_default_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    run()
    assert capsys.readouterr().out == "written: lessons/gelu.png, lessons/schedules.png, lessons/positions.png\n"
    assert {path.name for path in tmp_path.rglob("*")} == {"lessons", *(f"{name}.png" for name in NAMES)}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.rglob("*.png"))


def test_all_figures_and_formats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("-o", tmp_path / "new" / "folder", "--svg", "--arrays")
    names = {f"{name}{kind}" for name in NAMES for kind in (".png", ".svg", ".npz")}
    assert {path.name for path in (tmp_path / "new" / "folder").iterdir()} == names
    printed = capsys.readouterr().out.removeprefix("written: ").strip().split(", ")
    assert {Path(each).name for each in printed} == names
    with np.load(tmp_path / "new" / "folder" / "schedules.npz") as found:
        assert found["cosine"][99] == found["linear"][99] == 1
        assert found["step"].shape == found["inverse_sqrt"].shape == (1000,)


@pytest.mark.parametrize("name", ["page.html", "PAGE.HTM"])
def test_html_page(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("--out", tmp_path / name)
    assert capsys.readouterr().out == f"written: {tmp_path / name}\n"
    assert [path.name for path in tmp_path.iterdir()] == [name]
    page = (tmp_path / name).read_text("utf-8")
    assert page.count("<figure") == page.count("<pre") == page.count("<h2") == 3
    assert "GELU and related activations" in page


def test_invalid_arguments_are_one_line_errors(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    for flag in ("--svg", "--arrays"):
        with pytest.raises(ConfigError, match=rf"^{flag} with the page .*; expected a folder, such as -o lessons$"):
            run("-o", page, flag)
    page.write_text("")
    with pytest.raises(CheckpointError, match="cannot make the folder"):
        run("-o", page / "inside")
