"""What `vitrail predict` and `embed` are both asked, and how it is done: pictures in, rows out, whatever happens."""

import os
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

from cyclopts import Parameter

from vitrail.cli.options.values import parse_fields
from vitrail.cli.output.help_text import reflow_docstring
from vitrail.errors import ConfigError, VitrailError, unknown_name_error

if TYPE_CHECKING:
    from vitrail.data.image_items import ImageItem
    from vitrail.export.description import OutputKind
    from vitrail.predict.engine_selection import EngineChoice
    from vitrail.predict.image_list import ImageList, ImageListSummary
    from vitrail.predict.output.partial_folder import PartialFolder
    from vitrail.predict.pipeline import ImageResult
    from vitrail.predict.predictor import Predictor

ENGINE_SAMPLE_SIZE = 32  # pictures of a job on which engines are compared


class PartialFailureError(VitrailError):
    """Some of it could not be done; all the rest is."""

    exit_code = 1


class FinishedImages(Protocol):
    """Of pictures that are done."""

    def __len__(self) -> int: ...
    def __contains__(self, name: object, /) -> bool: ...
    def has_changed(self, name: str, stamp: int) -> bool: ...


class ResultSink(Protocol):
    """Where results go, and what of them is there already."""

    @property
    def done(self) -> FinishedImages: ...
    @property
    def failed(self) -> int: ...
    def finish(self) -> None: ...
    def close(self) -> None: ...


