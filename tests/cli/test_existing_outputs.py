"""No command replaces an existing file without --overwrite, and it refuses before any work."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.toy_datasets import write_class_folders, write_image

pytest.importorskip("matplotlib", reason="needs the extra `plot`")

Run = Callable[..., Any]
COMMANDS = {  # arguments of a command, and an existing file that it would replace
    "predict MODEL photo.png -o out/a.csv": "out/a.csv",
    "embed MODEL photo.png -o out/a.npy": "out/a.files.csv",
    "explain MODEL photo.png -o out": "out/photo.grad-rollout.png",
    "explain MODEL photo.png -o out --arrays": "out/photo.grad-rollout.npz",
    "look MODEL -o out": "out/filters.png",
    "look MODEL -o out --svg": "out/position_similarity.svg",
    "report MODEL -o out/page.html --images 2": "out/page.html",
    "eval MODEL --data photos --out out": "out/evaluation.json",
    "eval MODEL --data photos --wrong out/wrong.csv": "out/wrong.csv",
    "eval MODEL --data photos --wrong out/wrong.html": "out/wrong.html",
    "compare MODEL --data photos --out out": "out/comparison.png",
    "bench MODEL --engines eager --batches 1 --rounds 3 --starts 0 -o out": "out/bench.txt",
    "study cost --tokens 64 --budget 1 -o out": "out/cost.json",
    "look --lessons -o out": "out/gelu.png",
    "look --lessons -o out/lessons.html": "out/lessons.html",
    "runs runs --out out/curves.png": "out/curves.png",
    "export MODEL out": "out/mine",
    "convert MODEL out/weights.pth --to timm": "out/weights.pth",
}


@pytest.mark.parametrize("words", COMMANDS)
def test_an_existing_output_is_refused(
    vitrail_: Run, model: Path, tmp_path: Path, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_image(tmp_path / "photo.png")
    write_class_folders(tmp_path / "photos", ants=1, bees=1, cats=1)
    (tmp_path / "runs").mkdir()
    mine = tmp_path / COMMANDS[words]
    mine.parent.mkdir()
    mine.write_text("mine")
    result = vitrail_(*words.replace("MODEL", str(model)).split())
    lines = [line for line in result.err.splitlines() if not line.startswith(("vitrail: note", "vitrail: warning"))]
    output = "out" if words.startswith("export") else COMMANDS[words]
    assert (result.code, result.out, lines) == (
        2,
        "",
        [f"vitrail: {output} already exists; use --overwrite to replace it, or choose another name"],
    )
    assert [(path.name, path.read_text()) for path in mine.parent.iterdir()] == [(mine.name, "mine")]


@pytest.mark.parametrize(
    "words",
    [
        "explain MODEL photo.png -o out",
        "look --lessons -o out",
        "report MODEL -o out/page.html --images 2",
        "look MODEL -o out",
    ],
)
def test_outputs_are_replaced_on_request(
    vitrail_: Run, model: Path, tmp_path: Path, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_image(tmp_path / "photo.png")
    mine = tmp_path / COMMANDS[words]
    mine.parent.mkdir()
    mine.write_text("mine")
    assert vitrail_(*words.replace("MODEL", str(model)).split(), "--overwrite").code == 0
    assert mine.read_bytes() != b"mine"
