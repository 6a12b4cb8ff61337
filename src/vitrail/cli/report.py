"""vitrail report: write an HTML page about a model."""

from pathlib import Path

from vitrail.cli.options import model_flags as flags
from vitrail.cli.options.inspection_inputs import open_explainer
from vitrail.cli.options.values import check_minimum
from vitrail.cli.output.messages import print_notes
from vitrail.cli.output.progress import progress_bar
from vitrail.cli.output.results import check_output_file, prepare_figure_folder


def report(
    checkpoint: flags.TorchModel,
    /,
    *,
    data: flags.ImageData = None,
    images: flags.ImageCount = 32,
    explained: int = 6,
    evaluate: bool = True,
    out: flags.Out = Path("report.html"),
    overwrite: flags.Overwrite = False,
    labels: flags.Labels = None,
    fields: flags.ConfigFields = None,
    preprocessing: flags.PreprocessingFields = None,
    batch: flags.Batch = 4,
    device: flags.Device = "auto",
) -> None:
    """Write an HTML page about a model or a run.

    With labelled images: accuracy in total and per class, confusion matrix, calibration, samples of every class.
    For a run: its training curves and the figures of its task, such as reconstructions. For every model: predictions,
    maps of what it attends to, attention distances, patch features, filters, positions and a summary; without classes
    the attention of each head and nearest neighbours. A single file that opens in any browser, without a network, on
    a phone too.

    Examples::

        vitrail report vit_fashion --images 4
        vitrail report runs/demo --data fashion --images 4 --explained 2 -o run.html

    Parameters
    ----------
    explained
        Number of images that are shown with attention maps, spread over the classes.
    evaluate
        Measure the accuracy on all labelled images.
    out
        File name of the page; it ends in .html.
    """
    check_minimum("--explained", explained, 0)
    check_minimum("--batch", batch, 1)
    check_output_file("--out", out, (".html",), overwrite=overwrite)

    from vitrail.evaluation.evaluation_data import select_images
    from vitrail.report.evaluation_report import evaluate_images
    from vitrail.report.html_page import render_page, write_page
    from vitrail.report.model_report import MAX_BANK_IMAGES, build_model_report
    from vitrail.train.run_list import read_run_summary

    explainer = open_explainer(checkpoint, fields, preprocessing, device, labels)
    loaded = explainer.loaded
    chosen = select_images(loaded, data, images, by_class=True)
    prepare_figure_folder(out.parent, (), overwrite=overwrite)
    print_notes(chosen.notes)
    labelled, missing, evaluated = chosen.labelled if evaluate else None, list[str](), None
    if labelled is not None and labelled.no_mapping_reason:
        missing.append(f"accuracy: not measured, since {labelled.no_mapping_reason}")
    elif labelled is not None:
        with progress_bar(len(labelled.images), "evaluating") as advance:
            evaluated = evaluate_images(loaded, labelled, progress=advance)
    with progress_bar(len(chosen.items) + min(explained, len(chosen.items)), "explaining") as advance:
        title, lead, sections = build_model_report(
            explainer,
            loaded.source,
            chosen.items,
            explained=explained,
            batch=batch,
            evaluated=evaluated,
            run=None if loaded.run is None else read_run_summary(loaded.run.model.parent),
            bank=chosen.take_evenly(MAX_BANK_IMAGES) if not loaded.classes else (),
            notes=missing,
            progress=advance,
        )
    with progress_bar(sum(len(section.figures) for section in sections), "drawing") as advance:
        page = render_page(title, lead, sections, progress=advance)
    write_page(page, out)
    print(f"{out}: {len(page) / 1e6:.1f} MB, open it in a browser")
