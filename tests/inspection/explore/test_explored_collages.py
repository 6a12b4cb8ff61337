"""Collages of four photos with known classes: the map of a class is brightest in the tile that it is in."""

from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.figure_files import read_figures

from vitrail.inspection.explore.image_explorer import ImageExplorer
from vitrail.opening import open_model

PHOTOS = 32


def crop_tile(body: bytes) -> Image.Image:
    with Image.open(BytesIO(body)) as photo:
        side = min(photo.size)
        left, top = (photo.width - side) // 2, (photo.height - side) // 2
        return photo.convert("RGB").crop((left, top, left + side, top + side)).resize((224, 224))


@pytest.mark.slow
@pytest.mark.parametrize(("weights", "least"), [("deit_tiny_patch16_224.pth", 28), ("vit_tiny_patch16_224", 22)])
def test_the_map_of_a_class_finds_its_tile(weights: str, least: int, shared: Callable[[str], Path]) -> None:
    folder, photos = shared("weights"), shared("imagenet-val-1000")
    explorer = ImageExplorer(weights, open_model(next(folder.glob(f"{weights}*"))))
    chosen = list[tuple[int, bytes]]()  # that the model knows alone
    for index in np.random.default_rng(0).permutation(1000).tolist():
        body = next((photos / f"{index:03d}").iterdir()).read_bytes()
        (top, *_) = read_figures(explorer.explore(body, {"part": "top"}))[0]["top"]
        if top["index"] == index and top["probability"] > 0.5:
            chosen.append((index, body))
        if len(chosen) == PHOTOS:
            break
    found = 0
    for first in range(0, PHOTOS, 4):
        tiles, collage, stream = chosen[first : first + 4], Image.new("RGB", (448, 448)), BytesIO()
        for place, (_, body) in enumerate(tiles):
            collage.paste(crop_tile(body), (224 * (place % 2), 224 * (place // 2)))
        collage.save(stream, "PNG")
        for place, (index, _) in enumerate(tiles):
            _, arrays = read_figures(explorer.explore(stream.getvalue(), {"part": "class", "class": str(index)}))
            found += int(arrays["relevance"][-1].reshape(2, 7, 2, 7).sum((1, 3)).argmax() == place)
    assert found >= least  # of 32; 8 by chance
