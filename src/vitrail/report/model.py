"""One model on one page: what it is, what it answers, where it looks, what is seen of its weights and layers."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vitrail import __version__
from vitrail.data.shown import Shown, places
from vitrail.errors import DataError
from vitrail.figures import counted
from vitrail.inspection.explain import Explainer, Explanation
from vitrail.inspection.look import look
from vitrail.inspection.question import Method, Question
from vitrail.inspection.summary import Summary, dimensions, summarize
from vitrail.report.page import Section, Table

ANSWERS = 3  # in the table of predictions
PARTS = (  # title, what to know, the plates of `look` in it
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


def report_parts(
    explainer: Explainer,
    name: str,
    pictures: Sequence[Shown] = (),
    *,
    explained: int = 6,
    batch: int = 4,
    progress: Callable[[int], object] | None = None,
) -> tuple[str, str, list[Section]]:
    """Title, lead and sections. Of the pictures `explained` are shown with their maps, all are looked at.

    `progress` is called with 1 for each that is shown and for each that is looked at.
    """
    skipped, shown = list[str](), list[tuple[Shown, list[Explanation]]]()
    methods: list[Method] = [explainer.usual]
    if explainer.viewer.classes and explainer.usual not in ("grad-rollout", "norms"):
        methods.append("grad-rollout")
    questions = [explainer.settled(Question(method=method)) for method in methods]
    for each in (pictures[n] for n in places(len(pictures), explained)):
        try:
            shown.append((each, [explainer.ask(each.source, question, each.name) for question in questions]))
        except DataError as error:
            skipped.append(str(error))
        if progress is not None:
            progress(1)
    seen = look(explainer, (each.source for each in pictures), batch=batch, progress=progress)
    summary = summarize(explainer.model)
    sections = [Section(title="The model", table=facts(explainer, summary))]
    if shown:
        if explainer.viewer.classes:
            sections.append(Section(title="What it answers", table=predictions(shown)))
        followed = "of its last layer" if explainer.usual == "attention" else "followed through all layers"
        text = f"Where the model looks: attention {followed}"
        text += ", and what of it speaks for the class." if explainer.viewer.classes else "."
        if explainer.unseen:
            text = f"How long its tokens are after the last layer; there are no maps, {explainer.unseen}."
        plates = [explanation.plate for _, found in shown for explanation in found]
        sections.append(Section(title="What it looks at", text=text, plates=plates))
    by_name = {plate.name: plate for plate in seen.plates}
    for title, text, names in PARTS:
        if found := [by_name[each] for each in names if each in by_name]:
            sections.append(Section(title=title, text=text, plates=found))
    sections.append(Section(title="Layer by layer", preformatted=str(summary)))
    if lines := [*seen.notes, *dict.fromkeys([*skipped, *seen.skipped])]:
        sections.append(Section(title="What is not here", text="\n\n".join(lines)))
    return Path(name).name or name, lead(explainer, summary, seen.images), sections


def lead(explainer: Explainer, summary: Summary, images: int) -> str:
    size = dimensions(summary.input[2:])
    over = f" Seen with {counted(images, 'picture')}." if images else ""
    classes = f", {explainer.viewer.classes:,} classes" if explainer.viewer.classes else ", without a head"
    return (
        f"{summary.model}, {summary.parameters / 1e6:.1f} million parameters, pictures of {size} pixels{classes}.{over}"
    )


def facts(explainer: Explainer, summary: Summary) -> Table:
    how = explainer.viewer.preprocessing
    layers = explainer.layers or [block.attn for block in explainer.model.blocks]
    rows = [
        ("kind", summary.model),
        ("parameters", f"{summary.parameters:,}"),
        ("multiply-adds of one picture", f"{summary.macs / 1e9:.3f} billion"),
        ("attention layers and heads", f"{len(layers)}, {layers[0].heads} each"),
        ("prepared", f"{how.fit.replace('_', ' ')}, {how.crop:.0%} kept, {how.interpolation}"),
        ("mean and deviation of the channels", f"{numbers(how.mean)}; {numbers(how.std)}"),
        ("made with", f"vitrail {__version__}"),
    ]
    return ("", ""), rows, "ll"


def numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)


def predictions(shown: Sequence[tuple[Shown, Sequence[Explanation]]]) -> Table:
    rows = list[tuple[str, ...]]()
    for each, (first, *_) in shown:
        top: list[Any] = [] if first.prediction is None else list(first.prediction.top[:ANSWERS])
        said = [f"{one.name} {one.probability:.1%}" for one in top]
        rows.append((Path(each.name).name, each.label or "", *said, *("" for _ in range(ANSWERS - len(said)))))
    return ("picture", "it is", "the model says", "or", "or"), rows, "lllll"
