"""The sections of a report on accuracy and training: results per class, curves, confusion, samples of every class."""

from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from vitrail.base.errors import DataError, VitrailError
from vitrail.base.figures import CaptionedFigure, new_figure, sanitize_label
from vitrail.base.style import FIGURE_WIDTH, LABEL_POINTS, RIGHT, SOFT, WRONG
from vitrail.base.text import TableCells, format_count, format_duration, format_probability
from vitrail.data.images.class_names import split_label
from vitrail.data.images.datasets import ImageDataset
from vitrail.data.images.decoding.rgb_image import open_image
from vitrail.data.images.image_items import evenly_spaced_indices
from vitrail.evaluation.evaluate import evaluate
from vitrail.evaluation.evaluation_data import LabeledImages
from vitrail.evaluation.metrics import Evaluation
from vitrail.evaluation.plots import draw_confusion_matrix, draw_reliability_diagram
from vitrail.evaluation.wrong_predictions import WrongPrediction
from vitrail.inspection.explain.explain_options import ExplainOptions
from vitrail.inspection.explain.explainer import Explainer
from vitrail.inspection.explain.overlay import BRIGHTEST_QUANTILE, blend_map_with_photo, shrink_photo_and_box
from vitrail.opening import Opened
from vitrail.report.html_page import PageSection, escape_html, render_page, render_verdict
from vitrail.tasks.metric import LOSS_METRIC
from vitrail.train.plots import draw_training_curves
from vitrail.train.run_list import RecordedTask, RunSummary

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure

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

    def __init__(self, loaded: Opened) -> None:
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
    loaded: Opened,
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


MAX_CLASS_ROWS = 50  # in the table and in the samples; of more classes, those with the lowest accuracy
CLASSES_PER_FIGURE = 10  # of samples
SAMPLES = 4  # correct ones per class, and as many wrong ones
LABEL_WIDTH, SAMPLE_SIDE, ROW_HEIGHT = 1.7, 0.8, 1.08  # inches


@dataclass(frozen=True, kw_only=True, eq=False)
class EvaluatedImages:
    """An evaluation, with the prediction for each image."""

    result: Evaluation
    found: LabeledImages
    labels: NDArray[np.int64]  # the true class of each image, by the model's numbers
    predictions: NDArray[np.int64]  # −1 for an image that cannot be read
    confidences: NDArray[np.float32]
    label_probabilities: NDArray[np.float32]


def evaluate_images(
    loaded: Opened, found: LabeledImages, *, batch: int = 64, progress: Callable[[int], object] | None = None
) -> EvaluatedImages:
    """Evaluate a model on images whose classes map to the model's."""
    count, mapping = len(found.images), np.array(found.mapping)
    labels = mapping[[found.images.label(index) for index in range(count)]]
    predictions, confidences = np.full(count, -1), np.zeros(count, np.float32)
    of_labels = np.zeros(count, np.float32)

    def keep(indices: "torch.Tensor", logits: "torch.Tensor") -> None:
        rows, probabilities = indices.numpy(), logits.float().softmax(-1).cpu().numpy()
        predictions[rows], confidences[rows] = probabilities.argmax(-1), probabilities.max(-1)
        of_labels[rows] = probabilities[np.arange(len(rows)), labels[rows]]

    result = evaluate(
        loaded.module,
        found.images,
        loaded.preprocessing,
        batch=batch,
        device=next(loaded.module.parameters()).device,
        mapping=found.mapping,
        labels=loaded.labels,
        classes=loaded.classes,
        progress=progress,
        on_logits=keep,
    )
    return EvaluatedImages(
        result=result,
        found=found,
        labels=labels,
        predictions=predictions,
        confidences=confidences,
        label_probabilities=of_labels,
    )


def list_typical_images(evaluated: EvaluatedImages) -> list[int]:
    """The images that are predicted right, class by class in turn; those of a class's median confidence first."""
    right, turns = np.flatnonzero(evaluated.predictions == evaluated.labels), list[tuple[int, int, int]]()
    for label in np.unique(evaluated.labels[right]).tolist():
        of_class = right[evaluated.labels[right] == label]
        sure = evaluated.confidences[of_class]
        order = np.argsort(np.abs(sure - np.median(sure)), kind="stable")
        turns += [(turn, label, index) for turn, index in enumerate(of_class[order].tolist())]
    return [index for *_, index in sorted(turns)]


