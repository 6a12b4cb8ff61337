"""A Transformer runs in CTranslate2 with the same tokens as in torch, or its export does not appear."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.toy_translators import SENTENCES, make_translator, train_toy_tokenizer

from vitrail.base.errors import CheckpointError, ConfigError
from vitrail.export import ctranslate2_export
from vitrail.export.ctranslate2_export import (
    TranslationCheck,
    compare_translations,
    export_to_ctranslate2,
    find_exportable_parts,
    make_check_rows,
    run_exported,
    translate_greedily,
)
from vitrail.inspection.file_inspection import verify_checksums
from vitrail.opening import Opened
from vitrail.predict.search.settings import SearchSettings

CASES: dict[str, dict[str, Any]] = {
    "pre-norm": {},
    "post-norm": {"norm": "post"},
    "learned positions": {"positions": "learned", "length": 60},
    "gelu": {"activation": "gelu"},
    "dot": {"score": "dot"},
    "free width of heads": {"key_width": 5, "value_width": 5},
    "no attention bias": {"attention_bias": False},
    "shared tables": {"share": "all", "output_bias": False},
}
FILES = {"model.bin", "config.json", "shared_vocabulary.json", "tokenizer.json"}


def make(**fields: Any) -> Opened:
    """With separate tables and an output bias, random weights write different texts."""
    pytest.importorskip("ctranslate2", reason="needs the extra `ctranslate2`")
    given: dict[str, Any] = {"share": "none", "output_bias": True, **fields}
    return make_translator(**given)


def export(loaded: Opened, folder: Path, **options: Any) -> TranslationCheck:
    return export_to_ctranslate2(loaded.model, loaded.tokenizer, folder, languages=loaded.languages, **options)


@pytest.mark.parametrize("case", CASES)
def test_tokens_equal_those_of_torch(case: str, tmp_path: Path) -> None:
    loaded = make(**CASES[case])
    checked = export(loaded, tmp_path / "out")
    assert str(checked) == "matches torch on 50 of 50 sentences"
    assert {path.name for path in (tmp_path / "out").iterdir()} == FILES
    rows = loaded.tokenizer.encode(SENTENCES)
    ours = SearchSettings(beam=1, length=50).run(loaded.model, loaded.tokenizer, rows, range(len(rows)))
    expected = [each.tokens for (each,) in ours]
    assert translate_greedily(loaded.model, loaded.tokenizer, rows) == expected
    assert run_exported(tmp_path / "out", loaded.tokenizer, rows, None) == expected
    assert case == "shared tables" or len(set(expected)) > 2


@pytest.mark.parametrize("kind", ["bpe", "wordpiece"])
def test_the_folder_runs_without_vitrail_and_torch(kind: str, tmp_path: Path) -> None:
    """By the program in the docstring of the module, in a new process."""
    loaded = make(kind=kind)
    export(loaded, tmp_path / "exported")
    text = (ctranslate2_export.__doc__ or "").partition("import ctranslate2")[2]
    program = "import ctranslate2" + text.replace("\n    ", "\n").replace("beam_size=4", "beam_size=1")
    program = program.replace("Ein Hund läuft.", SENTENCES[0]).replace("beam_size=1", "beam_size=1, max_input_length=0")
    program += "\nimport sys; assert not {'torch', 'vitrail'} & set(sys.modules)"
    done = subprocess.run(
        [sys.executable, "-X", "utf8", "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    rows = loaded.tokenizer.encode(SENTENCES[:1])
    ((expected,),) = SearchSettings(beam=1, length=256).run(loaded.model, loaded.tokenizer, rows, [0])
    assert done.stdout == f"{loaded.tokenizer.decode(expected.tokens)}\n", done.stderr


def test_padding_and_start_are_never_written(tmp_path: Path) -> None:
    loaded = make()
    bias = loaded.model.get_parameter("output.bias").data
    bias[[loaded.tokenizer.pad, loaded.tokenizer.start]] = 50.0
    assert export(loaded, tmp_path / "out").same == 50


def test_an_empty_translation_is_equal(tmp_path: Path) -> None:
    loaded = make()
    loaded.model.get_parameter("output.bias").data[loaded.tokenizer.end] = 50.0
    assert export(loaded, tmp_path / "out").same == 50


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        (
            "transformer",
            {"score": "additive"},
            r"this Transformer: its `score` is additive; expected scaled_dot or dot$",
        ),
        (
            "transformer",
            {"key_width": 5, "value_width": 7},
            r"`key_width` is 5 and its `value_width` 7; expected equal",
        ),
        ("transformer", {"encoder_depth": 0}, r"expected a Transformer with an encoder and a decoder of text$"),
        ("seq2seq", {}, r"cannot run this Seq2Seq; expected a Transformer with an encoder and a decoder of text$"),
    ],
)
def test_what_ctranslate2_cannot_represent_is_refused(
    family: str, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    loaded = make_translator(family, **fields)
    with pytest.raises(ConfigError, match=message):
        find_exportable_parts(loaded.model)
    pytest.importorskip("ctranslate2", reason="needs the extra `ctranslate2`")
    with pytest.raises(ConfigError, match=message):
        export(loaded, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_an_export_that_differs_does_not_appear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = make()
    build = ctranslate2_export.build_spec

    def damage(*given: Any) -> Any:
        spec = build(*given)
        spec.decoder.projection.bias = spec.decoder.projection.bias[::-1].copy()
        return spec

    monkeypatch.setattr(ctranslate2_export, "build_spec", damage)
    with pytest.raises(CheckpointError, match=r"^the exported model translates .* and torch as .* nothing is written$"):
        export(loaded, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_equally_probable_tokens_are_not_a_difference() -> None:
    loaded = make_translator(share="none", output_bias=True)
    with torch.no_grad():
        for name in ("output.weight", "output.bias"):
            loaded.model.get_parameter(name)[10] = loaded.model.get_parameter(name)[11]
    rows = loaded.tokenizer.encode(SENTENCES[:1])

    def compare(*tokens: int) -> TranslationCheck:
        return compare_translations(loaded.model, loaded.tokenizer, rows, [(10, 20)], [tokens])

    assert compare(11, 5) == TranslationCheck(1, 0, 1)
    assert "equally probable tokens: 1" in str(compare(11, 5))
    with pytest.raises(CheckpointError, match="nothing is written"):
        compare(12, 20)


def test_only_an_export_is_replaced(tmp_path: Path) -> None:
    loaded = make()
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").touch()
    with pytest.raises(CheckpointError, match="is not an export, so it is not replaced"):
        export(loaded, tmp_path / "photos", overwrite=True)
    export(loaded, tmp_path / "out")
    with pytest.raises(CheckpointError, match="already exists"):
        export(loaded, tmp_path / "out")
    export(make(norm="post"), tmp_path / "out", overwrite=True)
    assert {path.name for path in (tmp_path / "out").iterdir()} <= {*FILES, ".lock"}


def test_the_description_names_languages_and_origin(tmp_path: Path) -> None:
    export(make(), tmp_path / "out", provenance={"checkpoint": "runs/demo"})
    config = json.loads((tmp_path / "out" / "config.json").read_text("utf-8"))
    assert (config["languages"], config["provenance"]) == (["de", "en"], {"checkpoint": "runs/demo"})
    assert (config["add_source_eos"], config["decoder_start_token"]) == (True, "<s>")


def test_a_damaged_file_is_found_by_its_checksum(tmp_path: Path) -> None:
    export(make(), tmp_path / "out")
    assert [(check.file, check.verdict) for check in verify_checksums(tmp_path / "out")] == [
        (name, "intact") for name in ("config.json", "model.bin", "shared_vocabulary.json", "tokenizer.json")
    ]
    weights = tmp_path / "out" / "model.bin"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert {check.file for check in verify_checksums(tmp_path / "out") if check.verdict == "damaged"} == {"model.bin"}


def test_other_languages_are_checked_on_random_tokens() -> None:
    tokenizer = train_toy_tokenizer()
    german, other = (make_check_rows(tokenizer, each) for each in (("de", "en"), ("fr", "cs")))
    assert tokenizer.decode(german[0]).isprintable()
    assert (len(german), len(other)) == (50, 50)
    assert not {tokenizer.pad, tokenizer.start, tokenizer.end} & {token for row in other for token in row}
    assert make_check_rows(tokenizer, None) == other


def test_a_missing_package_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    loaded = make_translator()
    with pytest.raises(ConfigError, match=r"needs ctranslate2.* run: .*pip install .*\[ctranslate2\]'$"):
        export(loaded, tmp_path / "out")


@pytest.mark.slow
def test_a_thousand_sentences_are_equal_token_by_token(tmp_path: Path) -> None:
    """Random weights of the size that is trained on two cores."""
    sizes = {"width": 256, "encoder_depth": 3, "decoder_depth": 3, "heads": 4, "mlp_width": 512}
    loaded = make(**sizes)
    generator = torch.Generator().manual_seed(0)
    rows = [
        torch.randint(4, loaded.tokenizer.vocabulary, (length,), generator=generator).tolist()
        for length in torch.randint(1, 25, (1000,), generator=generator).tolist()
    ]
    export(loaded, tmp_path / "out")
    expected = translate_greedily(loaded.model, loaded.tokenizer, rows)
    found = run_exported(tmp_path / "out", loaded.tokenizer, rows, loaded.model.length_limit)
    checked = compare_translations(loaded.model, loaded.tokenizer, rows, expected, found)
    assert checked.same + checked.ties == 1000
    assert checked.same >= 995
    assert len(set(expected)) > 500
