"""Evaluate a captioner: exact matches and BLEU; on collages also what its nouns attend to."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitrail.base.errors import ConfigError, DataError
from vitrail.base.files import write_text
from vitrail.base.text import format_count
from vitrail.data.captions.captions import CaptionedImages, CaptionSplits, open_captions
from vitrail.data.captions.collages import CollageImages
from vitrail.data.images.image_items import ImageItem
from vitrail.evaluation.caption_scores import CaptionScores, score_captions
from vitrail.evaluation.translation_scores import import_sacrebleu
from vitrail.inspection.sentences.known_attention import NounScores, score_nouns
from vitrail.predict.captioner import Captioner
from vitrail.predict.output.row_formats import make_single_line
from vitrail.predict.search.settings import GREEDY, SearchSettings

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
    nouns: NounScores | None = None  # of collages
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
        numbers, table = (folder / name for name in CAPTION_EVALUATION_FILES)
        write_text(numbers, json.dumps(report, indent=2, ensure_ascii=False) + "\n")
        rows = [("file", "caption", "references")]
        rows += [
            (name, caption, " | ".join(known))
            for name, caption, known in zip(self.images, self.captions, self.references, strict=True)
        ]
        lines = ("\t".join(make_single_line(each).replace("\t", " ") for each in row) for row in rows)
        write_text(table, "".join(f"{line}\n" for line in lines))
        return [numbers, table]

    def __str__(self) -> str:
        how = "greedy" if self.search.beam == 1 else f"beam {self.search.beam}"
        lines = [
            f"{self.part}: {format_count(len(self.images), 'image')}, {how}",
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
    search: SearchSettings = GREEDY,
    strict: bool = False,
    count: int | None = None,
    progress: Callable[[int], object] = lambda _: None,
) -> CaptionEvaluation:
    """Describe the test images, or the first `count`, and compare the captions with theirs; needs sacrebleu.

    The attention of the nouns of collages is that of the layer which finds most garments in the validation collages.
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
    if isinstance(part.images, CollageImages) and data.val is not None and isinstance(data.val.images, CollageImages):
        chosen, nouns = (score_part(captioner, images, count) for images in (data.val.images, part.images))
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


def score_part(captioner: Captioner, images: CollageImages, count: int | None) -> NounScores:
    device = next(captioner.model.parameters()).device
    how = captioner.loaded.preprocessing
    return score_nouns(captioner.model, captioner.tokenizer, how, images, device=device, count=count)
