"""vitrail explain: what is it looking at?"""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from vitrail.cli.jobs import check_misspelt_options
from vitrail.cli.options.inspection_inputs import open_explainer
from vitrail.cli.output.progress import progress_bar
from vitrail.errors import ConfigError, DataError, VitrailError

if TYPE_CHECKING:
    from vitrail.inspection.explain import Explainer, Explanation

REMOVED_SHARE = 0.3  # of the patches, for --check
OPTION_NAMES = (
    *("out", "method", "layer", "head", "from", "token", "class", "discard", "check", "labels", "set", "svg", "arrays"),
    *("device", "json"),
)
EMPTY_MAP_NOTE = "nothing of the attention speaks for the class, so the map is 0 everywhere"


def explain(
    checkpoint: str,
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
    labels: Path | None = None,
    fields: Annotated[list[str] | None, Parameter(name="--set", negative=())] = None,
    svg: Annotated[bool, Parameter(negative=())] = False,
    arrays: Annotated[bool, Parameter(negative=())] = False,
    device: str = "auto",
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> None:
    """Draw over photos what a model looks at when it answers.

    rollout follows the attention through all layers to the patches; grad-rollout keeps of it what speaks for a class;
    attention shows a layer and its heads; pool what a pool by attention takes of each patch; norms how long the tokens
    are, where artefacts of missing registers stand out. The model answers as ever: fused attention stays on.

    Examples::

        vitrail explain my_model photo.jpg
        vitrail explain my_model photo.jpg --method grad-rollout --class 3 --check
        vitrail explain my_model photo.jpg --method attention --layer all --head all -o maps --svg --arrays
        vitrail explain my_model photo.jpg --method attention --layer 0 --from 1,2
        vitrail explain runs/demo photo.jpg --json

    Parameters
    ----------
    checkpoint
        The folder of a run, or anything that `vitrail convert` reads: a file, a folder, hf-hub:owner/model.
    images
        Images, folders with images directly in them, or - for standard input. One that cannot be read is named and
        skipped.
    out
        The folder for PHOTO.METHOD.png.
    method
        What is drawn: rollout unless said; where heads are mixed (CaiT) grad-rollout, or attention without a head;
        where there are no maps (Linformer) norms.
    layer
        Which, from 0, -1 for the last, or all; a rollout goes up to it.
    head
        Which, from 0, -1 for the last; mean, max or min of all; or all, each by itself.
    token
        Who attends: head (what the classifier reads), class, distill, register0, or a patch as ROW,COLUMN from 0,0.
    of_class
        The class asked about, by number or name; unless said, the likeliest.
    discard
        Share of each row of a rollout's attention, its smallest entries, that is taken for noise: 0.9, say.
    check
        Whether the map means anything: the class's probability without the 30 % most and least attended patches.
    labels
        A text with the names of the classes, one a line, where the checkpoint has none.
    fields
        A config field that the file does not specify, as FIELD=VALUE; may be repeated.
    svg
        SVG files as well.
    arrays
        The numbers as well, as .npz files for numpy.
    device
        auto, cpu, cuda, cuda:1, mps.
    as_json
        Print JSON and nothing else.
    """
    check_misspelt_options(images, OPTION_NAMES)
    if not images:
        raise ConfigError("no pictures; expected at least one: a file, or a folder of them")
    if check and method == "norms":
        raise ConfigError("--check with --method norms, which is no attention; expected another method, or no --check")
    if check and "all" in (layer, head):
        raise ConfigError("--check of all layers or heads; expected one map to be checked: one of each, or none given")

    from vitrail.data.decoding.rgb_image import open_image
    from vitrail.data.image_items import list_image_items
    from vitrail.figures import new_figure
    from vitrail.files import make_writable_folder
    from vitrail.inspection.explain_options import ExplainOptions

    _, explainer = open_explainer(checkpoint, labels, device, fields)
    asked: dict[str, Any] = {"layer": layer, "head": head, "of_class": of_class}
    question = explainer.resolve_options(
        ExplainOptions(method=method or explainer.default_method, token=token, discard=discard, **asked)
    )
    if check and explainer.no_maps_reason:
        raise ConfigError(
            f"--check of {checkpoint}: there are no maps, {explainer.no_maps_reason}; expected no --check"
        )
    if check and not explainer.viewer.classes:
        raise ConfigError(f"--check of {checkpoint}, which has no head; expected a model with classes")
    found = list_image_items(images, getattr(sys.stdin, "buffer", None))
    make_writable_folder(out)  # what would fail in the end fails before the work
    new_figure(1, 1)
    names, report, failed = set[str](), list[dict[str, Any]](), 0
    with progress_bar(len(found) if len(found) > 1 else 0) as advance:
        for each in found:
            try:
                picture = open_image(each.source)
                result = explainer.explain_resolved(picture, question, each.name)
            except DataError as error:
                if len(found) == 1:
                    raise
                print(f"vitrail: {error}", file=sys.stderr)
                failed += 1
                continue
            finally:
                advance(1)
            plate = result.figure.with_unique_name(names)
            written = plate.save(out, (".png", ".svg") if svg else (".png",), arrays=arrays)
            if result.is_empty:
                print(
                    f"vitrail: note: {result.name}: {EMPTY_MAP_NOTE}{'; a check means nothing' * check}",
                    file=sys.stderr,
                )
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
        raise VitrailError(f"{failed} of {len(found)} pictures could not be read{others}")


def explanation_to_json(result: "Explanation") -> dict[str, Any]:
    """In plain values."""
    top = [] if result.prediction is None else [vars(each) for each in result.prediction.top]
    asked = (
        None
        if result.explained_class is None
        else {**vars(result.explained_class), "name": result.explained_class.name}
    )
    return {"image": result.name, "method": result.options.method, "asked": asked, "top": top}


def check_map_by_occlusion(explainer: "Explainer", picture: Any, result: "Explanation") -> dict[str, float]:
    """The probability of the class asked about as it is, and without the most and the least attended patches."""
    import torch

    from vitrail.inspection.occlusion import probabilities_without_patches

    assert result.explained_class is not None
    pixels, classes = explainer.viewer.see([picture]), torch.tensor([result.explained_class.index])
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
