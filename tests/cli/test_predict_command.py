"""vitrail predict as a user meets it."""

import csv
import io
import json
import multiprocessing
import os
import random
import resource
import signal
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from toy_data import picture
from toy_models import LABELS, saved_model

import vitrail
from vitrail.cli import main

Run = Callable[..., Any]
PROGRAM = "import sys; from vitrail.cli import main; sys.argv[0] = 'vitrail'; main()"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model(tmp_path_factory.mktemp("models") / "model")


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In the folder where we are; two of one name."""
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("a/1.png", "a/2.png", "b/1.png", "b/c/3.jpg")):
        picture(tmp_path / "photos" / name, number)
    return Path("photos")


NAMES = ["photos/a/1.png", "photos/a/2.png", "photos/b/1.png", "photos/b/c/3.jpg"]


def rows_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text, newline="")))


def test_the_answers_are_the_models(vitrail_: Run, model: Path, photos: Path) -> None:
    expected = list(vitrail.Predictor(model).predict_all(NAMES, top=2))
    said = vitrail_("predict", model, photos, "--top", 2, "--format", "jsonl")
    assert (said.code, said.err) == (0, "")
    rows = [json.loads(line) for line in said.out.splitlines()]
    assert [row["file"] for row in rows] == NAMES
    for row, prediction in zip(rows, expected, strict=True):
        assert [each["index"] for each in row["top"]] == [each.index for each in prediction.top]
        assert [each["label"] for each in row["top"]] == [LABELS[each.index] for each in prediction.top]
        shares = [each.probability for each in prediction.top]
        assert [each["probability"] for each in row["top"]] == pytest.approx(shares, abs=2e-6)


def test_a_table_for_one(vitrail_: Run, model: Path, photos: Path) -> None:
    said = vitrail_("predict", model, NAMES[0], "--top", 99)
    assert (said.code, said.err) == (0, "")
    name, *lines = said.out.splitlines()
    assert name == NAMES[0]
    assert sorted(line.split()[2] for line in lines) == sorted(LABELS)
    assert sum(float(line.split("%")[0]) for line in lines) == pytest.approx(100, abs=0.05)


def test_every_format_to_a_file(vitrail_: Run, model: Path, photos: Path) -> None:
    kinds = ["csv", "jsonl", "json", *(["parquet"] if can_parquet() else [])]
    for kind in kinds:
        said = vitrail_("predict", model, photos, "-o", f"new/out.{kind}", "--top", 1)
        assert (said.code, said.err) == (0, "")
        assert said.out.startswith(f"new/out.{kind}: 4 pictures, ")
    assert sorted(os.listdir("new")) == sorted(f"out.{kind}" for kind in kinds)
    found = json.loads(Path("new/out.json").read_text())
    assert [row["file"] for row in found] == NAMES
    assert found == [json.loads(line) for line in Path("new/out.jsonl").read_text().splitlines()]
    rows = rows_of(Path("new/out.csv").read_text())
    answers = [(row["file"], row["top"][0]["label"], str(row["top"][0]["probability"])) for row in found]
    assert answers == [(row["file"], row["label_1"], row["probability_1"]) for row in rows]
    if "parquet" in kinds:
        from pyarrow.parquet import read_table

        table: Any = read_table("new/out.parquet")
        assert [row["label_1"] for row in table.to_pylist()] == [row["label_1"] for row in rows]


def can_parquet() -> bool:
    try:
        import pyarrow  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError:
        return False
    return True


def bomb(path: Path, side: int = 30_000) -> None:
    """A PNG that says it is 30,000×30,000 pixels, in a hundred bytes."""
    chunks = ((b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)), (b"IDAT", zlib.compress(bytes(9))))
    parts = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    ]
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts))


def damage(photos: Path) -> dict[str, str]:
    """Pictures that are none, of every kind, and what is said of each."""
    (photos / "a" / "0.jpg").write_bytes(b"")
    (photos / "a" / "text.png").write_text("no picture")
    bomb(photos / "a" / "vast.png")
    (photos / "b" / "cut.png").write_bytes((photos / "a" / "1.png").read_bytes()[:60])
    (photos / "b" / "gone.jpg").symlink_to("nowhere.jpg")
    (photos / "b" / "loop.jpg").symlink_to("loop.jpg")
    return {
        "a/0.jpg": "",
        "a/text.png": "is no picture; expected",
        "a/vast.png": "too large",
        "b/cut.png": "cannot be read",
        "b/gone.jpg": "does not exist; expected",
        "b/loop.jpg": "cannot be read: Too many levels of symbolic links",
    }


def test_bad_pictures_are_named_and_the_rest_is_done(vitrail_: Run, model: Path, photos: Path) -> None:
    good = rows_of(vitrail_("predict", model, photos, "--format", "csv").out)
    bad = damage(photos)
    Path("empty").mkdir()
    said = vitrail_("predict", model, "empty", photos, "photos/none.png", "no*.jpg", "-o", "out.csv", "--batch", 3)
    assert said.code == 1
    *lines, last = said.err.splitlines()
    assert lines[0].startswith("vitrail: 'empty' holds no pictures; expected")
    assert lines[1].startswith("vitrail: 'no*.jpg' matches nothing; expected")
    assert last == ("vitrail: 7 of 11 pictures and 2 of the places given could not be read; the others are in out.csv")
    rows = rows_of(Path("out.csv").read_text())
    assert [row["file"] for row in rows] == [*sorted([*NAMES, *(f"photos/{name}" for name in bad)]), "photos/none.png"]
    assert [row for row in rows if not row["error"]] == good
    failed = {row["file"]: row["error"] for row in rows if row["error"]}
    assert lines[2:] == [f"vitrail: {error}" for error in failed.values()]
    for name, message in {**bad, "none.png": "does not exist"}.items():
        assert failed[f"photos/{name}"].startswith(f"'photos/{name}' "), failed
        assert message in failed[f"photos/{name}"], failed


@pytest.mark.parametrize("name", ["photos/none.png", "photos/a/text.png", "empty", "no*.jpg"])
def test_nothing_but_bad_pictures(vitrail_: Run, model: Path, photos: Path, name: str) -> None:
    damage(photos)
    Path("empty").mkdir()
    said = vitrail_("predict", model, name)
    assert (said.code, said.out) == (1, "")
    assert said.err.startswith(f"vitrail: '{name}' ")
    assert said.err.count("\n") == (1 if name.endswith("png") else 2)


def test_limits_are_flags(vitrail_: Run, model: Path, photos: Path) -> None:
    for words in (("--max-pixels", 29), ("--max-bytes", 50)):
        said = vitrail_("predict", model, NAMES[0], *words)
        assert said.code == 1
        assert said.err.startswith(f"vitrail: '{NAMES[0]}' ")
        assert vitrail_("predict", model, NAMES[0], words[0], 5000).code == 0


def test_given_twice_is_done_once(vitrail_: Run, model: Path, photos: Path) -> None:
    said = vitrail_("predict", model, NAMES[1], photos, "./photos/a/1.png", "--format", "csv")
    assert (said.code, said.err) == (0, "vitrail: note: 2 of the pictures were given twice; each is done once\n")
    assert [row["file"] for row in rows_of(said.out)] == [NAMES[1], NAMES[0], *NAMES[2:]]


def test_names_that_are_no_text(vitrail_: Run, model: Path, photos: Path) -> None:
    strange = os.fsdecode(b"photos/\xff\n.png")
    Path(NAMES[0]).rename(strange)
    for kind in ("csv", "json", "jsonl"):
        assert vitrail_("predict", model, photos, "-o", f"out.{kind}").code == 0
    text = Path("out.csv").read_bytes()
    assert os.fsencode(strange) in text
    assert json.loads(Path("out.json").read_text())[-1]["file"] == strange
    said = vitrail_("predict", model, photos)
    assert (said.code, said.err) == (0, "")
    assert "photos/\\udcff\\n.png" in said.out


BAD = {
    "": "no pictures; expected at least one",
    "http://example.org/a.jpg": "'http://example.org/a.jpg' is a URL, and URLs are not fetched; expected a file",
    "photos --top 0": "--top 0; expected 1 or more",
    "photos --batch 0": "--batch 0; expected 1 or more",
    "photos --max-bytes 0": "--max-bytes 0; expected 1 or more",
    "photos --merge -1": "--merge -1; expected tokens to merge",
    "photos --format xml": 'Invalid value "xml" for --format.',
    "photos --formt csv": "unknown option '--formt'; did you mean '--format'?",
    "photos --format parquet": "--format parquet to a terminal or a pipe; expected a file",
    "photos -o out.txt": "-o out.txt says no format; expected one of .csv",
    "photos -o photos": "-o photos says no format; expected",
    "photos -o photos --format csv": "photos is a folder; expected the name of a file",
    "photos -o there.csv": "there.csv already exists; expected a new name, or --overwrite to replace it",
    "photos -o half.csv": "half.csv.partial is an unfinished job; expected --resume",
    "photos -o there.csv/out.csv": "cannot make the folder there.csv: ",
    "photos --resume": "--resume without -o; expected -o OUT",
    "photos --overwrite": "--overwrite without -o; expected -o OUT",
    "photos --exact --fast": "--exact beside --fast, which is not exact; expected one of them",
    "photos --exact --engine int8": "--exact beside --engine int8, which is not exact",
    "photos --labels nowhere.txt": "--labels nowhere.txt cannot be read: ",
    "photos --labels there.csv": "0 labels for 3 classes; expected one a class",
}


@pytest.mark.parametrize("words", BAD)
def test_words_that_do_not_fit(
    vitrail_: Run, model: Path, photos: Path, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("there.csv").touch()
    Path("half.csv.partial").mkdir()
    Path("half.csv.partial/job.json").touch()
    monkeypatch.setattr("vitrail.predict.predictor.Predictor.rows", lambda *_: pytest.fail("the model was asked"))
    said = vitrail_("predict", model, *words.split())
    assert (said.code, said.out, said.err.count("\n")) == (2, "", 1), said.err
    assert said.err.startswith(f"vitrail: {BAD[words]}")


def test_a_model_that_is_none(vitrail_: Run, photos: Path) -> None:
    said = vitrail_("predict", "nowhere", photos, "-o", "out.csv")
    assert (said.code, said.out, said.err.count("\n")) == (2, "", 1)
    assert said.err.startswith("vitrail: nowhere does not exist; expected")
    assert not Path("out.csv.partial").exists()


def test_labels_from_a_file(vitrail_: Run, photos: Path, tmp_path: Path) -> None:
    plain = saved_model(tmp_path / "plain", labels=None, classes=3)
    Path("labels.txt").write_text("x\ny\nz\n")
    said = vitrail_("predict", plain, NAMES[0], "--labels", "labels.txt", "--format", "csv", "--top", 3)
    assert {rows_of(said.out)[0][f"label_{n}"] for n in (1, 2, 3)} == {"x", "y", "z"}
    said = vitrail_("predict", plain, NAMES[0], "--format", "csv", "--top", 3)
    assert {rows_of(said.out)[0][f"label_{n}"] for n in (1, 2, 3)} == {""}


# jobs that are ended from outside, in processes of their own


def forked(target: Callable[..., object], *given: object) -> Any:
    """A process that has all imported already."""
    process = multiprocessing.get_context("fork").Process(target=target, args=given)
    process.start()
    return process


def sitting(words: list[str], command: str = "predict") -> None:
    """What a process does until it is ended, with nobody listening."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nowhere, number)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: PTH123, SIM115
    sys.argv = ["vitrail", command, *words]
    main()


