"""One offline page about the translation of a sentence: lines between words, occlusion, the beam, all heads."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import vitrail
from vitrail import __version__
from vitrail.base.errors import ConfigError
from vitrail.base.figures import CaptionedFigure, FigureFile, FigureFolder, new_figure
from vitrail.base.files import make_writable_folder, refuse_existing_outputs
from vitrail.base.text import TableCells, escape_unprintable
from vitrail.inspection.attention.capture import resolve_index
from vitrail.inspection.sentences.beam_tree import draw_beam_tree
from vitrail.inspection.sentences.sentence_attention import MapKind, SentenceAttention, read_sentence
from vitrail.inspection.sentences.sentence_figures import (
    KIND_NAMES,
    MapHead,
    capitalise,
    clamp_layer,
    describe_map,
    draw_cross_attention,
    draw_cross_attention_heads,
    draw_self_attention,
)
from vitrail.inspection.sentences.word_occlusion import (
    AttentionAgreement,
    WordOcclusion,
    compare_with_occlusion,
    occlude_words,
)
from vitrail.opening import Opened
from vitrail.report.html_page import FigurePage, PageSection, escape_html, render_page, write_page

PAGE_FOLDER = Path(vitrail.__file__).parent / "serve" / "page"  # of `vitrail serve`, which draws the same lines
SCRIPT_FILES = (PAGE_FOLDER / "word_lines.js", Path(__file__).with_name("templates") / "attention_lines.js")
STYLE_FILE = PAGE_FOLDER / "word_lines.css"
MAX_NAME_LENGTH = 40  # characters of a file name that come from the sentence
MAX_ALTERNATIVES = 10
FIGURE_NAMES = ("attention", "heads", "self-attention", "beam")
SIDE_TITLES: dict[MapKind, tuple[str, str]] = {  # of the columns of words: what is read, and what reads
    "cross": ("source", "translation"),
    "encoder": ("reads", "word"),
    "decoder": ("reads", "writes"),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class ExplainedSentence:
    """A translation with its attention and its occlusion check."""

    read: SentenceAttention
    occlusion: WordOcclusion
    layer: int = -1
    head: MapHead = "mean"
    figures: tuple[CaptionedFigure, ...] = ()
    model: str = ""

    @property
    def agreement(self) -> AttentionAgreement | None:
        """Of the attention map that was asked for; None if there is none."""
        found = self.read.select_map("cross", self.layer, self.head)
        return None if found is None else compare_with_occlusion(found, self.occlusion, self.read)

    @property
    def verdict(self) -> str:
        agreement = f"no attention: {self.read.no_maps_reason}" if self.agreement is None else self.agreement
        return f"{agreement}; {self.occlusion}"

    def __str__(self) -> str:
        return escape_unprintable(f"{self.read.sentence} → {self.read.translation}: {self.verdict}")

    def to_json(self) -> dict[str, Any]:
        agreement = self.agreement
        return {
            "sentence": self.read.sentence,
            "translation": self.read.translation,
            "score": self.read.best.score,
            "log_probability": self.read.best.log_probability,
            "finished": self.read.best.finished,
            "source": list(self.read.source_words),
            "target": list(self.read.target_words),
            "without": [
                {"word": word, "loss": loss, "translation": text, "changed": changed}
                for word, loss, text, changed in zip(
                    self.read.source_words,
                    self.occlusion.totals.tolist(),
                    self.occlusion.without,
                    self.occlusion.changed,
                    strict=True,
                )
            ],
            "agreement": None if agreement is None else vars(agreement),
        }


def explain_sentence(
    loaded: Opened, sentence: str, *, beam: int = 4, layer: int = -1, head: MapHead = "mean"
) -> ExplainedSentence:
    """Translate a sentence, and collect attention, occlusion and figures; `layer` and `head` choose the main map."""
    read = read_sentence(loaded, sentence, beam=beam)
    if read.cross is not None:
        describe_map(read, layer, head)  # for its errors, before anything is computed
    occlusion, name = occlude_words(loaded, read), name_files(sentence)
    figures = [
        draw_cross_attention(read, occlusion, layer, head, f"{name}.attention"),
        draw_cross_attention_heads(read, occlusion, f"{name}.heads"),
        draw_self_attention(read, layer, head, f"{name}.self-attention"),
        draw_beam_tree(read.tree, loaded.tokenizer, f"{name}.beam"),
    ]
    return ExplainedSentence(
        read=read,
        occlusion=occlusion,
        layer=layer,
        head=head,
        figures=tuple(each for each in figures if each is not None),
        model=loaded.source,
    )


def name_files(sentence: str) -> str:
    """The beginning of file names: Ein Hund läuft. → ein-hund-läuft."""
    letters = "".join(each.lower() if each.isalnum() else " " for each in sentence)
    return "-".join(letters.split())[:MAX_NAME_LENGTH].strip("-") or "sentence"


def write_sentence_explanation(
    loaded: Opened,
    sentence: str,
    out: FigureFolder,
    *,
    beam: int = 4,
    layer: int = -1,
    head: MapHead = "mean",
) -> tuple[ExplainedSentence, list[Path]]:
    """Explain a sentence, and write its figures and its page, or only the page; the files that were written."""
    if isinstance(out, FigureFile):
        raise ConfigError(
            f"{out.path} is one figure, but a sentence has several; use a name that ends in .html, or a folder"
        )
    alone = isinstance(out, FigurePage)
    page = out.path if alone else out.path / f"{name_files(sentence)}.html"
    names = [] if alone else [f"{name_files(sentence)}.{each}" for each in FIGURE_NAMES]
    refuse_existing_outputs([page, *([] if alone else out.list_paths(names))], overwrite=out.overwrite)
    new_figure(1, 1)  # needs matplotlib
    explained = explain_sentence(loaded, sentence, beam=beam, layer=layer, head=head)
    make_writable_folder(page.parent)
    written = [] if alone else [path for each in explained.figures for path in out.save(each)]
    write_page(render_translation_page(explained), page)
    return explained, [*written, page]


def render_translation_page(explained: ExplainedSentence) -> str:
    """The page as HTML: no network, no script but ours, and all text escaped."""
    read, panels = explained.read, build_panels(explained)
    by_name = {figure.name.rpartition(".")[2]: figure for figure in explained.figures}
    data = json.dumps([each.data for each in panels.values()]).replace("<", "\\u003c")
    sections = [
        PageSection(
            title="What each word reads" if read.cross is not None else "What each word depends on",
            text="Point at a word to see what it reads, or which words read it. Attention shows where the model looks; "
            "occlusion what it needs: each word of the source is left out, and the same translation is scored again.",
            markup=f'{panels["cross"].markup}<script type="application/json" id="maps">{data}</script>',
        ),
        PageSection(title=by_name["attention"].title, figures=[by_name["attention"]]),
        PageSection(title="Without a word", table=build_occlusion_table(explained)),
        PageSection(title="Beam search", figures=[by_name["beam"]], table=build_beam_table(read)),
    ]
    if "heads" in by_name:
        sections.append(PageSection(title="Layers and heads", figures=[by_name["heads"]]))
    if "self-attention" in by_name:
        kinds: tuple[MapKind, ...] = ("encoder", "decoder")
        markup = "".join(panels[kind].markup for kind in kinds if kind in panels)
        sections.append(PageSection(title="Self-attention", figures=[by_name["self-attention"]], markup=markup))
    sections.append(PageSection(title="Model", table=build_text_model_table(explained)))
    return render_page(
        read.translation or "An empty translation",
        f"{read.sentence}\n\n{capitalise(explained.verdict)}.",
        sections,
        script=join_modules(SCRIPT_FILES),
        style=STYLE_FILE.read_text("utf-8"),
    )


def join_modules(files: Sequence[Path]) -> str:
    """One script of several modules, which need no import when they follow each other."""
    text = "\n".join(each.read_text("utf-8") for each in files)
    return f'"use strict";\n{text.replace("export function", "function")}'


@dataclass(frozen=True)
class LinePanel:
    """Two columns of words with lines between them: the HTML, and the numbers that its script draws."""

    markup: str
    data: Mapping[str, Any]


def build_panels(explained: ExplainedSentence) -> dict[MapKind, LinePanel]:
    """The interactive parts of the page, by the kind of their maps."""
    kinds: tuple[MapKind, ...] = ("cross", "encoder", "decoder")
    panels = dict[MapKind, LinePanel]()
    for kind in kinds:
        if kind == "cross" or explained.read.find_maps(kind) is not None:
            panels[kind] = build_panel(explained, kind, len(panels))
    return panels


def build_panel(explained: ExplainedSentence, kind: MapKind, number: int) -> LinePanel:
    """Values are in thousandths. Each layer has its heads, and at last the mean over them."""
    read, occlusion = explained.read, explained.occlusion
    rows, columns = (each.words for each in read.find_sides(kind))
    data, choices = dict[str, Any](), list[str]()
    maps = read.merge_words(kind)
    if maps is not None:
        layers, heads = maps.shape[:2]
        maps = np.concatenate([maps, maps.mean(1, keepdims=True)], axis=1)
        names: list[MapHead] = [*range(heads), "mean"]
        data["attention"] = np.rint(1000 * maps).astype(int).tolist()
        data["notes"] = [[describe_choice(explained, kind, layer, head) for head in names] for layer in range(layers)]
        layer = clamp_layer(explained.layer, layers) % layers
        chosen = heads if explained.head == "mean" else resolve_index(explained.head, heads, "`head`")
        choices.append(render_select("layer", [str(each) for each in range(layers)], layer))
        choices.append(render_select("head", [str(each) for each in names], chosen))
    if kind == "cross":
        data["occlusion"] = np.rint(1000 * np.pad(occlusion.losses, ((0, 0), (0, 1)))).astype(int).tolist()
        data["note"] = f"How much the log-probability of a target word falls without a source word: {occlusion}."
        choices += [render_switch(number)] if maps is not None else []
    sides = [
        render_words("read", columns, SIDE_TITLES[kind][0]),
        '<div class="ties"><svg aria-hidden="true" preserveAspectRatio="none"></svg></div>',
        render_words("written", rows, SIDE_TITLES[kind][1]),
    ]
    markup = (
        f'<div class="lines" data-panel="{number}" role="group" aria-label="{KIND_NAMES[kind]}">'
        f'<div class="choices">{"".join(choices)}</div><output></output><div class="sides">{"".join(sides)}</div></div>'
    )
    return LinePanel(markup, data)


def describe_choice(explained: ExplainedSentence, kind: MapKind, layer: int, head: MapHead) -> str:
    """What is shown for a layer and head; for cross-attention also its agreement with the occlusion."""
    text = (
        f"{KIND_NAMES[kind].capitalize()}, layer {layer}, {'mean of all heads' if head == 'mean' else f'head {head}'}"
    )
    found = explained.read.select_map("cross", layer, head) if kind == "cross" else None
    return (
        f"{text}."
        if found is None
        else f"{text}: {compare_with_occlusion(found, explained.occlusion, explained.read)}."
    )


def render_words(side: str, words: Sequence[str], title: str) -> str:
    items = "".join(f'<li tabindex="0"><bdi>{escape_html(each)}</bdi></li>' for each in words)
    return f'<ol class="{side}" aria-label="{title}">{items}</ol>'


def render_select(name: str, values: Sequence[str], chosen: int) -> str:
    options = "".join(
        f'<option value="{number}"{" selected" * (number == chosen)}>{value}</option>'
        for number, value in enumerate(values)
    )
    return f'<label>{name} <select name="{name}" autocomplete="off">{options}</select></label>'


def render_switch(number: int) -> str:
    inputs = "".join(
        f'<label><input type="radio" name="show-{number}" value="{value}" autocomplete="off"'
        f"{' checked' * (value == 'attention')}> {value}</label>"
        for value in ("attention", "occlusion")
    )
    return f"<fieldset>{inputs}</fieldset>"


def build_occlusion_table(explained: ExplainedSentence) -> TableCells:
    found = explained.occlusion
    rows = [("(the complete sentence)", "", found.greedy)]
    rows += [
        (word, f"{loss:.2f}", text if changed else "the same")
        for word, loss, text, changed in zip(
            explained.read.source_words, found.totals.tolist(), found.without, found.changed, strict=True
        )
    ]
    return ("left out", "log-probability lost", "greedy translation"), rows, "lrl"


def build_beam_table(read: SentenceAttention) -> TableCells:
    rows = [(f"{score:.3f}", text) for text, score in read.alternatives[:MAX_ALTERNATIVES]]
    return ("score", "text that the search finished"), rows, "rl"


def build_text_model_table(explained: ExplainedSentence) -> TableCells:
    layers, heads = explained.read.layers_and_heads
    rows = [
        ("model", explained.model),
        ("languages", " → ".join(explained.read.languages or ("", ""))),
        ("cross-attention", f"{layers} layers, {heads} heads each" if layers else explained.read.no_maps_reason),
        ("score of the translation", f"{explained.read.best.score:.4f}"),
        ("created with", f"vitrail {__version__}"),
    ]
    return ("", ""), rows, "ll"
