"""Engine selection: measured once, cached, and always with a note on the reason."""

import json
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.toy_exports import PREPROCESSING, ExportFinder, make_toy_model, random_pixels, save_toy_model

import vitrail
from vitrail.base.errors import CheckpointError, ConfigError
from vitrail.base.files import get_cache_folder
from vitrail.data.images.array_dataset import ArrayDataset
from vitrail.data.images.image_items import ImageItem
from vitrail.export import onnx_session
from vitrail.export.description import CONFIG_FILE
from vitrail.export.exported_model import ExportedModel
from vitrail.export.onnx_session import open_session
from vitrail.models.base.checks import pair
from vitrail.predict import engine_selection
from vitrail.predict.engine_cache import lock_engine_speeds, write_engine_speeds
from vitrail.predict.engine_selection import (
    EngineChoice,
    EngineOptions,
    choose_engine_for_dataset,
    open_on_fastest_engine,
)
from vitrail.predict.model_checksums import compute_model_key


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("vitrail.predict.engine_selection", "vitrail.predict.predictor"):
        monkeypatch.setattr(f"{module}.count_cores", lambda: 2)


class Speeds(dict[str, float]):
    """Images per second by "engine streams×threads", as if measured, and which were measured."""

    asked: list[str]


@pytest.fixture
def speeds(monkeypatch: pytest.MonkeyPatch) -> Speeds:
    found = Speeds()
    found.asked = []

    def measured(predictor: Any, _: int) -> float:
        engine = predictor.engine
        found.asked.append(f"{engine.name} {engine.streams}×{engine.threads}")
        return found.get(found.asked[-1], 1.0)

    monkeypatch.setattr("vitrail.predict.engine_selection.measure_images_per_second", measured)
    monkeypatch.setattr(engine_selection, "estimate_seconds", lambda *_: 99.0)  # pyright: ignore[reportUnknownLambdaType]
    return found


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_toy_model(tmp_path / "model")


@pytest.fixture
def written_exports(monkeypatch: pytest.MonkeyPatch, exported: ExportFinder) -> list[Path]:
    """Copy a toy export instead of exporting, which is slow."""
    found = list[Path]()

    def write(_: Any, folder: Path, *, to: str, **__: Any) -> None:
        found.append(folder)
        shutil.copytree(exported("onnx" if to == "onnx" else "int8"), folder)

    monkeypatch.setattr("vitrail.export.export.export_model", write)
    return found


def describe_setting(chosen: EngineChoice) -> str:
    engine = chosen.predictor.engine
    return f"{engine.name} {engine.streams}×{engine.threads}"


def make_items(count: int) -> list[ImageItem]:
    return [ImageItem(each, str(n)) for n, each in enumerate(random_pixels(count))]


def test_fewer_threads_per_call_are_preferred_at_similar_speed() -> None:
    settings: dict[str, engine_selection.EngineSetting] = {
        "eager 1×2": ("eager", 1, 2),
        "eager 2×1": ("eager", 2, 1),
        "onnx 1×2": ("onnx", 1, 2),
    }
    choose = engine_selection.choose_fastest_setting
    assert choose(settings, {"eager 1×2": 104, "eager 2×1": 100, "onnx 1×2": 90}) == "eager 2×1"
    assert choose(settings, {"eager 1×2": 106, "eager 2×1": 100, "onnx 1×2": 105}) == "eager 1×2"


def test_speeds_are_measured_once_and_cached(exported: ExportFinder, speeds: Speeds) -> None:
    speeds |= {"onnx 1×2": 100, "onnx 2×1": 150}
    first = open_on_fastest_engine(exported("onnx"), EngineOptions(), 1000)
    assert describe_setting(first) == "onnx 2×1"
    assert first.notes == ("engine onnx 2×1; images/s measured now: onnx 1×2 100, onnx 2×1 150",)
    assert speeds.asked == ["onnx 1×2", "onnx 2×1"]
    second = open_on_fastest_engine(exported("onnx"), EngineOptions(), 1000)
    assert describe_setting(second) == "onnx 2×1"
    assert len(speeds.asked) == 2
    assert second.notes[0].startswith("engine onnx 2×1; images/s measured 2")
    for other in (EngineOptions(batch=4), EngineOptions(output="logits", batch=1)):  # other conditions
        open_on_fastest_engine(exported("onnx"), other, 1000)
    assert len(speeds.asked) == 6