def size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def many(folder: Path, count: int) -> list[str]:
    first = picture(folder / "00000.png").read_bytes()
    for number in range(1, count):
        (folder / f"{number:05}.png").write_bytes(first)
    return [str(folder / f"{number:05}.png") for number in range(count)]


def torture(words: list[str], watched: Path, out: Path, kills: int, command: str = "predict") -> int:
    """Kills the job at random moments, mostly after it got on, sometimes while it begins; how often that was in time."""
    chance, killed = random.Random(0), 0
    for attempt in range(kills):
        before, process = size(watched), forked(sitting, words, command)
        while attempt % 5 and process.is_alive() and size(watched) <= before and not out.exists():
            time.sleep(0.001)
        process.join(chance.uniform(0, 0.02))
        process.kill()
        process.join()
        killed += process.exitcode == -signal.SIGKILL
    process = forked(sitting, words, command)
    process.join()
    assert process.exitcode == 0
    return killed


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_killed_at_random_moments_it_is_complete(
    vitrail_: Run, model: Path, photos: Path, tmp_path: Path, kills: int, kind: str
) -> None:
    """20 times here; with --kills as often as you like."""
    if kind == "parquet":
        pytest.importorskip("pyarrow")
        kills = kills // 4
    names, out = many(tmp_path / "many", 100 * kills), tmp_path / f"out.{kind}"
    words = [str(model), str(tmp_path / "many"), "-o", str(out), "--resume", "--top", "1", "--engine", "eager"]
    rows = tmp_path / f"{out.name}.partial" / ("rows.csv" if kind == "csv" else "rows.jsonl")
    assert torture([*words, "--batch", "4"], rows, out, kills) > kills / 2, "the job was over too soon to be killed"
    assert not list(tmp_path.glob("*.partial"))
    whole = vitrail_("predict", model, tmp_path / "many", "-o", f"whole.{kind}", "--top", 1, "--engine", "eager")
    assert whole.code == 0
    if kind == "csv":
        rows = rows_of(out.read_text())
        assert out.read_bytes() == Path("whole.csv").read_bytes()
    else:
        from pyarrow.parquet import read_table

        table: Any = read_table(out)
        rows = table.to_pylist()
    assert [row["file"] for row in rows] == names