@reflow_docstring
@dataclass(frozen=True, kw_only=True)
class PredictFlags:
    """How a job is done; without any of them it is done as fast as this machine can, and exactly.

    Parameters
    ----------
    out
        The file for the results, which appears when all are there; until then they gather in OUT.partial.
    resume
        Go on with what stands in OUT.partial: every picture is done once, however often and however the job ended.
    overwrite
        Replace OUT, and begin anew where there is an OUT.partial; beside --resume only the first.
    engine
        auto measures once which is the fastest here; eager and compiled are torch, onnx and int8 exported models.
    exact
        Only what equals the model in float32 within 0.0001, from pictures decoded in full.
    fast
        int8 as well, after a look at how often it agrees.
    batch
        Pictures that are computed at once; chosen unless said.
    streams
        Batches that are computed at the same time; chosen unless said.
    threads
        Of one stream; chosen unless said.
    merge
        Merge so many tokens in each layer that are alike: faster, and a little less right.
    max_pixels
        An image with more pixels is skipped before it is decoded. By default the limit depends on the format, so that
        no image takes more than about 1 GB: 178,956,970 for JPEG (89,478,485 at full size), 67,108,864 for progressive
        JPEG, PNG, GIF, TIFF and BMP, 50,331,648 for WebP.
    max_bytes
        A file of more is refused before it is read.
    device
        auto, cpu, cuda, cuda:1, mps.
    fields
        A config field that the file does not specify, as FIELD=VALUE; may be repeated.
    """

    out: Annotated[Path | None, Parameter(name=("--out", "-o"))] = None
    resume: Annotated[bool, Parameter(negative=())] = False
    overwrite: Annotated[bool, Parameter(negative=())] = False
    engine: Literal["auto", "eager", "compiled", "onnx", "int8"] = "auto"
    exact: Annotated[bool, Parameter(negative=())] = False
    fast: Annotated[bool, Parameter(negative=())] = False
    batch: int | None = None
    streams: int | None = None
    threads: int | None = None
    merge: int = 0
    max_pixels: int | None = None
    max_bytes: int = 2**28
    device: str = "auto"
    fields: Annotated[list[str] | None, Parameter(name="--set", negative=())] = None

    def check(self, images: Sequence[str], others: Sequence[str]) -> None:
        """Before any work; `others` are the command's own flags."""
        check_misspelt_options(
            images, (*("set" if field.name == "fields" else field.name for field in fields(self)), *others)
        )
        for name in ("batch", "streams", "threads", "max_pixels", "max_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"--{name.replace('_', '-')} {value}; expected 1 or more")
        if self.merge < 0:
            raise ConfigError(f"--merge {self.merge}; expected tokens to merge in each layer, or 0 for none")
        if self.exact and (self.fast or self.engine == "int8"):
            other = "--fast" if self.fast else "--engine int8"
            raise ConfigError(f"--exact beside {other}, which is not exact; expected one of them")
        for name in ("resume", "overwrite"):
            if getattr(self, name) and self.out is None:
                raise ConfigError(f"--{name} without -o; expected -o OUT, the file that it is about")


def check_misspelt_options(images: Sequence[str], options: Sequence[str]) -> None:
    """Refuses misspelt options, which are parsed as images because - stands for standard input."""
    for each in images:
        if len(each) > 1 and each.startswith("-") and not os.path.lexists(each):
            raise unknown_name_error(
                "option", each.partition("=")[0], [f"--{name.replace('_', '-')}" for name in options]
            )


@dataclass(frozen=True)
class PredictJob:
    """One model, pictures, and where what comes out goes."""

    model: str
    images: Sequence[str]
    flags: PredictFlags
    output: "OutputKind"
    partial: "PartialFolder | None"
    resume_conditions: dict[str, Any]  # what has to be the same for a job to be gone on with
    labels: tuple[str, ...] | None = None

    def run(
        self,
        sink_for: "Callable[[Predictor, dict[str, Any]], ResultSink]",
        write: "Callable[[Any, Predictor, ImageResult], None]",
    ) -> None:
        """Does all that can be done; what cannot is named, counted, and an error in the end."""
        from vitrail.predict.image_list import list_images

        stdin = getattr(sys.stdin, "buffer", None)
        listing = list_images(self.images, stdin=stdin, max_bytes=self.flags.max_bytes)
        with nullcontext() if self.partial is None else closing(self.partial):
            partial, flags = self.partial, self.flags
            if partial is not None and partial.start(resume=flags.resume, overwrite=flags.overwrite):
                print_note(f"{partial.out} is already complete; nothing to resume: use --overwrite to start over")
                print(f"{partial.out}: whole")
                return
            self.run_locked(listing, sink_for, write)

    def run_locked(
        self,
        listing: "ImageList",
        sink_for: "Callable[[Predictor, dict[str, Any]], ResultSink]",
        write: "Callable[[Any, Predictor, ImageResult], None]",
    ) -> None:
        """Runs the job while this process owns the output."""
        survey = listing.summarize()
        for complaint in survey.problems:
            print_message(complaint)
        if survey.repeated:
            print_note(f"{survey.repeated} of the pictures were given twice; each is done once")
        if not survey.images:
            raise PartialFailureError(
                f"no pictures in what was given: {len(survey.problems)} of {len(self.images)} failed"
            )
        with self.print_resume_hint():
            chosen = self.open_on_fastest_engine(listing, survey)
            with closing(sink_for(chosen.predictor, self.fingerprint(chosen.predictor))) as sink:
                self.process_images(chosen, listing, survey, sink, write)

    def open_on_fastest_engine(self, listing: "ImageList", survey: "ImageListSummary") -> "EngineChoice":
        """The model, on the engine that was chosen; what decided it is told."""
        from vitrail.data.decoding.image_formats import ImageLimits
        from vitrail.predict.engine_selection import EngineOptions, choose_engine

        flags = self.flags
        sample = islice(
            (each for each in listing if is_rereadable(each)), ENGINE_SAMPLE_SIZE if survey.images > 1 else 0
        )
        wish = EngineOptions(
            engine=flags.engine,
            exact=flags.exact,
            fast=flags.fast,
            batch=flags.batch,
            streams=flags.streams,
            threads=flags.threads,
            output=self.output,
            merge=flags.merge,
            labels=self.labels,
            limits=ImageLimits(pixels=flags.max_pixels, bytes=flags.max_bytes),
            device=flags.device,
            fields=parse_fields(flags.fields) or None,
        )
        chosen = choose_engine(self.resolve_model_path(), wish, survey.images, list(sample), print_note)
        for each in chosen.notes:
            print_note(each)
        return chosen

    def resolve_model_path(self) -> str | Path:
        """Of a run its model."""
        from vitrail.export.description import is_exported

        if is_exported(self.model):
            return self.model
        from vitrail.checkpoint.run_files import find_finished_run

        run = find_finished_run(Path(self.model))
        return self.model if run is None else run.model

    def fingerprint(self, predictor: "Predictor") -> dict[str, Any]:
        if self.partial is None:
            return {}
        from hashlib import blake2b

        from vitrail.predict.output.partial_folder import identify_model

        words = "\n".join(predictor.labels or ()).encode()
        relative = any(not Path(each).is_absolute() for each in self.images)
        return {
            **identify_model(self.model),
            **self.resume_conditions,
            "output": self.output,
            "merge": self.flags.merge,
            "exact": self.flags.exact,
            "int8": predictor.engine.name == "int8",
            "labels": blake2b(words, digest_size=8).hexdigest(),
            "started in": str(Path.cwd()) if relative else None,
            **({"set": sorted(self.flags.fields)} if self.flags.fields else {}),
        }

    def process_images(
        self,
        chosen: "EngineChoice",
        listing: "ImageList",
        survey: "ImageListSummary",
        sink: ResultSink,
        write: "Callable[[Any, Predictor, ImageResult], None]",
    ) -> None:
        before, failed, start = len(sink.done), sink.failed, monotonic()
        if before:
            print_note(f"{before} pictures were done before, {failed} of which failed; going on")
            self.report_changed_images(listing, sink)
        left = (each for each in listing if each.name not in sink.done) if before else iter(listing)
        alone = survey.images == 1 and not survey.problems
        with optional_progress_bar(max(0, survey.images - before), printing=self.partial is None) as advance:
            for row in chosen.predictor.iterate_results(left, chosen.batch):
                if row.error is not None:
                    if alone and self.partial is None:
                        raise PartialFailureError(str(row.error))
                    print_message(str(row.error))
                    failed += 1
                write(sink, chosen.predictor, row)
                advance(1)
        sink.finish()
        if self.partial is not None:
            print(f"{self.partial.out}: {survey.images:,} pictures, {monotonic() - start:.1f} s")
        if failed or survey.problems:
            where = "" if self.partial is None else f"; the others are in {self.partial.out}"
            places = f" and {len(survey.problems)} of the places given" if survey.problems else ""
            raise PartialFailureError(f"{failed} of {survey.images} pictures{places} could not be read{where}")

    def report_changed_images(self, listing: "ImageList", sink: ResultSink) -> None:
        """Reports finished images whose files have changed since; their rows describe the old contents."""
        from vitrail.predict.output.completed_images import compute_file_stamp

        changed, example = 0, ""
        for each in listing:
            if is_rereadable(each) and sink.done.has_changed(each.name, compute_file_stamp(each.source)):
                changed, example = changed + 1, example or each.name
        if changed:
            many = f"{changed:,} images" if changed > 1 else "1 image"
            print_note(
                f"{many} changed after processing, for example {example!r}; their rows describe the old "
                "contents: use --overwrite to start over"
            )

    @contextmanager
    def print_resume_hint(self) -> Generator[None]:
        try:
            yield
        except KeyboardInterrupt:
            if self.partial is not None and (self.partial.has_job or self.partial.is_complete):
                print_message(
                    f"stopped; what is done is in {self.partial.folder}: the same again with --resume goes on"
                )
            raise


@contextmanager
def optional_progress_bar(total: int, *, printing: bool) -> Generator[Callable[[int], object]]:
    """A bar on a terminal, unless rows are seen to come there anyway; drawing one costs a moment to load."""
    if total < 2 or not sys.stderr.isatty() or (printing and sys.stdout.isatty()):
        yield lambda _: None
        return
    from vitrail.cli.output.progress import progress_bar

    with progress_bar(total) as advance:
        yield advance


def write_to_stdout(text: str) -> None:
    """At once, for whoever reads along; names of files that are no text go into a pipe as the disk has them."""
    buffer = None if sys.stdout.isatty() else getattr(sys.stdout, "buffer", None)
    if buffer is None:
        print(text, end="", flush=True)
    else:
        buffer.write(text.encode("utf-8", "surrogateescape"))
        buffer.flush()


def is_rereadable(image: "ImageItem") -> bool:
    """What can be read twice: no pipe."""
    return isinstance(image.source, str) and os.path.isfile(image.source)  # noqa: PTH113


def print_message(line: str) -> None:
    print(f"vitrail: {line}", file=sys.stderr)


def print_note(line: str) -> None:
    print_message(f"note: {line}")
