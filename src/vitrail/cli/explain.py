"""vitrail explain: draw what a model attends to."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from vitrail.cli.jobs import check_misspelt_options
from vitrail.cli.options import model_flags as flags
from vitrail.cli.options.inspection_inputs import open_explainer
from vitrail.cli.output.progress import progress_bar
from vitrail.cli.output.results import prepare_figure_folder, print_notes
from vitrail.errors import ConfigError, DataError, VitrailError

if TYPE_CHECKING:
    from vitrail.inspection.explain import Explainer, Explanation

REMOVED_SHARE = 0.3  # of the patches removed by --check
OPTION_NAMES = (
    *("out", "method", "layer", "head", "from", "token", "class", "discard", "check", "labels", "set", "preprocessing"),
    *("svg", "arrays", "device", "json"),
)
EMPTY_MAP_NOTE = "no attention supports the class, so the map is 0 everywhere"


def explain(
    checkpoint: flags.TorchModel,
    /,
    *images: Annotated[str, Parameter(allow_leading_hyphen=True)],  # - is standard input
    out: Annotated[Path, Parameter(name=("--out", "-o"))] = Path("explained"),
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
    svg: flags.Svg = False,
    arrays: flags.Arrays = False,
    device: flags.Device = "auto",
    as_json: flags.Json = False,
) -> None:
    """Draw what a model attends to over photos.

    rollout follows the attention through all layers to the patches; grad-rollout keeps what supports a class;
    attention shows a layer and its heads; pool shows the weights of attention pooling; norms shows the norms of the
    tokens, where artefacts of missing registers stand out. Fused attention stays on.

    Examples::

        vitrail explain my_model photo.jpg
        vitrail explain my_model photo.jpg --method grad-rollout --class 3 --check
        vitrail explain my_model photo.jpg --method attention --layer all --head all -o maps --svg --arrays
        vitrail explain my_model photo.jpg --method attention --layer 0 --from 1,2
        vitrail explain runs/demo photo.jpg --json

    Parameters
    ----------
    images
        Images, folders with images directly in them, or - for standard input. Unreadable images are reported and
        skipped.
    out
        Folder for PHOTO.METHOD.png.
    method
        What to draw. [default: rollout; for CaiT, which mixes its heads, grad-rollout, or attention without a head;
        for Linformer, which has no maps, norms]
    layer
        Layer, from 0, -1 for the last, or all; rollout goes up to it.
    head
        Head, from 0, -1 for the last; mean, max or min of all; or all for one map each.
    token
        The token that attends: head (what the classifier reads), class, distill, register0, or a patch as ROW,COLUMN
        from 0,0.
    of_class
        Class to explain, by number or name. [default: the top class]
    discard
        Share of each attention row that rollout discards as noise, its smallest entries: for instance 0.9.
    check
        Check the map: the probability of the class without the 30 % most and the 30 % least attended patches.
    """
    check_misspelt_options(images, OPTION_NAMES)
    if not images:
        raise ConfigError("no images; expected at least one: a file, or a folder")
    if check and method == "norms":
        raise ConfigError("--check with --method norms, which is not attention; use another method, or no --check")
    if check and "all" in (layer, head):
        raise ConfigError("--check with all layers or heads; expected a single map: one layer and one head")

    from vitrail.data.decoding.rgb_image import open_image
    from vitrail.data.image_items import list_image_items
    from vitrail.inspection.explain_options import ExplainOptions

    explainer = open_explainer(checkpoint, fields, preprocessing, device, labels)
    given: dict[str, Any] = {"layer": layer, "head": head, "of_class": of_class}
    options = explainer.resolve_options(
        ExplainOptions(method=method or explainer.default_method, token=token, discard=discard, **given)
    )
    if check and explainer.no_maps_reason:
        raise ConfigError(
            f"--check for {checkpoint}, which has no attention maps: {explainer.no_maps_reason}; omit --check"
        )
    if check and not explainer.loaded.classes:
        raise ConfigError(f"--check for {checkpoint}, which has no head; expected a model with classes")
    found = list_image_items(images, getattr(sys.stdin, "buffer", None))
    prepare_figure_folder(out)
    names, report, failed = set[str](), list[dict[str, Any]](), 0
    with progress_bar(len(found) if len(found) > 1 else 0) as advance:
        for each in found:
            try:
                picture = open_image(each.source)
                result = explainer.explain_resolved(picture, options, each.name)
            except DataError as error:
                if len(found) == 1:
                    raise
                print(f"vitrail: {error}", file=sys.stderr)
                failed += 1
                continue
            finally:
                advance(1)
            written = result.figure.with_unique_name(names).save(
                out, (".png", ".svg") if svg else (".png",), arrays=arrays
            )
            if result.is_empty:
                print_notes([f"{result.name}: {EMPTY_MAP_NOTE}{'; the check means nothing' * check}"])
            row = {**explanation_to_json(result), "written": list(map(str, written))}
            if check:
                row["check"] = check_map_by_occlusion(explainer, picture, result)
            report.append(row)
            if not as_json:
                print(format_result(row))
    if as_json:
        print(json.dumps(report, indent=2))
    if failed:
        others = f"; the others are in {out}" if report else ""
        raise VitrailError(f"{failed} of {len(found)} images could not be read{others}")


def explanation_to_json(result: "Explanation") -> dict[str, Any]:
    """The explanation as JSON values."""
    top = [] if result.prediction is None else [vars(each) for each in result.prediction.top]
    asked = (
        None
        if result.explained_class is None
        else {**vars(result.explained_class), "name": result.explained_class.name}
    )
    return {"image": result.name, "method": result.options.method, "asked": asked, "top": top}


def check_map_by_occlusion(explainer: "Explainer", picture: Any, result: "Explanation") -> dict[str, float]:
    """The probability of the class for the image, and without its most and its least attended patches."""
    import torch

    from vitrail.inspection.patch_removal import probabilities_without_patches

    assert result.explained_class is not None
    pixels, classes = explainer.loaded.make_batch([picture]), torch.tensor([result.explained_class.index])
    found = {"as_it_is": result.explained_class.probability}
    for name, most in (("without_most", True), ("without_least", False)):
        shares = probabilities_without_patches(
            explainer.model, pixels, result.map[None], classes.to(pixels.device), [REMOVED_SHARE], most=most
        )
        found[name] = float(shares[0, 0])
    return found


def format_result(row: dict[str, Any]) -> str:
    asked, check = row["asked"], row.get("check")
    answer = "" if asked is None else f"{asked['name']} {asked['probability']:.1%}, "
    text = f"{row['image']}: {answer}{', '.join(row['written'])}"
    if check:
        text += (
            f"; without the {REMOVED_SHARE:.0%} most attended patches {check['without_most']:.1%}, "
            f"without the {REMOVED_SHARE:.0%} least {check['without_least']:.1%}"
        )
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)  # names may hold anything
