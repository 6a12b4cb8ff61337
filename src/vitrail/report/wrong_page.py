"""A page of the images that a model predicts wrong: what it said, what is true, and what it looked at."""

from base64 import b64encode
from collections.abc import Callable
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail.base.errors import DataError, VitrailError
from vitrail.base.text import TableCells, format_count, format_probability
from vitrail.data.images.datasets import ImageDataset
from vitrail.data.images.decoding.rgb_image import open_image
from vitrail.evaluation.metrics import Evaluation
from vitrail.evaluation.wrong_predictions import WrongPrediction
from vitrail.inspection.explain.explain_options import ExplainOptions
from vitrail.inspection.explain.explainer import Explainer
from vitrail.inspection.explain.overlay import BRIGHTEST_QUANTILE, blend_map_with_photo, shrink_photo_and_box
from vitrail.loaded_model import LoadedModel
from vitrail.report.html_page import PageSection, escape_html, render_page, render_verdict

MAX_SHOWN = 100  # images on the page: about 3 MB
THUMBNAIL_SIDE = 320  # pixels
MAX_PAIRS = 10  # rows of the table of confused classes
CARD_STYLE = """
section>.cards{max-width:none;display:grid;gap:2rem 1.5rem;margin-top:1.5rem;
grid-template-columns:repeat(auto-fill,minmax(min(100%,19rem),1fr))}
.cards article{line-height:1.5;min-width:0}
.pair{display:grid;grid-template-columns:1fr 1fr;gap:.25rem;margin-bottom:.5rem;align-items:start}
.pair img{width:100%;height:auto;display:block;border-radius:4px}
.said{display:grid;grid-template-columns:max-content 1fr max-content;gap:.25rem .5rem;margin:0;
font-variant-numeric:tabular-nums}
.said dt{color:var(--soft)}
.said dd{margin:0}
.said dd:nth-of-type(2n){text-align:right}
.bar{grid-column:1/-1;height:.25rem;background:var(--line);border-radius:2px;overflow:hidden}
.bar i{display:block;height:100%}
.bar .is-wrong{background:var(--wrong)}
.bar .is-true{background:var(--right)}
.file{color:var(--soft);font-size:var(--small);margin:.5rem 0 0}
"""


class MistakeMaps:
    """What a model looked at in the images that it predicts wrong, if it has attention maps."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.explainer: Explainer | None = None
        self.missing = ""  # why there are no maps
        try:
            explainer = Explainer(loaded)
            options = explainer.resolve_options(ExplainOptions(method=explainer.default_method))
        except VitrailError as error:  # an exported model, or one without attention
            self.missing = str(error).partition(";")[0]
        else:
            self.missing = explainer.no_maps_reason
            if not self.missing:
                self.explainer, self.options = explainer, options

    @property
    def introduction(self) -> str:
        if self.explainer is None:
            return f"What the model looked at is not shown: {self.missing}."
        return (
            "Left: the image. Right: bright is what the model looked at for the class that it said, dark is what it "
            f"did not look at; pale edges are cut off before the model receives the image ({self.options.description})."
        )

    def make_images(self, source: Any, name: str) -> list[NDArray[Any]]:
        """The photo, and the photo with the map if there is one."""
        if self.explainer is None:
            photo = open_image(source)
            return [shrink_photo_and_box(photo, (0, 0, photo.width, photo.height))[0]]
        found = self.explainer.explain_resolved(source, self.options, name)
        high = float(np.quantile(found.map, BRIGHTEST_QUANTILE)) or float(found.map.max()) or 1.0
        blended = blend_map_with_photo(found.photo, found.box, found.map, (0.0, high))
        return [found.photo, (255 * blended).astype(np.uint8)]


def render_wrong_page(
    result: Evaluation,
    loaded: LoadedModel,
    data: str,
    images: ImageDataset,
    *,
    progress: Callable[[int], object] = lambda _: None,
) -> str:
    """The page as HTML, with the most confident mistakes first; `progress` is called with 1 per image shown."""
    wrong, shown = result.wrong, result.wrong[:MAX_SHOWN]
    right = f"{loaded.source} on {data}: {result.images - len(wrong):,} of {result.images:,} right ({result.top1:.1%})."
    if not wrong:
        return render_page("No image was predicted wrong", right, [])
    maps = MistakeMaps(loaded)
    cards = list[str]()
    for each in shown:
        cards.append(render_card(each, maps, images.source(each.index)))
        progress(1)
    which = "" if len(shown) == len(wrong) else f" The {len(shown)} most confident of {len(wrong):,} are shown."
    sections = [
        PageSection(
            title="Most confident mistakes first",
            text=f"{maps.introduction}{which}",
            markup=f'<div class="cards">{"".join(cards)}</div>',
        )
    ]
    if len(result.list_confused_pairs()) > 1:
        sections.append(PageSection(title="Which classes are confused", table=build_pair_table(result)))
    title = f"{len(wrong):,} of {format_count(result.images, 'image')} predicted wrong"
    return render_page(title, right, sections, style=CARD_STYLE)


def build_pair_table(result: Evaluation) -> TableCells:
    rows = [(each.label, each.taken_for, f"{each.images:,}") for each in result.list_confused_pairs()[:MAX_PAIRS]]
    return ("it is", "the model said", "images"), rows, "llr"


def render_card(wrong: WrongPrediction, maps: MistakeMaps, source: Any) -> str:
    """The image, what the model looked at, what it said and what is true."""
    try:
        pixels = maps.make_images(source, wrong.name)
    except DataError:  # it was readable before
        pixels = []
    texts = (wrong.name, f"What the model looked at for {wrong.predicted}: bright parts of {wrong.name}")
    shown = "".join(render_thumbnail(each, text) for each, text in zip(pixels, texts, strict=False))
    rows = render_row(f"{render_verdict('wrong')}It said", wrong.predicted, wrong.probability, "is-wrong") + render_row(
        "It is", wrong.label, wrong.label_probability, "is-true"
    )
    return (
        f'<article><div class="pair">{shown}</div><dl class="said">{rows}</dl>'
        f'<p class="file">{escape_html(wrong.name)}</p></article>'
    )


def render_row(heading: str, name: str, probability: float, kind: str) -> str:
    return (
        f"<dt>{heading}</dt><dd>{escape_html(name)}</dd><dd>{escape_html(format_probability(probability))}</dd>"
        f'<div class="bar"><i class="{kind}" style="width:{100 * probability:.1f}%"></i></div>'
    )


def render_thumbnail(pixels: NDArray[Any], alt: str) -> str:
    """An image as WebP of at most 320 pixels; a small one is enlarged in whole steps, so that it stays sharp."""
    image = Image.fromarray(pixels)
    factor = max(1, THUMBNAIL_SIDE // 2 // max(image.size))
    image = image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
    image.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE))
    buffer = BytesIO()
    image.save(buffer, "WEBP", quality=80)
    source = f"data:image/webp;base64,{b64encode(buffer.getvalue()).decode('ascii')}"
    return f'<img alt="{escape_html(alt)}" width="{image.width}" height="{image.height}" src="{source}">'