def test_processes_that_find_no_speeds_measure_once(
    exported: ExportFinder, speeds: Speeds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Speeds that several measure at the same time are wrong, and each could choose another engine."""
    model = exported("onnx")
    open_on_fastest_engine(model, EngineOptions(), 1000)
    (path,) = (get_cache_folder() / "engines").iterdir()
    key = json.loads(path.read_text())["key"]
    path.unlink()
    speeds.asked.clear()
    looked, found, real = threading.Event(), list[Any](), engine_selection.read_engine_speeds

    def read(key: str) -> Any:
        known = real(key)
        looked.set()
        return known

    monkeypatch.setattr(engine_selection, "read_engine_speeds", read)
    other = threading.Thread(target=lambda: found.append(open_on_fastest_engine(model, EngineOptions(), 1000)))
    with lock_engine_speeds(key):
        other.start()
        assert looked.wait(60)
        write_engine_speeds(key, {"images_per_second": {"onnx 1×2": 3, "onnx 2×1": 2}})
    other.join(60)
    assert (describe_setting(found[0]), speeds.asked) == ("onnx 1×2", [])


def test_cache_records_the_conditions(exported: ExportFinder, speeds: Speeds) -> None:
    open_on_fastest_engine(exported("onnx"), EngineOptions(), 1000)
    (path,) = (get_cache_folder() / "engines").iterdir()
    cached = json.loads(path.read_text())
    assert "2 cores" in cached["key"]
    assert "batch 8" in cached["key"]
    assert cached["measured"]["images_per_second"] == {"onnx 1×2": 1.0, "onnx 2×1": 1.0}


@pytest.mark.parametrize(
    "cached",
    [
        {},
        {"images_per_second": 5},
        {"images_per_second": {"onnx 1×2": "fast", "onnx 2×1": 1}},
        {"images_per_second": {"onnx 1×2": 1}},
        {"images_per_second": None, "when": []},
    ],
)
def test_invalid_cache_is_measured_again(cached: Any, exported: ExportFinder, speeds: Speeds) -> None:
    open_on_fastest_engine(exported("onnx"), EngineOptions(), 1000)
    (path,) = (get_cache_folder() / "engines").iterdir()
    write_engine_speeds(json.loads(path.read_text())["key"], cached)
    found = open_on_fastest_engine(exported("onnx"), EngineOptions(), 1000)
    assert len(speeds.asked) == 4
    assert "measured now" in found.notes[0]
    open_on_fastest_engine(exported("onnx"), EngineOptions(), 1000)
    assert len(speeds.asked) == 4


def test_without_a_cache_speeds_are_measured_each_time(exported: ExportFinder, speeds: Speeds, home: Path) -> None:
    home.write_text("a file in the way")
    for _ in range(2):
        assert "measured now" in open_on_fastest_engine(exported("onnx"), EngineOptions(), 1000).notes[0]
    assert len(speeds.asked) == 4


def test_few_images_are_not_worth_measuring_or_exporting(
    exported: ExportFinder, model: Path, speeds: Speeds, written_exports: list[Path]
) -> None:
    found = open_on_fastest_engine(exported("onnx"), EngineOptions(), 1)
    assert (found.notes, found.batch) == ((), 1)
    found = open_on_fastest_engine(model, EngineOptions(), 12)
    assert found.notes == (
        "engine eager: for 12 images exporting the model would take longer than it saves; "
        "for many calls: vitrail export",
    )
    found = open_on_fastest_engine(model, EngineOptions(), 100)
    assert any("compiled was not tried" in each for each in found.notes)
    assert any("for 100 images exporting" in each for each in found.notes)
    assert written_exports == []
    assert set(speeds.asked) == {"eager 1×2", "eager 2×1"}


def test_for_many_images_the_model_is_exported(model: Path, speeds: Speeds, written_exports: list[Path]) -> None:
    speeds |= {"onnx 2×1": 9}
    found = open_on_fastest_engine(model, EngineOptions(), 1000)
    assert describe_setting(found) == "onnx 2×1"
    assert set(speeds.asked) == {"eager 1×2", "eager 2×1", "onnx 1×2", "onnx 2×1"}
    assert found.predictor.labels == ("ants", "bees", "cats", "dogs", "eels")
    assert len(written_exports) == 1
    speeds.clear()
    speeds |= {"eager 1×2": 9}
    assert (
        describe_setting(open_on_fastest_engine(save_toy_model(model.with_name("other")), EngineOptions(), 1000))
        == "eager 1×2"
    )


def test_a_short_job_is_not_worth_an_export_unless_there_is_one(
    model: Path, speeds: Speeds, written_exports: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_selection, "estimate_seconds", lambda *_: 7.0)  # pyright: ignore[reportUnknownLambdaType]
    found = open_on_fastest_engine(model, EngineOptions(), 1000)
    assert found.predictor.engine.name == "eager"
    assert any("for 1,000 images, which take about 7 s in torch, exporting" in each for each in found.notes)
    assert written_exports == []
    vitrail.Predictor(model, engine="onnx")
    assert len(written_exports) == 1
    speeds |= {"onnx 2×1": 9}
    assert describe_setting(open_on_fastest_engine(model, EngineOptions(), 1000)) == "onnx 2×1"


def test_weights_are_not_packed_for_a_single_image(exported: ExportFinder, monkeypatch: pytest.MonkeyPatch) -> None:
    packed, pixels, float32, int8 = list[bool](), random_pixels(1), exported("onnx"), exported("int8")

    def record(model: Any, threads: int = 0, *, pack: bool = True) -> Any:
        packed.append(pack)
        return open_session(model, threads, pack=pack)

    monkeypatch.setattr(onnx_session, "open_session", record)
    one, many = (open_on_fastest_engine(float32, EngineOptions(), count) for count in (1, 9))
    assert packed == [False, True]
    found, expected = (each.predictor.engine.run(pixels) for each in (one, many))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    open_on_fastest_engine(int8, EngineOptions(), 1)
    assert packed == [False, True, True], "only float32 is faster without"


@pytest.mark.usefixtures("written_exports")
def test_fast_uses_an_exact_engine_that_is_faster(model: Path, speeds: Speeds) -> None:
    speeds |= {"onnx 2×1": 9, "int8 2×1": 5}
    assert describe_setting(open_on_fastest_engine(model, EngineOptions(fast=True), 1000)) == "onnx 2×1"


@pytest.mark.usefixtures("written_exports")
def test_labeled_images_run_on_the_fastest_engine_if_that_saves_time(
    model: Path, speeds: Speeds, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, images = vitrail.open_model(model), ArrayDataset(random_pixels(600), None, ())
    speeds |= {"onnx 2×1": 9, "eager 1×2": 3}
    found = choose_engine_for_dataset(opened, images, EngineOptions())
    assert found is not None
    assert describe_setting(found) == "onnx 2×1"
    monkeypatch.setattr(engine_selection, "estimate_seconds", lambda *_: 1.0)  # pyright: ignore[reportUnknownLambdaType]
    assert choose_engine_for_dataset(opened, images, EngineOptions()) is None
    named = choose_engine_for_dataset(opened, images, EngineOptions(engine="eager", streams=2))
    assert named is not None
    assert describe_setting(named) == "eager 2×1"
    monkeypatch.setattr(engine_selection, "estimate_seconds", lambda *_: pytest.fail("on another device"))  # pyright: ignore[reportUnknownLambdaType]
    assert choose_engine_for_dataset(opened, images, EngineOptions(device="cuda")) is None


def test_failed_export_is_a_note(model: Path, speeds: Speeds, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """After a full disk, a missing package or a failed export, the model runs in torch."""

    def write(*_: Any, **__: Any) -> None:
        raise CheckpointError("cannot write there: No space left on device")

    monkeypatch.setattr("vitrail.export.export.export_model", write)
    for options in (EngineOptions(), EngineOptions(fast=True)):
        found = open_on_fastest_engine(model, options, 1000)
        assert found.predictor.engine.name == "eager"
        assert "engine onnx was left out: cannot write there: No space left on device" in found.notes
    with pytest.raises(CheckpointError, match="No space left"):
        open_on_fastest_engine(model, EngineOptions(engine="onnx"), 1000)


@pytest.mark.parametrize(
    ("options", "ways"),
    [
        (EngineOptions(streams=3), ["onnx 3×1"]),
        (EngineOptions(threads=3), ["onnx 1×3"]),
        (EngineOptions(streams=2, threads=5), ["onnx 2×5"]),
    ],
)
def test_given_streams_and_threads_are_used(
    options: EngineOptions, ways: list[str], exported: ExportFinder, speeds: Speeds
) -> None:
    assert describe_setting(open_on_fastest_engine(exported("onnx"), options, 1000)) in ways
    assert speeds.asked == []
    assert open_on_fastest_engine(exported("onnx"), EngineOptions(batch=3), 1000).batch == 3
    assert open_on_fastest_engine(exported("onnx"), EngineOptions(batch=300), 7).batch == 7


def test_given_streams_and_threads_are_used_for_every_engine(
    model: Path, speeds: Speeds, written_exports: list[Path]
) -> None:
    open_on_fastest_engine(model, EngineOptions(streams=2, threads=2), 1000)
    assert speeds.asked == ["eager 2×2", "onnx 2×2"]
    speeds.asked.clear()
    open_on_fastest_engine(model, EngineOptions(threads=1), 1000)
    assert speeds.asked == ["eager 1×1", "eager 2×1", "onnx 1×1", "onnx 2×1"]


def test_named_engine_is_used(model: Path, exported: ExportFinder, written_exports: list[Path]) -> None:
    assert open_on_fastest_engine(model, EngineOptions(engine="eager"), 1).predictor.engine.name == "eager"
    assert open_on_fastest_engine(model, EngineOptions(engine="onnx"), 1).predictor.engine.name == "onnx"
    assert open_on_fastest_engine(model, EngineOptions(engine="int8"), 1).predictor.engine.name == "int8"
    assert open_on_fastest_engine(exported("int8"), EngineOptions(engine="int8"), 1).predictor.engine.name == "int8"
    with pytest.raises(ConfigError, match=r"`engine` eager for .* which is exported; expected onnx or auto"):
        open_on_fastest_engine(exported("onnx"), EngineOptions(engine="eager"), 1)


def test_compiled_engine_has_one_stream(model: Path, speeds: Speeds, monkeypatch: pytest.MonkeyPatch) -> None:
    def as_it_is(function: Any, **_: Any) -> Any:
        return function

    monkeypatch.setattr(torch, "compile", as_it_is)
    assert describe_setting(open_on_fastest_engine(model, EngineOptions(engine="compiled"), 1000)) == "compiled 1×2"


@pytest.mark.usefixtures("written_exports")
@pytest.mark.parametrize("agrees", [True, False])
def test_fast_uses_bfloat16_if_it_is_fastest_and_agrees(
    agrees: bool, model: Path, speeds: Speeds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_selection, "find_bfloat16_instructions", lambda: "avx512_bf16")
    same = 32 if agrees else 28
    monkeypatch.setattr(engine_selection, "count_agreeing_images", lambda *_: same)  # pyright: ignore[reportUnknownLambdaType]
    speeds.update({"bfloat16 1×2": 900, "int8 1×2": 700, "onnx 1×2": 300})
    found = open_on_fastest_engine(model, EngineOptions(fast=True), 1000)
    engine = found.predictor.engine
    assert (engine.name == "bfloat16") is agrees
    if agrees:
        assert "bfloat16 agrees with fp32 on 32 of 32 built-in images" in found.notes
        assert not engine.exact
    else:
        assert "bfloat16 agrees with fp32 on 28 of 32 built-in images: too few, so fp32 is used" in found.notes
    plain = open_on_fastest_engine(model, EngineOptions(), 1000)
    assert plain.predictor.engine.exact


def test_bfloat16_is_close_to_float32_and_not_exact(model: Path) -> None:
    one, other = vitrail.Predictor(model, engine="bfloat16"), vitrail.Predictor(model, engine="eager")
    rows, columns = pair(one.preprocessing.image_size)
    pixels = np.random.default_rng(0).integers(0, 256, (2, rows, columns, 3), dtype=np.uint8)
    found, expected = one.engine.run(pixels), other.engine.run(pixels)
    assert found.dtype == np.float32
    assert not np.array_equal(found, expected)
    np.testing.assert_allclose(found, expected, atol=0.03)
    assert "`exact` with `engine` bfloat16, which is not exact" in get_error(model, exact=True, engine="bfloat16")


def test_fast_uses_int8_and_reports_its_agreement(
    exported: ExportFinder, model: Path, speeds: Speeds, written_exports: list[Path]
) -> None:
    found = open_on_fastest_engine(exported("onnx"), EngineOptions(fast=True), 4, make_items(4))
    assert found.predictor.engine.name == "int8"
    assert found.notes[0].startswith("int8 agrees with fp32 on ")
    assert found.notes[0].endswith(" of 32 built-in images")
    found = open_on_fastest_engine(exported("onnx"), EngineOptions(fast=True, streams=2), 20, make_items(20))
    assert found.notes[0].endswith(" of 20 of these images")
    assert describe_setting(found) == "int8 2×1", "two streams share two cores"
    found = open_on_fastest_engine(model, EngineOptions(fast=True), 4, make_items(4))
    assert found.predictor.engine.name == "int8"
    assert found.predictor.labels is not None
    found = open_on_fastest_engine(exported("int8"), EngineOptions(fast=True), 4)
    assert found.notes[0].startswith("int8 agreed with fp32 on ")
    assert found.notes[0].endswith(" of 36 images when it was exported")


def test_unreadable_images_do_not_count_in_the_agreement(exported: ExportFinder) -> None:
    mixed = [*make_items(9), ImageItem("none.png", "none.png"), ImageItem(b"not an image", "bytes")]
    assert (
        open_on_fastest_engine(exported("onnx"), EngineOptions(fast=True), 11, mixed)
        .notes[0]
        .endswith(" of 9 of these images")
    )


@pytest.mark.parametrize("count", [4, 20])
def test_float32_is_used_if_int8_disagrees(
    count: int, exported: ExportFinder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the built-in images by the recorded agreement, and on those of the job by their predictions."""
    poor = tmp_path / "poor"
    shutil.copytree(exported("int8"), poor)
    about = {**json.loads((poor / CONFIG_FILE).read_text()), "agreement": {"pictures": 36, "same": 20}}
    (poor / CONFIG_FILE).write_text(json.dumps({name: value for name, value in about.items() if name != "checksum"}))

    def open_cached(_: Any, open_export: Any) -> Any:
        return open_export(poor)

    monkeypatch.setattr(engine_selection, "open_cached_int8_export", open_cached)
    run = ExportedModel.run

    def run_wrong_int8(engine: Any, pixels: Any) -> Any:
        found = run(engine, pixels)
        return found if engine.exact else np.roll(found, 1, axis=-1)

    monkeypatch.setattr(ExportedModel, "run", run_wrong_int8)
    found = open_on_fastest_engine(exported("onnx"), EngineOptions(fast=True), count, make_items(count))
    assert found.predictor.engine.name == "onnx"
    assert found.notes[0].startswith(f"int8 agrees with fp32 on {20 if count == 4 else 0} of ")
    assert found.notes[0].endswith("too few, so fp32 is used")


def test_failed_quantization_is_a_note(exported: ExportFinder, home: Path) -> None:
    home.write_text("a file in the way")
    found = open_on_fastest_engine(exported("onnx"), EngineOptions(fast=True), 4)
    assert found.predictor.engine.name == "onnx"
    assert found.notes[0].startswith("engine int8 was left out: cannot make the folder ")


def get_error(source: Any, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        open_on_fastest_engine(source, EngineOptions(**options), 1)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_contradictory_options_are_refused(exported: ExportFinder, model: Path) -> None:
    assert "which is int8; expected a model exported to onnx" in get_error(exported("int8"), exact=True)
    assert "`exact` with `fast`, which is not exact" in get_error(model, exact=True, fast=True)
    assert "`exact` with `engine` int8, which is not exact" in get_error(model, exact=True, engine="int8")
    assert "`fast` with `engine` eager; expected auto, onnx or int8" in get_error(model, fast=True, engine="eager")
    assert "`batch` 0; expected 1 or more" in get_error(model, batch=0)
    assert "`streams` -1" in get_error(model, streams=-1)
    assert "`threads` 0" in get_error(model, threads=0)
    assert "`merge` -1" in get_error(model, merge=-1)
    assert "returns logits; expected mean" in get_error(exported("onnx"), output="mean")
    assert "`merge` 2 for " in get_error(exported("onnx"), merge=2)


def test_measured_speed_is_plausible(exported: ExportFinder, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine with 10 ms per call and two streams at once: 400 images per second in batches of two."""
    predictor = open_on_fastest_engine(exported("onnx"), EngineOptions(streams=2, threads=1), 1).predictor

    calls = list[int]()

    class Slow:
        name, exact, streams, threads = "toy", True, 2, 1

        def run(self, pixels: Sequence[Any]) -> Any:
            calls.append(len(pixels))
            return np.zeros((len(pixels), 5), np.float32)

    clock = SimpleNamespace(perf_counter=lambda: 0.005 * len(calls))
    monkeypatch.setattr(engine_selection, "time", clock)
    predictor.engine = Slow()  # pyright: ignore[reportAttributeAccessIssue]
    assert engine_selection.measure_images_per_second(predictor, 2) == pytest.approx(400)


def test_model_keys_are_distinct(exported: ExportFinder, tmp_path: Path, model: Path) -> None:
    shutil.copytree(exported("onnx"), tmp_path / "copy")
    names = {compute_model_key(each) for each in (exported("onnx"), exported("int8"), tmp_path / "copy", model)}
    assert len(names) == 3, "a copy is the same model"
    assert compute_model_key("no/such/model") == "no/such/model"
    before = compute_model_key(model)
    vitrail.save(make_toy_model("vit"), model, preprocessing=PREPROCESSING)
    assert compute_model_key(model) != before
