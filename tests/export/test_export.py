"""An exported folder appears whole, checked against torch, or not at all; and replaces nothing but an export."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.command_processes import kill_process, start_command, wait_for_exit, wait_until
from support.toy_exports import (
    LABELS,
    PREPROCESSING,
    ExportFinder,
    make_toy_model,
    random_pixels,
    reference_probabilities,
    save_toy_model,
    softmax_rows,
)

import vitrail
from vitrail.errors import CheckpointError, ConfigError
from vitrail.export.atomic_folder import check_target_folder, move_into_place, write_folder_atomically
from vitrail.export.description import CONFIG_FILE, ONNX_FILE, TORCH_PROGRAM_FILE, ExportDescription
from vitrail.export.export import compare_outputs, compute_weights_digest, export_model, make_check_images


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_folder_has_its_parts_and_says_what_it_is(exported: ExportFinder) -> None:
    for name, parts in (
        ("onnx", {ONNX_FILE, CONFIG_FILE}),
        ("int8", {ONNX_FILE, CONFIG_FILE}),
        ("program", {TORCH_PROGRAM_FILE, CONFIG_FILE}),
    ):
        assert set(content(exported(name))) == parts
    about = ExportDescription.from_json((exported("onnx") / CONFIG_FILE).read_text(), "here")
    assert (about.precision, about.output, about.multiple, about.merge) == ("fp32", "logits", 0, 0)
    assert about.agreement is None
    assert about.digest == compute_weights_digest(make_toy_model("vit"))
    assert about.digest != compute_weights_digest(make_toy_model("vit any size"))
    assert ExportDescription.from_json((exported("any size") / CONFIG_FILE).read_text(), "here").multiple == 16
    assert (exported("onnx").stat().st_mode & 0o777) == 0o755


def test_a_program_needs_nothing_of_ours(exported: ExportFinder, tmp_path: Path) -> None:
    """In a fresh process that knows torch and numpy alone."""
    np.save(tmp_path / "pixels.npy", random_pixels(4))
    program = (
        "import sys, torch, numpy as np\n"
        "extra = {'vitrail': ''}\n"
        f"module = torch.export.load({str(exported('program') / TORCH_PROGRAM_FILE)!r}, extra_files=extra).module()\n"
        f"answers = [module(torch.from_numpy(each)).numpy() for each in (np.load({str(tmp_path / 'pixels.npy')!r}),)]\n"
        f"np.save({str(tmp_path / 'answers.npy')!r}, answers[0])\n"
        "assert 'labels' in extra['vitrail'] or b'labels' in extra['vitrail']\n"
        "assert not any(name.split('.')[0] == 'vitrail' for name in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = np.load(tmp_path / "answers.npy")
    assert (
        np.abs(softmax_rows(found) - reference_probabilities(make_toy_model("distilled"), random_pixels(4))).max()
        < 1e-5
    )


def fails(model: Any, folder: Path, **options: Any) -> str:
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        export_model(model, folder, preprocessing=PREPROCESSING, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def no_export(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be in the end is refused before the work."""

    def ask(*_: object, **__: object) -> None:
        pytest.fail("the model was exported")

    monkeypatch.setattr("vitrail.export.export.write_onnx", ask)
    monkeypatch.setattr("vitrail.export.export.trace_to_exported_program", ask)


@pytest.mark.usefixtures("no_export")
def test_what_is_there_is_not_replaced(tmp_path: Path) -> None:
    checkpoint = save_toy_model(tmp_path / "model")
    before, model = content(checkpoint), make_toy_model("vit")
    assert "already exists; choose a new folder" in fails(model, checkpoint)
    assert "is not an export, so it is not replaced" in fails(model, checkpoint, overwrite=True)
    assert content(checkpoint) == before, "its config.json would have been lost"
    vitrail.load(checkpoint)
    file = tmp_path / "file"
    file.write_text("mine")
    assert "already exists" in fails(model, file)
    assert "is not an export" in fails(model, file, overwrite=True)
    assert "cannot write" in fails(model, file / "inside")
    assert file.read_text() == "mine"


