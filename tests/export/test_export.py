"""An export appears complete and checked against torch, or not at all; it replaces nothing but an export."""

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
from vitrail.base.errors import CheckpointError, ConfigError
from vitrail.export.atomic_folder import check_target_folder, move_into_place, write_folder_atomically
from vitrail.export.description import CONFIG_FILE, ONNX_FILE, TORCH_PROGRAM_FILE, ExportDescription
from vitrail.export.export import compare_outputs, compute_weights_digest, export_model, make_check_images


def read_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_export_has_its_files_and_description(exported: ExportFinder) -> None:
    for name, parts in (
        ("onnx", {ONNX_FILE, CONFIG_FILE}),
        ("int8", {ONNX_FILE, CONFIG_FILE}),
        ("program", {TORCH_PROGRAM_FILE, CONFIG_FILE}),
    ):
        assert set(read_files(exported(name))) == parts
    about = ExportDescription.from_json((exported("onnx") / CONFIG_FILE).read_text(), "here")
    assert (about.precision, about.output, about.multiple, about.merge) == ("fp32", "logits", 0, 0)
    assert about.agreement is None
    assert about.digest == compute_weights_digest(make_toy_model("vit"))
    assert about.digest != compute_weights_digest(make_toy_model("vit any size"))
    assert ExportDescription.from_json((exported("any size") / CONFIG_FILE).read_text(), "here").multiple == 16
    assert (exported("onnx").stat().st_mode & 0o777) == 0o755


def test_torch_program_runs_without_vitrail(exported: ExportFinder, tmp_path: Path) -> None:
    """In a new process with only torch and numpy."""
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


