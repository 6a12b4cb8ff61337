"""Draw the figures of the documentation from public weights and the example photos of the package.

    python docs/figures/make_figures.py --weights FOLDER

FOLDER holds vit_tiny_patch16_224.augreg_in21k_ft_in1k.safetensors (timm) and deit_tiny_patch16_224.pth (facebook).
A figure whose weights are missing is skipped by name. cost.png and positions.png are measured: they come from
`vitrail study cost` and `vitrail study positions`.
"""

import argparse
from pathlib import Path

from PIL import Image

from vitrail.base.figures import CaptionedFigure
from vitrail.data.images.datasets import open_data
from vitrail.data.images.image_items import spread_over_labels
from vitrail.inspection.explain.explainer import Explainer
from vitrail.inspection.model_figures import look
from vitrail.inspection.representation.patch_pca import draw_patch_pca

FOLDER = Path(__file__).parent
WEIGHTS = {
    "vit": "vit_tiny_patch16_224.augreg_in21k_ft_in1k.safetensors",
    "deit": "deit_tiny_patch16_224.pth",
}
EXPLAINED = {"vit": "camera", "deit": "coffee"}  # example photos
LOOKED_AT = ("attention_distance", "filters", "occlusion", "position_similarity")
MAX_PHOTO_WIDTH = 1100  # pixels of a figure with photos; plots get a palette of 256 colors instead


def save(figure: CaptionedFigure, name: str, *, photo: bool = False) -> None:
    """Save a figure as a small PNG."""
    (path,) = figure.save(FOLDER)
    target = FOLDER / f"{name}.png"
    with Image.open(path) as image:
        drawn = image.convert("RGB")
    path.unlink()
    if photo:
        drawn.thumbnail((MAX_PHOTO_WIDTH, drawn.height))
    (drawn if photo else drawn.quantize(256)).save(target, optimize=True)
    print(f"{target}: {target.stat().st_size / 1e3:.0f} KB")


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the figures of the documentation.")
    parser.add_argument("--weights", type=Path, required=True, help="Folder with the public weights.")
    parser.add_argument("--images", help="Folder of images by class, for attention distance and occlusion.")
    parser.add_argument("--labels", type=Path, help="Text file with the class names, one per line.")
    given = parser.parse_args()
    labels = given.labels.read_text("utf-8").splitlines() if given.labels else None
    save(Explainer("cct_cifar10").explain("example:cat").figure, "cat-cct", photo=True)  # bundled with the package
    for key, file in WEIGHTS.items():
        path = given.weights / file
        if not path.exists():
            print(f"{key}: {path} does not exist; skipped")
            continue
        explainer = Explainer(path, labels=labels)
        save(explainer.explain(f"example:{EXPLAINED[key]}").figure, f"{EXPLAINED[key]}-{key}", photo=True)
        if key == "deit":
            save(explainer.explain("example:astronaut", "heads").figure, "astronaut-heads", photo=True)
            photos = [f"example:{name}" for name in ("coffee", "cat", "astronaut", "rocket")]
            save(draw_patch_pca(explainer.loaded, photos), f"{key}-pca", photo=True)
        images = open_data(given.images, val_share=1.0).val if given.images else None
        chosen = [] if images is None else spread_over_labels([images.label(n) for n in range(len(images))], 64)
        sources = (images.source(n) for n in chosen) if images is not None else ()
        for figure in look(explainer, sources).figures:
            if figure.name in LOOKED_AT:
                save(figure, f"{key}-{figure.name}")


if __name__ == "__main__":
    main()
