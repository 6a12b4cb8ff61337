"""vitrail explain: figures of what a model attends to."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from vitrail.cli.options import model_flags as flags
from vitrail.cli.options.inspection_inputs import open_explainer
from vitrail.cli.options.predict_flags import Images
from vitrail.cli.output.messages import print_error, print_note
from vitrail.cli.output.progress import progress_bar
from vitrail.cli.usage_errors import check_arguments
from vitrail.output_streams import get_binary_buffer


def explain(
    checkpoint: flags.TorchModel,
    /,
    *images: Images,
    out: flags.Out = Path("explained"),
    method: Literal["rollout", "grad-rollout", "attention", "pool", "norms"] | None = None,
    layer: str = "-1",
    head: str = "mean",
    token: Annotated[str, Parameter(name=("--from", "--token"))] = "head",
    of_class: Annotated[str | None, Parameter(name="--class")] = None,
    discard: float = 0.0,
    check: Annotated[bool, Parameter(negative=())] = False,
    labels: flags.Labels = None,
    fields: flags.ConfigFields = None,
    preprocessing: flags.PreprocessingFields = None,
    overwrite: flags.Overwrite = False,
    svg: flags.Svg = False,
    arrays: flags.Arrays = False,
    device: flags.Device = "auto",
    as_json: flags.Json = False,
) -> None:
    """Draw what a model attends to in each photo.

    The photo stays bright where the model attends and is darkened elsewhere. grad-rollout follows the attention
    through all layers and keeps what contributes to a class; rollout keeps all; attention shows a layer and its
    heads; pool shows the weights of attention pooling; norms shows token norms, which reveal artefacts in models
    without registers. An image that cannot be read is reported and skipped; the exit code is then 2.

    Examples::

        vitrail explain cct_cifar10 example:cat
        vitrail explain cct_cifar10 example:cat --class dog --check -o checked
        vitrail explain cct_cifar10 example:cat --method attention --layer all --head all -o maps --svg
        vitrail explain vit_fashion photos -o explained_photos --json

    Parameters
    ----------
    out
        Folder for PHOTO.METHOD.png.
    method
        What is drawn. [default: grad-rollout; rollout with --head or --discard, or for a model without classes;
        norms if there are no maps (Linformer)]
    layer
        Layer from 0, -1 for the last, or all; a rollout goes up to it.
    head
        Head from 0, -1 for the last; mean, max or min of all heads; or all, each in its own map.
    token
        The token that attends: head (what the classifier reads), class, distill, register0, or a patch as ROW,COLUMN.
    of_class
        The class to explain, by number or name. [default: the top class]
    discard
        Share of the smallest entries in each row of a rollout's attention to treat as noise: 0.9, for example.
    check
        Print the probability of the class without the 30 % most and the 30 % least attended patches.
    """
    check_arguments("explain", checkpoint, images)

    from vitrail.inspection.explain_files import explain_arguments
    from vitrail.inspection.explain_options import ExplainOptions, default_method

    explainer = open_explainer(checkpoint, fields, preprocessing, device, labels)
    asked: dict[str, Any] = {"layer": layer, "head": head, "of_class": of_class}
    chosen = default_method(explainer.model, explainer.layers, head=head, discard=discard)
    options = explainer.resolve_options(ExplainOptions(method=method or chosen, token=token, discard=discard, **asked))
    result = explain_arguments(
        explainer,
        images,
        options,
        out,
        stdin=get_binary_buffer(sys.stdin),
        suffixes=(".png", ".svg") if svg else (".png",),
        arrays=arrays,
        check=check,
        overwrite=overwrite,
        on_explained=(lambda _: None) if as_json else print,
        on_note=print_note,
        on_error=print_error,
        progress=progress_bar,
    )
    if as_json:
        print(json.dumps(result.report, indent=2))
    result.raise_if_failed()
