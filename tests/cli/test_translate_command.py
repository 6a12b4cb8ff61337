"""vitrail train, translate and eval on sentence pairs: results, files that resume, and wrong calls in one line each."""

import csv
import gzip
import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.command_processes import kill_process, start_command, wait_for_exit, wait_until
from support.toy_translation import make_pairs, make_tokenizer, write_text_model

import vitrail
from vitrail.base.errors import format_install_command
from vitrail.predict.output.partial_folder import PartialFolder
from vitrail.predict.text_rows import TranslationRows, list_sentences

Run = Callable[..., Any]
MODEL_FIELDS = ("width=16", "encoder_depth=1", "decoder_depth=1", "heads=2", "mlp_width=32")
SMALL = [word for each in MODEL_FIELDS for word in ("--set", each)]
TEXTS = list(make_pairs().val.sources)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights and 40 positions; do not modify it."""
    return write_text_model(tmp_path_factory.mktemp("models") / "model", length=40)


def write_pairs(folder: Path, train: int = 80, val: int = 8) -> Path:
    """Folder with digits.ab, the source, and digits.xy; a test set, too."""
    folder.mkdir()
    for part, pairs in (("train", make_pairs().train), ("val", make_pairs().val), ("test_toy", make_pairs().val)):
        rows = train if part == "train" else val
        (folder / f"{part}.ab").write_text("".join(f"{each}\n" for each in pairs.sources[:rows]))
        with gzip.open(folder / f"{part}.xy.gz", "wt") as file:
            file.writelines(f"{each}\n" for each in pairs.targets[:rows])
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two epochs, started by the command; do not modify it."""
    folder = tmp_path_factory.mktemp("runs")
    pairs = write_pairs(folder / "pairs")
    options = ["--recipe", "reversal", "--epochs", "2", "--batch", "20", "--vocabulary", "30", "--bleu-sentences", "3"]
    words = ["train", "--data", pairs, "--pair", "ab-xy", "-o", folder / "run", "--save-every", "1", *options, *SMALL]
    assert wait_for_exit(start_command(words)) == 0
    return folder / "run"


def test_a_run_has_its_model_tokenizer_and_languages(vitrail_: Run, run: Path) -> None:
    about = vitrail.describe(run / "model")
    assert about.languages == ("ab", "xy")
    assert (run / "model" / "tokenizer.json").is_file()
    plan = json.loads((run / "run.json").read_text())
    assert plan["request"]["pair"] == "ab-xy"
    assert plan["data"]["languages"] == ["ab", "xy"]
    assert plan["task"]["metrics"][0]["name"] == "perplexity"
    listed = vitrail_("runs", run)
    assert "perplexity" in listed.out
    assert vitrail_("runs", run, "--json").code == 0
    result = vitrail_("train", "--resume", run)
    assert "is finished; evaluate it with: vitrail eval" in result.out


def test_the_log_of_a_resumed_command_is_the_same(vitrail_: Run, run: Path, tmp_path: Path) -> None:
    plan = json.loads((run / "run.json").read_text())
    copy = tmp_path / "run"
    (copy / "checkpoints").mkdir(parents=True)
    first = min((run / "checkpoints").glob("*.safetensors"))
    (copy / "checkpoints" / first.name).write_bytes(first.read_bytes())
    (copy / "run.json").write_bytes((run / "run.json").read_bytes())
    (copy / "log.jsonl").write_bytes((run / "log.jsonl").read_bytes())
    result = vitrail_("train", "--resume", copy, "--threads", plan["threads"])
    assert result.code == 0, result.err
    assert f"model  {copy}/model: vitrail translate {copy} " in result.out
    one, two = (vitrail.load(folder / "model").state_dict() for folder in (run, copy))
    assert all((one[name] == two[name]).all() for name in one)


def test_init_continues_with_the_same_tokenizer(vitrail_: Run, run: Path, tmp_path: Path) -> None:
    pairs = write_pairs(tmp_path / "pairs")
    words = ("--data", pairs, "--pair", "xy-ab", "--init", run, "--epochs", "0.5", "--batch", "20", "--dropout", "0.1")
    result = vitrail_("train", *words, "-o", tmp_path / "two")
    assert result.code == 0, result.err
    assert f"from {run}" in result.out
    before, after = (folder / "model" / "tokenizer.json" for folder in (run, tmp_path / "two"))
    assert before.read_bytes() == after.read_bytes()
    assert vitrail.describe(tmp_path / "two" / "model").languages == ("xy", "ab")


