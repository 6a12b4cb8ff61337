"""The bundled photos: small, readable, with their sources, and views made from them."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitrail.base.errors import ConfigError, DataError
from vitrail.data.images.decoding.model_input import decode_for_model
from vitrail.data.images.decoding.rgb_image import open_image
from vitrail.data.images.preprocessing import Preprocessing
from vitrail.data.photos import PHOTO_FOLDER, list_example_photos
from vitrail.export.agreement import make_photo_crops


def test_eight_small_photos_with_their_sources() -> None:
    photos = list_example_photos()
    assert len(photos) == 8
    sources = (PHOTO_FOLDER / "SOURCES.txt").read_text()
    lines = {line.split()[0]: line for line in sources.splitlines() if ".jpg " in line}
    assert sorted(lines) == [path.name for path in photos]
    for path in photos:
        assert "CC0" in lines[path.name] or "public domain" in lines[path.name]
        assert path.stat().st_size <= 20_000
        with Image.open(path) as image:
            assert min(image.size) == 256
            assert not image.getexif()


@pytest.mark.parametrize(
    "preprocessing",
    [Preprocessing(), Preprocessing(image_size=(32, 48), crop=1.0), Preprocessing(mean=(0.5,), std=(0.5,))],
)
def test_all_views_differ(preprocessing: Preprocessing) -> None:
    views = make_photo_crops(120, preprocessing)
    rows, columns = (32, 48) if preprocessing.crop == 1.0 else (224, 224)
    assert views.shape == (120, rows, columns, len(preprocessing.mean))
    assert views.dtype == np.uint8
    assert len({view.tobytes() for view in views}) == 120
    assert (views.reshape(120, -1).std(1) > 10).all()  # no view has a single color


def test_views_start_with_the_uncropped_photos_and_are_reproducible() -> None:
    preprocessing = Preprocessing(image_size=64)
    views = make_photo_crops(20, preprocessing)
    for view, path in zip(views, list_example_photos(), strict=False):
        assert np.array_equal(view, decode_for_model(path, preprocessing))
    assert np.array_equal(make_photo_crops(9, preprocessing), views[:9])
    assert np.array_equal(make_photo_crops(1, preprocessing), views[:1])


def test_less_than_one_view_is_refused() -> None:
    with pytest.raises(ConfigError, match="0 views; expected 1 or more"):
        make_photo_crops(0, Preprocessing())


def test_torch_is_not_needed() -> None:
    program = (
        "import sys; from vitrail.export.agreement import make_photo_crops; "
        "from vitrail.data.images.preprocessing import Preprocessing; "
        "make_photo_crops(2, Preprocessing(image_size=32)); "
        "print(sorted({'torch', 'safetensors', 'yaml'} & set(sys.modules)))"
    )
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert output == "[]\n"


def test_example_photos_open_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_image("example:cat").tobytes() == open_image(PHOTO_FOLDER / "cat.jpg").tobytes()
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (8, 8)).save("file.png")
    Path("file.png").rename("example:cat")
    assert open_image("example:cat").size == (8, 8)  # an existing file wins


def test_an_unknown_example_photo_is_one_line() -> None:
    with pytest.raises(DataError, match=r"'example:catt'.*did you mean 'example:cat'"):
        open_image("example:catt")
