"""The options that `predict` and `embed` share, and the job that they describe."""

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from vitrail.cli.options.model_flags import ConfigFields, Device, OptionalOut, PreprocessingFields
from vitrail.cli.options.values import parse_fields
from vitrail.cli.output.help_text import reflow_docstring
from vitrail.cli.output.messages import print_error, print_note, write_to_stdout
from vitrail.errors import ConfigError, unknown_name_error

if TYPE_CHECKING:
    from vitrail.export.description import OutputKind

Images = Annotated[
    str,
    Parameter(
        allow_leading_hyphen=True,  # for - alone
        help="Images, folders with all their subfolders, patterns in quotes (** is any number of folders), or - for an "
        "image on standard input. URLs are not fetched.",
    ),
]


@reflow_docstring
@dataclass(frozen=True, kw_only=True)
class PredictFlags:
    """How images are processed; by default as fast as this machine can without changing the results.

    Parameters
    ----------
    out
        File for the results. It appears when it is complete; until then finished rows are in OUT.partial.
    resume
        Continue from OUT.partial. Each image is processed exactly once.
    overwrite
        Replace OUT, and start over if there is an OUT.partial; together with --resume only the former.
    engine
        auto measures once which is the fastest here; eager and compiled are torch, onnx and int8 exported models.
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
        Merge this number of similar tokens in each layer: faster and less accurate.
    max_pixels
        Skip images with more pixels before they are decoded. By default the limit depends on the format, so that
        no image takes more than about 1 GB: 178,956,970 for JPEG (89,478,485 at full size), 67,108,864 for progressive
        JPEG, PNG, GIF, TIFF and BMP, 50,331,648 for WebP.
    max_bytes
        Skip files with more bytes before they are read.
    """

    out: OptionalOut = None
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
    device: Device = "auto"
    fields: ConfigFields = None
    preprocessing: PreprocessingFields = None

    def run_job(
        self, model: str, images: Sequence[str], output: "OutputKind", own_flags: Sequence[str], **settings: Any
    ) -> None:
        """Check the options, run the job and print what it did; `own_flags` are the command's further options."""
        shared = ("set" if each.name == "fields" else each.name for each in fields(self))
        check_misspelt_options(images, (*shared, *own_flags))
        for name in ("max_pixels", "max_bytes"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(f"`{name}` {value}; expected 1 or more", (name,))
        for name in ("resume", "overwrite"):
            if getattr(self, name) and self.out is None:
                raise ConfigError(f"--{name} needs -o OUT, the file with the results")

        from vitrail.data.decoding.image_formats import ImageLimits
        from vitrail.predict.engine_selection import EngineOptions
        from vitrail.predict.job import PredictJob

        options = EngineOptions(
            **{name: getattr(self, name) for name in ("engine", "exact", "fast", "batch", "streams", "threads")},
            output=output,
            merge=self.merge,
            labels=settings.pop("labels", None),
            limits=ImageLimits(pixels=self.max_pixels, bytes=self.max_bytes),
            device=self.device,
            fields=parse_fields(self.fields) or None,
            preprocessing=parse_fields(self.preprocessing, "--preprocessing") or None,
        )
        result = PredictJob(
            model=model,
            images=images,
            out=self.out,
            options=options,
            resume=self.resume,
            overwrite=self.overwrite,
            stdin=getattr(sys.stdin, "buffer", None),
            write_text=write_to_stdout,
            on_note=print_note,
            on_error=print_error,
            progress=self.progress_bar,
            **settings,
        ).run()
        if result.out is not None:
            done = "complete" if result.was_complete else f"{result.images:,} images, {result.seconds:.1f} s"
            print(f"{result.out}: {done}")
        result.raise_if_failed()

    def progress_bar(self, total: int) -> AbstractContextManager[Callable[[int], object]]:
        """A bar on a terminal, unless rows are printed there; importing it takes a while, so not for a single image."""
        if total < 2 or not sys.stderr.isatty() or (self.out is None and sys.stdout.isatty()):
            return nullcontext(lambda _: None)
        from vitrail.cli.output.progress import progress_bar

        return progress_bar(total)


def check_misspelt_options(images: Sequence[str], options: Sequence[str]) -> None:
    """Refuse misspelt options, which are parsed as images because - stands for standard input."""
    for each in images:
        if len(each) > 1 and each.startswith("-") and not os.path.lexists(each):
            raise unknown_name_error(
                "option", each.partition("=")[0], [f"--{name.replace('_', '-')}" for name in options]
            )
