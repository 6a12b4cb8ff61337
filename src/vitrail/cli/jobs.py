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

from vitrail.cli.reflow import reflowed
from vitrail.cli.summary import parse_fields
from vitrail.errors import ConfigError, VitrailError, unknown

if TYPE_CHECKING:
    from vitrail.data.shown import Shown
    from vitrail.export.exported import Output
    from vitrail.predict.choice import Chosen
    from vitrail.predict.predictor import Predictor
    from vitrail.predict.resuming import Partial
    from vitrail.predict.sources import Listing, Survey
    from vitrail.predict.stream import Row

SAMPLE = 32  # pictures of a job on which engines are compared


class FailedError(VitrailError):
    """Some of it could not be done; all the rest is."""

    exit_code = 1


class Names(Protocol):
    """Of pictures that are done."""

    def __len__(self) -> int: ...
    def __contains__(self, name: object, /) -> bool: ...
    def has_changed(self, name: str, stamp: int) -> bool: ...


class Sink(Protocol):
    """Where results go, and what of them is there already."""

    @property
    def done(self) -> Names: ...
    @property
    def failed(self) -> int: ...
    def finish(self) -> None: ...
    def close(self) -> None: ...


@reflowed
@dataclass(frozen=True, kw_only=True)
class JobFlags:
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
        check_options(images, (*("set" if field.name == "fields" else field.name for field in fields(self)), *others))
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


def check_options(images: Sequence[str], options: Sequence[str]) -> None:
    """Refuses misspelt options, which are parsed as images because - stands for standard input."""
    for each in images:
        if len(each) > 1 and each.startswith("-") and not os.path.lexists(each):
            raise unknown("option", each.partition("=")[0], [f"--{name.replace('_', '-')}" for name in options])


