"""`decode_for_model` refuses images beyond the limits before decoding them, and files that are not images."""

import io
import os
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFile
from support.encoded_images import encode_test_image

from vitrail.base.errors import ConfigError, DataError
from vitrail.data.images.decoding import image_formats, jpeg
from vitrail.data.images.decoding.image_formats import ImageLimits
from vitrail.data.images.decoding.model_input import decode_for_model
from vitrail.data.images.preprocessing import Preprocessing

PLAIN = Preprocessing(image_size=32)


def refused(source: Any, limits: ImageLimits | None = None) -> str:
    messages = set[str]()
    for scaled in (False, True):
        with pytest.raises(DataError) as caught:
            decode_for_model(source, PLAIN, limits or ImageLimits(), reduce_jpeg=scaled)
        assert re.match(r"^[^\n]+; expected [^\n]+$", str(caught.value)), caught.value
        messages.add(str(caught.value))
    assert len(messages) == 1
    return messages.pop()


def must_not_be_called(*_: Any) -> None:
    pytest.fail("it came too far")


def bomb(kind: str, rows: int = 30_000, columns: int = 30_000) -> bytes:
    """A small file whose header claims a large size."""
    data = bytearray(encode_test_image(kind, 8, 8))
    if kind == "PNG":
        data[16:24] = columns.to_bytes(4, "big") + rows.to_bytes(4, "big")
        data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    elif kind == "JPEG":
        at = data.index(b"\xff\xc0") + 5
        data[at : at + 4] = rows.to_bytes(2, "big") + columns.to_bytes(2, "big")
    elif kind == "GIF":
        data[6:10] = columns.to_bytes(2, "little") + rows.to_bytes(2, "little")
    else:
        data[18:26] = columns.to_bytes(4, "little") + rows.to_bytes(4, "little")  # BMP
    return bytes(data)


@pytest.mark.usefixtures("decoder")
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "BMP"])
def test_decompression_bombs_are_refused_before_decoding(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "bomb"
    path.write_bytes(bomb(kind))
    monkeypatch.setattr(ImageFile.ImageFile, "load", must_not_be_called)
    monkeypatch.setattr(jpeg, "try_decode_jpeg", must_not_be_called)
    most = 178956970 if kind == "JPEG" else 67108864
    assert refused(path) == (
        f"'{path}' is 30000×30000 pixels; expected at most {most} pixels: "
        "if it is not a decompression bomb, raise the limit on pixels"
    )
    path.write_bytes(bomb(kind, 14_000, 14_000))  # beyond both limits of Pillow
    assert "is 14000×14000 pixels" in refused(path)


@pytest.mark.usefixtures("decoder")
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF"])
def test_limit_on_pixels_applies_per_call(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode_test_image(kind, 40, 60)
    assert "is 40×60 pixels; expected at most 2399 pixels" in refused(data, ImageLimits(pixels=2399))
    assert "the given image is 40×60" in refused(Image.open(io.BytesIO(data)), ImageLimits(pixels=2399))
    decode_for_model(data, PLAIN, ImageLimits(pixels=2400))
    truth = decode_for_model(data, PLAIN)
    for pillows in (1500, 1100):  # where it warns, which the tests turn into an error, and where it refuses
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", pillows)
        if kind not in ("WEBP", "TIFF"):  # their plugins check it themselves
            assert np.array_equal(decode_for_model(data, PLAIN), truth)
        assert pillows == Image.MAX_IMAGE_PIXELS


def test_limit_on_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode_test_image("JPEG", 40, 60)
    path = tmp_path / "long.jpg"
    path.write_bytes(data)
    most = ImageLimits(bytes=len(data) - 1)
    assert refused(path, most) == (
        f"'{path}' has {len(data)} bytes; expected at most {len(data) - 1}: raise the limit on bytes"
    )
    assert "the given data has more bytes" in refused(data, most)
    assert "bytes; expected at most" in refused(io.BytesIO(data), most)
    decode_for_model(path, PLAIN, ImageLimits(bytes=len(data)))
    with (tmp_path / "vast").open("wb") as file:
        file.truncate(2**40)
    monkeypatch.setattr(os, "open", must_not_be_called)
    assert "has 1099511627776 bytes" in refused(tmp_path / "vast")


def test_limits_below_one_are_refused() -> None:
    with pytest.raises(ConfigError, match="the limit on pixels is 0; expected 1 or more"):
        ImageLimits(pixels=0)
    with pytest.raises(ConfigError, match="the limit on bytes is -1"):
        ImageLimits(bytes=-1)


@pytest.mark.usefixtures("decoder")
def test_unreadable_images_are_one_line_errors(tmp_path: Path) -> None:
    (tmp_path / "empty.jpg").touch()
    (tmp_path / "text.jpg").write_text("not an image\n")
    os.mkfifo(tmp_path / "pipe.jpg")
    for kind in ("JPEG", "PNG", "WEBP"):
        data = encode_test_image(kind, 200, 300)
        (tmp_path / f"cut.{kind}").write_bytes(data[: len(data) // 2])
        assert f"cut.{kind}' cannot be read" in refused(tmp_path / f"cut.{kind}")
    assert "'/dev/null' is a pipe, a socket or a device; expected a file" in refused("/dev/null")
    assert "pipe.jpg' is a pipe" in refused(tmp_path / "pipe.jpg")
    assert "empty.jpg' is empty; expected an image" in refused(tmp_path / "empty.jpg")
    assert "text.jpg' is not an image" in refused(tmp_path / "text.jpg")
    assert "is a folder" in refused(tmp_path)
    assert "none.jpg' does not exist" in refused(tmp_path / "none.jpg")
    assert "is empty" in refused(b"")
    assert "cannot be read" in refused(b"\xff\xd8\xff")
    assert "cannot be read" in refused(io.StringIO("text"))
    assert "cannot be read" in refused("a\0b")
    assert "cannot be read" in refused("a" * 300)
    refused(tmp_path / "two\nlines.jpg")
    assert "expected a path, bytes" in refused(7)


def test_file_without_read_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    path = tmp_path / "a.jpg"
    path.write_bytes(encode_test_image("JPEG", 8, 8))
    monkeypatch.setattr(image_formats, "open", forbidden, raising=False)
    assert refused(path).startswith(f"'{path}' cannot be read: Permission denied; expected")


def test_thin_images_are_refused_before_they_fill_the_memory() -> None:
    data = encode_test_image("JPEG", 1, 30_000)
    with pytest.raises(DataError, match="1×30000 pixels would be resized to"):
        decode_for_model(data, Preprocessing(), reduce_jpeg=True)
