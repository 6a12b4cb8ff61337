"""vitrail explain: figures of what a model attends to, in photos or in a sentence."""

import json
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from vitrail.cli.options import model_flags as flags
from vitrail.cli.options.predict_flags import OptionalImages
from vitrail.cli.options.values import parse_fields, parse_size, read_labels
from vitrail.cli.output.messages import print_text
from vitrail.cli.output.results import make_message_callbacks, open_figure_output
from vitrail.cli.usage_errors import check_arguments

Method = Literal["rollout", "grad-rollout", "attention", "heads", "windows", "pool", "norms", "pca", "neighbors"]


def explain(
    checkpoint: flags.TorchModel,
    /,
    *images: OptionalImages,
    sentence: str | None = None,
    out: flags.Out = Path("explained"),
    method: Method | None = None,
    layer: str = "-1",
    head: str = "mean",
    token: Annotated[str, Parameter(name=("--from", "--token"))] = "head",
    of_class: Annotated[str | None, Parameter(name="--class")] = None,
    discard: float = 0.0,
    mass: float | None = None,
    foreground: Annotated[bool, Parameter(negative=())] = False,
    data: str | None = None,
    k: int | None = None,
    check: Annotated[bool, Parameter(negative=())] = False,
    beam: int | None = None,
    labels: flags.Labels = None,
    image_size: flags.ImageSize = None,
    fields: flags.ConfigFields = None,
    preprocessing: flags.PreprocessingFields = None,
    overwrite: flags.Overwrite = False,
    svg: flags.Svg = False,
    arrays: flags.Arrays = False,
    device: flags.Device = "auto",
    as_json: flags.Json = False,
) -> None:
    """Draw what a model attends to in each photo, or in a sentence that it translates.

    The photo stays bright where the model attends and is darkened elsewhere. grad-rollout follows the attention
    through all layers and keeps what contributes to a class; rollout keeps all; attention shows a layer and its
    heads, and heads all heads of a layer with their mean; windows shows the attention between the windows of a layer,
    if the model has it; pool shows the weights of attention pooling; norms shows token norms, which reveal artifacts in
    models without registers. pca colors the patches of all images by the principal components of their features, so
    that similar parts have the same color; neighbors shows the most similar images of --data. Both work with any
    model, even one without attention. An image that cannot be read is reported and skipped; the exit code is then 2.

    A captioner describes the photos; the figures show what it attended to when it wrote each word (--layer, --beam).

    With --sentence, a text model translates it. The figures show the words that each word reads (cross-attention,
    all heads, self-attention) next to those that it depends on, found by leaving out each word, and the beam search;
    a page shows all of it with lines between the words.

    Examples::

        vitrail explain cct_cifar10 example:cat
        vitrail explain cct_cifar10 example:cat example:rocket -o why.html
        vitrail explain cct_cifar10 example:cat --class dog --check -o checked
        vitrail explain cct_cifar10 example:cat --method attention --layer all --head all -o maps --svg
        vitrail explain vit_fashion photos -o explained_photos --json
        vitrail explain cct_cifar10 example:cat example:rocket --method pca -o together
        vitrail explain vit_fashion example:coffee --method neighbors --data fashion -o similar
        vitrail explain runs/translation --sentence "Ein Hund läuft." --layer 1 --head 0

    Parameters
    ----------
    sentence
        A sentence to translate and explain, instead of photos. [default: photos are explained]
    out
        Folder for PHOTO.METHOD.png, or the figures and the page of a sentence; a name that ends in .html is one page
        with all images and the check of their maps, and one that ends in .png, .svg or .pdf is a single figure.
    method
        What is drawn. [default: grad-rollout; rollout with --head or --discard, heads with --mass; rollout, heads and
        pca for a model without classes; norms if there are no maps (Linformer)]
    layer
        Layer from 0, -1 for the last, or all; a rollout goes up to it.
    head
        Head from 0, -1 for the last; mean, max or min of all heads; or all, each in its own map.
    token
        The token that attends: head (what the classifier reads), class, distill, register0, or a patch as ROW,COLUMN;
        with --method windows, a window.
    of_class
        The class to explain, by number or name. [default: the top class]
    discard
        Share of the smallest entries in each row of a rollout's attention to treat as noise: 0.9, for example.
    mass
        For heads: show the patches that hold this share of each head's attention: 0.6, for example. [default: all]
    foreground
        For pca: leave out the background, found by the first component; for images of one kind of object.
    data
        For neighbors: folder of images, any data that `vitrail eval` takes, or a .npy or .parquet file that
        `vitrail embed` wrote with this model. [default: the data of the training]
    k
        For neighbors: number of images to show. [default: 5]
    check
        Print the probability of the class without the 30% most and the 30% least attended patches.
    beam
        For a sentence: number of beginnings that the beam search keeps. [default: 4]
    """
    check_arguments("explain", checkpoint, images)

    title = f"What {Path(checkpoint).name or checkpoint} looked at"
    output = open_figure_output(out, title, svg=svg, arrays=arrays, overwrite=overwrite)

    from vitrail.opening import run_command

    result = run_command(
        "explain",
        checkpoint,
        inputs=images,
        output=output,
        sentence=sentence,
        method=method,
        layer=None if layer == "-1" else layer,
        head=None if head == "mean" else head,
        token=None if token == "head" else token,
        of_class=of_class,
        discard=discard or None,
        mass=mass,
        foreground=foreground or None,
        data=data,
        k=k,
        check=check or None,
        beam=beam,
        labels=read_labels(labels),
        image_size=None if image_size is None else parse_size(image_size),
        fields=parse_fields(fields) or None,
        preprocessing=parse_fields(preprocessing, "--preprocessing") or None,
        device=device,
        messages=make_message_callbacks(on_result=ignore if as_json else print_result),
    )
    if as_json:
        print(json.dumps(result.report, indent=2))
    result.raise_if_failed()


def print_result(found: object) -> None:
    print_text(str(found))


def ignore(_: object) -> None:
    """Print nothing: JSON is printed at the end."""
