"""Evaluate a model that translates on sentence pairs: what `vitrail eval` measures of a run of translation."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from vitrail.base.errors import ConfigError, DataError, unknown_name_error
from vitrail.base.files import write_text
from vitrail.base.table import Column, Table
from vitrail.base.text import format_count
from vitrail.checkpoint.run_files import FinishedRun
from vitrail.data.text.batches import EncodedPairs, load_validation_batches
from vitrail.data.text.pairs import BUILT_IN_PAIRS, UNNAMED_COLUMNS, PairSplits, SentencePairs, open_pairs
from vitrail.distributed import Ranks, resolve_device
from vitrail.evaluation.evaluation_data import is_same_data_path
from vitrail.evaluation.text_scores import (
    CorpusScores,
    compute_perplexity,
    import_sacrebleu,
    measure_token_loss,
    score_translations,
)
from vitrail.opening import Opened, open_model
from vitrail.predict.output.resumable_rows import make_single_line
from vitrail.predict.search.settings import SearchSettings
from vitrail.predict.translator import Translator

TEXT_EVALUATION_FILES = ("evaluation.json", "translations.tsv")


@dataclass(frozen=True, kw_only=True)
class TranslationEvaluation:
    """BLEU, chrF2, exact matches and perplexity on sentence pairs, with the translations."""

    pairs: SentencePairs
    translations: Sequence[str]
    scores: CorpusScores
    loss: float  # per token
    search: SearchSettings
    seconds: float  # of the translation

    @property
    def perplexity(self) -> float:
        return compute_perplexity(self.loss)

    @property
    def sentences_per_second(self) -> float:
        return len(self.pairs) / max(self.seconds, 1e-9)

    def __str__(self) -> str:
        return "\n".join(
            (
                f"BLEU {self.scores.bleu:.2f}   {self.scores.bleu_signature}",
                f"chrF2 {self.scores.chrf:.2f}  {self.scores.chrf_signature}",
                f"perplexity {self.perplexity:.4g}, exact match {self.scores.exact:.2%}; "
                f"{format_count(len(self.pairs), 'sentence')} of {self.pairs.name}, {self.search.describe_beam()}, "
                f"{self.sentences_per_second:.1f} sentences/s",
            )
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "part": self.pairs.name,
            "sentences": len(self.pairs),
            "bleu": self.scores.bleu,
            "bleu_signature": self.scores.bleu_signature,
            "chrf": self.scores.chrf,
            "chrf_signature": self.scores.chrf_signature,
            "exact_match": self.scores.exact,
            "perplexity": self.perplexity,
            "loss": self.loss,
            "search": asdict(self.search),
            "seconds": self.seconds,
            "sentences_per_second": self.sentences_per_second,
        }

    @property
    def table(self) -> Table:
        """One row with the scores."""
        columns = (
            Column(name="part"),
            Column(name="sentences"),
            Column(name="BLEU", digits=2),
            Column(name="chrF2", digits=2),
            Column(name="perplexity"),
            Column(name="exact match", unit="%", digits=2),
        )
        scores = self.scores
        row = (self.pairs.name, len(self.pairs), scores.bleu, scores.chrf, self.perplexity, scores.exact)
        return Table(columns=columns, rows=[row], notes=(scores.bleu_signature, scores.chrf_signature))

    def write(self, report: Mapping[str, Any], folder: Path) -> list[Path]:
        """Write the report, and a table of sources, references and translations."""
        rows = zip(self.pairs.sources, self.pairs.targets, self.translations, strict=True)
        return write_scored_texts(report, folder, "translations.tsv", ("source", "reference", "translation"), rows)


@dataclass(frozen=True, kw_only=True)
class TextEvaluation:
    """A model that translates, and the pairs that it is evaluated on."""

    loaded: Opened
    data: str  # its name
    pairs: SentencePairs
    encoded: EncodedPairs
    notes: Sequence[str]
    device: torch.device
    search: SearchSettings
    batch: int = 64
    files: Sequence[str] = TEXT_EVALUATION_FILES

    @property
    def examples(self) -> int:
        return len(self.pairs)

    def run(self, progress: Callable[[int], object] = lambda _: None) -> TranslationEvaluation:
        model, pad = self.loaded.model, self.loaded.tokenizer.pad
        loss, _ = measure_token_loss(model, load_validation_batches(self.encoded, batch=self.batch), pad, self.device)
        translator, start = Translator(self.loaded, device=str(self.device), batch=self.batch), monotonic()
        found = list(translator.iterate(self.pairs.sources, self.search, progress=progress))
        seconds = monotonic() - start
        texts = ["" if isinstance(each, DataError) else each.text for each in found]
        return TranslationEvaluation(
            pairs=self.pairs,
            translations=texts,
            scores=score_translations(texts, self.pairs.targets),
            loss=loss,
            search=self.search,
            seconds=seconds,
        )


def write_scored_texts(
    report: Mapping[str, Any], folder: Path, name: str, columns: Sequence[str], rows: Iterable[Sequence[str]]
) -> list[Path]:
    """Write evaluation.json, and the texts with their references as TSV."""
    numbers, table = folder / TEXT_EVALUATION_FILES[0], folder / name
    write_text(numbers, json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    lines = ("\t".join(make_single_line(each).replace("\t", " ") for each in row) for row in (columns, *rows))
    write_text(table, "".join(f"{line}\n" for line in lines))
    return [numbers, table]


def open_text_evaluation(
    model: str,
    data: str | None = None,
    *,
    pair: str | None = None,
    part: str | None = None,
    beam: int = 4,
    batch: int = 64,
    device: str = "auto",
) -> TextEvaluation:
    """Open a model and the pairs, by default the validation part of the run's data.

    `part` is val, train, or the name of a test set. Other data than the run's is not split: all its pairs are used.
    """
    import_sacrebleu()  # fail before the work, not after it
    place = resolve_device(device, Ranks())
    loaded = open_model(model, device=place, kind="text")
    splits = open_evaluation_pairs(data, pair, loaded)
    name, pairs = choose_part(splits, part)
    encoded = EncodedPairs.encode(pairs, loaded.tokenizer, length=loaded.model.length_limit)
    notes = [*splits.notes, *encoded.notes]
    if part is None and (others := [each for each in splits.tests if each != name]):
        notes.append(f"evaluated on {name}; {splits.name} also has {', '.join(others)}: choose one with `part`")
    return TextEvaluation(
        loaded=loaded,
        data=splits.name,
        pairs=pairs,
        encoded=encoded,
        notes=notes,
        device=place,
        search=SearchSettings(beam=beam),
        batch=batch,
    )


def open_evaluation_pairs(data: str | None, pair: str | None, loaded: Opened) -> PairSplits:
    """The pairs in the direction of the model."""
    run = loaded.run or FinishedRun(model=Path())
    where = data or run.data or find_built_in_pairs(loaded)
    if where is None:
        raise ConfigError(
            f"no `data`, and {loaded.source} is not a run; expected tatoeba, or a folder of sentence pairs"
        )
    own = run.data is not None and (where == run.data or is_same_data_path(run.data, where))
    known = "-".join(loaded.languages) if loaded.languages not in (None, UNNAMED_COLUMNS) else None
    return open_pairs(
        where, pair or (run.pair if own else None) or known, seed=run.seed, val_share=run.val_share if own else 0.0
    )


def find_built_in_pairs(loaded: Opened) -> str | None:
    """The bundled pairs that the model was trained on; None if it was trained on others."""
    name = None if loaded.checkpoint is None else loaded.checkpoint.description.provenance.get("data")
    own = name in BUILT_IN_PAIRS and {*(loaded.languages or ())} == {*BUILT_IN_PAIRS[name][0]}
    return name if own else None


def list_parts(splits: PairSplits) -> dict[str, SentencePairs]:
    return {"val": splits.val, "train": splits.train, **splits.tests}


def choose_part(splits: PairSplits, part: str | None) -> tuple[str, SentencePairs]:
    """The named part; by default validation pairs, else the first test set, else all pairs."""
    parts = list_parts(splits)
    name = part or next(each for each in ("val", *sorted(splits.tests), "train") if len(parts[each]))
    if name not in parts:
        raise unknown_name_error("part", name, parts)
    if not len(parts[name]):
        raise DataError(f"{splits.name} has no pairs in {name}; expected another `part`: {', '.join(parts)}")
    return name, parts[name]
