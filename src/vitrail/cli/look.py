"""vitrail look: draw the figures of a model."""

from pathlib import Path
from typing import Literal

from vitrail.cli.options import model_flags as flags
from vitrail.cli.options.inspection_inputs import open_explainer
from vitrail.cli.options.values import check_minimum
from vitrail.cli.output.messages import print_notes, print_text
from vitrail.cli.output.progress import progress_bar
from vitrail.cli.output.results import prepare_figure_folder


def look(
    checkpoint: flags.TorchModel,
    /,
    *,
    data: flags.ImageData = None,
    images: flags.ImageCount = 32,
    method: Literal["rollout", "grad-rollout", "attention", "pool"] | None = None,
    out: flags.Out = Path("look"),
    overwrite: flags.Overwrite = False,
    svg: flags.Svg = False,
    arrays: flags.Arrays = False,
    fields: flags.ConfigFields = None,
    preprocessing: flags.PreprocessingFields = None,
    batch: flags.Batch = 4,
    device: flags.Device = "auto",
) -> None:
    """Draw the figures of the ViT paper for a model, and others.

    From the weights alone: principal components of the patch filters, similarity of the positions. From images: mean
    attention distance per head and layer in pixels, norms of the tokens, class against distillation token, similarity
    of the layers (CKA), and the occlusion check, which tells whether the attention is meaningful.

    Examples::

        vitrail look cct_cifar10 --images 4
        vitrail look vit_fashion --data photos --images 4 -o figures --svg --arrays

    Parameters
    ----------
    method
        Method of the maps in the occlusion check: see `vitrail explain`. [default: that of explain]
    out
        Folder for the figures.
    """
    check_minimum("--batch", batch, 1)

    from vitrail.evaluation.evaluation_data import select_images
    from vitrail.inspection.explain.explain_options import ExplainOptions
    from vitrail.inspection.model_figures import FIGURE_NAMES
    from vitrail.inspection.model_figures import look as draw_figures

    kinds = (".png", ".svg") if svg else (".png",)
    files = [f"{name}{kind}" for name in FIGURE_NAMES for kind in (*kinds, *[".npz"] * arrays)]
    explainer = open_explainer(checkpoint, fields, preprocessing, device)
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
