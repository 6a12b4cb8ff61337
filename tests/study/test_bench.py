"""Benchmarks: what is measured and compared, what is left out, and the results. No times are asserted."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.figure_checks import check_figure
from support.saved_models import write_convnet_folder, write_model_folder

import vitrail
from vitrail.base.errors import CheckpointError, ConfigError
from vitrail.study import bench as benches
from vitrail.study import bench_engines, timing
from vitrail.study.bench import BenchLine, BenchRequest, BenchResults, run_benchmark
from vitrail.study.bench_engines import (
    ModelFiles,
    StartupError,
    StartupMeasurement,
    make_predict_step,
    measure_startup,
    random_pixels,
)
from vitrail.study.timing import PROGRESS_PARTS, CallTimings, MedianAndQuartiles, time_interleaved


class Clock:
    """A clock that advances only with calls, at another speed in some rounds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.slow = 0.0, 1.0
        monkeypatch.setattr(timing, "perf_counter", lambda: self.now)
        monkeypatch.setattr(timing, "sleep", lambda _: None)  # pyright: ignore[reportUnknownLambdaType]
        self.log = list[str]()

    def way(self, name: str, seconds: float) -> Callable[[], None]:
        def work() -> None:
            self.now += seconds * self.slow
            self.log.append(name)

        return work


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "TURN_SECONDS", 0.0)
    monkeypatch.setattr(timing, "PAUSE_SECONDS", 0.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("models") / "model")


