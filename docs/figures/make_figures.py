"""Draw the figures of the documentation from public weights and the example photos of the package.

    python docs/figures/make_figures.py --weights FOLDER

FOLDER holds vit_tiny_patch16_224.augreg_in21k_ft_in1k.safetensors (timm) and deit_tiny_patch16_224.pth (facebook).
A figure whose weights are missing is skipped by name. cost.png and positions.png are measured: they come from
`vitrail study cost` and `vitrail study positions`.
"""

import argparse
from pathlib import Path

from PIL import Image

from vitrail.data.datasets import open_data
from vitrail.data.image_items import spread_over_labels
from vitrail.figures import CaptionedFigure
from vitrail.inspection.explain import Explainer
from vitrail.inspection.model_figures import look

FOLDER = Path(__file__).parent
WEIGHTS = {
    "vit": "vit_tiny_patch16_224.augreg_in21k_ft_in1k.safetensors",
    "deit": "deit_tiny_patch16_224.pth",
}
EXPLAINED = {"vit": ("camera", "cat"), "deit": ("coffee", "cat")}  # example photos
LOOKED_AT = ("attention_distance", "filters", "occlusion", "position_similarity")
COLOURS = 256  # of a PNG palette, a third of the bytes


def save(figure: CaptionedFigure, name: str) -> None:
    """Save a figure as a PNG with a palette."""
    (path,) = figure.save(FOLDER)
    target = FOLDER / f"{name}.png"
    with Image.open(path) as image:
        reduced = image.convert("RGB").quantize(COLOURS, Image.Quantize.MEDIANCUT, dither=Image.Dither.FLOYDSTEINBERG)
    path.unlink()
    reduced.save(target, optimize=True)
    print(f"{target}: {target.stat().st_size / 1e3:.0f} KB")


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the figures of the documentation.")
    parser.add_argument("--weights", type=Path, required=True, help="Folder with the public weights.")
    parser.add_argument("--images", help="Folder of images by class, for attention distance and occlusion.")
    parser.add_argument("--labels", type=Path, help="Text file with the class names, one per line.")
    given = parser.parse_args()
    labels = given.labels.read_text("utf-8").splitlines() if given.labels else None
    for key, file in WEIGHTS.items():
        path = given.weights / file
        if not path.exists():
            print(f"{key}: {path} does not exist; skipped")
            continue
        explainer = Explainer(path, labels=labels)
        for photo in EXPLAINED[key]:
            save(explainer.explain(f"example:{photo}").figure, f"{photo}-{key}")
        images = open_data(given.images, val_share=1.0).val if given.images else None
        chosen = [] if images is None else spread_over_labels([images.label(n) for n in range(len(images))], 64)
        sources = (images.source(n) for n in chosen) if images is not None else ()
        for figure in look(explainer, sources).figures:
            if figure.name in LOOKED_AT:
                save(figure, f"{key}-{figure.name}")


if __name__ == "__main__":
    main()
