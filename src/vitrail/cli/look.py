"""vitrail look: all that can be seen of a model."""

import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from vitrail.cli.options.inspection_inputs import open_explainer, select_images
from vitrail.cli.output.progress import progress_bar
from vitrail.cli.output.results import prepare_figure_folder
from vitrail.errors import ConfigError


def look(
    checkpoint: str,
    /,
    *,
    data: str | None = None,
    images: int = 32,
    method: Literal["rollout", "grad-rollout", "attention", "pool"] | None = None,
    out: Annotated[Path, Parameter(name=("--out", "-o"))] = Path("look"),
    overwrite: Annotated[bool, Parameter(negative=())] = False,
    svg: Annotated[bool, Parameter(negative=())] = False,
    arrays: Annotated[bool, Parameter(negative=())] = False,
    fields: Annotated[list[str] | None, Parameter(name="--set", negative=())] = None,
    batch: int = 4,
    device: str = "auto",
) -> None:
    """Draw what there is to be seen of a model: the figures of the ViT paper, and some more.

    Of the weights alone: principal components of the patch filters, similarity of the positions. Over pictures: mean
    attention distance by head and depth in pixels, norms of the tokens, class against distillation token, alignment of
    the layers (CKA), and the occlusion check, which tells whether its attention means anything.

    Examples::

        vitrail look runs/demo --images 4
        vitrail look my_model -o figures --svg
        vitrail look my_model --data photos --images 4 --arrays

    Parameters
    ----------
    checkpoint
        The folder of a run, or anything that `vitrail convert` reads: a file, a folder, hf-hub:owner/model.
    data
        Pictures: a folder of them, with classes or without, or what `vitrail eval` takes; of a run its own unless said.
    images
        How many of them, taken evenly.
    method
        Whose maps the occlusion check is of: see `vitrail explain`.
    out
        The folder for the figures.
    overwrite
        Replace files that exist.
    svg
        SVG files as well.
    arrays
        The numbers as well, as .npz files for numpy.
    fields
        A config field that the file does not specify, as FIELD=VALUE; may be repeated.
    batch
        Pictures at once.
    device
        auto, cpu, cuda, cuda:1, mps.
    """
    if batch < 1:
        raise ConfigError(f"--batch {batch}; expected at least 1")

    from vitrail.inspection.explain_options import ExplainOptions
    from vitrail.inspection.model_figures import FIGURE_NAMES
    from vitrail.inspection.model_figures import look as looked

    kinds = (".png", ".svg") if svg else (".png",)
    files = [f"{name}{kind}" for name in FIGURE_NAMES for kind in (*kinds, *[".npz"] * arrays)]
    prepare_figure_folder(out, files, overwrite=overwrite)
    opened, explainer = open_explainer(checkpoint, None, device, fields)
    pictures, notes = select_images(opened, data, images)
    with progress_bar(len(pictures)) as advance:
        seen = looked(
            explainer,
            (each.source for each in pictures),
            batch=batch,
            options=None if method is None else ExplainOptions(method=method),
            progress=advance,
        )
    for text in (*notes, *seen.notes, *seen.skipped):
        print(f"vitrail: note: {text}", file=sys.stderr)
    for plate in seen.figures:
        written = plate.save(out, kinds, arrays=arrays)
        print(f"{', '.join(map(str, written))}: {plate.caption}")
