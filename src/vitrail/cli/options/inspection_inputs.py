"""The model that `explain`, `look` and `report` open."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vitrail.cli.options.values import parse_fields, read_labels_file

if TYPE_CHECKING:
    from vitrail.inspection.explain import Explainer
    from vitrail.loaded_model import LoadedModel


def open_explainer(
    checkpoint: str,
    fields: Sequence[str] | None,
    preprocessing: Sequence[str] | None,
    device: str,
    labels: Path | None = None,
) -> "Explainer":
    """Open a model for attention maps with the values of --set, --preprocessing, --device and --labels."""
    from vitrail.inspection.explain import Explainer

    return Explainer(open_inspected_model(checkpoint, fields, preprocessing, device, labels))


def open_inspected_model(
    checkpoint: str,
    fields: Sequence[str] | None,
    preprocessing: Sequence[str] | None,
    device: str,
    labels: Path | None = None,
) -> "LoadedModel":
    """Open a model with the values of --set, --preprocessing, --device and --labels."""
    config_fields, how = parse_fields(fields), parse_fields(preprocessing, "--preprocessing")

    from vitrail.distributed import Ranks, resolve_device
    from vitrail.loading import open_torch_model

    return open_torch_model(
        checkpoint,
        fields=config_fields,
        preprocessing=how or None,
        labels=None if labels is None else read_labels_file(labels),
        device=resolve_device(device, Ranks()),
    )
