"""Images in, a file of predictions or features out; a job can be interrupted and resumed.

The commands `predict` and `embed` are this class with options from the command line.
"""

import os
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from time import monotonic
from typing import Any, BinaryIO

from vitrail.base.errors import ConfigError, DataError
from vitrail.base.text import format_count
from vitrail.data.images.image_items import ImageItem
from vitrail.data.images.preprocessing import Preprocessing
from vitrail.predict.engine_selection import EngineChoice, EngineOptions, open_on_fastest_engine
from vitrail.predict.image_list import (
    ImageList,
    ImageListSummary,
    check_has_images,
    list_images,
    unreadable_images_error,
)
from vitrail.predict.output.completed_images import CompletedImages, compute_file_stamp
from vitrail.predict.output.feature_files import (
    FEATURE_FORMAT_BY_SUFFIX,
    MAPS_FORMAT_BY_SUFFIX,
    FeatureFile,
    partial_folder_for_features,
)
from vitrail.predict.output.job_file import identify_model
from vitrail.predict.output.partial_folder import PartialFolder
from vitrail.predict.output.prediction_files import PredictionFile, partial_folder_for_predictions
from vitrail.predict.output.row_formats import (
    PredictionPrinter,
    choose_format,
    choose_prediction_format,
    import_pyarrow,
)
from vitrail.predict.pipeline import ImageResult
from vitrail.predict.predictor import Predictor, compute_map_shapes

ResultSink = PredictionFile | FeatureFile | PredictionPrinter
ENGINE_SAMPLE_SIZE = 32  # images of the job on which engines are compared


@dataclass(frozen=True)
class JobResult:
    """What a job did, including the rows of earlier runs that it resumed."""

    out: Path | None
    images: int
    failed: int  # images that could not be read; their rows say why
    problems: Sequence[str] = ()  # arguments without images
    seconds: float = 0.0  # of this run
    resumed: int = 0  # images of earlier runs
    was_complete: bool = False  # there was nothing left to resume

    def raise_if_failed(self) -> None:
        """DataError if some images could not be read; the results of all others are complete."""
        error = unreadable_images_error(self.failed, self.images, self.problems, self.out)
        if error is not None:
            raise error


def ignore_message(_: object) -> None:
    """Drop a message."""


