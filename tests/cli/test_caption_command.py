"""vitrail caption, and vitrail train and eval for captions, on the command line."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.toy_captions import write_toy_captioner

import vitrail
from vitrail.data.captions.collages import CollageImages
from vitrail.predict.output.row_files import RowFile

Run = Callable[..., Any]
TOY = ("--set", "width=16", "--set", "depth=1", "--set", "heads=2", "--set", "mlp_width=32", "--set", "patch_size=14")
TOY_DECODER = ("--decoder-width", 16, "--decoder-depth", 1, "--decoder-heads", 2, "--decoder-mlp-width", 32)
ONE_STEP = ("--epochs", 0.004, "--scored-images", 4, "--threads", 1)


@pytest.fixture(scope="module")
def captioner(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy_captioner(tmp_path_factory.mktemp("captioner") / "model")


@pytest.fixture
def collages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three collages with captions, in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VITRAIL_HOME", str(tmp_path / "home"))
    folder, images = Path("photos"), CollageImages("val", count=3)
    folder.mkdir()
    for index in range(3):
        Image.fromarray(images.source(index)[..., 0]).save(folder / f"{index}.png")
    rows = [f"{index}.png\t{images.collage(index).sentence}\n" for index in range(3)]
    (folder / "captions.tsv").write_text("".join(rows))
    return folder


def test_a_caption_per_image_is_printed(vitrail_: Run, captioner: Path, collages: Path) -> None:
    result = vitrail_("caption", captioner, collages, "--length", 4)
    assert (result.code, result.err) == (0, "")
    expected = [
        f"photos/{index}.png: {vitrail.Captioner(captioner).caption(collages / f'{index}.png', length=4).text}"
        for index in range(3)
    ]
    assert [line.rstrip() for line in result.out.splitlines()] == [line.rstrip() for line in expected]


def test_json_has_captions_with_scores_and_alternatives(vitrail_: Run, captioner: Path, collages: Path) -> None:
    result = vitrail_("caption", captioner, collages / "0.png", "--n-best", 2, "--length", 4, "--json")
    (found,) = json.loads(result.out)
    assert found["file"] == "photos/0.png"
    assert len(found["alternatives"]) == 1
    assert found["score"] >= found["alternatives"][0]["score"]
    lines = vitrail_("caption", captioner, collages / "0.png", "--n-best", 2, "--length", 4).out.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith(f"photos/0.png: {found['score']:7.3f}  ")


def test_figures_and_arrays_are_written(vitrail_: Run, captioner: Path, collages: Path) -> None:
    words = ("caption", captioner, collages, "--length", 4, "-o", "words", "--arrays", "--svg", "--layer", 0)
    result = vitrail_(*words)
    assert result.code == 0
    for index in range(3):
        assert f"words/{index}.words.png, words/{index}.words.svg, words/{index}.words.npz" in result.out
        arrays = np.load(f"words/{index}.words.npz")
        assert arrays["attention"].shape[1:] == (2, 2, 4, 4)
        assert len(arrays["words"]) == len(arrays["maps"])
    again = vitrail_(*words)
    assert (again.code, again.err.count("\n")) == (2, 1)
    assert "already exists; use --overwrite to replace it" in again.err
    assert vitrail_(*words, "--overwrite").code == 0


def test_explain_draws_the_same_figures(vitrail_: Run, captioner: Path, collages: Path) -> None:
    assert vitrail_("caption", captioner, collages, "--beam", 2, "-o", "words", "--arrays", "--layer", 0).code == 0
    result = vitrail_("explain", captioner, collages, "--beam", 2, "-o", "explained", "--arrays", "--layer", 0)
    assert (result.code, result.out.count("\n")) == (0, 3), result.err
    assert "photos/0.png: " in result.out
    for name in ("words", "maps"):
        one, other = (np.load(f"{folder}/0.words.npz")[name] for folder in ("words", "explained"))
        assert np.array_equal(one, other)
    assert vitrail_("explain", captioner, collages / "0.png", "-o", "why.html").code == 0
    assert "0.png: " in Path("why.html").read_text()
    report = json.loads(vitrail_("explain", captioner, collages / "0.png", "-o", "one", "--json").out)
    assert [*report[0]][:2] == ["file", "caption"]
    result = vitrail_("explain", captioner, collages, "--method", "pca")
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert "--method does not apply, since" in result.err


def test_captions_in_files_of_every_format(vitrail_: Run, captioner: Path, collages: Path) -> None:
    (collages / "bad.png").write_bytes(b"not an image")
    words = ("caption", captioner, collages, "--length", 4, "-o")
    for kind in ("jsonl", "csv", "tsv"):
        result = vitrail_(*words, f"out.{kind}", "--n-best", 2)
        assert (result.code, result.out.startswith(f"out.{kind}: 4 images, ")) == (2, True)
        assert result.err.endswith(f"1 of 4 images could not be read; the results of the others are in out.{kind}\n")
    assert vitrail_(*words, "out.txt").code == 2
    records = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    names = [*(f"photos/{index}.png" for index in range(3)), "photos/bad.png"]
    assert [each["file"] for each in records] == names
    assert ["error" in each for each in records] == [False, False, False, True]
    assert Path("out.txt").read_text().split("\n") == [*(each.get("caption", "") for each in records), ""]
    for kind, separator in (("csv", ","), ("tsv", "\t")):
        with Path(f"out.{kind}").open() as file:
            rows = list(csv.DictReader(file, delimiter=separator))
        assert [row["file"] for row in rows] == names
        assert {*rows[0]} == {"file", "caption_1", "score_1", "caption_2", "score_2", "error"}
        assert [row["caption_2"] for row in rows[:3]] == [each["alternatives"][0]["caption"] for each in records[:3]]
        assert "not an image" in rows[3]["error"]
    assert not list(Path().glob("*.partial"))


@pytest.mark.parametrize("options", [("--beam", 2), ("--temperature", 2, "--seed", 3)])
def test_captions_are_the_same_after_resuming(
    vitrail_: Run, captioner: Path, collages: Path, options: tuple[object, ...]
) -> None:
    words = ("caption", captioner, collages, "--length", 4, "--batch", 2, *options, "-o")
    assert vitrail_(*words, "whole.csv").code == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RowFile, "finish", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))  # pyright: ignore[reportUnknownLambdaType]
        assert vitrail_(*words, "out.csv").code == 130
    rows = Path("out.csv.partial/rows.jsonl")
    rows.write_bytes(rows.read_bytes().splitlines(keepends=True)[0] + b'{"file": "pho')
    result = vitrail_(*words, "out.csv", "--resume")
    assert "resuming: 1 image done, of which 0 could not be read" in result.err
    assert "3 images, 2 of them now in" in result.out
    assert Path("out.csv").read_bytes() == Path("whole.csv").read_bytes()
    assert vitrail_(*words, "out.csv", "--resume").out == "out.csv: complete\n"


def test_an_unreadable_image_is_reported_and_skipped(vitrail_: Run, captioner: Path, collages: Path) -> None:
    (collages / "bad.png").write_bytes(b"not an image")
    result = vitrail_("caption", captioner, collages, "--length", 4)
    assert result.code == 2
    assert len(result.out.splitlines()) == 3
    assert "bad.png" in result.err
    assert result.err.endswith("1 of 4 images could not be read\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("vit_fashion", "photos"),
            "vit_fashion reads images; expected a model that describes images",
        ),
        (("MODEL", "nothing.png"), "nothing.png"),
        (("MODEL", "photos", "--layer", 0), "--layer needs -o OUT, the folder for the figures"),
        (("MODEL", "photos", "--layer", 9, "-o", "out"), "--layer is 9; expected 0 to 1, the layers of the decoder"),
        (("MODEL", "photos", "--svg", "-o", "out.csv"), "--svg needs -o OUT, the folder for the figures"),
        (("MODEL", "photos", "--resume"), "--resume needs -o OUT, the file with the results"),
        (("MODEL", "photos", "--resume", "-o", "out"), "--resume with the figures of out; expected a file of captions"),
        (("MODEL", "photos", "--json", "-o", "out.csv"), "--json with -o out.csv; expected one of them"),
        (("MODEL", "photos", "--n-best", 2, "-o", "out.txt"), "--n-best 2 for a text file"),
        (("MODEL", "photos", "--n-best", 9), "--n-best is 9; expected at most --beam, 4"),
        (("MODEL", "photos", "--beam", 0), "beam"),
    ],
)
def test_wrong_calls_are_one_line(
    vitrail_: Run, captioner: Path, collages: Path, words: tuple[object, ...], message: str
) -> None:
    assert collages.exists()
    result = vitrail_("caption", *(captioner if word == "MODEL" else word for word in words))
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert message in result.err


def test_captioners_are_refused_by_other_commands(vitrail_: Run, captioner: Path, collages: Path) -> None:
    for command in (("predict",), ("embed", "-o", "f.npy")):
        result = vitrail_(command[0], captioner, collages, *command[1:])
        assert (result.code, result.err.count("\n")) == (2, 1), result.err
        assert "describes images; expected a model that reads images: use vitrail caption" in result.err
    assert vitrail_("embed", captioner / "encoder", collages, "-o", "f.npy").code == 0
    result = vitrail_("translate", captioner, "Ein Hund")
    assert (result.code, result.err.count("\n")) == (2, 1)
    result = vitrail_("caption", captioner / "decoder", collages)
    assert "reads text; expected a model that describes images: use vitrail translate" in result.err


def test_train_caption_and_evaluate_collages(vitrail_: Run, collages: Path) -> None:
    result = vitrail_("train", "--task", "caption", "-o", "run", *TOY, *TOY_DECODER, *ONE_STEP)
    assert result.code == 0, result.err
    assert "data   collages: 20,000 training captions, 1,000 validation captions" in result.out
    assert 'vitrail caption run photo.jpg, vitrail eval run, or in Python vitrail.Captioner("run")' in result.out
    assert vitrail_("caption", "run", collages).code == 0
    result = vitrail_("eval", "run", "--beam", 1, "--out", "results", "--json")
    report = json.loads(result.out)
    assert (report["data"], report["part"], report["images"]) == ("collages", "collages (test)", 1000)
    assert {"exact", "bleu", "bleu_signature", "nouns"} <= report.keys()
    assert report["nouns"]["count"] == 2000
    assert sorted(path.name for path in Path("results").iterdir()) == ["captions.tsv", "evaluation.json"]
    assert len(Path("results/captions.tsv").read_text().splitlines()) == 1001
    assert "run  " in vitrail_("runs", ".").out
    resumed = vitrail_("train", "--resume", "run")
    assert "run is finished; evaluate it with: vitrail eval run" in resumed.out


def test_train_on_a_folder_with_a_frozen_encoder(vitrail_: Run, collages: Path) -> None:
    words = ("train", "--data", collages, "--init", "vit_fashion", "--batch", 2, "--val-share", 0.4, "-o", "run")
    few = ("--epochs", 2, "--vocabulary", 40, "--threads", 1)
    result = vitrail_(*words, *TOY_DECODER, *few)
    assert result.code == 0, result.err
    assert "recipe caption:" in result.out
    assert "frozen encoder of" in result.out
    assert len([*Path("home/features").iterdir()]) == 2
    text = vitrail_("eval", "run").out
    assert text.startswith("photos (val): 1 image, beam 4\nexact match  ")
    assert "BLEU-4" in text
    assert "attention" not in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--task", "caption", "--data", "empty"), "empty has no captions; expected 'collages', or a folder of images"),
        (("--task", "caption", "--data", "photos"), "no model is named; use --init to fine-tune one"),
        (("--task", "caption", "--recipe", "fashion"), "--task caption, but the recipe fashion is for classification"),
        (("--freeze-encoder",), "--freeze-encoder is not a setting of classification, which the recipe fashion is for"),
        (
            ("--task", "caption", "--model", "transformer_tiny"),
            "Transformer reads text; expected a model that reads images",
        ),
        (("--task", "caption", "--decoder", "vit_tiny_patch16_224"), "reads images; expected a model that reads text"),
        (("--task", "caption", "--tokenizer", "none.json"), "--tokenizer is 'none.json'; expected bpe, wordpiece, or"),
    ],
)
def test_wrong_training_is_one_line(vitrail_: Run, collages: Path, words: tuple[str, ...], message: str) -> None:
    (collages.parent / "empty").mkdir()
    result = vitrail_("train", *words, "-o", "run")
    assert (result.code, result.err.count("\n")) == (2, 1), result.err
    assert message in result.err
    assert not Path("run").exists()


def test_options_of_other_models_are_refused_in_an_evaluation(vitrail_: Run, captioner: Path) -> None:
    for option, value in (("--pair", "de-en"), ("--head", "class"), ("--image-size", 28)):
        result = vitrail_("eval", captioner, "--data", "collages", option, value)
        assert (result.code, result.err.count("\n")) == (2, 1)
        assert f"{option} does not apply, since" in result.err
    result = vitrail_("eval", captioner)
    assert "does not say what it was trained on; expected --data" in result.err
