"""vitrail report: a model on one page."""

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from vitrail.cli.options.inspection_inputs import open_explainer, select_images
from vitrail.cli.output.progress import progress_bar
from vitrail.cli.output.results import prepare_figure_folder
from vitrail.errors import ConfigError


def report(
    checkpoint: str,
    /,
    *,
    data: str | None = None,
    images: int = 32,
    explained: int = 6,
    out: Annotated[Path, Parameter(name=("--out", "-o"))] = Path("report.html"),
    overwrite: Annotated[bool, Parameter(negative=())] = False,
    labels: Path | None = None,
    fields: Annotated[list[str] | None, Parameter(name="--set", negative=())] = None,
    batch: int = 4,
    device: str = "auto",
) -> None:
    """Write a page on a model that opens in any browser: predictions, maps, distances, tiles, filters, summary.

    One file with everything in it: it needs no network and no server, is read in light and dark and on a phone, and can
    be sent to others as it is.

    Examples::

        vitrail report runs/demo --images 4 -o report.html
        vitrail report my_model --data photos --images 4 --explained 2

    Parameters
    ----------
    checkpoint
        The folder of a run, or anything that `vitrail convert` reads: a file, a folder, hf-hub:owner/model.
    data
        Pictures: a folder of them, with classes or without, or what `vitrail eval` takes; of a run its own unless said.
    images
        How many of them, taken evenly.
    explained
        How many of these are shown with what the model looks at.
    out
        The page, a name that ends in .html.
    overwrite
        Replace OUT if it exists.
    labels
        A text with the names of the classes, one a line, where the checkpoint has none.
    fields
        A config field that the file does not specify, as FIELD=VALUE; may be repeated.
    batch
        Pictures at once.
    device
        auto, cpu, cuda, cuda:1, mps.
    """
    if explained < 0:
        raise ConfigError(f"--explained {explained}; expected 0 or more")
    if batch < 1:
        raise ConfigError(f"--batch {batch}; expected at least 1")
    if out.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"--out {out}; expected a name that ends in .html")

    from vitrail.report.html_page import render_page, write_page
    from vitrail.report.model_report import build_model_report

    if out.is_dir():
        raise ConfigError(f"--out {out} is a folder; expected the name of a page")
    prepare_figure_folder(out.parent, [out.name], overwrite=overwrite)
    opened, explainer = open_explainer(checkpoint, labels, device, fields)
    pictures, notes = select_images(opened, data, images, explainer.viewer.labels)
    for text in notes:
        print(f"vitrail: note: {text}", file=sys.stderr)
    with progress_bar(len(pictures) + min(explained, len(pictures)), "looking") as advance:
        title, lead, sections = build_model_report(
            explainer, opened.name, pictures, explained=explained, batch=batch, progress=advance
        )
    with progress_bar(sum(len(section.figures) for section in sections), "drawing") as advance:
        page = render_page(title, lead, sections, progress=advance)
    write_page(page, out)
    print(f"{out}: {len(page) / 1e6:.1f} MB, to be opened in a browser")