@dataclass(frozen=True, kw_only=True)
class PredictJob:
    """One model, images, and a file for its predictions, or for features if `options.output` is not logits."""

    model: str
    images: Sequence[str]  # files, folders, patterns, - for `stdin`
    out: Path | None = None  # None: predictions are passed to `write_text`
    format: Any = None  # None: by the suffix of `out`
    top: int = 5  # classes per image
    options: EngineOptions = field(default_factory=EngineOptions)
    resume: bool = False  # continue with the rows in OUT.partial
    overwrite: bool = False  # replace OUT
    stdin: BinaryIO | None = None
    write_text: Callable[[str], object] = ignore_message
    on_note: Callable[[str], object] = ignore_message
    on_error: Callable[[DataError], object] = ignore_message  # an image that could not be read
    progress: Callable[[int], AbstractContextManager[Callable[[int], object]]] = lambda _: nullcontext(ignore_message)

    def run(self) -> JobResult:
        """Process all images; those that cannot be read are reported, counted and skipped."""
        kind, partial = self.plan_output()
        if kind == "parquet":
            import_pyarrow()  # fail before the work, not after it
        listing = list_images(self.images, stdin=self.stdin, max_bytes=self.options.limits.bytes)
        with nullcontext() if partial is None else closing(partial):
            if partial is not None and partial.start(resume=self.resume, overwrite=self.overwrite):
                self.on_note(f"{partial.out} is already complete; use `overwrite` to start over")
                return JobResult(self.out, 0, 0, was_complete=True)
            summary = listing.summarize()
            check_has_images(summary)
            for problem in summary.problems:
                self.on_error(DataError(problem))
            if summary.repeated:
                self.on_note(f"{format_count(summary.repeated, 'image')} given twice; each is processed once")
            with self.report_interrupt(partial):
                engine = self.open_engine(listing, summary)
                job = {} if partial is None else self.describe(kind, engine.predictor)
                single = is_single_image(summary)
                with closing(self.open_sink(kind, partial, engine.predictor, job, single=single)) as sink:
                    return self.process_images(engine, listing, summary, sink)

    def plan_output(self) -> tuple[Any, PartialFolder | None]:
        """The format, and the folder for unfinished results if they go to a file."""
        if self.options.output == "logits":
            kind = choose_prediction_format(self.out, self.format)
            return kind, None if self.out is None else partial_folder_for_predictions(self.out, kind)
        maps = self.options.output == "maps"
        if self.out is None:
            files = "maps.npz" if maps else "features.npy or features.parquet"
            raise ConfigError(f"features need a file; set `out` to {files}")
        if maps and self.format is not None:
            raise ConfigError(f"`format` {self.format} with `maps`; expected maps.npz, one array per level")
        kind = choose_format(self.out, self.format, MAPS_FORMAT_BY_SUFFIX if maps else FEATURE_FORMAT_BY_SUFFIX)
        return kind, partial_folder_for_features(self.out, kind)

    def open_engine(self, listing: ImageList, summary: ImageListSummary) -> EngineChoice:
        readable = (each for each in listing if is_regular_image_file(each))
        sample = list(islice(readable, ENGINE_SAMPLE_SIZE if summary.images > 1 else 0))
        engine = open_on_fastest_engine(self.model, self.options, summary.images, sample, self.on_note)
        for note in engine.notes:
            self.on_note(note)
        return engine

    def describe(self, kind: str, predictor: Predictor) -> dict[str, Any]:
        """What must be the same when the job is resumed; the keys are those of job.json."""
        labels = "\n".join(predictor.labels or ()).encode()
        relative = any(not Path(each).is_absolute() for each in self.images)
        fields, how = self.options.fields, self.options.preprocessing
        changed = asdict(how) if isinstance(how, Preprocessing) else how
        return {
            **identify_model(self.model),
            "format": kind,
            "output": predictor.output,
            "merge": self.options.merge,
            "exact": self.options.exact,
            "int8": predictor.engine.name == "int8",
            "labels": blake2b(labels, digest_size=8).hexdigest(),
            "started in": str(Path.cwd()) if relative else None,
            **({"set": sorted(format_field(name, value) for name, value in fields.items())} if fields else {}),
            **({"preprocessing": sorted(format_field(*each) for each in changed.items())} if changed else {}),
        }

    def open_sink(
        self, kind: Any, partial: PartialFolder | None, predictor: Predictor, job: dict[str, Any], *, single: bool
    ) -> ResultSink:
        top = min(self.top, predictor.classes)
        if partial is None:
            return PredictionPrinter(kind, top, self.write_text, single=single)
        if self.options.output != "logits":
            levels = compute_map_shapes(predictor) if self.options.output == "maps" else ()
            return FeatureFile(partial, kind, job, resume=self.resume, levels=levels)
        return PredictionFile(partial, kind, top, {**job, "top": top}, resume=self.resume)

    def process_images(
        self, engine: EngineChoice, listing: ImageList, summary: ImageListSummary, sink: ResultSink
    ) -> JobResult:
        done, failed, start = sink.done, sink.failed, monotonic()
        resumed = len(done)
        if done:
            self.on_note(f"resuming: {format_count(len(done), 'image')} done, of which {failed} could not be read")
            self.note_changed_images(listing, done)
        left = (each for each in listing if each.name not in done) if done else iter(listing)
        single = is_single_image(summary) and self.out is None
        with self.progress(max(0, summary.images - len(done))) as advance:
            for row in engine.predictor.iterate_results(left, engine.batch):
                if row.error is not None:
                    if single:
                        raise row.error
                    self.on_error(row.error)
                    failed += 1
                self.write_result(sink, engine.predictor, row)
                advance(1)
        sink.finish()
        seconds = monotonic() - start
        return JobResult(self.out, summary.images, failed, summary.problems, seconds, resumed)

    def write_result(self, sink: ResultSink, predictor: Predictor, row: ImageResult) -> None:
        values: Any = row.values
        if self.options.output == "logits":
            values = () if row.values is None else predictor.prediction_from_logits(row.values, self.top).top
        sink.write(row.name, None if row.error is None else str(row.error), values, row.stamp)

    def note_changed_images(self, listing: ImageList, done: CompletedImages) -> None:
        """Report finished images whose files have changed since; their rows describe the old contents."""
        changed, example = 0, ""
        for each in listing:
            if is_regular_image_file(each) and done.has_changed(each.name, compute_file_stamp(each.source)):
                changed, example = changed + 1, example or each.name
        if changed:
            count = format_count(changed, "image")
            self.on_note(
                f"{count} changed after processing, for example {example!r}; their rows describe the old "
                "contents: use `overwrite` to start over"
            )

    @contextmanager
    def report_interrupt(self, partial: PartialFolder | None) -> Generator[None]:
        try:
            yield
        except KeyboardInterrupt:
            if partial is not None and (partial.has_job or partial.is_complete):
                self.on_note(f"stopped; finished rows are in {partial.folder}: run it again with `resume` to continue")
            raise


def is_single_image(summary: ImageListSummary) -> bool:
    """Whether one image was named, and nothing else."""
    return summary.images == 1 and not summary.problems


def is_regular_image_file(image: ImageItem) -> bool:
    """Whether it is a regular file, which can be read twice."""
    return isinstance(image.source, str) and os.path.isfile(image.source)  # noqa: PTH113


def format_field(name: str, value: Any) -> str:
    """FIELD=VALUE as users write it, which is how job.json has always recorded it."""
    if isinstance(value, bool):
        return f"{name}={str(value).lower()}"
    if isinstance(value, tuple):
        return f"{name}={'x'.join(map(str, value))}"  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return f"{name}={str(value).replace(' ', '')}"
