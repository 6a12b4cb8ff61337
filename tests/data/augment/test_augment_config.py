"""The configuration of augmentation: off by default, checked, explained, and light to import."""

import subprocess
import sys
from dataclasses import asdict, fields
from typing import Any

import pytest

from vitrail.data.augment.config import Augmentation
from vitrail.errors import ConfigError


def test_every_field_is_explained() -> None:
    for field in fields(Augmentation):
        assert 10 < len(field.metadata["help"]) < 100


def test_it_goes_through_plain_data() -> None:
    given = Augmentation(crop="resized", area=(0.35, 1), policy="rand", mixup=0.8, cutmix=1, flip=1)
    plain: dict[str, Any] = {
        name: list(value) if isinstance(value, tuple) else value for name, value in asdict(given).items()
    }
    assert Augmentation(**plain) == given


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"crop": "center"}, "did you mean 'centre'"),
        ({"policy": "random"}, "did you mean 'rand'"),
        ({"area": (0.5,)}, "area is (0.5,); expected two numbers, the smaller first"),
        ({"area": (1.0, 0.5)}, "the smaller first"),
        ({"area": (0.5, 2)}, "expected shares of the picture, at most 1"),
        ({"area": (0.0, 1)}, "more than 0"),
        ({"aspect": (3, 1)}, "the smaller first"),
        ({"flip": 1.5}, "at least 0 and at most 1"),
        ({"erase": -0.1}, "at least 0 and at most 1"),
        ({"smoothing": 1.0}, "less than 1"),
        ({"magnitude": 11}, "expected 0 to 10"),
        ({"shift": 1.5}, "a whole number"),
        ({"repeats": 0}, "more than 0"),
    ],
)
def test_what_makes_no_sense_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Augmentation(**given)
    assert says in str(caught.value)


def test_importing_it_loads_nothing_heavy() -> None:
    program = "import sys, vitrail.data.augment.config; print({'torch', 'numpy', 'PIL'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
