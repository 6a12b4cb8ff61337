"""vitrail look: draw the figures of the ViT paper for a model, or figures that teach parts of any model."""

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from vitrail.base.errors import ConfigError
from vitrail.cli.options import model_flags as flags
from vitrail.cli.options.values import check_minimum, parse_fields
from vitrail.cli.output.messages import print_notes, print_text
from vitrail.cli.output.progress import progress_bar
from vitrail.cli.output.results import prepare_figure_folder

LESSONS_INTRODUCTION = "Three parts of a Vision Transformer and its training, drawn with the code that the models use."


def look(
    checkpoint: flags.OptionalModel = None,
    /,
    *,
    lessons: Annotated[bool, Parameter(negative=())] = False,
    data: flags.ImageData = None,
    images: flags.ImageCount = 32,
    method: Literal["rollout", "grad-rollout", "attention", "pool"] | None = None,
    out: flags.OptionalOut = None,
    overwrite: flags.Overwrite = False,
    svg: flags.Svg = False,
    arrays: flags.Arrays = False,
    fields: flags.ConfigFields = None,
    preprocessing: flags.PreprocessingFields = None,
    batch: flags.Batch = 4,
    device: flags.Device = "auto",
) -> None:
    """Draw the ViT paper's figures, and others, for a model.

    From the weights alone: principal components of the patch filters, similarity of the positions. From images: mean
    attention distance per head and layer in pixels, norms of the tokens, class versus distillation token, similarity
    of the layers (CKA), and the occlusion check, which tells whether the attention is meaningful.

    With --lessons, and without a model: activations such as GELU, learning rate schedules, sinusoidal positions. Each
    plot is computed by the code that the models use, and has a caption that explains it.

    Examples::

        vitrail look cct_cifar10 --images 4
        vitrail look vit_fashion --data photos --images 4 -o figures --svg --arrays
        vitrail look --lessons -o lessons.html

    Parameters
    ----------
    lessons
        Draw gelu, schedules and positions instead of the figures of a model.
    method
        Method of the maps in the occlusion check: see `vitrail explain`. [default: that of explain]
    out
        Folder for the figures; with --lessons also a page that ends in .html, a single file that opens in any browser.
        [default: look, or lessons]
    """
    check_minimum("--batch", batch, 1)
    if lessons:
        for_models = {"MODEL": checkpoint, "--data": data, "--method": method, "--set": fields}
        if unused := [name for name, given in (for_models | {"--preprocessing": preprocessing}).items() if given]:
            raise ConfigError(f"{unused[0]} with --lessons, which needs no model; leave one of them out")
        draw_lessons(out or Path("lessons"), svg=svg, arrays=arrays, overwrite=overwrite)
        return
    if checkpoint is None:
        raise ConfigError("look needs MODEL, or --lessons. See vitrail look --help.")
    out = out or Path("look")

    from vitrail.evaluation.evaluation_data import select_images
    from vitrail.inspection.explain.explain_options import ExplainOptions
    from vitrail.inspection.explain.explainer import Explainer
    from vitrail.inspection.model_figures import FIGURE_NAMES
    from vitrail.inspection.model_figures import look as draw_figures
    from vitrail.kinds.image import open_inspected_model

    kinds = (".png", ".svg") if svg else (".png",)
    files = [f"{name}{kind}" for name in FIGURE_NAMES for kind in (*kinds, *[".npz"] * arrays)]
    how = parse_fields(preprocessing, "--preprocessing") or None
    explainer = Explainer(
        open_inspected_model(checkpoint, fields=parse_fields(fields), preprocessing=how, device=device)
    )
    chosen = select_images(explainer.loaded, data, images)
    prepare_figure_folder(out, files, overwrite=overwrite)
    with progress_bar(len(chosen.items)) as advance:
        found = draw_figures(
            explainer,
            (each.source for each in chosen.items),
            batch=batch,
            options=None if method is None else ExplainOptions(method=method),
            progress=advance,
        )
    print_notes((*chosen.notes, *found.notes, *found.skipped))
    for figure in found.figures:
        written = figure.save(out, kinds, arrays=arrays)
        print_text(f"{', '.join(map(str, written))}: {figure.caption}")


def draw_lessons(out: Path, *, svg: bool, arrays: bool, overwrite: bool) -> None:
    page = out.suffix.lower() in (".html", ".htm")
    if page and (svg or arrays):
        flag = "--svg" if svg else "--arrays"
        raise ConfigError(f"{flag} with the page {out}, which is a single file; expected a folder, such as -o lessons")

    from vitrail.base.figures import list_figure_paths
    from vitrail.base.files import refuse_existing_outputs
    from vitrail.report.html_page import PageSection, render_page, write_page
    from vitrail.study.lesson_plots import LESSON_FORMULAS, draw_lesson_figures

    figures, kinds = draw_lesson_figures(), (".png", ".svg") if svg else (".png",)
    paths = list_figure_paths(out, [each.name for each in figures], kinds, arrays=arrays)
    refuse_existing_outputs([out] if page else paths, overwrite=overwrite)
    if page:
        sections = [
            PageSection(title=each.title, figures=[each], preformatted=LESSON_FORMULAS[each.name]) for each in figures
        ]
        write_page(render_page("Lessons", LESSONS_INTRODUCTION, sections), out)
        written = [out]
    else:
        written = [path for each in figures for path in each.save(out, kinds, arrays=arrays)]
    print(f"written: {', '.join(map(str, written))}")
