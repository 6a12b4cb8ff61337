"""vitrail lessons: the teaching plots."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from vitrail.errors import ConfigError

PAGE_INTRODUCTION = (
    "Three small things inside a Vision Transformer and its training, drawn from the code that the models run."
)


def lessons(
    *,
    out: Annotated[Path, Parameter(name=("--out", "-o"))] = Path("lessons"),
    svg: Annotated[bool, Parameter(negative=())] = False,
    arrays: Annotated[bool, Parameter(negative=())] = False,
    overwrite: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Draw what there is to learn by looking: GELU and its neighbours, learning rates, sinusoids for positions.

    Each is drawn from the code that the models themselves run, with a caption that says what there is to be seen.

    Examples::

        vitrail lessons -o lessons
        vitrail lessons -o lessons --svg --arrays
        vitrail lessons -o lessons.html

    Parameters
    ----------
    out
        A folder for gelu.png, schedules.png and positions.png; or a page that ends in .html, one file with everything
        in it, which opens in any browser.
    svg
        SVG files as well.
    arrays
        The numbers as well, as .npz files for numpy.
    overwrite
        Replace files that exist.
    """
    page = out.suffix.lower() in (".html", ".htm")
    if page and (svg or arrays):
        flag = "--svg" if svg else "--arrays"
        raise ConfigError(f"{flag} with the page {out}, which is one file; expected a folder, such as -o lessons")

    from vitrail.figures import list_figure_paths
    from vitrail.files import check_output_paths
    from vitrail.report.html_page import PageSection, render_page, write_page
    from vitrail.study.lesson_plots import LESSON_FORMULAS
    from vitrail.study.lesson_plots import plot_all_lessons as all_lessons

    plates, kinds = all_lessons(), (".png", ".svg") if svg else (".png",)
    figures = list_figure_paths(out, [each.name for each in plates], kinds, arrays=arrays)
    check_output_paths([out] if page else figures, overwrite=overwrite)
    if page:
        sections = [
            PageSection(title=each.title, figures=[each], preformatted=LESSON_FORMULAS[each.name]) for each in plates
        ]
        write_page(render_page("Lessons", PAGE_INTRODUCTION, sections), out)
        written = [out]
    else:
        written = [path for each in plates for path in each.save(out, kinds, arrays=arrays)]
    print(f"written: {', '.join(map(str, written))}")
