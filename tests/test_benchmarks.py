"""Every benchmark of `make bench` starts: one round at toy size, into a copy of its page. `slow`: as they are."""

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from shutil import copyfile
from typing import Any

import pytest
from cyclopts import App
from PIL import Image
from support import torchvision_shim  # noqa: F401  # pyright: ignore[reportUnusedImport]  # before timm

# isort: split

from vitrail.study.bench_engines import ModelFiles

ROOT = Path(__file__).parents[1]
SHARED = ROOT.parent / "shared" / "data"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """A benchmark as a module."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return import_module


@pytest.fixture
def page(tmp_path: Path) -> Path:
    return copyfile(ROOT / "docs" / "results.md", tmp_path / "results.md")


class SameProcess:
    """Instead of a ProcessPoolExecutor: runs what it gets at once."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __enter__(self) -> "SameProcess":
        return self

    def __exit__(self, *_: object) -> None: ...

    def submit(self, function: Callable[..., Any], *args: Any) -> "Future[Any]":
        future = Future[Any]()
        future.set_result(function(*args))
        return future


def read_section(page: Path, name: str) -> str:
    match = re.search(rf"<!-- begin {name} -->\n(.*?)\n<!-- end {name} -->", page.read_text("utf-8"), re.DOTALL)
    assert match is not None
    return match[1]


def check_section(page: Path, name: str, rows: int) -> None:
    """The section is a new table with this many rows, and says on what it was measured."""
    text = read_section(page, name)
    assert text != read_section(ROOT / "docs" / "results.md", name)
    assert len([line for line in text.splitlines() if line.startswith("|")]) == rows + 2
    assert "torch uses " in text
    assert "--rounds 1" in text


def test_each_command_of_make_bench_is_understood_and_has_its_section(load: Callable[[str], Any]) -> None:
    benchmarks = load("run_all").BENCHMARKS
    assert len(benchmarks) == len({each.command for each in benchmarks})
    assert sum(each.minutes for each in benchmarks) <= 70  # those are limits; together they end after 30
    for each in benchmarks:
        script, *options = shlex.split(each.command)
        module = load(Path(script).stem)
        _, bound, _ = App(default_command=module.main).parse_args(
            [*options, "--page", str(each.page)], exit_on_error=False, print_error=False
        )
        assert bound.arguments["page"] == each.page
        if script == "prediction.py":
            assert bound.arguments["only"] in module.SECTIONS
            assert read_section(each.page, bound.arguments["only"])
        assert read_section(each.page, "machine")


def test_throughput(load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, page: Path) -> None:
    throughput = load("throughput")
    small = [replace(throughput.CASES[0], training=training, repeats=1) for training in (False, True)]
    monkeypatch.setattr(throughput, "CASES", small)
    monkeypatch.setattr(throughput, "WARM_STEPS", 1)
    throughput.main(rounds=1, threads=1, page=page)
    check_section(page, "throughput", 2)


@pytest.mark.parametrize("instructions", ["", "avx512_bf16"])
def test_precision(load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, page: Path, instructions: str) -> None:
    precision = load("precision")
    chosen = ("ViT-Ti/16", "CCT-7/3×1", "MAE, `mae-cpu`", "SimCLR, `simclr-cpu`", "translation, `translate-cpu`")
    cases = {each.name: replace(each, batch=2) for each in precision.CASES if each.name in chosen}
    assert set(cases) == set(chosen)
    monkeypatch.setattr(precision, "CASES", list(cases.values())[: None if instructions else 1])
    monkeypatch.setattr(precision, "TURN_SECONDS", 0)
    monkeypatch.setattr(precision, "find_bfloat16_instructions", lambda: instructions)
    precision.main(rounds=1, threads=1, page=page)
    check_section(page, "precision", 5 if instructions else 1)
    assert ("no instructions" in read_section(page, "precision")) is not bool(instructions)


