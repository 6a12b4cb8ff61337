"""vitrail convert: a checkpoint of any layout into any other."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from vitrail.cli.summary import parse_field, parse_fields, parse_size
from vitrail.errors import ConfigError, describe_error
from vitrail.files import check_output_paths, read_text

LOAD_SNIPPETS = {  # how the result is opened where it belongs
    "vitrail": "vitrail.load({path!r})",
    "timm": 'timm.create_model("local-dir:{path}", pretrained=True)',
    "hf": "transformers.AutoModelForImageClassification.from_pretrained({path!r})",
}


def convert(
    checkpoint: str,
    out: Path,
    /,
    *,
    to: Literal[
        "vitrail",
        "timm",
        "hf",
        "torchvision",
        "google",
        "deit",
        "dino",
        "mae",
        "moco",
        "akamaster",
        "t2t",
        "t2t_by_width",
    ],
    source: Annotated[str | None, Parameter(name="--from")] = None,
    image_size: str | None = None,
    patch_size: str | None = None,
    classes: int | None = None,
    policy: Literal["timm", "deit", "google", "torchvision", "dino"] | None = None,
    labels: Path | None = None,
    fields: Annotated[list[str] | None, Parameter(name="--set", negative=())] = None,
    preprocessing: Annotated[list[str] | None, Parameter(negative=())] = None,
    overwrite: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Read a checkpoint of any layout and write it in another; says what became of every tensor.

    Reads .npz by Google, .pth, .bin and .safetensors of timm, facebook's DeiT, DINO, MAE, MoCo v3, torchvision,
    akamaster, T2T-ViT, folders of transformers, timm and our own, and hf-hub:owner/model[@revision]. Nothing in a file
    is run.

    Examples::

        vitrail convert weights.pth my_vitrail --to vitrail
        vitrail convert weights.pth for_transformers --to hf --labels labels.txt
        vitrail convert my_model larger --to vitrail --image-size 64 --policy deit
        vitrail convert my_model weights.npz --to google

    Parameters
    ----------
    checkpoint
        What to read: a file, a folder, or hf-hub:owner/model[@revision].
    out
        What to write: a folder for vitrail, hf or timm, .npz for google; else, or for timm, .pth or .safetensors.
    to
        The layout to write.
    source
        The layout to read, where it should not be found out: vitrail, timm, hf, torchvision, google, deit, dino, mae,
        moco, akamaster, t2t, or t2t_by_width for a T2T-ViT whose attention was scaled by its whole width.
    image_size
        Resample the positions for pictures of this size: 384, or rows x columns: 384x256.
    patch_size
        Resample the patch kernel, as FlexiViT does it: 16, or 16x8.
    classes
        Replace the head by one of so many classes, which starts at zero; 0 leaves it out.
    policy
        How positions are resampled: timm, deit, google, torchvision, dino. Each checkpoint has its makers' own.
    labels
        A file with the names of the classes, one a line.
    fields
        A config field that the file does not specify, as FIELD=VALUE: heads=3; may be repeated. trained_size=32x128
        is the size of the images that its positions were trained for.
    preprocessing
        A field of the preprocessing to put right, as FIELD=VALUE: mean=[0.485,0.456,0.406]; may be repeated.
    overwrite
        Replace what already stands at OUT.
    """
    given = parse_fields(fields)
    how = dict(parse_field(item, "--preprocessing") for item in preprocessing or ())
    for name, text in (("image_size", image_size), ("patch_size", patch_size)):
        if text is not None:
            given[name] = parse_size(text, f"--{name.replace('_', '-')}")
    if classes is not None:
        given["classes"] = classes
    check_output_paths([out], overwrite=overwrite)

    from vitrail.checkpoint import read, write
    from vitrail.data.preprocessing import Preprocessing

    found = read(checkpoint, source=source, policy=policy, **given)
    about, size = found.description, found.model.config.image_size
    if how:
        about = replace(about, preprocessing=(about.preprocessing or Preprocessing(image_size=size)).with_fields(how))
    if labels is not None:
        about = replace(about, labels=read_labels_file(labels))
    print(f"{checkpoint}: family {about.family}, {found.layout} layout")
    print(found.report)
    write(
        found.model,
        out,
        to,
        preprocessing=about.preprocessing,
        labels=about.labels,
        provenance=about.provenance,
        resampling=about.resampling,
    )
    opens = LOAD_SNIPPETS.get(to if out.is_dir() else "", "").format(path=str(out))
    print(f"{out}: {to} layout, whole{f'; open it with {opens}' if opens else ''}")


def read_labels_file(path: Path) -> tuple[str, ...]:
    try:
        return tuple(read_text(path).splitlines())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--labels {path} cannot be read: {describe_error(error)}; expected a text, one label a line"
        ) from None