def test_eval_prints_bleu_with_its_signature(vitrail_: Run, run: Path, tmp_path: Path) -> None:
    result = vitrail_("eval", run, "--beam", "2")
    assert result.code == 0, result.err
    bleu, chrf, rest = result.out.splitlines()
    assert bleu.split()[0] == "BLEU"
    assert "tok:13a|smooth:exp|version:" in bleu
    assert chrf.split()[0] == "chrF2"
    assert rest.startswith("perplexity ")
    assert "8 sentences of val, beam 2" in rest
    assert "evaluated on val; pairs also has test_toy: choose one with --part" in result.err
    words = ("--data", run.parent / "pairs", "--part", "test_toy", "--out", tmp_path / "out", "--json")
    report = json.loads(vitrail_("eval", run, *words).out)
    assert (report["part"], report["sentences"], report["search"]["beam"]) == ("test_toy", 8, 4)
    assert {"bleu", "chrf", "perplexity", "exact_match", "sentences_per_second", "bleu_signature"} <= report.keys()
    assert json.loads((tmp_path / "out" / "evaluation.json").read_text()) == report
    rows = [line.split("\t") for line in (tmp_path / "out" / "translations.tsv").read_text().splitlines()]
    assert rows[0] == ["source", "reference", "translation"]
    assert [row[0] for row in rows[1:]] == TEXTS[:8]


def test_eval_of_other_data_uses_all_pairs(vitrail_: Run, saved: Path, tmp_path: Path) -> None:
    table = tmp_path / "pairs.tsv"
    table.write_text("".join(f"{text}\t{text}\n" for text in TEXTS))
    result = vitrail_("eval", saved, "--data", table, "--beam", "1", "--json")
    assert result.code == 0, result.err
    assert json.loads(result.out)["sentences"] == len(TEXTS)


def test_translations_are_printed(vitrail_: Run, saved: Path, tmp_path: Path) -> None:
    expected = vitrail.Translator(saved).translate(TEXTS[:2], beam=3, n_best=3)
    result = vitrail_("translate", saved, *TEXTS[:2], "--beam", "3")
    assert (result.code, result.out.splitlines()) == (0, [each.text for each in expected])
    ranked = vitrail_("translate", saved, TEXTS[0], "--beam", "3", "--n-best", "3").out.splitlines()
    assert [line.split(maxsplit=1)[1] for line in ranked] == [
        each.text for each in (expected[0], *expected[0].alternatives)
    ]
    rows = vitrail_("translate", saved, TEXTS[0], "--beam", "3", "--n-best", "2", "--format", "jsonl").out
    record = json.loads(rows)
    assert (record["file"], record["line"], record["source"]) == ("text", 1, TEXTS[0])
    assert [each["text"] for each in record["translations"]] == [expected[0].text, expected[0].alternatives[0].text]
    drawn = vitrail_("translate", saved, TEXTS[0], "--temperature", "2", "--seed", "3")
    assert drawn.code == 0


def test_standard_input(vitrail_: Run, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("\n".join([*TEXTS[:2], ""]).encode())))
    result = vitrail_("translate", saved, "-", "--beam", "1")
    expected = vitrail.Translator(saved).translate(TEXTS[:2], beam=1)
    assert result.out.splitlines() == [each.text for each in expected]


@pytest.mark.parametrize("kind", ["csv", "tsv"])
def test_a_table_has_no_formulas(kind: Any) -> None:
    found = [{"text": "=cmd|' /C calc'!A0", "score": -1.5}]
    layout = TranslationRows(model="m", inputs=(), format=kind).make_layout(None)
    row = layout.format_record({"source": "\t+1 =x", "translations": found, "error": "@a"})
    fields = next(csv.reader([row], delimiter="," if kind == "csv" else "\t"))
    assert fields[1:] == ["'=cmd|' /C calc'!A0", "-1.5", "'@a"]
    assert fields[0].startswith("'" if kind == "csv" else " ")