def test_deit_variants(load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, page: Path) -> None:
    variants = load("deit_variants")
    monkeypatch.setattr(variants, "PIXELS", (32,))
    monkeypatch.setattr(variants, "BATCHES", {"tiny": 1})
    variants.main(rounds=1, threads=1, sizes=("tiny",), page=page)
    check_section(page, "variants", 2)


def test_families(load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, page: Path) -> None:
    families = load("families")
    monkeypatch.setattr(families, "MODELS", {"PVTv2-b0": families.MODELS["PVTv2-b0"]})
    monkeypatch.setattr(families, "TURN_SECONDS", 0)
    monkeypatch.setattr(families, "BATCHES", (1,))
    monkeypatch.setattr(families, "make_onnx_step", lambda *_: lambda: None)  # pyright: ignore[reportUnknownLambdaType]
    families.main(rounds=1, threads=1, page=page)
    check_section(page, "families", 1)


def test_distillation(load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, page: Path) -> None:
    distillation = load("distillation")
    monkeypatch.setattr(distillation, "CASES", [replace(distillation.CASES[0], batch=2, repeats=1)])
    distillation.main(rounds=1, threads=1, page=page)
    check_section(page, "distillation", 1)


def test_pretraining(load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, page: Path) -> None:
    pretraining = load("pretraining_steps")
    settings, fields = pretraining.MaeSettings(decoder_depth=1), {"positions": "sincos_2d", "depth": 2}
    steps = pretraining.make_mae_steps(1, settings, "vit_tiny_patch16_224", fields)
    monkeypatch.setattr(pretraining, "CASES", [pretraining.Case("mae", "toy", lambda: steps)])
    pretraining.main(rounds=1, threads=1, page=page)
    check_section(page, "pretraining", 1)


def test_inspection(load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, page: Path) -> None:
    inspection = load("inspection")
    monkeypatch.setattr(inspection, "ProcessPoolExecutor", SameProcess)
    monkeypatch.setattr(inspection, "measure_peak_memory", lambda *_: 1.0)  # pyright: ignore[reportUnknownLambdaType]
    inspection.main(rounds=1, threads=1, page=page)
    assert "`vitrail.look`" in read_section(page, "inspection")


def test_decoding(load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, page: Path) -> None:
    decoding = load("decoding")
    cases = [replace(each, batch=2, sentences=2) for each in decoding.CASES[1::2]]
    monkeypatch.setattr(decoding, "CASES", cases)
    monkeypatch.setattr(decoding, "CACHE_LENGTHS", (4,))
    decoding.main(rounds=1, page=page)
    text = read_section(page, "decoding")
    assert [line.split(" | ")[0] for line in text.splitlines() if line.startswith("|")][2:4] == ["| greedy", "| beam 4"]


def test_checkpoint_loading(load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, page: Path) -> None:
    loading = load("checkpoint_loading")
    monkeypatch.setattr(loading, "ProcessPoolExecutor", SameProcess)
    monkeypatch.setattr(loading, "MODEL", "vit_tiny_patch16_224")
    loading.main(rounds=1, page=page)
    check_section(page, "loading", 2 * len(loading.LOADERS))


def test_image_pipeline(load: Callable[[str], Any], tmp_path: Path, page: Path) -> None:
    (tmp_path / "photos").mkdir()
    for number in range(2):
        Image.radial_gradient("L").convert("RGB").save(tmp_path / "photos" / f"{number}.jpg")
    load("image_pipeline").main(tmp_path / "photos", rounds=1, files=2, page=page)
    check_section(page, "images", 2)


def test_token_merging(load: Callable[[str], Any]) -> None:
    if not SHARED.exists():
        pytest.skip("needs the public weights in ../shared/data")
    table = load("token_merging").make_table(merges=(0, 8), batch=1, threads=1, images=2)
    assert len(table.splitlines()) == 8