@pytest.fixture(scope="module")
def stock(model: Path, tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return ModelFiles(str(model), None, tmp_path_factory.mktemp("stock"))


def line(**changes: Any) -> BenchLine:
    timed = CallTimings(((0.1, 0.3), (0.2, 0.2), (0.4, 0.4)))
    about: dict[str, Any] = {
        "model": "a",
        "image_size": (32, 32),
        "batch": 4,
        "threads": 2,
        "way": "onnx",
        "exact": True,
    }
    about |= {
        "base": "timm",
        "ratio": MedianAndQuartiles(1.2, 1.3, 1.5),
        "starts": [StartupMeasurement(0.4, 100.0)],
        "apart": 1e-6,
    }
    return BenchLine.from_timings(timed, **{**about, **changes})


def test_ratios_do_not_depend_on_load(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    ways = {"slow": clock.way("slow", 0.2), "fast": clock.way("fast", 0.05)}

    def busier(share: float) -> None:
        if float(share * 5).is_integer():
            clock.slow *= 2

    found = time_interleaved(ways, rounds=5, progress=busier)
    assert len(found["slow"].rounds) == len(found["fast"].rounds) == 5
    assert found["slow"].mean_seconds[4] == pytest.approx(16 * found["slow"].mean_seconds[0])
    ratio = found["fast"].speedup_over(found["slow"])
    assert (ratio.low, ratio.median, ratio.high) == pytest.approx((4, 4, 4))
    assert [len(calls) for calls in found["slow"].rounds] == [1] * 5
    assert [len(calls) for calls in found["fast"].rounds] == [4] * 5, "short calls are repeated"


def test_every_round_has_all_functions_in_shuffled_order(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, shares = Clock(monkeypatch), list[float]()
    time_interleaved({name: clock.way(name, 1.0) for name in "abc"}, rounds=20, warm=False, progress=shares.append)
    orders = ["".join(clock.log[at : at + 3]) for at in range(0, 60, 3)]
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)
    assert len(set(orders)) > 3
    assert shares == pytest.approx([n / 60 for n in range(1, 61)])
    again = Clock(monkeypatch)
    time_interleaved({name: again.way(name, 1.0) for name in "abc"}, rounds=20, warm=False)
    assert again.log == clock.log


@pytest.mark.parametrize(("seconds", "rounds"), [(0.01, 3), (2.0, 4), (1e9, 500)])
def test_number_of_rounds_from_seconds(monkeypatch: pytest.MonkeyPatch, seconds: float, rounds: int) -> None:
    clock = Clock(monkeypatch)
    found = time_interleaved({"a": clock.way("a", 0.5), "b": clock.way("b", 0.1)}, seconds=seconds)
    assert len(found["a"].rounds) == rounds
    assert {len(calls) for calls in found["b"].rounds} == {2}


def test_quartiles_lie_within_the_values() -> None:
    assert MedianAndQuartiles.from_values([3.0]) == MedianAndQuartiles(3.0, 3.0, 3.0)
    assert MedianAndQuartiles.from_values([1.0, 9.0]) == MedianAndQuartiles(3.0, 5.0, 7.0)
    assert MedianAndQuartiles.from_values([5.0, 1.0, 4.0, 2.0, 3.0]) == MedianAndQuartiles(2.0, 3.0, 4.0)


def test_line_has_images_per_second_and_latency() -> None:
    made = line(starts=[StartupMeasurement(1.0, 50.0), StartupMeasurement(3.0, 70.0), StartupMeasurement(2.0, 60.0)])
    assert made.images_per_second.median == pytest.approx(4 / 0.2)
    assert made.latency == pytest.approx(tuple(1000 * np.percentile([0.1, 0.2, 0.2, 0.3, 0.4, 0.4], (50, 90, 99))))
    assert (made.calls, made.rounds, made.start, made.memory) == (6, 3, 2.0, 60.0)


@pytest.fixture
def results() -> BenchResults:
    lines = [
        line(way="timm", ratio=MedianAndQuartiles(1, 1, 1)),
        line(),
        line(way="int8 × 2", exact=False, ratio=MedianAndQuartiles(1.5, 2.0, 2.5)),
        line(model="b", image_size=(64, 48), way="timm", ratio=MedianAndQuartiles(1, 1, 1)),
        line(model="b", image_size=(64, 48)),
    ]
    return BenchResults(lines=tuple(lines), notes=("b: int8 is left out: why",), seed=3)


def test_text_of_the_table(results: BenchResults) -> None:
    heading, _, first, second, third, *_, last = str(results.table).splitlines()
    names = "model pixels batch threads by images/s ms: p50 p90 p99 MB start s to timm quartiles"
    assert " ".join(heading.split()) == names
    assert first.split()[-1] == "1"
    assert " ".join(second.split()) == "a 32 4 2 onnx 20.0 250 400 400 100 0.40 1.30 1.20–1.50"
    assert third.split()[4:7] == ["int8", "×", "2"]
    assert last.split()[:2] == ["b", "64×48"]
    bare = BenchResults(lines=tuple(replace(each, start=None, memory=None) for each in results.lines))
    assert "MB" not in str(bare)
    assert "start s" not in str(bare)


def test_models_are_named_by_the_ends_of_their_paths() -> None:
    """In the tables; JSON and CSV have the paths."""
    found = BenchResults(lines=(line(model="/home/me/runs/ants-1"), line(model="ViT-Ti/16")))
    assert [row.split()[0] for row in str(found.table).splitlines()[2:]] == ["ants-1", "ViT-Ti/16"]
    assert [row[0] for row in found.make_throughput_table().rows] == ["ants-1", "ViT-Ti/16"]
    assert found.table.list_records()[0]["model"] == "/home/me/runs/ants-1"
    assert found.to_json()["lines"][0]["model"] == "/home/me/runs/ants-1"


def test_table_of_images_per_second(results: BenchResults) -> None:
    table = results.make_throughput_table()
    assert [each.name for each in table.columns] == ["model", "pixels", "batch", "threads", "timm", "onnx", "int8 × 2"]
    assert table.format_cells() == [
        ["a", "32", "4", "2", "20.0", "20.0", "20.0"],
        ["b", "64×48", "4", "2", "20.0", "20.0", ""],
    ]
    assert str(results).endswith(f"\n\n{table}")


def test_files(results: BenchResults, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra `plot`")
    written = results.write(tmp_path / "new")
    assert [path.name for path in written] == ["bench.json", "bench.txt", "bench.png"]
    import json

    data = json.loads(written[0].read_text("utf-8"))
    assert data["lines"][1]["ratio"] == {"low": 1.2, "median": 1.3, "high": 1.5}
    assert set(data["lines"][1]["latency"]) == {"p50", "p90", "p99"}
    assert (data["seed"], data["notes"]) == (3, ["b: int8 is left out: why"])
    assert data["machine"].endswith(("core", "cores"))
    assert data["versions"]["vitrail"] == vitrail.__version__


def test_figure(results: BenchResults) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra `plot`")
    first, *rest = results.lines
    faster = replace(
        first, model="a name $of$ 我 kinds " * 5, images_per_second=MedianAndQuartiles(6000.0, 6000.0, 6000.0)
    )
    figure = replace(results, lines=(faster, *rest)).figure()
    check_figure(figure, "images/s, log scale", "ratio within a round (median, quartiles)")
    assert figure.arrays["ratio"].shape == (5, 3)
    assert "int8 × 2 for a, 2.00 × timm." in figure.caption
    left, _ = results.figure().draw().axes
    assert left.get_xlabel() == "images/s"
    assert left.get_xlim()[0] == 0


@pytest.mark.usefixtures("quick")
@pytest.mark.slow
def test_engines_and_peers_in_one_run(stock: ModelFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benches, "ModelFiles", lambda *_: stock)  # pyright: ignore[reportUnknownLambdaType]
    data = list[int]()
    request = BenchRequest(
        models=[stock.model],
        engines=("eager", "onnx", "int8"),
        batches=(1, 3),
        threads=(2,),
        peers=("timm",),
        rounds=2,
        starts=0,
    )
    found = run_benchmark(request, progress=data.append)
    assert found.notes == ()
    split = ["onnx", "onnx × 2", "int8", "int8 × 2"]
    assert [each.way for each in found.lines if each.batch == 1] == ["timm", "eager", "onnx", "int8"]
    assert [each.way for each in found.lines if each.batch == 3] == ["timm", "eager", *split]
    assert {each.base for each in found.lines} == {"timm"}
    assert all(each.apart is not None and each.apart < 1e-5 for each in found.lines if each.exact)
    assert {each.way for each in found.lines if not each.exact} == {"int8", "int8 × 2"}
    assert all(each.rounds == 2 and each.start is None for each in found.lines)
    assert sum(data) == request.progress_total == 2 * PROGRESS_PARTS
    assert torch.get_num_threads() == 1, "as before"


@pytest.mark.usefixtures("quick")
def test_presets_at_several_resolutions(tmp_path: Path) -> None:
    models, sizes = ["vit_tiny_patch16_224", "DeiT-Ti-distilled"], [(32, 32), (32, 48)]
    request = BenchRequest(
        models=models, engines=("eager",), sizes=sizes, batches=(1,), threads=(1,), rounds=2, starts=0
    )
    found = run_benchmark(request, folder=tmp_path)
    assert [(each.model, each.image_size) for each in found.lines] == [(m, s) for m in models for s in sizes]


@pytest.mark.usefixtures("quick")
def test_failing_engines_are_left_out_with_a_note(stock: ModelFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benches, "ModelFiles", lambda *_: stock)  # pyright: ignore[reportUnknownLambdaType]
    plain, model = bench_engines.make_predict_step, stock.model

    def failing(way: bench_engines.BenchEngine, pixels: bench_engines.PixelBatch) -> bench_engines.PredictStep:
        if way.name == "onnx":
            raise RuntimeError("no such\n operator")
        return plain(way, pixels)

    monkeypatch.setattr(benches, "make_predict_step", failing)
    request = BenchRequest(models=[model], engines=("onnx", "eager"), batches=(1, 2), threads=(1,), rounds=2, starts=0)
    found = run_benchmark(request)
    assert [each.way for each in found.lines] == ["eager", "eager"]
    assert found.notes == (f"{model} at 32: onnx is left out: no such operator",)
    with pytest.raises(ConfigError, match=r"nothing could be measured: .* onnx is left out: no such operator$"):
        run_benchmark(replace(request, engines=("onnx",)))


@pytest.mark.usefixtures("quick")
def test_failing_models_do_not_stop_the_others(model: Path, tmp_path: Path) -> None:
    convnet = write_convnet_folder(tmp_path / "convnet")
    request = BenchRequest(
        models=[str(tmp_path / "nowhere.pth"), str(convnet), str(model)],
        engines=("eager",),
        peers=("timm",),
        batches=(1,),
        threads=(1,),
        rounds=2,
        starts=0,
    )
    data = list[int]()
    found = run_benchmark(request, folder=tmp_path, progress=data.append)
    assert [(each.model, each.way) for each in found.lines] == [
        (str(convnet), "eager"),
        (str(model), "timm"),
        (str(model), "eager"),
    ]
    missing, no_place = found.notes
    assert "nowhere.pth" in missing
    assert "timm is left out: timm cannot" in no_place
    assert sum(data) == request.progress_total


@pytest.mark.usefixtures("quick")
def test_peers_with_other_weights_are_left_out(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = vitrail.create("ViT-Ti/16", image_size=32, classes=3).eval()
    monkeypatch.setattr(bench_engines, "load_peer_model", lambda *_: other)  # pyright: ignore[reportUnknownLambdaType]
    request = BenchRequest(
        models=[str(model)], engines=("eager",), peers=("timm",), batches=(1,), threads=(1,), rounds=2, starts=0
    )
    found = run_benchmark(request, folder=tmp_path)
    assert [(each.way, each.base) for each in found.lines] == [("eager", "eager")]
    assert "so it is another model" in found.notes[0]


@pytest.mark.parametrize("peer", ["timm", pytest.param("transformers", marks=pytest.mark.slow)])
def test_all_engines_predict_the_same(stock: ModelFiles, peer: str) -> None:
    pixels = stock.make_pixels(3)
    answers = {name: make_predict_step(stock.make_engine(name, 1), pixels)() for name in ("eager", "onnx", peer)}
    answers["split"] = make_predict_step(stock.make_engine("onnx", 2, 2), pixels)()
    for name, each in answers.items():
        np.testing.assert_allclose(each, answers["eager"], atol=1e-5, err_msg=name)
    assert answers["eager"].std() > 0.01


def test_files_are_written_once_and_only_for_used_engines(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = list[tuple[Path, bool]]()
    monkeypatch.setattr(ModelFiles, "write_export", lambda _, folder, int8: made.append((folder, int8)))  # pyright: ignore[reportUnknownLambdaType]
    stock = ModelFiles(str(model), None, tmp_path)
    assert not list(tmp_path.iterdir())
    assert stock.folder_for("eager") == stock.folder_for("compiled")
    assert {path.name for path in tmp_path.iterdir()} == {"vitrail"}
    assert not made
    folders = stock.folder_for("onnx"), stock.folder_for("int8")
    assert folders == (stock.folder_for("onnx"), stock.folder_for("int8"))
    assert made == [(folders[0], False), (folders[1], True)]


def test_failing_files_are_not_written_again(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = list[Path]()

    def fails(_: ModelFiles, folder: Path, *, int8: bool) -> None:
        tried.append(folder)
        raise ConfigError("no way")

    monkeypatch.setattr(ModelFiles, "write_export", fails)
    stock = ModelFiles(str(model), None, tmp_path)
    for _ in range(2):
        with pytest.raises(ConfigError, match="no way"):
            stock.folder_for("onnx")
    assert len(tried) == 1


def test_random_weights_depend_on_the_seed(tmp_path: Path) -> None:
    first, second, other = (
        ModelFiles("ViT-Ti/16", (32, 32), tmp_path / str(n), seed) for n, seed in enumerate((5, 5, 6))
    )
    states = [each.module.state_dict() for each in (first, second, other)]
    assert all((states[0][name] == states[1][name]).all() for name in states[0])
    assert not (states[0]["head.weight"] == states[2]["head.weight"]).all()
    assert states[0]["head.weight"].std() > 0.01, "a head of zeros would make all predictions equal"
    assert first.preprocessing.image_size == (32, 32)


def test_exported_folders_have_one_engine_and_one_size(stock: ModelFiles, tmp_path: Path) -> None:
    place = str(stock.folder_for("int8"))
    exported = ModelFiles(place, None, tmp_path)
    assert exported.preprocessing == stock.preprocessing
    assert exported.default_engines == ("int8",)
    assert exported.folder_for("int8") == Path(place)
    with pytest.raises(ConfigError, match="is exported for int8; eager needs weights"):
        exported.folder_for("eager")
    with pytest.raises(ConfigError, match="is exported for int8; timm needs weights"):
        exported.folder_for("timm")
    with pytest.raises(ConfigError, match=r"`image_size` is 64, but .* is exported; expected 32, or the checkpoint"):
        ModelFiles(place, (64, 64), tmp_path)


def test_models_without_a_head_are_errors(tmp_path: Path) -> None:
    headless = write_model_folder(tmp_path / "model", labels=None, classes=0)
    with pytest.raises(ConfigError, match="has no head, so no outputs"):
        ModelFiles(str(headless), None, tmp_path)
    with pytest.raises((ConfigError, CheckpointError), match="ViT-Tu"):
        ModelFiles("ViT-Tu/16", None, tmp_path)


def test_onnx_starts_without_torch(stock: ModelFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "no_torch.py").write_text("import sys\nsys.modules['torch'] = None\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{':'.join(sys.path)}")
    found = measure_startup(stock.make_engine("onnx", 1), 2, ["no_torch"])
    assert found.seconds > 0
    assert 20 < found.megabytes < 400
    with pytest.raises(StartupError, match=r"eager did not start in a new process: .*torch"):
        measure_startup(stock.make_engine("eager", 1), 2, ["no_torch"])


def test_peak_memory_of_this_process() -> None:
    before = bench_engines.read_peak_memory()
    held = random_pixels((64, 1024, 1024))
    assert bench_engines.read_peak_memory() - before > 0.9 * held.nbytes / 1e6 or before > held.nbytes / 1e6


BAD: dict[str, dict[str, Any]] = {
    "unknown engine 'onxn'; did you mean 'onnx'": {"engines": ("onxn",)},
    "unknown peer 'tim'; did you mean 'timm'": {"peers": ("tim",)},
    "`batches` is 0; expected 1 or more": {"batches": (1, 0)},
    "`threads` is -1; expected 1 or more": {"threads": (-1,)},
    "`starts` is -1; expected 0 or more": {"starts": -1},
    "`rounds` is 0; expected 1 or more": {"rounds": 0},
    "`seconds` is 0; expected more than 0": {"seconds": 0.0},
    "`seconds` is nan; expected more than 0": {"seconds": float("nan")},
    "nothing to measure": {"models": ()},
}


@pytest.mark.parametrize("message", BAD)
def test_invalid_requests(message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(BenchRequest(models=("ViT-Ti/16",)), **BAD[message])


def test_peers_that_are_not_installed_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_engines, "find_spec", lambda _: None)  # pyright: ignore[reportUnknownLambdaType]
    with pytest.raises(ConfigError, match=r"`peers` timm needs timm, .* pip install .*\[parity\]'$"):
        run_benchmark(BenchRequest(models=("ViT-Ti/16",), peers=("timm",)))
