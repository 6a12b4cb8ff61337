"""BLEU and chrF are sacreBLEU's, with its signatures; perplexity is that of all real tokens."""

import sys
from math import exp

import pytest
import sacrebleu
import torch
import torch.nn.functional as F
from support.toy_translation import make_model, make_source, make_tokenizer

from vitrail.base.errors import ConfigError
from vitrail.data.text.batches import EncodedPairs, load_validation_batches
from vitrail.evaluation import text_scores
from vitrail.evaluation.text_scores import (
    compute_perplexity,
    is_sacrebleu_installed,
    measure_token_loss,
    score_captions,
    score_translations,
)

REFERENCES = ["A dog runs across the green grass.", "Two men are sitting on a bench in the park.", "Hello, world!"]
TRANSLATIONS = ["A dog is running across the grass.", "Two men are sitting on a bench in the park.", "hello world"]


def test_scores_are_those_of_sacrebleu() -> None:
    found = score_translations(TRANSLATIONS, REFERENCES)
    assert found.bleu == sacrebleu.corpus_bleu(TRANSLATIONS, [REFERENCES]).score
    assert found.chrf == sacrebleu.corpus_chrf(TRANSLATIONS, [REFERENCES]).score
    assert found.exact == pytest.approx(1 / 3)
    version = sacrebleu.__version__
    assert found.bleu_signature == f"nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:{version}"
    assert found.chrf_signature == f"nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no|version:{version}"


def test_perfect_and_missing_translations() -> None:
    perfect, missing = score_translations(REFERENCES, REFERENCES), score_translations([""] * 3, REFERENCES)
    assert (round(perfect.bleu, 6), round(perfect.chrf, 6), perfect.exact) == (100, 100, 1)
    assert (missing.bleu, missing.chrf, missing.exact) == (0, 0, 0)
    with pytest.raises(ConfigError, match="2 translations for 3 references; expected one of each"):
        score_translations(TRANSLATIONS[:2], REFERENCES)


def test_missing_sacrebleu_is_the_command_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics", None)
    with pytest.raises(ConfigError, match=r"^BLEU needs sacrebleu, .*; run: .*pip install .*\[text\]'$"):
        score_translations(TRANSLATIONS, REFERENCES)
    assert is_sacrebleu_installed()


def test_loss_is_the_mean_over_all_tokens() -> None:
    model, source = make_model().eval(), make_source()
    found, tokens = measure_token_loss(model, source.load_validation_batches(batch=7), 0, torch.device("cpu"))
    total = torch.zeros(())
    tokenizer = make_tokenizer()
    for text, target in zip(source.data.val.sources, source.data.val.targets, strict=True):
        row, words = tokenizer.encode([text])[0], tokenizer.encode([target])[0]
        logits = model(torch.tensor([[*row, tokenizer.end]]), torch.tensor([[tokenizer.start, *words]]))
        total += F.cross_entropy(logits[0], torch.tensor([*words, tokenizer.end]), reduction="sum")
    assert tokens == sum(len(each) + 1 for each in tokenizer.encode(source.data.val.targets))
    assert found == pytest.approx(total.item() / tokens, rel=1e-5)
    assert compute_perplexity(found) == exp(found)
    assert compute_perplexity(1e9) == exp(100)


def test_mode_of_the_model_is_restored() -> None:
    model, source = make_model(), make_source()
    encoded = EncodedPairs.encode(source.data.val, make_tokenizer())
    measure_token_loss(model.train(), load_validation_batches(encoded, batch=20), 0, torch.device("cpu"))
    assert model.training


CAPTIONS = ["a dog runs on the green grass", "two men sit on a bench", "a red car"]
CAPTION_REFERENCES = [
    ("a dog is running over the grass", "a dog runs on the green grass"),
    ("two men are sitting on a wooden bench", "people on a bench", "two men on a bench"),
    ("a red bus",),
]


def test_a_caption_that_equals_any_reference_is_exact() -> None:
    assert score_captions(CAPTIONS, CAPTION_REFERENCES).exact == pytest.approx(1 / 3)


def test_bleu_is_that_of_sacrebleu_with_its_signature() -> None:
    found = score_captions(CAPTIONS[:2], [each[:2] for each in CAPTION_REFERENCES[:2]])
    streams = [[each[number] for each in CAPTION_REFERENCES[:2]] for number in (0, 1)]
    assert found.bleu == sacrebleu.corpus_bleu(CAPTIONS[:2], streams).score
    assert found.bleu_signature is not None
    assert found.bleu_signature.startswith("nrefs:2|case:mixed|")
    assert "tok:13a" in found.bleu_signature


def test_images_may_have_different_numbers_of_references() -> None:
    found = score_captions(CAPTIONS, CAPTION_REFERENCES)
    assert found.bleu is not None
    assert 20 < found.bleu < 100
    assert str(found.bleu_signature).startswith("nrefs:var|")
    assert score_captions(["a red bus"], [("a red bus",)]).exact == 1


def test_bleu_is_never_home_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_scores, "is_sacrebleu_installed", lambda: False)
    found = score_captions(CAPTIONS, CAPTION_REFERENCES)
    assert (found.bleu, found.bleu_signature) == (None, None)
    assert found.exact == pytest.approx(1 / 3)


@pytest.mark.parametrize(("captions", "references"), [([], []), (["a"], []), (["a"], [()])])
def test_missing_references_are_one_line(captions: list[str], references: list[tuple[str, ...]]) -> None:
    with pytest.raises(ConfigError, match=r"captions and .* lists of references; expected at least one reference each"):
        score_captions(captions, references)
