"""The configuration of augmentation: defaults, checks, help texts and cheap import."""

import subprocess
import sys
from dataclasses import asdict, fields
from typing import Any

import pytest

from vitrail.base.errors import ConfigError
from vitrail.data.images.augment.config import Augmentation


def test_every_field_has_a_help_text() -> None:
    for field in fields(Augmentation):
        assert 10 < len(field.metadata["help"]) < 100


def test_config_survives_asdict_and_lists() -> None:
    given = Augmentation(crop="resized", area=(0.35, 1), policy="rand", mixup=0.8, cutmix=1, flip=1)
    plain: dict[str, Any] = {
        name: list(value) if isinstance(value, tuple) else value for name, value in asdict(given).items()
    }
    assert Augmentation(**plain) == given


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"crop": "centered"}, "did you mean 'center'"),
        ({"policy": "random"}, "did you mean 'rand'"),
        ({"area": (0.5,)}, "area is (0.5,); expected two numbers"),
        ({"area": (1.0, 0.5)}, "area is (1.0, 0.5); expected two numbers"),
        ({"area": (0.5, 2)}, "area is (0.5, 2); expected shares"),
        ({"area": (0.0, 1)}, "more than 0"),
        ({"aspect": (3, 1)}, "aspect is (3, 1); expected two numbers"),
        ({"flip": 1.5}, "at least 0 and at most 1"),
        ({"erase": -0.1}, "at least 0 and at most 1"),
        ({"smoothing": 1.0}, "less than 1"),
        ({"magnitude": 11}, "expected 0 to 10"),
        ({"shift": 1.5}, "a whole number"),
        ({"repeats": 0}, "more than 0"),
    ],
)
def test_invalid_values_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Augmentation(**given)
    assert message in str(caught.value)


def test_import_loads_no_heavy_modules() -> None:
    program = "import sys, vitrail.data.images.augment.config; print({'torch', 'numpy', 'PIL'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
