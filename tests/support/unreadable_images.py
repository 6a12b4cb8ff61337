"""Unreadable image files of every kind."""

import struct
import zlib
from pathlib import Path


def write_png_bomb(path: Path, side: int = 30_000) -> None:
    """A PNG of a hundred bytes that claims 30,000×30,000 pixels."""
    chunks = ((b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)), (b"IDAT", zlib.compress(bytes(9))))
    parts = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    ]
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts))


def add_unreadable_images(photos: Path) -> dict[str, str]:
    """Add unreadable images of every kind; returns a part of the error message of each."""
    (photos / "a" / "0.jpg").write_bytes(b"")
    (photos / "a" / "text.png").write_text("not an image")
    write_png_bomb(photos / "a" / "vast.png")
    (photos / "b" / "cut.png").write_bytes((photos / "a" / "1.png").read_bytes()[:60])
    (photos / "b" / "gone.jpg").symlink_to("nowhere.jpg")
    (photos / "b" / "loop.jpg").symlink_to("loop.jpg")
    (photos / "b" / "page.jpg").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n")
    return {
        "a/0.jpg": "is empty; expected",
        "a/text.png": "is not an image; expected",
        "a/vast.png": "is 30000×30000 pixels; expected at most",
        "b/cut.png": "cannot be read",
        "b/gone.jpg": "does not exist; expected",
        "b/loop.jpg": "cannot be read: Too many levels of symbolic links",
        "b/page.jpg": "is a PostScript file; expected JPEG",
    }