def build_result_sections(evaluated: EvaluatedImages) -> list[PageSection]:
    """Accuracy, confusion, calibration, and samples of the classes."""
    result = evaluated.result
    classes = select_classes(result)
    shown = "" if len(classes) == len(result.per_class) else f" The {len(classes)} with the lowest accuracy are listed."
    overview = PageSection(
        title="Results",
        text=f"{evaluated.found.name}: {format_count(result.images, 'validation image')}"
        f" of {format_count(len(result.per_class), 'class')}.{shown}",
        table=build_accuracy_table(result),
    )
    per_class = PageSection(title="Accuracy per class", table=build_class_table(result, classes))
    figures = list[CaptionedFigure]()
    if result.confusion is not None:
        figures.append(caption_confusion_matrix(result))
    figures.append(caption_reliability_diagram(result))
    return [
        overview,
        per_class,
        PageSection(title="Confusion and calibration", figures=figures),
        PageSection(
            title="Samples",
            text="Correct predictions are evenly spaced over the data; wrong ones are those with the highest"
            " probability, labeled with the predicted class.",
            figures=list_sample_figures(evaluated, classes),
        ),
    ]


def select_classes(result: Evaluation) -> list[int]:
    """The classes that are shown, in their own order: all, or of many the worst."""
    worst = sorted(result.per_class, key=lambda each: each.accuracy)[:MAX_CLASS_ROWS]
    return sorted(each.index for each in worst)


def build_accuracy_table(result: Evaluation) -> TableCells:
    rows = [
        ("top-1 accuracy", f"{result.top1:.2%}"),
        *([("top-5 accuracy", f"{result.top5:.2%}")] if len(result.labels) > 5 else []),  # 100% for five classes
        ("loss (cross-entropy)", f"{result.loss:.4f}"),
        ("calibration error (ECE)", f"{result.calibration_error:.4f}"),
        ("images", f"{result.images:,}"),
        *([("images that cannot be read", f"{len(result.skipped):,}")] if result.skipped else []),
    ]
    return ("", ""), rows, "lr"


def build_class_table(result: Evaluation, classes: Sequence[int]) -> TableCells:
    by_index = {each.index: each for each in result.per_class}
    rows = list[tuple[str, ...]]()
    for index in classes:
        each = by_index[index]
        confused = find_most_confused(result, index)
        rows.append((each.label, f"{each.images:,}", f"{each.accuracy:.1%}", confused))
    return ("class", "images", "accuracy", "most often confused with"), rows, "lrrl"


def find_most_confused(result: Evaluation, index: int) -> str:
    """The class that is predicted most often instead of this one, and how often."""
    if result.confusion is None:
        return ""
    counts = result.confusion[index].clone()
    counts[index] = 0
    most = int(counts.argmax())
    return f"{result.labels[most]} ({counts[most]:,})" if counts[most] else ""


def caption_confusion_matrix(result: Evaluation) -> CaptionedFigure:
    assert result.confusion is not None
    pairs = [f"{each.label} as {each.taken_for} ({each.images:,})" for each in result.list_confused_pairs()[:3]]
    most = f" Most confused: {', '.join(pairs)}." if pairs else ""
    return CaptionedFigure(
        name="confusion",
        title="Confusion matrix",
        caption="Rows are true classes, columns predicted classes. Colors show the share of the true class." + most,
        arrays={"confusion": result.confusion.numpy()},
        draw=lambda: draw_confusion_matrix(result.confusion, result.labels),
    )


def caption_reliability_diagram(result: Evaluation) -> CaptionedFigure:
    bins = [each for each in result.bins if each.images]
    mean = sum((each.confidence or 0) * each.images for each in bins) / result.images
    return CaptionedFigure(
        name="reliability",
        title="Reliability diagram",
        caption="Accuracy of the predictions by their probability (confidence). Bars below the diagonal are"
        f" overconfident. The mean confidence is {mean:.1%}, the accuracy {result.top1:.1%}.",
        arrays={"images": np.array([each.images for each in result.bins])},
        draw=lambda: draw_reliability_diagram(result.bins),
    )


def list_sample_figures(evaluated: EvaluatedImages, classes: Sequence[int]) -> list[CaptionedFigure]:
    """Figures of at most ten classes each."""
    parts = [classes[n : n + CLASSES_PER_FIGURE] for n in range(0, len(classes), CLASSES_PER_FIGURE)]
    return [caption_samples(evaluated, part, number) for number, part in enumerate(parts, 1)]


def caption_samples(evaluated: EvaluatedImages, classes: Sequence[int], number: int) -> CaptionedFigure:
    rows = [(index, *select_samples(evaluated, index)) for index in classes]
    names = [evaluated.result.labels[index] for index in classes]
    return CaptionedFigure(
        name=f"samples-{number}",
        title=f"Samples of {names[0]} to {names[-1]}" if len(names) > 1 else f"Samples of {names[0]}",
        caption="One row per class. Left: correct predictions. Right: wrong predictions, with the predicted class.",
        arrays={f"class_{index}": np.array([*right, *wrong]) for index, right, wrong in rows},
        draw=lambda: draw_samples(evaluated, rows),
    )


