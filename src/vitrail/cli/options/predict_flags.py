"""The options that `predict` and `embed` share."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from vitrail.base.errors import ConfigError
from vitrail.cli.options.model_flags import (
    ConfigFields,
    Device,
    EngineFlags,
    ImageSize,
    OptionalOut,
    PreprocessingFields,
)
from vitrail.cli.options.values import parse_fields, parse_model_fields
from vitrail.cli.output.help_text import DATA, SPEED, reflow_docstring
from vitrail.cli.output.job import check_job_options, run_job

if TYPE_CHECKING:
    from vitrail.export.description import OutputKind
    from vitrail.predict.engine_selection import EngineOptions
    from vitrail.predict.job import RowSource

IMAGES_HELP = (
    "Images, folders with all their subfolders, patterns in quotes ('photos/**/*.png'), photos of the package "
    "(example:cat), or - for an image on standard input. URLs are not downloaded."
)
Images = Annotated[str, Parameter(allow_leading_hyphen=True, required=True, help=IMAGES_HELP)]  # - alone is allowed
OptionalImages = Annotated[str, Parameter(allow_leading_hyphen=True, required=False, help=IMAGES_HELP)]


@reflow_docstring
@dataclass(frozen=True, kw_only=True)
class PredictFlags(EngineFlags):
    """How images are processed; by default as fast as this machine can without changing the results.

    Parameters
    ----------
    out
        File for the results. It appears when it is complete; until then, finished rows are in OUT.partial.
    resume
        Continue from OUT.partial. Each image is processed exactly once.
    overwrite
        Replace OUT. Without --resume, an OUT.partial is deleted, too.
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
    merge: Annotated[int, Parameter(group=SPEED)] = 0
    max_pixels: Annotated[int | None, Parameter(group=DATA)] = None
    max_bytes: Annotated[int, Parameter(group=DATA)] = 2**28
    device: Device = "auto"
    image_size: ImageSize = None
    fields: ConfigFields = None
    preprocessing: PreprocessingFields = None

    def make_options(self, output: "OutputKind | Literal['features']", **more: Any) -> "EngineOptions":
        """The options of the engine, checked."""
        for name, value in (("max_pixels", self.max_pixels), ("max_bytes", self.max_bytes)):
            if value is not None and value < 1:
                raise ConfigError(f"`{name}` {value}; expected 1 or more", (name,))
        check_job_options(self.out, resume=self.resume, overwrite=self.overwrite)

        from vitrail.data.images.decoding.image_formats import ImageLimits
        from vitrail.predict.engine_selection import EngineOptions

        return EngineOptions(
            **self.list_given(),
            output=output,
            merge=self.merge,
            limits=ImageLimits(pixels=self.max_pixels, bytes=self.max_bytes),
            device=self.device,
            fields=parse_model_fields(self.fields, self.image_size) or None,
            preprocessing=parse_fields(self.preprocessing, "--preprocessing") or None,
            **more,
        )

    def run(self, rows: "RowSource") -> None:
        run_job(rows, self.out, resume=self.resume, overwrite=self.overwrite).raise_if_failed()
