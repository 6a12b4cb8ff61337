"""vitrail report: write an HTML page about a model."""

from pathlib import Path

from vitrail.cli.options import model_flags as flags
from vitrail.cli.options.inspection_inputs import open_explainer
from vitrail.cli.options.values import check_minimum
from vitrail.cli.output.messages import print_notes
from vitrail.cli.output.progress import progress_bar
from vitrail.cli.output.results import prepare_figure_folder
from vitrail.errors import ConfigError


def report(
    checkpoint: flags.TorchModel,
    /,
    *,
    data: flags.ImageData = None,
    images: flags.ImageCount = 32,
    explained: int = 6,
    out: flags.Out = Path("report.html"),
    overwrite: flags.Overwrite = False,
    labels: flags.Labels = None,
    fields: flags.ConfigFields = None,
    preprocessing: flags.PreprocessingFields = None,
    batch: flags.Batch = 4,
    device: flags.Device = "auto",
) -> None:
    """Write a page about a model that opens in any browser: predictions, maps, distances, filters, summary.

    A single file with everything in it: it needs no network and no server, has a light and a dark theme, and can be
    read on a phone.

    Examples::

        vitrail report runs/demo --images 4 -o report.html
        vitrail report my_model --data photos --images 4 --explained 2

    Parameters
    ----------
    explained
        Number of images that are shown with attention maps.
    out
        The page, a file name that ends in .html.
    """
    check_minimum("--explained", explained, 0)
    check_minimum("--batch", batch, 1)
    if out.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"--out {out}; expected a file name that ends in .html")

    from vitrail.report.html_page import render_page, write_page
    from vitrail.report.model_report import build_model_report
    from vitrail.train.evaluation_data import select_images

    if out.is_dir():
        raise ConfigError(f"--out {out} is a folder; expected the name of a page")
    explainer = open_explainer(checkpoint, fields, preprocessing, device, labels)
    items, notes = select_images(explainer.loaded, data, images)
    prepare_figure_folder(out.parent, [out.name], overwrite=overwrite)
    print_notes(notes)
    with progress_bar(len(items) + min(explained, len(items)), "explaining") as advance:
        title, lead, sections = build_model_report(
            explainer, explainer.loaded.source, items, explained=explained, batch=batch, progress=advance
        )
    with progress_bar(sum(len(section.figures) for section in sections), "drawing") as advance:
        page = render_page(title, lead, sections, progress=advance)
    write_page(page, out)
    print(f"{out}: {len(page) / 1e6:.1f} MB, open it in a browser")
