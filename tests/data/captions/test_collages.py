"""Collages of the bundled garments with sentences."""

from collections import Counter

import numpy as np
import pytest

from vitrail.base.errors import ConfigError
from vitrail.data.captions.collages import (
    NOUNS,
    PLACE_PAIRS,
    WORDS,
    Collage,
    CollageImages,
    PlacedGarment,
    describe_relation,
    find_nouns,
    is_noun_gone,
)
from vitrail.data.fashion import FASHION_CLASSES, read_fashion
from vitrail.data.images.datasets import ImageDataset


def test_a_sentence_names_the_upper_or_left_garment_first() -> None:
    found = {pair: describe_relation(*pair) for pair in PLACE_PAIRS}
    assert found == {
        (0, 1): "left of",
        (2, 3): "left of",
        (0, 2): "above",
        (1, 3): "above",
        (0, 3): "above and left of",
        (1, 2): "above and right of",
    }
    boot, trousers = PlacedGarment("boot", 0, 0), PlacedGarment("trousers", 0, 1)
    assert Collage((boot,)).sentence == "a boot"
    assert Collage((boot, trousers)).sentence == "a boot left of trousers"
    assert Collage((trousers, PlacedGarment("bag", 0, 2))).sentence == "trousers above and right of a bag"


def test_a_collage_is_a_function_of_seed_part_and_index() -> None:
    some, more = CollageImages("train", count=5), CollageImages("train", count=50)
    assert all(np.array_equal(some.source(index), more.source(index)) for index in range(5))
    assert some.list_sentences() == more.list_sentences()[:5]
    assert not np.array_equal(CollageImages("train", seed=1, count=5).plans, some.plans)
    assert not np.array_equal(CollageImages("val", count=5).plans[:, :2], some.plans[:, :2])


def test_collages_are_images_without_classes() -> None:
    images = CollageImages("val", count=3)
    assert isinstance(images, ImageDataset)
    image, label = images[2]
    assert (len(images), images.classes, label, image.size) == (3, (), -1, (56, 56))
    assert images.name(2) == "collage 2 (val)"
    assert len(CollageImages("train")) == 20_000
    arrays = images.to_arrays()
    assert (arrays.classes, arrays.label(0), arrays.images.shape) == ((), -1, (3, 56, 56, 1))
    assert np.array_equal(arrays.source(2), images.source(2))


def test_a_garment_is_in_its_place_and_the_others_are_empty() -> None:
    images = CollageImages("train", count=30)
    train, _ = read_fashion()
    for index in range(len(images)):
        pixels, collage = images.source(index), images.collage(index)
        empty = np.ones(pixels.shape[:2], bool)
        for garment in collage.garments:
            name = next(name for name, word in NOUNS.items() if word == garment.word)
            expected = train.images[garment.number * 10 + FASHION_CLASSES.index(name)]  # classes alternate
            assert np.array_equal(pixels[garment.rows_and_columns], expected)
            empty[garment.rows_and_columns] = False
        assert not pixels[empty].any()


def test_garments_of_the_parts_are_different() -> None:
    train, val, test = (CollageImages(part, count=1).garments for part in ("train", "val", "test"))
    assert (train.shape, val.shape, test.shape) == ((8, 600, 28, 28), (8, 50, 28, 28), (8, 50, 28, 28))
    seen = {garment.tobytes() for garment in train.reshape(-1, 784)}
    assert not seen & {garment.tobytes() for part in (val, test) for garment in part.reshape(-1, 784)}
    _, held_out = read_fashion()
    every = {image.tobytes() for image in held_out.images}
    assert {garment.tobytes() for part in (val, test) for garment in part.reshape(-1, 784)} <= every


def test_kinds_places_and_garments_are_about_equally_frequent() -> None:
    images = CollageImages("train", count=8000)
    every = [images.collage(index) for index in range(len(images))]
    single = [each.garments[0].place for each in every if len(each.garments) == 1]
    assert abs(len(single) - 1000) < 100
    assert all(abs(single.count(place) - 250) < 50 for place in range(4))
    collages = [each for each in every if len(each.garments) == 2]
    words = Counter(garment.word for each in collages for garment in each.garments)
    assert set(words) == set(WORDS)
    assert all(abs(count - 1750) < 175 for count in words.values())
    places = Counter(tuple(garment.place for garment in each.garments) for each in collages)
    assert set(places) == set(PLACE_PAIRS)
    assert all(abs(count - 1167) < 120 for count in places.values())
    assert all(first.word != second.word for first, second in (each.garments for each in collages))
    assert {garment.number for each in collages for garment in each.garments} == set(range(600))


def test_only_training_collages_may_have_one_garment() -> None:
    for part in ("val", "test"):
        images = CollageImages(part)
        assert all(len(images.collage(index).garments) == 2 for index in range(len(images)))


def test_removing_a_garment_empties_its_place_only() -> None:
    images = CollageImages("test", count=10)
    for index in range(len(images)):
        first, second = images.collage(index).garments
        pixels = images.source(index)
        for number, (gone, kept) in enumerate(((first, second), (second, first))):
            left = images.source_without(index, number)
            assert not left[gone.rows_and_columns].any()
            assert np.array_equal(left[kept.rows_and_columns], pixels[kept.rows_and_columns])
            assert left.sum() == pixels[kept.rows_and_columns].sum()


def test_the_patches_of_a_garment_are_those_of_its_place() -> None:
    top_right = PlacedGarment("bag", 0, 1)
    found = top_right.find_patches((8, 8))
    assert found.shape == (8, 8)
    assert found.sum() == 16
    assert found[:4, 4:].all()
    assert top_right.find_patches((2, 4)).tolist() == [[False, False, True, True], [False] * 4]
    together = sum(PlacedGarment("bag", 0, place).find_patches((8, 8)).astype(int) for place in range(4))
    assert np.array_equal(together, np.ones((8, 8)))
    with pytest.raises(ConfigError, match="7×8 patches; expected even numbers"):
        top_right.find_patches((7, 8))


def test_nouns_are_found_in_a_sentence() -> None:
    sentence = "trousers above and right of a boot"
    assert [sentence[start:end] for start, end in find_nouns(sentence)] == ["trousers", "boot"]
    for sentence in CollageImages("val", count=50).list_sentences():
        assert len([*find_nouns(sentence)]) == 2
    assert is_noun_gone("a boot left of a bag", "a bag", 0)
    assert not is_noun_gone("a boot left of a bag", "a bag", 1)
    assert not is_noun_gone("a boot", "a bag", 1)
    assert not [*find_nouns("two bootlegs on a handbag")]
