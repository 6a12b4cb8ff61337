"""Evaluate a captioner: exact matches and BLEU; on collages also what its nouns attend to."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.base.errors import ConfigError, DataError
from vitrail.base.table import Cell, Column, Table
from vitrail.base.text import format_count
from vitrail.data.captions.captions import CaptionedImages, CaptionSplits, open_captions
from vitrail.data.captions.collages import CollageImages
from vitrail.data.images.image_items import ImageItem
from vitrail.evaluation.text_evaluation import write_scored_texts
from vitrail.evaluation.text_scores import CaptionScores, import_sacrebleu, score_captions
from vitrail.predict.captioner import Captioner
from vitrail.predict.search.settings import GREEDY, SearchSettings

if TYPE_CHECKING:
    from vitrail.inspection.sentences.known_attention import NounScores

CAPTION_EVALUATION_FILES = ("evaluation.json", "captions.tsv")


@dataclass(frozen=True, kw_only=True)
class CaptionEvaluation:
    """The scores of a captioner on the images of a part of its data."""

    part: str
    images: tuple[str, ...]  # names
    captions: tuple[str, ...]
    references: tuple[tuple[str, ...], ...]
    scores: CaptionScores
    search: SearchSettings
    nouns: "NounScores | None" = None  # of collages
    layer: int = 0  # of the decoder, chosen on other collages: the attention is that of its heads' mean
    skipped: tuple[str, ...] = ()  # why images could not be read

    @property
    def strongest(self) -> float | None:
        """Share of the nouns whose strongest patch is in their garment."""
        return None if self.nouns is None else float(self.nouns.strongest[self.layer, -1])

    @property
    def mass(self) -> float | None:
        """Share of the attention that is in the garment."""
        return None if self.nouns is None else float(self.nouns.mass[self.layer, -1])

    @property
    def table(self) -> Table:
        """One row with the scores; those of nouns only for collages."""
        nouns, signature = self.nouns, self.scores.bleu_signature
        cells: dict[Column, Cell] = {
            Column(name="part"): self.part,
            Column(name="images"): len(self.images),
            Column(name="exact match", unit="%", digits=1): self.scores.exact,
            Column(name="BLEU-4", digits=2): self.scores.bleu,
            Column(name="right nouns", unit="%", digits=1): None if nouns is None else nouns.correct,
            Column(name="strongest patch in garment", unit="%", digits=1): self.strongest,
            Column(name="attention in garment", unit="%", digits=1): self.mass,
            Column(name="gone without garment", unit="%", digits=1): None if nouns is None else nouns.changed,
        }
        notes = (signature,) if signature else ()
        return Table(columns=tuple(cells), rows=[list(cells.values())], notes=notes).drop_empty_columns()

    def to_json(self) -> dict[str, Any]:
        report: dict[str, Any] = {"part": self.part, "images": len(self.images), **vars(self.scores)}
        if self.nouns is not None:
            report["nouns"] = {
                "count": self.nouns.nouns,
                "correct": self.nouns.correct,
                "layer": self.layer,
                "strongest_in_garment": self.strongest,
                "attention_in_garment": self.mass,
                "strongest_by_layer_and_head": self.nouns.strongest.tolist(),  # the mean of the heads is last
                "gone_without_garment": self.nouns.changed,
            }
        return {**report, "skipped": list(self.skipped)}

    def write(self, report: Mapping[str, Any], folder: Path) -> list[Path]:
        """Write the report, and a table of images, captions and references."""
        rows = zip(self.images, self.captions, map(" | ".join, self.references), strict=True)
        columns = ("file", "caption", "references")
        return write_scored_texts(report, folder, CAPTION_EVALUATION_FILES[1], columns, rows)

    def __str__(self) -> str:
        lines = [
            f"{self.part}: {format_count(len(self.images), 'image')}, {self.search.describe_beam()}",
            f"exact match  {self.scores.exact:.1%}",
        ]
        if self.scores.bleu is not None:
            lines.append(f"BLEU-4       {self.scores.bleu:.2f}  {self.scores.bleu_signature}")
        if self.nouns is not None:
            layers = len(self.nouns.strongest)
            lines += [
                f"nouns        {self.nouns.correct:.1%} of {self.nouns.nouns:,} right, after the right words",
                f"attention    strongest patch in the garment of the noun {self.strongest:.1%}, attention in it "
                f"{self.mass:.1%} (layer {self.layer} of {layers}, chosen on validation collages)",
                f"removal      without its garment, a noun is gone in {self.nouns.changed:.1%}",
            ]
        if self.skipped:
            lines.append(f"skipped      {format_count(len(self.skipped), 'image')}, for example {self.skipped[0]}")
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class OpenCaptionEvaluation:
    """A captioner, and the images that it is evaluated on."""

    captioner: Captioner
    splits: CaptionSplits
    search: SearchSettings = GREEDY
    strict: bool = False
    score_nouns: "Callable[[CollageImages], NounScores] | None" = None
    files: Sequence[str] = CAPTION_EVALUATION_FILES

    @property
    def data(self) -> str:
        return self.splits.name

    @property
    def notes(self) -> Sequence[str]:
        return self.splits.notes

    @property
    def examples(self) -> int:
        return len(choose_part(self.splits))

    def run(self, progress: Callable[[int], object] = lambda _: None) -> CaptionEvaluation:
        return evaluate_captioner(
            self.captioner,
            self.splits,
            score_nouns=self.score_nouns,
            search=self.search,
            strict=self.strict,
            progress=progress,
        )


def open_evaluation_data(captioner: Captioner, data: str | None) -> CaptionSplits:
    """The given data, or that of the run, with the same images held out."""
    run = captioner.loaded.run
    if data is not None:
        return open_captions(data)
    if run is None or run.data is None:
        raise ConfigError(f"{captioner.loaded.source} does not say what it was trained on; expected `data`")
    return open_captions(run.data, seed=run.seed, val_share=run.val_share)


def choose_part(data: CaptionSplits) -> CaptionedImages:
    """The test images, or without any those for validation."""
    part = data.test or data.val
    if part is None:
        raise DataError(f"{data.name} has no test or validation images; expected some, with captions")
    return part


def evaluate_captioner(
    captioner: Captioner,
    data: CaptionSplits,
    *,
    score_nouns: "Callable[[CollageImages], NounScores] | None" = None,
    search: SearchSettings = GREEDY,
    strict: bool = False,
    count: int | None = None,
    progress: Callable[[int], object] = lambda _: None,
) -> CaptionEvaluation:
    """Describe the test images, or the first `count`, and compare the captions with theirs; needs sacrebleu.

    `score_nouns` is for collages: the attention of their nouns is that of the layer which finds most garments in the
    validation collages.
    """
    import_sacrebleu()
    part = choose_part(data)
    total = len(part) if count is None else min(count, len(part))
    items = (ImageItem(part.images.source(index), part.images.name(index)) for index in range(total))
    captions, skipped = dict[int, str](), list[str]()
    for index, found in enumerate(captioner.iterate(items, search)):
        if isinstance(found, DataError):
            if strict:
                raise found
            skipped.append(str(found))
        else:
            captions[index] = found.text
        progress(1)
    if not captions:
        raise DataError(f"none of {total} images of {part.name} can be read, for example {skipped[0]}")
    texts, references = tuple(captions.values()), tuple(part.captions[index] for index in captions)
    nouns, layer = None, 0
    collages = [each.images for each in (data.val, part) if each is not None and isinstance(each.images, CollageImages)]
    if score_nouns is not None and len(collages) == 2:
        chosen, nouns = map(score_nouns, collages)
        layer = chosen.choose_layer()
    return CaptionEvaluation(
        part=part.name,
        images=tuple(part.images.name(index) for index in captions),
        captions=texts,
        references=references,
        scores=score_captions(texts, references),
        search=search,
        nouns=nouns,
        layer=layer,
        skipped=tuple(skipped),
    )
