"""The model that `explain`, `look` and `report` open."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vitrail.cli.options.values import parse_fields, parse_model_fields, read_labels

if TYPE_CHECKING:
    from vitrail.inspection.explain.explainer import Explainer
    from vitrail.loaded_model import LoadedModel


def open_explainer(
    checkpoint: str,
    fields: Sequence[str] | None,
    preprocessing: Sequence[str] | None,
    device: str,
    labels: Path | None = None,
    image_size: str | None = None,
) -> "Explainer":
    """Open a model for attention maps with the values of these options."""
    from vitrail.inspection.explain.explainer import Explainer

    return Explainer(open_inspected_model(checkpoint, fields, preprocessing, device, labels, image_size))


def open_inspected_model(
    checkpoint: str,
    fields: Sequence[str] | None,
    preprocessing: Sequence[str] | None,
    device: str,
    labels: Path | None = None,
    image_size: str | None = None,
) -> "LoadedModel":
    """Open a model with the values of --set, --preprocessing, --device, --labels and --image-size."""
    config_fields, how = parse_model_fields(fields, image_size), parse_fields(preprocessing, "--preprocessing")

    from vitrail.distributed import Ranks, resolve_device
    from vitrail.opening import open_torch_model

    return open_torch_model(
        checkpoint,
        fields=config_fields,
        preprocessing=how or None,
        labels=read_labels(labels),
        device=resolve_device(device, Ranks()),
    )
