"""Evaluate a captioner: which images, what is measured, and what is written."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.toy_captions import make_captions, open_toy_captioner

from vitrail.base.errors import ConfigError, DataError
from vitrail.data.captions.captions import CaptionedImages, CaptionSplits, open_captions
from vitrail.data.images.formats.class_folders import FileDataset
from vitrail.evaluation.caption_evaluation import choose_part, evaluate_captioner, open_evaluation_data
from vitrail.kinds.caption import make_noun_scorer
from vitrail.predict.captioner import Captioner
from vitrail.predict.search.settings import SearchSettings


@pytest.fixture(scope="module")
def captioner(tmp_path_factory: pytest.TempPathFactory) -> Captioner:
    return Captioner(open_toy_captioner(tmp_path_factory.mktemp("captioner") / "model"), device="cpu")


def test_captions_of_the_test_images_are_compared_with_theirs(captioner: Captioner, tmp_path: Path) -> None:
    found = evaluate_captioner(
        captioner, open_captions("collages"), count=20, score_nouns=make_noun_scorer(captioner, 20)
    )
    assert (found.part, len(found.images)) == ("collages (test)", 20)
    assert found.nouns is not None
    assert found.nouns.nouns == 40
    assert found.strongest == found.nouns.strongest[found.layer, -1]
    report = json.loads(json.dumps(found.to_json()))
    assert report["nouns"]["attention_in_garment"] == found.mass
    assert np.shape(report["nouns"]["strongest_by_layer_and_head"]) == (2, 3)
    lines = str(found).splitlines()
    assert [line.split()[0] for line in lines] == ["collages", "exact", "BLEU-4", "nouns", "attention", "removal"]
    tmp_path.joinpath("out").mkdir()
    numbers, table = found.write(report, tmp_path / "out")
    assert json.loads(numbers.read_text())["exact"] == found.scores.exact
    rows = [line.split("\t") for line in table.read_text().splitlines()]
    assert rows[0] == ["file", "caption", "references"]
    assert rows[1][2] == found.references[0][0]


def test_right_captions_have_full_scores(captioner: Captioner) -> None:
    part = make_captions().val
    assert part is not None
    said = [each.text for each in captioner.caption_all([part.images.source(index) for index in range(len(part))])]
    data = CaptionSplits(name="said", train=part, val=replace(part, captions=tuple((text, "x") for text in said)))
    found = evaluate_captioner(captioner, data, search=SearchSettings())
    assert found.scores.exact == 1
    assert found.captions == tuple(said)


def test_unreadable_images_are_skipped_or_an_error(captioner: Captioner, tmp_path: Path) -> None:
    (tmp_path / "bad.png").write_bytes(b"not an image")
    bad = CaptionedImages(FileDataset(["bad.png"], None, (), root=tmp_path), (("a bag",),), "photos")
    data = CaptionSplits(name="photos", train=bad, val=bad)
    with pytest.raises(DataError, match=r"none of 1 images of photos can be read, for example .*bad\.png"):
        evaluate_captioner(captioner, data)
    with pytest.raises(DataError, match=r"bad\.png"):
        evaluate_captioner(captioner, data, strict=True)


def test_data_must_be_known_and_have_held_out_images(captioner: Captioner) -> None:
    with pytest.raises(ConfigError, match="does not say what it was trained on; expected `data`"):
        open_evaluation_data(captioner, None)
    assert open_evaluation_data(captioner, "collages").name == "collages"
    data = make_captions()
    assert choose_part(data) is data.val
    with pytest.raises(DataError, match="toy has no test or validation images"):
        choose_part(replace(data, val=None))
