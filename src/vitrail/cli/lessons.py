"""vitrail lessons: draw teaching plots."""

from pathlib import Path

from vitrail.base.errors import ConfigError
from vitrail.cli.options import model_flags as flags

PAGE_INTRODUCTION = "Three parts of a Vision Transformer and its training, drawn with the code that the models use."


def lessons(
    *,
    out: flags.Out = Path("lessons"),
    svg: flags.Svg = False,
    arrays: flags.Arrays = False,
    overwrite: flags.Overwrite = False,
) -> None:
    """Draw plots that teach parts of a Vision Transformer.

    Activations such as GELU, learning rate schedules, sinusoidal positions. Each plot is computed by the code that
    the models use, and has a caption that explains it.

    Examples::

        vitrail lessons -o plots --svg --arrays
        vitrail lessons -o lessons.html

    Parameters
    ----------
    out
        Folder for gelu.png, schedules.png and positions.png; or a page that ends in .html, a single file that opens in
        any browser.
    """
    page = out.suffix.lower() in (".html", ".htm")
    if page and (svg or arrays):
        flag = "--svg" if svg else "--arrays"
        raise ConfigError(f"{flag} with the page {out}, which is a single file; expected a folder, such as -o lessons")

    from vitrail.base.figures import list_figure_paths
    from vitrail.base.files import refuse_existing_outputs
    from vitrail.report.html_page import PageSection, render_page, write_page
    from vitrail.study.lesson_plots import LESSON_FORMULAS, plot_all_lessons

    figures, kinds = plot_all_lessons(), (".png", ".svg") if svg else (".png",)
    paths = list_figure_paths(out, [each.name for each in figures], kinds, arrays=arrays)
    refuse_existing_outputs([out] if page else paths, overwrite=overwrite)
    if page:
        sections = [
            PageSection(title=each.title, figures=[each], preformatted=LESSON_FORMULAS[each.name]) for each in figures
        ]
        write_page(render_page("Lessons", PAGE_INTRODUCTION, sections), out)
        written = [out]
    else:
        written = [path for each in figures for path in each.save(out, kinds, arrays=arrays)]
    print(f"written: {', '.join(map(str, written))}")