@pytest.mark.usefixtures("no_export")
def test_what_a_model_cannot_answer_is_refused_first(tmp_path: Path) -> None:
    assert "no head" in fails(make_toy_model("vit", classes=0), tmp_path / "a")
    assert "without a class token; use mean or tokens" in fails(make_toy_model("cct"), tmp_path / "a", output="class")
    assert "merge" in fails(make_toy_model("vit"), tmp_path / "a", merge=5)
    assert "merge" in fails(make_toy_model("rotary"), tmp_path / "a", merge=1)
    assert list(tmp_path.iterdir()) == []


def test_a_model_of_nan_is_not_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = np.full((36, 5), np.nan, np.float32)
    with pytest.raises(CheckpointError, match="returns NaN"):
        compare_outputs(answers, answers, "logits", exact=True)
    with pytest.raises(CheckpointError, match="returns NaN"):
        compare_outputs(answers, answers, "mean", exact=False)


def test_what_differs_from_torch_does_not_appear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exported: ExportFinder
) -> None:
    """An exporter that writes another model than it was given."""

    def other(_: Any, path: Path, *__: Any, **___: Any) -> None:
        shutil.copy(exported("onnx") / ONNX_FILE, path)

    monkeypatch.setattr("vitrail.export.export.write_onnx", other)
    with torch.no_grad():
        model = make_toy_model("vit")
        model.head.bias[0] += 0.01
    assert "differs from torch by" in fails(model, tmp_path / "new")

    def nonsense(_: Any, path: Path, *__: Any, **___: Any) -> None:
        path.write_bytes(b"\x08\x07no")

    monkeypatch.setattr("vitrail.export.export.write_onnx", nonsense)
    assert "cannot be run" in fails(make_toy_model("vit"), tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


def test_probabilities_and_features_are_compared() -> None:
    a = np.array([[1.0, 2.0], [3.0, 1.0]], np.float32)
    b = np.array([[1.0, 2.0], [1.0, 3.0]], np.float32)
    found = compare_outputs(a, b, "logits", exact=False)
    assert (found.images, found.same) == (2, 1)
    assert found.difference == pytest.approx(0.7616, abs=1e-4)
    with pytest.raises(CheckpointError, match=r"differs from torch by 0\.76; expected at most 0\.0001"):
        compare_outputs(a, b, "logits", exact=True)
    assert compare_outputs(a, a + 10, "logits", exact=True).difference < 1e-6, "the same probabilities"
    with pytest.raises(CheckpointError, match="differs from torch"):
        compare_outputs(a, a + 10, "mean", exact=True)


def test_the_pictures_that_it_is_checked_on() -> None:
    given = random_pixels(3, seed=1)
    shown = make_check_images(PREPROCESSING, given)
    assert shown.shape == (3 + 32 + 4, 48, 32, 3)
    assert np.array_equal(shown[:3], given)
    assert len({each.tobytes() for each in shown}) == len(shown)
    assert make_check_images(replace(PREPROCESSING, mean=(0.5,), std=(0.5,)), None).shape == (36, 48, 32, 1)
    assert make_check_images(PREPROCESSING, given[:0]).shape[0] == 36


def test_half_precision_and_a_size_of_the_preprocessing(tmp_path: Path) -> None:
    """A model that takes any size, for one of them: that of the pictures, not its own."""
    model = make_toy_model("vit any size").bfloat16()
    how = replace(PREPROCESSING, image_size=(64, 80))
    _, checked = export_model(model, tmp_path / "new", preprocessing=how)
    assert checked.difference < 1e-4
    assert next(model.parameters()).dtype == torch.bfloat16, "the model given stays as it is"
    predictor = vitrail.Predictor(tmp_path / "new")
    assert predictor.preprocessing.image_size == (64, 80)
    expected = reference_probabilities(model.float(), random_pixels(2, (64, 80)), how)
    assert np.abs(softmax_rows(predictor.engine.run(random_pixels(2, (64, 80)))) - expected).max() < 1e-4


def test_digests() -> None:
    model = make_toy_model("vit")
    before = compute_weights_digest(model)
    assert compute_weights_digest(make_toy_model("vit")) == before
    with torch.no_grad():
        model.head.bias[0] += 1e-6
    assert compute_weights_digest(model) != before
    assert (
        len(
            {
                before,
                compute_weights_digest(make_toy_model("vit").bfloat16()),
                compute_weights_digest(make_toy_model("regnety")),
                compute_weights_digest(make_toy_model("vit", classes=7)),
            }
        )
        == 4
    )


def test_places(tmp_path: Path) -> None:
    with write_folder_atomically(tmp_path / "a" / "new") as place:
        (place / CONFIG_FILE).write_text("1")
        (place / ONNX_FILE).write_text("2")
        assert not (tmp_path / "a" / "new").exists()
        assert place.parent == tmp_path / "a", "on the same disk"
    assert content(tmp_path / "a" / "new") == {CONFIG_FILE: b"1", ONNX_FILE: b"2"}
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["new"]

    def half() -> None:
        with write_folder_atomically(tmp_path / "a" / "other") as place:
            (place / ONNX_FILE).write_text("half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        half()
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["new"]

    (tmp_path / "empty").mkdir()
    check_target_folder(tmp_path / "empty", overwrite=False)
    with write_folder_atomically(tmp_path / "empty") as place:
        (place / ONNX_FILE).write_text("2")
    assert content(tmp_path / "empty") == {ONNX_FILE: b"2"}


def test_over_an_older_export_nothing_of_it_stays(tmp_path: Path) -> None:
    for name, parts in (
        ("old", (ONNX_FILE, f"{ONNX_FILE}.data", CONFIG_FILE)),
        ("new", (TORCH_PROGRAM_FILE, CONFIG_FILE)),
    ):
        (tmp_path / name).mkdir()
        for part in parts:
            (tmp_path / name / part).write_text(f'{{"exported": true}} {name}')
    check_target_folder(tmp_path / "old", overwrite=True)
    move_into_place(tmp_path / "new", tmp_path / "old")
    assert content(tmp_path / "old") == dict.fromkeys((TORCH_PROGRAM_FILE, CONFIG_FILE), b'{"exported": true} new')


def test_another_process_was_quicker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look and the rename its folder appeared."""
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / ONNX_FILE).write_text("mine")
    before = Path.rmdir

    def rmdir(folder: Path) -> None:
        before(folder)
        folder.mkdir()
        (folder / ONNX_FILE).write_text("theirs")
        (folder / CONFIG_FILE).write_text('{"exported": true}')

    (tmp_path / "there").mkdir()
    monkeypatch.setattr(Path, "rmdir", rmdir)
    move_into_place(tmp_path / "new", tmp_path / "there")
    assert content(tmp_path / "there") == {ONNX_FILE: b"mine"}


FORKED = pytest.mark.filterwarnings("ignore:Cyclopts application invoked without tokens")  # they are in sys.argv


@FORKED
@pytest.mark.parametrize("to", [pytest.param("onnx", marks=pytest.mark.slow), "torch-export"])
def test_a_disk_that_is_too_small(to: str, tmp_path: Path) -> None:
    """Of the ONNX file, and of torch's program, whose own writer ends the process."""
    model, out = save_toy_model(tmp_path / "model", width=64, depth=1), tmp_path / "out" / "new"
    process = start_command(["export", model, out, "--to", to], stderr=tmp_path / "said", longest_file=20_000)
    code = wait_for_exit(process)
    said = (tmp_path / "said").read_text().splitlines()
    assert code == 2, said
    assert len([line for line in said if not line.startswith("vitrail: note: ")]) == 1
    assert said[-1].startswith(f"vitrail: cannot write {out}: ")
    assert list((tmp_path / "out").iterdir()) == []


@FORKED
def test_killed_while_it_writes(tmp_path: Path) -> None:
    """At any moment there is no folder of that name, or a whole one."""
    model, out = save_toy_model(tmp_path / "model"), tmp_path / "out" / "new"
    process = start_command(["export", model, out])
    wait_until(process, lambda: bool(list(tmp_path.glob("out/.new.*"))))
    assert kill_process(process)
    assert not out.exists()


def test_provenance(exported: ExportFinder) -> None:
    assert json.loads((exported("onnx") / CONFIG_FILE).read_text())["labels"] == list(LABELS)