def select_samples(evaluated: EvaluatedImages, index: int) -> tuple[list[int], list[int]]:
    """Some images of a class that are classified correctly, and the most confident ones that are not."""
    of_class = np.flatnonzero((evaluated.labels == index) & (evaluated.predictions >= 0))
    is_right = evaluated.predictions[of_class] == index
    right, wrong = of_class[is_right], of_class[~is_right]
    most_confident = wrong[np.argsort(-evaluated.confidences[wrong], kind="stable")][:SAMPLES]
    return right[evenly_spaced_indices(len(right), SAMPLES)].tolist(), most_confident.tolist()


def draw_samples(evaluated: EvaluatedImages, rows: Sequence[tuple[int, list[int], list[int]]]) -> "Figure":
    """Thumbnails in one axes, in inches: much faster than one axes each."""
    height = 0.35 + len(rows) * ROW_HEIGHT
    figure = new_figure(FIGURE_WIDTH, height)
    figure.set_layout_engine("none")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, FIGURE_WIDTH), ylim=(height, 0))
    axes.set_axis_off()
    step = (FIGURE_WIDTH - LABEL_WIDTH - 0.25) / (2 * SAMPLES)
    starts = (LABEL_WIDTH, LABEL_WIDTH + SAMPLES * step + 0.2)
    for start, title, color in zip(starts, ("correct", "wrong"), (RIGHT, WRONG), strict=True):
        axes.text(start, 0.22, title, fontsize=10, color=color)
    for row, (index, right, wrong) in enumerate(rows):
        top = 0.35 + row * ROW_HEIGHT
        label = sanitize_label(shorten_label(evaluated.result.labels[index]), 22)
        axes.text(0.08, top + SAMPLE_SIDE / 2, label, fontsize=LABEL_POINTS, va="center", parse_math=False)
        for start, images, color in zip(starts, (right, wrong), (RIGHT, WRONG), strict=True):
            for column, image in enumerate(images):
                predicted = shorten_label(evaluated.result.labels[evaluated.predictions[image]])
                note = "" if color == RIGHT else f"{predicted}"
                plot_thumbnail(axes, evaluated.found, image, (start + column * step, top), color, note)
        if not wrong:
            axes.text(starts[1], top + SAMPLE_SIDE / 2, "none", fontsize=LABEL_POINTS, va="center", color=SOFT)
    return figure


def plot_thumbnail(
    axes: Any, found: LabeledImages, image: int, corner: tuple[float, float], color: str, note: str
) -> None:
    """Draw a square part of an image with a frame, and a note below it."""
    from matplotlib.patches import Rectangle

    left, top = corner
    try:
        photo = ImageOps.fit(open_image(found.images.source(image)).convert("RGB"), (128, 128))
    except DataError:  # it was readable before
        return
    axes.imshow(photo, extent=(left, left + SAMPLE_SIDE, top + SAMPLE_SIDE, top), aspect="auto")
    axes.add_patch(Rectangle(corner, SAMPLE_SIDE, SAMPLE_SIDE, fill=False, edgecolor=color, linewidth=1.4))
    axes.text(left, top + SAMPLE_SIDE + 0.14, sanitize_label(note, 14), fontsize=7, parse_math=False)


def shorten_label(label: str) -> str:
    """The first name of a label, without its WordNet id."""
    return next(iter(split_label(label)), label)


def build_training_section(run: RunSummary) -> PageSection:
    """How a run was trained, with its curves."""
    epochs, metric, names = max(run.list_values("epoch"), default=None), run.task.metric, ("epoch", "loss", "val_loss")
    rows = [
        ("model", run.model),
        ("data", run.data),
        ("recipe", run.recipe),
        ("started from", run.init),
        ("distilled from", run.teacher),
        ("epochs", "" if epochs is None else f"{epochs:.4g}"),
        ("steps", f"{run.step:,}"),
        ("time", format_duration(run.last_value("seconds"))),
        ("training loss", LOSS_METRIC.format_value(run.last_value("loss"))),
        ("validation loss", LOSS_METRIC.format_value(run.last_value("val_loss"))),
        *(
            (f"validation {metric.label}, last", metric.format_value(run.last_metric)),
            (f"validation {metric.label}, best", metric.format_value(run.best_metric)),
        )[metric.name == "loss" :],  # the last loss is listed above
    ]
    curves = CaptionedFigure(
        name="curves",
        title="Training curves",
        caption=describe_curves(run.task),
        arrays={name: np.array(run.list_values(name)) for name in dict.fromkeys((*names, f"val_{metric.name}"))},
        draw=lambda: draw_training_curves({run.name: run.records}, [metric]),
    )
    filled = [row for row in rows if row[1]]
    return PageSection(title="Training", table=(("", ""), filled, "ll"), figures=[curves] if run.records else [])


def describe_curves(task: RecordedTask) -> str:
    if not task.is_classification:
        counted = "" if task.metric.name == "loss" else f", and {task.metric.label} on the validation images"
        return f"Loss on the training and validation images{counted}."
    return (
        "Loss on the training and validation images, and top-1 accuracy on the validation images. With label"
        " smoothing, Mixup or CutMix the training loss is higher than the validation loss."
    )
