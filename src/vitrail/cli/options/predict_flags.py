"""The options that `predict` and `embed` share, and the job that they describe."""

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from vitrail.base.errors import ConfigError
from vitrail.base.text import format_job_time
from vitrail.cli.options.groups import DATA, SPEED
from vitrail.cli.options.model_flags import ConfigFields, Device, ImageSize, OptionalOut, PreprocessingFields
from vitrail.cli.options.values import parse_fields, parse_model_fields
from vitrail.cli.output.help_text import reflow_docstring
from vitrail.cli.output.messages import print_error, print_note, write_to_stdout
from vitrail.cli.output.streams import get_binary_buffer
from vitrail.cli.usage_errors import check_arguments

if TYPE_CHECKING:
    from vitrail.export.description import OutputKind

IMAGES_HELP = (
    "Images, folders with all their subfolders, patterns in quotes ('photos/**/*.png'), photos of the package "
    "(example:cat), or - for an image on standard input. URLs are not downloaded."
)
Images = Annotated[str, Parameter(allow_leading_hyphen=True, required=True, help=IMAGES_HELP)]  # - alone is allowed
OptionalImages = Annotated[str, Parameter(allow_leading_hyphen=True, required=False, help=IMAGES_HELP)]


@reflow_docstring
@dataclass(frozen=True, kw_only=True)
class PredictFlags:
    """How images are processed; by default as fast as this machine can without changing the results.

    Parameters
    ----------
    out
        File for the results. It appears when it is complete; until then, finished rows are in OUT.partial.
    resume
        Continue from OUT.partial. Each image is processed exactly once.
    overwrite
        Replace OUT. Without --resume, an OUT.partial is deleted, too.
    engine
        Engine: eager and compiled are torch, onnx and int8 exported models. auto measures once which is the fastest.
    exact
        Allow only engines within 0.0001 of the model in float32, and decode images at full size.
    fast
        Allow int8, too, if it agrees on a sample of the images.
    batch
        Images per batch. [default: automatic]
    streams
        Batches that are computed at the same time. [default: automatic]
    threads
        Threads per stream. [default: automatic]
    merge
        Number of similar tokens to merge in each layer: faster and less accurate.
    max_pixels
        Skip images with more pixels, before they are decoded. [default: the pixels of about 1 GB]
    max_bytes
        Skip files with more bytes, before they are read.
    """

    out: OptionalOut = None
    resume: Annotated[bool, Parameter(negative=())] = False
    overwrite: Annotated[bool, Parameter(negative=())] = False
    engine: Annotated[Literal["auto", "eager", "compiled", "onnx", "int8"], Parameter(group=SPEED)] = "auto"
    exact: Annotated[bool, Parameter(negative=(), group=SPEED)] = False
    fast: Annotated[bool, Parameter(negative=(), group=SPEED)] = False
    batch: Annotated[int | None, Parameter(group=SPEED)] = None
    streams: Annotated[int | None, Parameter(group=SPEED)] = None
    threads: Annotated[int | None, Parameter(group=SPEED)] = None
    merge: Annotated[int, Parameter(group=SPEED)] = 0
    max_pixels: Annotated[int | None, Parameter(group=DATA)] = None
    max_bytes: Annotated[int, Parameter(group=DATA)] = 2**28
    device: Device = "auto"
    image_size: ImageSize = None
    fields: ConfigFields = None
    preprocessing: PreprocessingFields = None

    def run_job(
        self,
        command: str,
        model: str,
        images: Sequence[str],
        output: "OutputKind | Literal['features']",
        **settings: Any,
    ) -> None:
        """Check the options, run the job and print what it did."""
        check_arguments(command, model, images)
        for name, value in (("max_pixels", self.max_pixels), ("max_bytes", self.max_bytes)):
            if value is not None and value < 1:
                raise ConfigError(f"`{name}` {value}; expected 1 or more", (name,))
        for name, is_set in (("resume", self.resume), ("overwrite", self.overwrite)):
            if is_set and self.out is None:
                raise ConfigError(f"--{name} needs -o OUT, the file with the results")

        from vitrail.data.images.decoding.image_formats import ImageLimits
        from vitrail.predict.engine_selection import EngineOptions
        from vitrail.predict.job import PredictJob

        options = EngineOptions(
            **{name: vars(self)[name] for name in ("engine", "exact", "fast", "batch", "streams", "threads")},
            output=output,
            merge=self.merge,
            labels=settings.pop("labels", None),
            limits=ImageLimits(pixels=self.max_pixels, bytes=self.max_bytes),
            device=self.device,
            fields=parse_model_fields(self.fields, self.image_size) or None,
            preprocessing=parse_fields(self.preprocessing, "--preprocessing") or None,
        )
        result = PredictJob(
            model=model,
            images=images,
            out=self.out,
            options=options,
            resume=self.resume,
            overwrite=self.overwrite,
            stdin=get_binary_buffer(sys.stdin),
            write_text=write_to_stdout,
            on_note=print_note,
            on_error=print_error,
            progress=self.progress_bar,
            **settings,
        ).run()
        if result.out is not None:
            done = format_job_time(result.images, result.resumed, "image", result.seconds)
            print(f"{result.out}: {'complete' if result.was_complete else done}")
        result.raise_if_failed()

    def progress_bar(self, total: int) -> AbstractContextManager[Callable[[int], object]]:
        """A bar on a terminal, unless rows are printed there; importing it takes a while, so not for a single image."""
        if total < 2 or not sys.stderr.isatty() or (self.out is None and sys.stdout.isatty()):
            return nullcontext(lambda _: None)
        from vitrail.cli.output.progress import progress_bar

        return progress_bar(total)
