"""vitrail bench on the command line; no time is asserted."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vitrail.base.errors import format_install_command
from vitrail.study import bench as benches
from vitrail.study import timing
from vitrail.study.bench_engines import ModelFiles

Run = Callable[..., Any]
QUICK = ("--batches", "1", "--threads", "1", "--rounds", "2", "--starts", "0")


@pytest.fixture(autouse=True)
def shorten_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "TURN_SECONDS", 0.0)
    monkeypatch.setattr(timing, "PAUSE_SECONDS", 0.0)


@pytest.fixture(scope="module")
def stock(model: Path, tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return ModelFiles(str(model), None, tmp_path_factory.mktemp("stock"))


@pytest.fixture
def exported(stock: ModelFiles) -> Path:
    return stock.folder_for("onnx")


def test_table_of_engines(
    vitrail_: Run, model: Path, stock: ModelFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benches, "ModelFiles", lambda *_: stock)  # pyright: ignore[reportUnknownLambdaType]
    table = tmp_path / "new/table.csv"
    result = vitrail_("bench", model, "--engines", "eager,onnx", *QUICK, "-o", table)
    assert (result.code, result.err) == (0, "")
    machine, heading, _, eager, onnx, _, written = result.out.splitlines()
    assert written == f"written: {table}"
    assert [line.split(",")[:5] for line in table.read_text("utf-8").splitlines()[1:]] == [
        [str(model), "32", "1", "1", name] for name in ("eager", "onnx")
    ]
    assert "torch" in machine
    assert heading.split()[:6] == ["model", "pixels", "batch", "threads", "by", "images/s"]
    assert "to eager" in heading
    assert eager.split()[:5] == [model.name, "32", "1", "1", "eager"]
    assert onnx.split()[4] == "onnx"


def test_json_equals_the_written_file(vitrail_: Run, exported: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra `plot`")
    out = tmp_path / "new" / "speed"
    result = vitrail_("bench", exported, *QUICK[:-1], "1", "--json", "-o", out)
    assert (result.code, result.err) == (0, "")
    results = json.loads(result.out)
    assert results == json.loads((out / "bench.json").read_text("utf-8"))
    (line,) = results["lines"]
    assert (line["way"], line["batch"], line["rounds"]) == ("onnx", 1, 2)
    assert line["start"] > 0
    assert line["memory"] > 20
    assert {path.name for path in out.iterdir()} == {"bench.json", "bench.txt", "bench.png"}


def test_several_resolutions_have_a_second_table(vitrail_: Run) -> None:
    result = vitrail_("bench", "ViT-Ti/16", "--engines", "eager", "--image-size", "32,48x32", *QUICK)
    assert (result.code, result.err) == (0, "")
    assert "\nimages/s by model and resolution\n" in result.out
    assert [line.split()[1] for line in result.out.splitlines()[-2:]] == ["32", "48×32"]


def test_engine_of_an_export_is_chosen(vitrail_: Run, exported: Path) -> None:
    result = vitrail_("bench", exported, *QUICK)
    assert (result.code, result.err) == (0, "")
    assert result.out.splitlines()[-1].split()[4] == "onnx"
    result = vitrail_("bench", exported, "--engines", "onnx,eager", *QUICK)
    assert result.code == 0
    assert (
        result.err
        == f"vitrail: note: {exported} at 32: eager is left out: {exported} is exported for onnx; eager needs weights\n"
    )
    result = vitrail_("bench", exported, "--engines", "eager", *QUICK)
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert result.err.startswith("vitrail: nothing could be measured: ")


BAD = {
    "": "bench needs MODELS.",
    "ViT-Ti/17": "ViT-Ti/17 is neither a file nor the name of a model; did you mean 'ViT-Ti/1",
    "MODEL --engines eager,onxn": "unknown engine 'onxn'; did you mean 'onnx'?",
    "MODEL --engines eager,": "--engines 'eager,'; expected names or numbers separated by commas",
    "MODEL --peers pytorch": "unknown peer 'pytorch'",
    "MODEL --batches 1,0": "--batches '1,0'; expected whole numbers of at least 1",
    "MODEL --batches ten": "--batches 'ten'; expected whole numbers of at least 1",
    "MODEL --threads 0": "--threads '0'; expected whole numbers of at least 1",
    "MODEL --image-size 32,x": "--image-size 'x'; expected pixels such as 384",
    "MODEL --rounds 0": "--rounds is 0; expected 1 or more",
    "MODEL --rounds 2 --seconds 1": "--rounds with --seconds; use one of them",
    "MODEL --seconds -1": "--seconds is -1; expected more than 0",
    "MODEL --starts -1": "--starts is -1; expected 0 or more",
    "MODEL -o file": "cannot make the folder file: ",
}


@pytest.mark.parametrize("words", BAD)
def test_invalid_arguments_are_one_line_errors(
    vitrail_: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    monkeypatch.setattr(benches, "time_interleaved", lambda *_, **__: pytest.fail("it was measured"))  # pyright: ignore[reportUnknownLambdaType]
    result = vitrail_("bench", *(model if word == "MODEL" else word for word in words.split()))
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert result.err.startswith(f"vitrail: {BAD[words]}")


def test_peer_that_cannot_be_imported_is_left_out(vitrail_: Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitrail.study.bench_engines.find_spec", lambda _: None)  # pyright: ignore[reportUnknownLambdaType]
    result = vitrail_("bench", model, "--peers", "transformers", *QUICK)
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert result.err.startswith("vitrail: --peers transformers needs transformers, ")
    assert result.err.endswith(f"{format_install_command('parity')}\n")