def test_files_of_every_format(vitrail_: Run, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty line stays empty, so that line n is the translation of line n."""
    monkeypatch.chdir(tmp_path)
    texts = [TEXTS[0], "", TEXTS[1]]
    Path("in.txt").write_text("".join(f"{each}\n" for each in texts))
    expected = [each.text for each in vitrail.Translator(saved).translate(texts, beam=2)]
    result = vitrail_("translate", saved, "in.txt", "--beam", "2", "-o", "out.txt")
    assert result.out.startswith("out.txt: 3 sentences, ")
    assert Path("out.txt").read_text().split("\n") == [*expected, ""]
    for kind in ("csv", "tsv", "jsonl"):
        assert vitrail_("translate", saved, "in.txt", "--beam", "2", "--n-best", "2", "-o", f"out.{kind}").code == 0
    for kind, separator in (("csv", ","), ("tsv", "\t")):
        rows = list(csv.DictReader(io.StringIO(Path(f"out.{kind}").read_text()), delimiter=separator))
        assert [row["source"] for row in rows] == texts
        assert [row["text_1"] for row in rows] == expected
        assert {*rows[0]} == {"source", "text_1", "score_1", "text_2", "score_2", "error"}
    records = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    assert [(each["file"], each["line"]) for each in records] == [("in.txt", 1), ("in.txt", 2), ("in.txt", 3)]
    assert not list(Path().glob("*.partial"))
    again = vitrail_("translate", saved, "in.txt", "-o", "out.txt")
    assert again.err == "vitrail: out.txt already exists; use --overwrite to replace it, or choose another name\n"


@pytest.mark.timeout(600)
def test_a_killed_job_gives_the_same_file_after_resuming(vitrail_: Run, saved: Path, tmp_path: Path) -> None:
    texts = [text for _ in range(20) for text in TEXTS]
    source, out, plain = tmp_path / "in.txt", tmp_path / "out.csv", tmp_path / "plain.csv"
    source.write_text("".join(f"{each}\n" for each in texts))
    words = ["translate", saved, source, "--beam", "1", "--batch", "2", "-o"]
    rows = tmp_path / "out.csv.partial" / "rows.jsonl"
    killed = 0
    for size in (1, 15_000):
        process = start_command([*words, out, "--resume"])
        wait_until(process, lambda size=size: (rows.exists() and rows.stat().st_size > size) or out.exists())
        killed += kill_process(process, 0.0)
    assert killed >= 1
    resumed = vitrail_(*words, out, "--resume")
    assert resumed.code == 0, resumed.err
    done = int(re.findall(r"resuming: ([\d,]+) sentences? done", resumed.err)[0].replace(",", ""))
    assert f": {len(texts):,} sentences, {len(texts) - done:,} of them now in " in resumed.out
    assert vitrail_(*words, plain).code == 0
    assert out.read_bytes() == plain.read_bytes()
    complete = vitrail_(*words, out, "--resume")
    assert "is already complete" in complete.err


def test_a_job_resumes_only_with_the_same_settings(vitrail_: Run, saved: Path, tmp_path: Path) -> None:
    source, out = tmp_path / "in.txt", tmp_path / "out.txt"
    source.write_text(f"{TEXTS[0]}\n")
    partial = PartialFolder(out, {})
    partial.open_job({"model": str(saved), "beam": 3}, resume=False)
    partial.close()
    result = vitrail_("translate", saved, source, "-o", out, "--resume")
    assert result.code == 2
    assert "cannot resume" in result.err
    assert "Use the same settings, or --overwrite to start over." in result.err


def test_long_sentences_and_unknown_characters(vitrail_: Run, saved: Path, tmp_path: Path) -> None:
    long = " ".join("1" * 60)
    error = "sentence {} has 61 tokens; expected at most 40, the positions of the model: split it\n"
    assert vitrail_("translate", saved, long).err == f"vitrail: {error.format(1)}"
    result = vitrail_("translate", saved, TEXTS[0], long, "1 猫 2", "--beam", "1", "-o", tmp_path / "out.jsonl")
    assert result.code == 2
    assert result.err.splitlines() == [
        f"vitrail: {error.format(2)}".strip(),
        "vitrail: note: 1 unknown token in 1 sentence, for example '猫': the tokenizer was trained without these "
        "characters",
        f"vitrail: 1 of 3 sentences could not be translated; the results of the others are in {tmp_path / 'out.jsonl'}",
    ]
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert ["error" in each for each in records] == [False, True, False]


def test_convert_keeps_tokenizer_and_languages(vitrail_: Run, run: Path, tmp_path: Path) -> None:
    assert vitrail_("convert", run, tmp_path / "half", "--to", "vitrail", "--dtype", "float16").code == 0
    assert vitrail.describe(tmp_path / "half").languages == ("ab", "xy")
    assert vitrail.Translator(tmp_path / "half").languages == ("ab", "xy")


def check_one_line(result: Any, *parts: str) -> None:
    assert result.code == 2, result
    assert result.err.count("\n") == 1, result.err
    for part in parts:
        assert part in result.err


def test_wrong_models_are_one_line(vitrail_: Run, saved: Path, tmp_path: Path) -> None:
    check_one_line(
        vitrail_("translate", "vit_fashion", "Hallo"),
        "vit_fashion reads images; expected a model that reads text: use vitrail predict",
    )
    for words in (("predict", saved, "example:cat"), ("explain", saved, "example:cat"), ("train", "--init", saved)):
        check_one_line(vitrail_(*words), "reads text; expected a model that reads images")
    check_one_line(vitrail_("translate", saved / "nothing", "Hallo"), "nothing")
    broken = write_text_model(tmp_path / "model")
    (broken / "tokenizer.json").unlink()
    check_one_line(vitrail_("translate", broken, "1"), "tokenizer.json is missing; expected the tokenizer")
    check_one_line(vitrail_("translate", "example:cat", saved), "example:cat is an image")


def test_wrong_options_are_one_line(vitrail_: Run, saved: Path, tmp_path: Path) -> None:
    check_one_line(vitrail_("translate", saved), "translate needs TEXT")
    check_one_line(vitrail_("translate", saved, "in.txt"), "in.txt does not exist; expected a file with one sentence")
    check_one_line(vitrail_("translate", saved, "a", "--beem", "3"), "Unknown option --beem. Did you mean --beam?")
    check_one_line(vitrail_("translate", saved, "1", "--n-best", "9"), "--n-best is 9; expected at most --beam, 4")
    check_one_line(vitrail_("translate", saved, "1", "--resume"), "--resume needs -o OUT")
    check_one_line(
        vitrail_("translate", saved, "1", "--n-best", "2", "-o", tmp_path / "out.txt"), "--n-best 2 for a text file"
    )
    check_one_line(vitrail_("translate", saved, "1", "-o", tmp_path / "out.xml"), "none of the suffixes .txt, .jsonl")
    check_one_line(vitrail_("translate", saved, " "), "there are no sentences")
    check_one_line(vitrail_("eval", saved, "--head", "class"), "--head does not apply, since")
    check_one_line(vitrail_("eval", "vit_fashion", "--data", "fashion", "--part", "val"), "--part does not apply")
    check_one_line(vitrail_("eval", saved), "no --data, and", "is not a run")
    check_one_line(vitrail_("eval", saved, "--data", "reversal", "--part", "vall"), "did you mean 'val'?")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("sentences.de", "sentences.de does not exist; expected a file .*: did you mean 'sentence.de'[?]"),
        ("texts/sentence", "texts/sentence does not exist; expected a file"),
        ("./two words", "./two words does not exist; expected a file .*: did you mean './two_words'[?]"),
        ("two words.TXT", "two words.TXT does not exist"),
        (
            "two_words",
            "'two_words' is also a file or folder; write './two_words' to read it, or pass the text through -",
        ),
        ("z.B", "z.B does not exist; .* or - for a word from standard input"),
    ],
)
def test_a_mistyped_file_is_not_a_sentence(
    given: str, expected: str, vitrail_: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("sentence.de", "two_words"):
        Path(name).write_text("1 2\n")
    done = vitrail_("translate", "transformer_tatoeba", given, "-o", "out.txt")
    assert (done.code, done.out, len(done.err.splitlines())) == (2, "", 1), done
    assert re.search(expected, done.err)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sentence.de", "two_words"]


def test_what_has_spaces_or_neither_suffix_nor_slash_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my words").write_text("a\nb\n")
    texts = ["Hund", "Hund.", "z.B.", "3.14", "Das ist booking.com", "und/oder ja", "wie ... ", "a\nb"]
    assert [each.text for each in list_sentences(texts)] == [" ".join(each.split()) for each in texts]
    assert [each.text for each in list_sentences(["./my words"])] == ["a", "b"]


def test_wrong_pairs_are_one_line(vitrail_: Run, tmp_path: Path) -> None:
    pairs = write_pairs(tmp_path / "pairs")
    train = ("train", "--data", pairs, "--batch", "20", *SMALL)
    check_one_line(vitrail_(*train, "--pair", "ab-ab"), "ab")
    check_one_line(vitrail_(*train, "--pair", "ab-cd"), "cd")
    check_one_line(vitrail_(*train, "--pair", "ab-xy", "--flip", "0.5"), "--flip changes images, but pairs has sent")
    check_one_line(vitrail_(*train, "--model", "ViT-Ti/16"), "ViT-Ti/16 is a ViT, which reads images; expected a model")
    check_one_line(vitrail_(*train, "--tokenizer", "words"), "--tokenizer is 'words'; expected bpe, wordpiece")
    check_one_line(vitrail_("train", "--batch-tokens", "5"), "--batch-tokens is not a setting of classification")
    check_one_line(vitrail_("train", "--pair", "de-en", "--recipe", "fashion"), "--pair de-en is for sentence pairs")
    with (pairs / "train.ab").open("a") as file:
        file.write("1 2 3\n")
    check_one_line(vitrail_(*train), "has 81 lines and train.xy.gz 80; expected the same number")


def test_missing_packages_are_the_command_to_install_them(
    vitrail_: Run, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tokenizer()
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics", None)
    check_one_line(
        vitrail_("eval", saved, "--data", "reversal"), "BLEU needs sacrebleu", format_install_command("text")
    )
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    check_one_line(vitrail_("translate", saved, "1 2"), "tokenizers, which is not installed", "[text]")
    check_one_line(vitrail_("train", "--data", "tatoeba"), "tokenizers, which is not installed", "[text]")