def test_processes_of_prediction_are_scripts_that_exist(
    load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    processes, models, jobs = load("prediction_processes"), load("prediction_models"), load("peer_prediction_jobs")
    commands = list[tuple[Any, ...]]()

    def record(*words: Any) -> Any:
        commands.append(words)
        return jobs.FinishedProcess(1.0, 1.0, "1.0")

    monkeypatch.setattr(processes, "run_job", record)
    monkeypatch.setattr(ModelFiles, "__init__", lambda *_: None)  # pyright: ignore[reportUnknownLambdaType]
    monkeypatch.setattr(ModelFiles, "folder_for", lambda _, name: tmp_path / str(name))  # pyright: ignore[reportUnknownLambdaType]
    weights = {name: (preset, tmp_path / "none") for name, (preset, _) in models.WEIGHTS.items()}
    monkeypatch.setattr(models, "WEIGHTS", weights)
    work = models.PredictionBench(tmp_path, 1, 1, 0, {}, 1)
    assert "timm, B/16" in processes.measure_cold_start(work)
    peers = [words for words in commands if words[0] == sys.executable and "-m" not in words]
    assert {Path(words[1]).exists() for words in peers} == {True}
    assert {words[2] for words in peers} == {"timm-photo", "transformers-photo"} <= set(jobs.JOBS)
    own = {tuple(words[:3]) for words in commands if words not in peers}
    assert all(Path(words[0]).exists() for words in own)


def test_prediction_engines(load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    prediction, models = load("prediction"), load("prediction_models")
    monkeypatch.setattr(models, "WEIGHTS", dict.fromkeys(models.WEIGHTS, ("vit_fashion", tmp_path / "none")))
    monkeypatch.setattr(prediction, "ENGINES", ("eager", "bfloat16"))
    monkeypatch.setattr(prediction, "PEERS", ())
    text = prediction.measure_engines(models.PredictionBench(tmp_path, 1, 1, 0, {}, 1))
    assert "| ViT-B/16 | 1 | bfloat16 |" in text


def test_a_benchmark_that_fails_or_hangs_is_named_and_the_others_run(
    load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_all = load("run_all")
    for name, code in (("good", "print('measured')"), ("bad", "raise SystemExit(3)"), ("hangs", "time.sleep(60)")):
        (tmp_path / f"{name}.py").write_text(f"import time\n{code}\n")
    page = copyfile(ROOT / "docs" / "results.md", tmp_path / "results.md")
    monkeypatch.setattr(run_all, "RESULTS", page)
    monkeypatch.setattr(run_all, "PREDICTION", page)
    monkeypatch.setattr(
        run_all,
        "BENCHMARKS",
        [
            run_all.Benchmark(f"{name}.py", minutes, page)
            for name, minutes in (("bad", 1), ("hangs", 0.01), ("good", 1))
        ],
    )
    monkeypatch.setattr(run_all, "SCRIPTS", tmp_path)
    with pytest.raises(SystemExit) as failed:
        run_all.main(minutes=1)
    message, shown = str(failed.value), capfd.readouterr().out
    assert "bad.py: exit code 3" in message
    assert "hangs.py: stopped after 0.0 minutes" in message
    assert "good.py" not in message
    assert "measured" in shown
    assert "1 of 3 benchmarks" in shown
    assert "torch uses" in read_section(page, "machine")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_make_bench_with_one_round(load: Callable[[str], Any], tmp_path: Path) -> None:
    """Each command as `make bench` starts it, with one round and few photos."""
    if not SHARED.exists():
        pytest.skip("needs the photos and weights in ../shared/data")
    for each in load("run_all").BENCHMARKS:
        page = copyfile(each.page, tmp_path / each.page.name)
        words = shlex.split(re.sub(r"--rounds \d+", "--rounds 1", re.sub(r"--images \d+", "--images 8", each.command)))
        command = [sys.executable, str(ROOT / "benchmarks" / words[0]), *words[1:], "--page", str(page)]
        subprocess.run(command, check=True, cwd=ROOT, env=load("run_all").make_environment(each))
        assert page.read_text("utf-8") != each.page.read_text("utf-8")