def test_interrupted_it_says_how_to_go_on(vitrail_: Run, model: Path, photos: Path, tmp_path: Path) -> None:
    names, words = many(tmp_path / "many", 3000), ["--top", "1", "--batch", "2", "--engine", "eager"]
    command = [sys.executable, "-c", PROGRAM, "predict", str(model), "many", "-o", "out.csv", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and size(tmp_path / "out.csv.partial" / "rows.csv") < 1000:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, ""), err
    assert err == "vitrail: stopped; what is done is in out.csv.partial: the same again with --resume goes on\n"
    done = len((tmp_path / "out.csv.partial" / "rows.csv").read_text().splitlines()) - 1
    said = vitrail_("predict", model, "many", "-o", "out.csv", "--resume", *words)
    assert said.code == 0
    assert said.err == f"vitrail: note: {done} pictures were done before, 0 of which failed; going on\n"
    assert [row["file"] for row in rows_of(Path("out.csv").read_text())] == [
        f"many/{Path(name).name}" for name in names
    ]


def test_resumed_it_is_the_same_job(vitrail_: Run, model: Path, photos: Path, tmp_path: Path) -> None:
    damage(photos)
    assert vitrail_("predict", model, photos, "-o", "whole.csv").code == 1
    words = ("predict", model, photos, "-o", "out.csv", "--resume")
    whole = Path("whole.csv").read_bytes()
    half_done(vitrail_, words, whole[: len(whole) // 2])
    said = vitrail_(*words, "--top", 1)
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith("vitrail: out.csv.partial was begun with top 3, not 1; expected the same to go on")
    other = saved_model(tmp_path / "other")
    for changed, what in (((other, photos), "model"), ((model, Path.cwd() / "photos"), "started in")):
        said = vitrail_("predict", *changed, "-o", "out.csv", "--resume")
        assert (said.code, f"was begun with {what} " in said.err) == (2, True), said.err
    said = vitrail_(*words)
    assert said.code == 1
    assert said.err.endswith("6 of 10 pictures could not be read; the others are in out.csv\n")
    assert Path("out.csv").read_bytes() == whole
    assert vitrail_(*words) == (
        0,
        "out.csv: whole\n",
        "vitrail: note: out.csv is there and whole; nothing to go on with: --overwrite does it anew\n",
    )
    assert vitrail_(*words[:-1], "--overwrite", "--top", 1).code == 1
    assert Path("out.csv").read_bytes() != whole


def half_done(vitrail_: Run, words: Any, rows: bytes) -> None:
    """As a kill would leave it."""
    import vitrail.predict.sinks as sinks

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sinks.RowFile, "finish", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))  # pyright: ignore[reportUnknownLambdaType]
        assert vitrail_(*words).code == 130
    Path("out.csv.partial/rows.csv").write_bytes(rows)


