"""Fixtures for the tests of data."""

import pytest

from vitrail.data.images.decoding import jpeg


@pytest.fixture(params=["simplejpeg", "Pillow alone"])
def decoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "simplejpeg":
        pytest.importorskip("simplejpeg")
    else:
        monkeypatch.setattr(jpeg, "simplejpeg", None)
