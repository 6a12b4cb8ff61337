"""Exact matches and BLEU of captions against several references."""

import pytest
import sacrebleu

from vitrail.base.errors import ConfigError
from vitrail.evaluation import caption_scores
from vitrail.evaluation.caption_scores import score_captions

CAPTIONS = ["a dog runs on the green grass", "two men sit on a bench", "a red car"]
REFERENCES = [
    ("a dog is running over the grass", "a dog runs on the green grass"),
    ("two men are sitting on a wooden bench", "people on a bench", "two men on a bench"),
    ("a red bus",),
]


def test_a_caption_that_equals_any_reference_is_exact() -> None:
    assert score_captions(CAPTIONS, REFERENCES).exact == pytest.approx(1 / 3)


def test_bleu_is_that_of_sacrebleu_with_its_signature() -> None:
    found = score_captions(CAPTIONS[:2], [each[:2] for each in REFERENCES[:2]])
    streams = [[each[number] for each in REFERENCES[:2]] for number in (0, 1)]
    assert found.bleu == sacrebleu.corpus_bleu(CAPTIONS[:2], streams).score
    assert found.bleu_signature is not None
    assert found.bleu_signature.startswith("nrefs:2|case:mixed|")
    assert "tok:13a" in found.bleu_signature


def test_images_may_have_different_numbers_of_references() -> None:
    found = score_captions(CAPTIONS, REFERENCES)
    assert found.bleu is not None
    assert 20 < found.bleu < 100
    assert str(found.bleu_signature).startswith("nrefs:var|")
    assert score_captions(["a red bus"], [("a red bus",)]).exact == 1


def test_bleu_is_never_home_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caption_scores, "is_sacrebleu_installed", lambda: False)
    found = score_captions(CAPTIONS, REFERENCES)
    assert (found.bleu, found.bleu_signature) == (None, None)
    assert found.exact == pytest.approx(1 / 3)


@pytest.mark.parametrize(("captions", "references"), [([], []), (["a"], []), (["a"], [()])])
def test_missing_references_are_one_line(captions: list[str], references: list[tuple[str, ...]]) -> None:
    with pytest.raises(ConfigError, match=r"captions and .* lists of references; expected at least one reference each"):
        score_captions(captions, references)