def test_pictures_that_came_meanwhile_are_done_too(vitrail_: Run, model: Path, photos: Path) -> None:
    words = ("predict", model, photos, "-o", "out.csv", "--resume")
    assert vitrail_("predict", model, photos, "-o", "whole.csv").code == 0
    half_done(vitrail_, words, b"".join(Path("whole.csv").read_bytes().splitlines(keepends=True)[:3]))
    picture(photos / "a" / "0.png")
    assert vitrail_(*words).code == 0
    names = [row["file"] for row in rows_of(Path("out.csv").read_text())]
    assert names == [*NAMES[:2], "photos/a/0.png", *NAMES[2:]]


def test_a_full_disk(model: Path, photos: Path, tmp_path: Path, vitrail_: Run) -> None:
    names = many(tmp_path / "many", 200)
    command = [sys.executable, "-c", PROGRAM, "predict", str(model), str(tmp_path / "many"), "-o", "out.csv"]

    def small() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))

    done = subprocess.run(
        [*command, "--engine", "eager"], capture_output=True, text=True, check=False, preexec_fn=small
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "vitrail: out.csv cannot be written: File too large; "
        "what is done is kept: make room for it, then the same again with --resume\n"
    )
    assert size(tmp_path / "out.csv.partial" / "rows.csv") == 3000
    said = vitrail_(*command[3:], "--engine", "eager", "--resume")
    assert said.code == 0
    assert [row["file"] for row in rows_of(Path("out.csv").read_text())] == names


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is full")
def test_a_full_disk_behind_stdout(model: Path, photos: Path) -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-c", PROGRAM, "predict", str(model), "photos", "--format", "csv"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "vitrail: the output cannot be written: No space left on device\n")


def test_nobody_reads_on(model: Path, photos: Path, tmp_path: Path) -> None:
    """As with `| head -2`: it ends at once, and without a word."""
    many(tmp_path / "many", 3000)
    command = [sys.executable, "-c", PROGRAM, "predict", str(model), "many", "--format", "jsonl", "--top", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        first = process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 0
    assert json.loads(first)["file"] == "many/00000.png"


def test_bytes_on_standard_input(model: Path, photos: Path, vitrail_: Run) -> None:
    command = [sys.executable, "-c", PROGRAM, "predict", str(model), "-", "--format", "csv"]
    done = subprocess.run(command, input=Path(NAMES[0]).read_bytes(), capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    said = vitrail_("predict", model, NAMES[0], "--format", "csv")
    assert done.stdout.decode() == said.out.replace(NAMES[0], "-")
    done = subprocess.run(command, input=b"", capture_output=True, check=False)
    assert (done.returncode, done.stdout.count(b"\n")) == (1, 1)
    assert done.stderr.count(b"\n") == 1
