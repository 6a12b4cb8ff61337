"""Classes of a data set are mapped to those of a model by name, by number, or by one of several names."""

import re

import pytest

from vitrail.base.errors import ConfigError, DataError
from vitrail.data.images.class_names import (
    check_class_labels,
    list_imagenet_labels,
    match_data_classes_to_model,
    split_label,
)

IMAGENET = ("n01440764 tench, Tinca tinca", "n01443537 goldfish", "n02012849 crane", "n03126707 crane")


@pytest.mark.parametrize(
    ("labels", "data", "expected", "note"),
    [
        (("ants", "bees"), ("ants", "bees"), (0, 1), ""),
        (("bees", "ants"), ("ants", "bees"), (1, 0), ""),
        (("Ankle boot", "T-shirt/top"), ("t_shirt/top", "ankle-boot"), (1, 0), ""),
        (IMAGENET, ("goldfish", "tench"), (1, 0), ""),
        (IMAGENET, ("n03126707", "Tinca tinca"), (3, 0), ""),
        (("3", "1"), ("1", "3"), (1, 0), ""),
        (("an ant", "ant", "ant, emmet"), ("ant", "emmet"), (1, 2), ""),
        (IMAGENET, ("000", "001"), (0, 1), ".* class numbers of the model: 000 is n01440764 tench, Tinca tinca$"),
        (None, ("3", "0"), (3, 0), "the data's class names are class numbers of the model$"),
        (None, ("a", "b", "c", "d"), (0, 1, 2, 3), "the model has no class names: .* in order, a is class 0"),
        (None, ("1", "2", "3", "4"), (0, 1, 2, 3), "the model has no class names: .* in order"),
        (
            ("tench", "goldfish"),
            ("n01440764", "n01443537"),
            (0, 1),
            "the data's classes are WordNet ids: .* in order, n01440764 is class 0",
        ),
    ],
)
def test_classes_match_by_name_number_or_order(
    labels: tuple[str, ...] | None, data: tuple[str, ...], expected: tuple[int, ...], note: str
) -> None:
    mapping, said = match_data_classes_to_model(labels, 4 if labels is None else len(labels), data)
    assert mapping == expected
    assert bool(said) == bool(note)
    assert re.match(note, said), said


@pytest.mark.parametrize(
    ("labels", "data", "message"),
    [
        (
            ("cats", "dogs"),
            ("ants", "bees"),
            r"^2 of the data's 2 classes \(ants, bees\) are not among the model's 2 classes \(cats",
        ),
        (
            ("cats", "dogs"),
            ("cats", "bees"),
            r"^1 of the data's 2 classes \(bees\) are not among the model's 2 classes \(cats, dogs\)",
        ),
        (
            IMAGENET,
            ("crane", "tench"),
            r"^1 of the data's 2 classes \(crane\) are not among",
        ),  # two classes have this name
        (
            IMAGENET,
            ("tench", "Tinca tinca"),
            r"^2 of the data's 2 classes \(tench, Tinca tinca\) are not among",
        ),  # one class
        (None, ("a", "b"), r"^2 of the data's 2 classes \(a, b\) are not among the model's 4 classes without names; "),
        (None, ("1", 5000 * "9"), "not among the model's 4 classes"),
    ],
)
def test_unknown_or_ambiguous_classes_are_refused(
    labels: tuple[str, ...] | None, data: tuple[str, ...], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        match_data_classes_to_model(labels, 4 if labels is None else len(labels), data)


@pytest.mark.parametrize(
    ("label", "names"),
    [
        ("n01440764 tench, Tinca tinca", ["tench", "Tinca tinca"]),
        ("n01440764: tench", ["tench"]),
        ("n01440764", ["n01440764"]),
        ("ant", ["ant"]),
        (" , b", ["b"]),
        ("", []),
    ],
)
def test_split_label(label: str, names: list[str]) -> None:
    assert split_label(label) == names


def test_imagenet_labels_match_by_id_and_by_every_name() -> None:
    labels = list_imagenet_labels()
    classes, note = match_data_classes_to_model(labels, 1000, ["n02123045", "Tinca tinca", "tank suit", "Crane (bird)"])
    assert (classes, note) == ((281, 0, 639, 134), "")


def test_there_is_one_label_per_class() -> None:
    assert check_class_labels(["a", "b"], 2) == ("a", "b")
    for labels, says in (
        ("ab", "expected a list of strings"),
        (["a"], "1 labels for 2 classes"),
        ([1, 2], "a list of"),
    ):
        with pytest.raises(ConfigError, match=says):
            check_class_labels(labels, 2)  # pyright: ignore[reportArgumentType]