@dataclass(frozen=True)
class Job:
    """One model, pictures, and where what comes out goes."""

    model: str
    images: Sequence[str]
    flags: JobFlags
    output: "Output"
    partial: "Partial | None"
    told: dict[str, Any]  # what has to be the same for a job to be gone on with
    labels: tuple[str, ...] | None = None

    def run(
        self, sink_for: "Callable[[Predictor, dict[str, Any]], Sink]", write: "Callable[[Any, Predictor, Row], None]"
    ) -> None:
        """Does all that can be done; what cannot is named, counted, and an error in the end."""
        from vitrail.predict.sources import pictures_of

        stdin = getattr(sys.stdin, "buffer", None)
        listing = pictures_of(self.images, stdin=stdin, most_bytes=self.flags.max_bytes)
        with nullcontext() if self.partial is None else closing(self.partial):
            partial, flags = self.partial, self.flags
            if partial is not None and partial.begin(resume=flags.resume, overwrite=flags.overwrite):
                note(f"{partial.out} is already complete; nothing to resume: use --overwrite to start over")
                print(f"{partial.out}: whole")
                return
            self.run_as_owner(listing, sink_for, write)

    def run_as_owner(
        self,
        listing: "Listing",
        sink_for: "Callable[[Predictor, dict[str, Any]], Sink]",
        write: "Callable[[Any, Predictor, Row], None]",
    ) -> None:
        """Runs the job while this process owns the output."""
        survey = listing.survey()
        for complaint in survey.complaints:
            tell(complaint)
        if survey.repeated:
            note(f"{survey.repeated} of the pictures were given twice; each is done once")
        if not survey.pictures:
            raise FailedError(f"no pictures in what was given: {len(survey.complaints)} of {len(self.images)} failed")
        with self.said_when_stopped():
            chosen = self.opened(listing, survey)
            with closing(sink_for(chosen.predictor, self.fingerprint(chosen.predictor))) as sink:
                self.carry_out(chosen, listing, survey, sink, write)

    def opened(self, listing: "Listing", survey: "Survey") -> "Chosen":
        """The model, on the engine that was chosen; what decided it is told."""
        from vitrail.data.image_formats import Limits
        from vitrail.predict.choice import Wish, choose

        flags = self.flags
        sample = islice((each for each in listing if is_file(each)), SAMPLE if survey.pictures > 1 else 0)
        wish = Wish(
            engine=flags.engine,
            exact=flags.exact,
            fast=flags.fast,
            batch=flags.batch,
            streams=flags.streams,
            threads=flags.threads,
            output=self.output,
            merge=flags.merge,
            labels=self.labels,
            limits=Limits(pixels=flags.max_pixels, bytes=flags.max_bytes),
            device=flags.device,
            fields=parse_fields(flags.fields) or None,
        )
        chosen = choose(self.place(), wish, survey.pictures, list(sample), note)
        for each in chosen.notes:
            note(each)
        return chosen

    def place(self) -> str | Path:
        """Of a run its model."""
        from vitrail.export.exported import is_exported

        if is_exported(self.model):
            return self.model
        from vitrail.train.runs import finished_run

        run = finished_run(Path(self.model))
        return self.model if run is None else run.model

    def fingerprint(self, predictor: "Predictor") -> dict[str, Any]:
        if self.partial is None:
            return {}
        from hashlib import blake2b

        from vitrail.predict.resuming import stamp_of

        words = "\n".join(predictor.labels or ()).encode()
        relative = any(not Path(each).is_absolute() for each in self.images)
        return {
            **stamp_of(self.model),
            **self.told,
            "output": self.output,
            "merge": self.flags.merge,
            "exact": self.flags.exact,
            "int8": predictor.engine.name == "int8",
            "labels": blake2b(words, digest_size=8).hexdigest(),
            "started in": str(Path.cwd()) if relative else None,
            **({"set": sorted(self.flags.fields)} if self.flags.fields else {}),
        }

    def carry_out(
        self,
        chosen: "Chosen",
        listing: "Listing",
        survey: "Survey",
        sink: Sink,
        write: "Callable[[Any, Predictor, Row], None]",
    ) -> None:
        before, failed, start = len(sink.done), sink.failed, monotonic()
        if before:
            note(f"{before} pictures were done before, {failed} of which failed; going on")
            self.report_changed(listing, sink)
        left = (each for each in listing if each.name not in sink.done) if before else iter(listing)
        alone = survey.pictures == 1 and not survey.complaints
        with bar(max(0, survey.pictures - before), printing=self.partial is None) as advance:
            for row in chosen.predictor.rows(left, chosen.batch):
                if row.error is not None:
                    if alone and self.partial is None:
                        raise FailedError(str(row.error))
                    tell(str(row.error))
                    failed += 1
                write(sink, chosen.predictor, row)
                advance(1)
        sink.finish()
        if self.partial is not None:
            print(f"{self.partial.out}: {survey.pictures:,} pictures, {monotonic() - start:.1f} s")
        if failed or survey.complaints:
            where = "" if self.partial is None else f"; the others are in {self.partial.out}"
            places = f" and {len(survey.complaints)} of the places given" if survey.complaints else ""
            raise FailedError(f"{failed} of {survey.pictures} pictures{places} could not be read{where}")

    def report_changed(self, listing: "Listing", sink: Sink) -> None:
        """Reports finished images whose files have changed since; their rows describe the old contents."""
        from vitrail.predict.ledger import stamp_of_file

        changed, example = 0, ""
        for each in listing:
            if is_file(each) and sink.done.has_changed(each.name, stamp_of_file(each.source)):
                changed, example = changed + 1, example or each.name
        if changed:
            many = f"{changed:,} images" if changed > 1 else "1 image"
            note(
                f"{many} changed after processing, for example {example!r}; their rows describe the old "
                "contents: use --overwrite to start over"
            )

    @contextmanager
    def said_when_stopped(self) -> Generator[None]:
        try:
            yield
        except KeyboardInterrupt:
            if self.partial is not None and (self.partial.is_begun or self.partial.is_whole):
                tell(f"stopped; what is done is in {self.partial.folder}: the same again with --resume goes on")
            raise


@contextmanager
def bar(total: int, *, printing: bool) -> Generator[Callable[[int], object]]:
    """A bar on a terminal, unless rows are seen to come there anyway; drawing one costs a moment to load."""
    if total < 2 or not sys.stderr.isatty() or (printing and sys.stdout.isatty()):
        yield lambda _: None
        return
    from vitrail.cli.progress import progress

    with progress(total) as advance:
        yield advance


def put_on_stdout(text: str) -> None:
    """At once, for whoever reads along; names of files that are no text go into a pipe as the disk has them."""
    buffer = None if sys.stdout.isatty() else getattr(sys.stdout, "buffer", None)
    if buffer is None:
        print(text, end="", flush=True)
    else:
        buffer.write(text.encode("utf-8", "surrogateescape"))
        buffer.flush()


def is_file(picture: "Shown") -> bool:
    """What can be read twice: no pipe."""
    return isinstance(picture.source, str) and os.path.isfile(picture.source)  # noqa: PTH113


def tell(line: str) -> None:
    print(f"vitrail: {line}", file=sys.stderr)


def note(line: str) -> None:
    tell(f"note: {line}")
