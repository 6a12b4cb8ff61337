"""One model on one page: what it is, what it answers, where it looks, what is seen of its weights and layers."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vitrail import __version__
from vitrail.data.image_items import ImageItem, evenly_spaced_indices
from vitrail.errors import DataError
from vitrail.figures import pluralize
from vitrail.inspection.explain import Explainer, Explanation
from vitrail.inspection.explain_options import ExplainMethod, ExplainOptions
from vitrail.inspection.model_figures import look
from vitrail.inspection.summary import ModelSummary, format_shape, summarize
from vitrail.report.html_page import PageSection, TableCells

TOP_PREDICTIONS = 3  # in the table of predictions
FIGURE_SECTIONS = (  # title, what to know, the plates of `look` in it
    ("How far it looks", "", ("attention_distance",)),
    (
        "Does its attention mean anything?",
        "Patches are taken away in the order of the rollout, and the class is asked again.",
        ("occlusion",),
    ),
    ("What it knows of places", "", ("position_similarity",)),
    ("What its first filters see", "", ("filters",)),
    ("From layer to layer", "", ("token_norms", "token_similarity", "alignment")),
)


def build_model_report(
    explainer: Explainer,
    name: str,
    images: Sequence[ImageItem] = (),
    *,
    explained: int = 6,
    batch: int = 4,
    progress: Callable[[int], object] | None = None,
) -> tuple[str, str, list[PageSection]]:
    """Title, lead and sections. Of the pictures `explained` are shown with their maps, all are looked at.

    `progress` is called with 1 for each that is shown and for each that is looked at.
    """
    skipped, shown = list[str](), list[tuple[ImageItem, list[Explanation]]]()
    methods: list[ExplainMethod] = [explainer.default_method]
    if explainer.loaded.classes and explainer.default_method not in ("grad-rollout", "norms"):
        methods.append("grad-rollout")
    questions = [explainer.resolve_options(ExplainOptions(method=method)) for method in methods]
    for each in (images[n] for n in evenly_spaced_indices(len(images), explained)):
        try:
            shown.append(
                (each, [explainer.explain_resolved(each.source, question, each.name) for question in questions])
            )
        except DataError as error:
            skipped.append(str(error))
        if progress is not None:
            progress(1)
    seen = look(explainer, (each.source for each in images), batch=batch, progress=progress)
    summary = summarize(explainer.model)
    sections = [PageSection(title="The model", table=build_model_table(explainer, summary))]
    if shown:
        if explainer.loaded.classes:
            sections.append(PageSection(title="What it answers", table=build_prediction_table(shown)))
        followed = "of its last layer" if explainer.default_method == "attention" else "followed through all layers"
        text = f"Where the model looks: attention {followed}"
        text += ", and what of it speaks for the class." if explainer.loaded.classes else "."
        if explainer.no_maps_reason:
            text = f"How long its tokens are after the last layer; there are no maps, {explainer.no_maps_reason}."
        plates = [explanation.figure for _, found in shown for explanation in found]
        sections.append(PageSection(title="What it looks at", text=text, figures=plates))
    by_name = {plate.name: plate for plate in seen.figures}
    for title, text, names in FIGURE_SECTIONS:
        if found := [by_name[each] for each in names if each in by_name]:
            sections.append(PageSection(title=title, text=text, figures=found))
    sections.append(PageSection(title="Layer by layer", preformatted=str(summary)))
    if lines := [*seen.notes, *dict.fromkeys([*skipped, *seen.skipped])]:
        sections.append(PageSection(title="What is not here", text="\n\n".join(lines)))
    return Path(name).name or name, format_lead(explainer, summary, seen.images), sections


def format_lead(explainer: Explainer, summary: ModelSummary, images: int) -> str:
    size = format_shape(summary.input[2:])
    over = f" Seen with {pluralize(images, 'picture')}." if images else ""
    classes = f", {explainer.loaded.classes:,} classes" if explainer.loaded.classes else ", without a head"
    return (
        f"{summary.model}, {summary.parameters / 1e6:.1f} million parameters, pictures of {size} pixels{classes}.{over}"
    )


def build_model_table(explainer: Explainer, summary: ModelSummary) -> TableCells:
    how = explainer.loaded.preprocessing
    layers = explainer.layers or [block.attn for block in explainer.model.blocks]
    rows = [
        ("kind", summary.model),
        ("parameters", f"{summary.parameters:,}"),
        ("multiply-adds of one picture", f"{summary.macs / 1e9:.3f} billion"),
        ("attention layers and heads", f"{len(layers)}, {layers[0].heads} each"),
        ("prepared", f"{how.fit.replace('_', ' ')}, {how.crop:.0%} kept, {how.interpolation}"),
        ("mean and deviation of the channels", f"{format_numbers(how.mean)}; {format_numbers(how.std)}"),
        ("made with", f"vitrail {__version__}"),
    ]
    return ("", ""), rows, "ll"


def format_numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)


def build_prediction_table(shown: Sequence[tuple[ImageItem, Sequence[Explanation]]]) -> TableCells:
    rows = list[tuple[str, ...]]()
    for each, (first, *_) in shown:
        top: list[Any] = [] if first.prediction is None else list(first.prediction.top[:TOP_PREDICTIONS])
        said = [f"{one.name} {one.probability:.1%}" for one in top]
        rows.append((Path(each.name).name, each.label or "", *said, *("" for _ in range(TOP_PREDICTIONS - len(said)))))
    return ("picture", "it is", "the model says", "or", "or"), rows, "lllll"
