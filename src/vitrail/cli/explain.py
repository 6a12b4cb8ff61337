"""vitrail explain: figures of what a model attends to, in photos or in a sentence."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from vitrail.base.errors import ConfigError
from vitrail.cli.options import model_flags as flags
from vitrail.cli.options.inspection_inputs import open_explainer, open_inspected_model
from vitrail.cli.options.predict_flags import OptionalImages
from vitrail.cli.options.values import parse_fields
from vitrail.cli.output.messages import print_error, print_note, print_text
from vitrail.cli.output.progress import progress_bar
from vitrail.cli.output.results import open_figure_output
from vitrail.cli.output.streams import get_binary_buffer
from vitrail.cli.usage_errors import check_arguments

if TYPE_CHECKING:
    from vitrail.base.figures import FigureFolder

Method = Literal["rollout", "grad-rollout", "attention", "heads", "windows", "pool", "norms", "pca", "neighbours"]


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
    if the model has it; pool shows the weights of attention pooling; norms shows token norms, which reveal artefacts in
    models without registers. pca colours the patches of all images by the principal components of their features, so
    that similar parts have the same colour; neighbours shows the most similar images of --data. Both work with any
    model, even one without attention. An image that cannot be read is reported and skipped; the exit code is then 2.

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
        vitrail explain vit_fashion example:coffee --method neighbours --data fashion -o similar
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
        For neighbours: folder of images, any data that `vitrail eval` takes, or a .npy or .parquet file that
        `vitrail embed` wrote with this model. [default: the data of the training]
    k
        For neighbours: number of images to show. [default: 5]
    check
        Print the probability of the class without the 30% most and the 30% least attended patches.
    beam
        For a sentence: number of beginnings that the beam search keeps. [default: 4]
    """
    check_arguments("explain", checkpoint, images)

    check_combination(method, "pca", {"--foreground": foreground})
    check_combination(method, "neighbours", {"--data": data is not None, "--k": k is not None})
    of_maps = {
        "--layer": layer != "-1",
        "--head": head != "mean",
        "--from": token != "head",
        "--class": of_class is not None,
        "--discard": discard != 0,
        "--mass": mass is not None,
        "--check": check,
    }
    title = f"What {Path(checkpoint).name or checkpoint} looked at"
    output = open_figure_output(out, title, svg=svg, arrays=arrays, overwrite=overwrite)
    if sentence is not None:
        for_photos = {name: is_given for name, is_given in of_maps.items() if name not in ("--layer", "--head")}
        for_photos |= {"--method": method is not None, "--labels": labels is not None, "a photo": bool(images)}
        refuse_with_sentence({**for_photos, "--image-size": bool(image_size), "--preprocessing": bool(preprocessing)})
        how: dict[str, Any] = {"layer": parse_place("--layer", layer), "beam": 4 if beam is None else beam}
        how["head"] = head if head == "mean" else parse_place("--head", head)
        opening = {"fields": parse_fields(fields), "device": device}
        print_text(explain_text(checkpoint, sentence, output, opening, as_json=as_json, **how))
        return
    if beam is not None:
        raise ConfigError("--beam needs --sentence")
    if not images:
        raise ConfigError("explain needs IMAGES. See vitrail explain --help.")
    writing: dict[str, Any] = {
        "stdin": get_binary_buffer(sys.stdin),
        "on_explained": ignore if as_json else print,
        "on_error": print_error,
    }
    if method in ("pca", "neighbours"):
        if unused := [name for name, is_given in of_maps.items() if is_given]:
            raise ConfigError(f"{unused[0]} cannot be combined with --method {method}; leave it out")

        from vitrail.inspection.explain.explain_files import explain_by_components, explain_by_neighbours

        loaded = open_inspected_model(checkpoint, fields, preprocessing, device, labels, image_size)
        if method == "pca":
            result = explain_by_components(loaded, images, output, foreground=foreground, **writing)
        else:
            wanted = 5 if k is None else k
            result = explain_by_neighbours(
                loaded, images, data, output, k=wanted, on_note=print_note, progress=progress_bar, **writing
            )
    else:
        from vitrail.base.figures import FigureFile
        from vitrail.inspection.explain.explain_files import can_occlude, explain_arguments
        from vitrail.inspection.explain.explain_options import ExplainOptions, default_method, default_methods

        explainer = open_explainer(checkpoint, fields, preprocessing, device, labels, image_size)
        by_default = method is None and not any(of_maps.values()) and not isinstance(output, FigureFile)
        chosen = method or default_method(explainer.model, explainer.layers, head=head, discard=discard, mass=mass)
        methods = default_methods(explainer.model, explainer.layers) if by_default else (chosen,)
        asked: dict[str, Any] = {"layer": layer, "head": head, "of_class": of_class, "mass": mass}
        options = [
            explainer.resolve_options(ExplainOptions(method=each, token=token, discard=discard, **asked))
            for each in methods
        ]
        result = explain_arguments(
            explainer,
            images,
            options,
            output,
            with_components=by_default and not explainer.loaded.classes,
            check=check or (out.suffix.lower() in (".html", ".htm") and can_occlude(explainer, options)),
            on_note=print_note,
            progress=progress_bar,
            **writing,
        )
    if as_json:
        print(json.dumps(result.report, indent=2))
    result.raise_if_failed()


def refuse_with_sentence(options: dict[str, bool]) -> None:
    """Refuse what is for photos."""
    for name, is_given in options.items():
        if is_given:
            raise ConfigError(f"{name} with --sentence; expected one of them")


def parse_place(option: str, text: str) -> int:
    """A layer or head of a text model."""
    try:
        return int(text)
    except ValueError:
        expected = "a number from 0, or -1 for the last" + "; or mean" * (option == "--head")
        raise ConfigError(f"{option} {text!r} with --sentence; expected {expected}") from None


def explain_text(
    checkpoint: str, sentence: str, out: "FigureFolder", opening: dict[str, Any], *, as_json: bool, **options: Any
) -> str:
    """Explain how a text model translates a sentence; what is printed about it."""
    from vitrail.distributed import Ranks, resolve_device
    from vitrail.report.translation_report import explain_sentence_files
    from vitrail.text_loading import open_text_model

    device = resolve_device(opening["device"], Ranks())
    loaded = open_text_model(checkpoint, fields=opening["fields"], device=device)
    explained, written = explain_sentence_files(loaded, sentence, out, **options)
    files = list(map(str, written))
    return json.dumps([{**explained.to_json(), "written": files}], indent=2) if as_json else f"{explained}; {files[-1]}"


def ignore(_: object) -> None:
    """Print nothing: JSON is printed at the end."""


def check_combination(method: str | None, needed: str, options: dict[str, bool]) -> None:
    """Refuse options of another method."""
    for name, is_given in options.items():
        if is_given and method != needed:
            raise ConfigError(f"{name} needs --method {needed}")
