"""What a job writes of images: predictions, or features and feature maps."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial as bind
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Literal

from vitrail.base.errors import ConfigError
from vitrail.base.text import escape_formula_in_text, escape_unprintable, format_count
from vitrail.data.images.image_items import ImageItem
from vitrail.data.images.preprocessing import Preprocessing
from vitrail.predict.engine_selection import ENGINE_SAMPLE_SIZE, EngineChoice, EngineOptions, open_on_fastest_engine
from vitrail.predict.image_list import ImageList, check_has_images, list_images
from vitrail.predict.job import ItemSummary, OpenRows
from vitrail.predict.model_checksums import identify_model
from vitrail.predict.output.feature_files import (
    FEATURE_FORMAT_BY_SUFFIX,
    MAPS_FORMAT_BY_SUFFIX,
    FeatureFile,
    FeatureFormat,
    partial_folder_for_features,
)
from vitrail.predict.output.partial_folder import PartialFolder
from vitrail.predict.output.resumable_rows import (
    CompletedItems,
    Record,
    Row,
    choose_format,
    compute_file_stamp,
    escape_formula_in_path,
    escape_surrogates,
    import_pyarrow,
    round_probability,
)
from vitrail.predict.output.row_files import RowLayout, open_row_sink
from vitrail.predict.pipeline import ImageResult
from vitrail.predict.predictions import ClassProbability, format_probabilities
from vitrail.predict.predictor import Predictor, compute_map_shapes

ROWS_PER_GROUP = 10_000  # rows of a parquet file in memory
PredictionFormat = Literal["table", "json", "jsonl", "csv", "parquet"]
PREDICTION_FORMAT_BY_SUFFIX: dict[str, PredictionFormat] = {
    ".csv": "csv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
}


@dataclass(frozen=True, kw_only=True)
class PredictionRows:
    """The top classes of each image, for a job."""

    noun: ClassVar[str] = "image"
    failure: ClassVar[str] = "could not be read"
    model: str
    inputs: Sequence[str]  # files, folders, patterns, - for standard input
    format: PredictionFormat | None = None  # None: by the suffix of the file
    top: int = 5  # classes per image
    options: EngineOptions = field(default_factory=EngineOptions)

    def plan_output(self, out: Path | None) -> PartialFolder | None:
        layout = make_prediction_layout(choose_prediction_format(out, self.format), self.top)
        if layout.kind == "parquet":
            import_pyarrow()  # fail before the work, not after it
        return None if out is None else layout.partial_folder(out)

    def list_items(self, stdin: BinaryIO | None) -> ImageList:
        return list_images(self.inputs, stdin=stdin, max_bytes=self.options.limits.bytes)

    def summarize(self, items: ImageList) -> ItemSummary:
        return summarize_images(items)

    def open(
        self, items: ImageList, summary: ItemSummary, partial: PartialFolder | None, on_note: Callable[[str], object]
    ) -> OpenRows:
        engine = open_engine(self.model, self.options, items, summary.total, on_note)
        predictor, kind = engine.predictor, choose_prediction_format(partial and partial.out, self.format)
        top = min(self.top, predictor.classes)

        def iterate(done: CompletedItems, advance: Callable[[int], object]) -> Iterator[Row]:
            for found in iterate_results(engine, items, done, on_note):
                yield self.make_row(found, predictor, single=summary.is_single)
                advance(1)

        return OpenRows(
            iterate=iterate,
            describe=lambda: {**describe_image_job(self.model, self.inputs, self.options, kind, predictor), "top": top},
            open_sink=bind(open_row_sink, make_prediction_layout(kind, top), partial),
        )

    def make_row(self, found: ImageResult, predictor: Predictor, *, single: bool) -> Row:
        if found.values is None:
            return Row(found.name, {"file": found.name, "error": str(found.error)}, found.error, found.stamp)
        top_classes = predictor.prediction_from_logits(found.values, self.top).top
        shown = format_class_table(top_classes, None if single else found.name)
        return Row(found.name, make_prediction_record(found.name, top_classes), None, found.stamp, shown)


@dataclass(frozen=True, kw_only=True)
class FeatureRows:
    """The features of each image, or its feature maps if `options.output` is maps, for a job."""

    noun: ClassVar[str] = "image"
    failure: ClassVar[str] = "could not be read"
    model: str
    inputs: Sequence[str]  # files, folders, patterns, - for standard input
    format: FeatureFormat | None = None  # None: by the suffix of the file
    options: EngineOptions = field(default_factory=lambda: EngineOptions(output="features"))

    def plan_output(self, out: Path | None) -> PartialFolder:
        maps = self.options.output == "maps"
        if out is None:
            files = "maps.npz" if maps else "features.npy or features.parquet"
            raise ConfigError(f"features need a file; set `out` to {files}")
        if maps and self.format is not None:
            raise ConfigError(
                f"`format` is {self.format}, but `maps` needs .npz, one array per level: set `out` to maps.npz"
            )
        kind = self.choose_format(out)
        if kind == "parquet":
            import_pyarrow()  # fail before the work, not after it
        return partial_folder_for_features(out, kind)

    def choose_format(self, out: Path) -> FeatureFormat:
        by_suffix = MAPS_FORMAT_BY_SUFFIX if self.options.output == "maps" else FEATURE_FORMAT_BY_SUFFIX
        return choose_format(out, self.format, by_suffix)

    def list_items(self, stdin: BinaryIO | None) -> ImageList:
        return list_images(self.inputs, stdin=stdin, max_bytes=self.options.limits.bytes)

    def summarize(self, items: ImageList) -> ItemSummary:
        return summarize_images(items)

    def open(
        self, items: ImageList, summary: ItemSummary, partial: PartialFolder | None, on_note: Callable[[str], object]
    ) -> OpenRows:
        assert partial is not None, "features are not printed"
        engine = open_engine(self.model, self.options, items, summary.total, on_note)
        predictor, kind = engine.predictor, self.choose_format(partial.out)

        def iterate(done: CompletedItems, advance: Callable[[int], object]) -> Iterator[Row]:
            for found in iterate_results(engine, items, done, on_note):
                yield Row(found.name, found.values, found.error, found.stamp)
                advance(1)

        levels = compute_map_shapes(predictor) if self.options.output == "maps" else ()
        return OpenRows(
            iterate=iterate,
            describe=lambda: describe_image_job(self.model, self.inputs, self.options, kind, predictor),
            open_sink=lambda _: FeatureFile(partial, kind, levels),
        )


def summarize_images(images: ImageList) -> ItemSummary:
    """Count the images; DataError if there are none."""
    found = images.summarize()
    check_has_images(found)
    repeated = format_count(found.repeated, "image")
    notes = [f"{repeated} given twice; each is processed once"] if found.repeated else []
    return ItemSummary(found.images, found.problems, notes)


def open_engine(
    model: str, options: EngineOptions, images: ImageList, total: int, on_note: Callable[[str], object]
) -> EngineChoice:
    readable = (each for each in images if is_regular_image_file(each))
    sample = list(islice(readable, ENGINE_SAMPLE_SIZE if total > 1 else 0))
    engine = open_on_fastest_engine(model, options, total, sample, on_note)
    for note in engine.notes:
        on_note(note)
    return engine


def iterate_results(
    engine: EngineChoice, images: ImageList, done: CompletedItems, on_note: Callable[[str], object]
) -> Iterator[ImageResult]:
    """The outputs for the images that are not done."""
    if done:
        note_changed_images(images, done, on_note)
    left = (each for each in images if each.name not in done) if done else iter(images)
    return engine.predictor.iterate_results(left, engine.batch)


def note_changed_images(images: ImageList, done: CompletedItems, on_note: Callable[[str], object]) -> None:
    """Report finished images whose files have changed since; their rows describe the old contents."""
    changed, example = 0, ""
    for each in images:
        if is_regular_image_file(each) and done.has_changed(each.name, compute_file_stamp(each.source)):
            changed, example = changed + 1, example or each.name
    if changed:
        count = format_count(changed, "image")
        on_note(
            f"{count} changed after processing, for example {example!r}; their rows describe the old "
            "contents: use `overwrite` to start over"
        )


def is_regular_image_file(image: ImageItem) -> bool:
    """Whether it is a regular file, which can be read twice."""
    return isinstance(image.source, str) and os.path.isfile(image.source)  # noqa: PTH113


def describe_image_job(
    model: str, images: Sequence[str], options: EngineOptions, kind: str, predictor: Predictor
) -> dict[str, Any]:
    """What must be the same when the job is resumed; the keys are those of job.json."""
    labels = "\n".join(predictor.labels or ()).encode()
    fields, how = options.fields, options.preprocessing
    changed = asdict(how) if isinstance(how, Preprocessing) else how
    return {
        **identify_model(model),
        "format": kind,
        "output": predictor.output,
        "merge": options.merge,
        "exact": options.exact,
        "int8": predictor.engine.name == "int8",
        **({"bfloat16": True} if predictor.engine.name == "bfloat16" else {}),
        "labels": blake2b(labels, digest_size=8).hexdigest(),
        "started in": find_starting_folder(images),
        **({"set": sorted(format_field(name, value) for name, value in fields.items())} if fields else {}),
        **({"preprocessing": sorted(format_field(*each) for each in changed.items())} if changed else {}),
    }


def find_starting_folder(arguments: Sequence[str]) -> str | None:
    """The folder that relative paths start in; None if there are none."""
    return str(Path.cwd()) if any(not Path(each).is_absolute() for each in arguments) else None


def format_field(name: str, value: Any) -> str:
    """FIELD=VALUE as users write it, which is how job.json has always recorded it."""
    if isinstance(value, bool):
        return f"{name}={str(value).lower()}"
    if isinstance(value, tuple):
        return f"{name}={'x'.join(map(str, value))}"  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return f"{name}={str(value).replace(' ', '')}"


def choose_prediction_format(out: Path | None, given: PredictionFormat | None) -> PredictionFormat:
    """As `choose_format`; without a file a table by default."""
    if out is None and given == "parquet":
        raise ConfigError("`format` parquet needs a file: set `out` OUT.parquet")
    if out is not None and given == "table":
        raise ConfigError(f"`format` table is for terminals; expected csv, jsonl, json or parquet for `out` {out}")
    return given or "table" if out is None else choose_format(out, given, PREDICTION_FORMAT_BY_SUFFIX)


def make_prediction_layout(kind: PredictionFormat, top: int) -> RowLayout:
    return RowLayout(
        kind=kind,
        columns=list_prediction_columns(top),
        list_cells=bind(list_prediction_cells, top=top),
        write_parquet=bind(write_predictions_as_parquet, top=top),
        spaced=True,
        gathered_as_csv=kind == "csv",
    )


def make_prediction_record(name: str, top_classes: Sequence[ClassProbability]) -> Record:
    top = [
        {"index": each.index, "label": each.label, "probability": round_probability(each.probability)}
        for each in top_classes
    ]
    return {"file": name, "top": top}


def list_prediction_columns(top: int) -> list[str]:
    return ["file", "error", *(f"{name}_{n}" for n in range(1, top + 1) for name in ("label", "index", "probability"))]


def list_prediction_cells(record: Record, top: int) -> list[str]:
    found = [
        text
        for each in record.get("top", ())
        for text in (escape_formula_in_text(each["label"] or ""), str(each["index"]), str(each["probability"]))
    ]
    name, error = escape_formula_in_path(record["file"]), escape_formula_in_text(record.get("error", ""))
    return [name, error, *found, *[""] * (3 * top - len(found))]


def format_class_table(top_classes: Sequence[ClassProbability], name: str | None = None) -> str:
    """The top classes of an image, one per line, below its name if one is given."""
    lines = format_probabilities(top_classes)
    if name is not None:
        lines = [escape_unprintable(name), *(f"  {line}" for line in lines)]
    return "".join(f"{line}\n" for line in lines)


def write_predictions_as_parquet(records: Iterator[Record], place: BinaryIO, top: int) -> None:
    """The columns of the CSV file; an image without an error has null there."""
    arrow, parquet = import_pyarrow()
    kinds = {"label": arrow.string(), "index": arrow.int32(), "probability": arrow.float32()}
    names = list_prediction_columns(top)
    schema = arrow.schema([(name, kinds.get(name.rpartition("_")[0], arrow.string())) for name in names])
    with parquet.ParquetWriter(place, schema) as file:
        while group := list(islice(records, ROWS_PER_GROUP)):
            columns: list[list[Any]] = [
                [escape_surrogates(record["file"]) for record in group],
                [record.get("error") for record in group],
            ]
            for n in range(top):
                predicted = [record["top"][n] if n < len(record.get("top", ())) else {} for record in group]
                columns += [[each.get(name) for each in predicted] for name in kinds]
            file.write_table(arrow.table(dict(zip(names, columns, strict=True)), schema=schema))