def export_and_get_error(model: Any, folder: Path, **options: Any) -> str:
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        export_model(model, folder, preprocessing=PREPROCESSING, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def no_export(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if a model is exported: errors must be raised before."""

    def fail(*_: object, **__: object) -> None:
        pytest.fail("the model was exported")

    monkeypatch.setattr("vitrail.export.export.write_onnx", fail)
    monkeypatch.setattr("vitrail.export.export.trace_to_exported_program", fail)


@pytest.mark.usefixtures("no_export")
def test_existing_files_are_not_replaced(tmp_path: Path) -> None:
    checkpoint = save_toy_model(tmp_path / "model")
    before, model = read_files(checkpoint), make_toy_model("vit")
    assert "already exists; choose a new folder" in export_and_get_error(model, checkpoint)
    assert "is not an export, so it is not replaced" in export_and_get_error(model, checkpoint, overwrite=True)
    assert read_files(checkpoint) == before, "its config.json would have been lost"
    vitrail.load(checkpoint)
    file = tmp_path / "file"
    file.write_text("mine")
    assert "already exists" in export_and_get_error(model, file)
    assert "is not an export" in export_and_get_error(model, file, overwrite=True)
    assert "cannot write" in export_and_get_error(model, file / "inside")
    assert file.read_text() == "mine"


@pytest.mark.usefixtures("no_export")
def test_unavailable_outputs_are_refused_before_exporting(tmp_path: Path) -> None:
    assert "no head" in export_and_get_error(make_toy_model("vit", classes=0), tmp_path / "a")
    assert "without a class token; use mean or tokens" in export_and_get_error(
        make_toy_model("cct"), tmp_path / "a", output="class"
    )
    assert "merge" in export_and_get_error(make_toy_model("vit"), tmp_path / "a", merge=5)
    assert "merge" in export_and_get_error(make_toy_model("rotary"), tmp_path / "a", merge=1)
    assert list(tmp_path.iterdir()) == []


def test_nan_outputs_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = np.full((36, 5), np.nan, np.float32)
    with pytest.raises(CheckpointError, match="returns NaN"):
        compare_outputs(logits, logits, "logits", exact=True)
    with pytest.raises(CheckpointError, match="returns NaN"):
        compare_outputs(logits, logits, "mean", exact=False)


def test_export_that_differs_from_torch_is_discarded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exported: ExportFinder
) -> None:
    """An exporter that writes another model than the given one."""
    file = exported("onnx") / ONNX_FILE  # written before the exporter is replaced

    def other(_: Any, path: Path, *__: Any, **___: Any) -> None:
        shutil.copy(file, path)

    monkeypatch.setattr("vitrail.export.export.write_onnx", other)
    with torch.no_grad():
        model = make_toy_model("vit")
        model.head.bias[0] += 0.01
    assert "differs from torch by" in export_and_get_error(model, tmp_path / "new")

    def nonsense(_: Any, path: Path, *__: Any, **___: Any) -> None:
        path.write_bytes(b"\x08\x07no")

    monkeypatch.setattr("vitrail.export.export.write_onnx", nonsense)
    assert "cannot be run" in export_and_get_error(make_toy_model("vit"), tmp_path / "new")
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


def test_check_images_are_given_photos_and_noise() -> None:
    given = random_pixels(3, seed=1)
    images = make_check_images(PREPROCESSING, given)
    assert images.shape == (3 + 32 + 4, 48, 32, 3)
    assert np.array_equal(images[:3], given)
    assert len({each.tobytes() for each in images}) == len(images)
    assert make_check_images(replace(PREPROCESSING, mean=(0.5,), std=(0.5,)), None).shape == (36, 48, 32, 1)
    assert make_check_images(PREPROCESSING, given[:0]).shape[0] == 36


def test_bfloat16_model_at_the_image_size_of_the_preprocessing(tmp_path: Path) -> None:
    """A dynamic model is exported for the size of the preprocessing, not for its own."""
    model = make_toy_model("vit any size").bfloat16()
    preprocessing = replace(PREPROCESSING, image_size=(64, 80))
    stages = list[int]()
    _, checked = export_model(model, tmp_path / "new", preprocessing=preprocessing, progress=stages.append)
    assert stages == [1, 1, 1], "torch's outputs, the file, the comparison"
    assert checked.difference < 1e-4
    assert next(model.parameters()).dtype == torch.bfloat16, "the given model is not modified"
    predictor = vitrail.Predictor(tmp_path / "new")
    assert predictor.preprocessing.image_size == (64, 80)
    expected = reference_probabilities(model.float(), random_pixels(2, (64, 80)), preprocessing)
    assert np.abs(softmax_rows(predictor.engine.run(random_pixels(2, (64, 80)))) - expected).max() < 1e-4


def test_digest_depends_on_weights_dtype_and_shape() -> None:
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


def test_folder_is_written_atomically(tmp_path: Path) -> None:
    with write_folder_atomically(tmp_path / "a" / "new") as temporary:
        (temporary / CONFIG_FILE).write_text("1")
        (temporary / ONNX_FILE).write_text("2")
        assert not (tmp_path / "a" / "new").exists()
        assert temporary.parent == tmp_path / "a", "on the same disk"
    assert read_files(tmp_path / "a" / "new") == {CONFIG_FILE: b"1", ONNX_FILE: b"2"}
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["new"]

    def fail_halfway() -> None:
        with write_folder_atomically(tmp_path / "a" / "other") as temporary:
            (temporary / ONNX_FILE).write_text("half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_halfway()
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["new"]

    (tmp_path / "empty").mkdir()
    check_target_folder(tmp_path / "empty", overwrite=False)
    with write_folder_atomically(tmp_path / "empty") as temporary:
        (temporary / ONNX_FILE).write_text("2")
    assert read_files(tmp_path / "empty") == {ONNX_FILE: b"2"}


def test_replacing_an_export_removes_its_old_files(tmp_path: Path) -> None:
    for name, parts in (
        ("old", (ONNX_FILE, f"{ONNX_FILE}.data", CONFIG_FILE)),
        ("new", (TORCH_PROGRAM_FILE, CONFIG_FILE)),
    ):
        (tmp_path / name).mkdir()
        for part in parts:
            (tmp_path / name / part).write_text(f'{{"exported": true}} {name}')
    check_target_folder(tmp_path / "old", overwrite=True)
    move_into_place(tmp_path / "new", tmp_path / "old")
    assert read_files(tmp_path / "old") == dict.fromkeys((TORCH_PROGRAM_FILE, CONFIG_FILE), b'{"exported": true} new')


def test_export_of_another_process_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder appears between the check and the renaming."""
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
    assert read_files(tmp_path / "there") == {ONNX_FILE: b"mine"}


FORKED = pytest.mark.filterwarnings("ignore:Cyclopts application invoked without tokens")  # they are in sys.argv


@FORKED
@pytest.mark.parametrize("to", [pytest.param("onnx", marks=pytest.mark.slow), "torch-export"])
def test_full_disk_is_a_one_line_error(to: str, tmp_path: Path) -> None:
    """For ONNX and for torch's program, whose writer ends the process on a full disk."""
    model, out = save_toy_model(tmp_path / "model", width=64, depth=1), tmp_path / "out" / "new"
    process = start_command(["export", model, out, "--to", to], stderr=tmp_path / "stderr", longest_file=20_000)
    code = wait_for_exit(process)
    lines = (tmp_path / "stderr").read_text().splitlines()
    assert code == 2, lines
    assert len([line for line in lines if not line.startswith("vitrail: note: ")]) == 1
    assert lines[-1].startswith(f"vitrail: cannot write {out}: ")
    assert list((tmp_path / "out").iterdir()) == []


@FORKED
def test_kill_leaves_no_unfinished_export(tmp_path: Path) -> None:
    """At any moment the folder is complete or does not exist."""
    model, out = save_toy_model(tmp_path / "model"), tmp_path / "out" / "new"
    process = start_command(["export", model, out])
    wait_until(process, lambda: bool(list(tmp_path.glob("out/.new.*"))))
    assert kill_process(process)
    assert not out.exists()


def test_labels_are_in_the_description(exported: ExportFinder) -> None:
    assert json.loads((exported("onnx") / CONFIG_FILE).read_text())["labels"] == list(LABELS)
