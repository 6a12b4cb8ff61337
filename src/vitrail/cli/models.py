"""vitrail models: list the presets. Reads their costs and public weights from files, so torch is not imported."""

import json
from typing import Annotated

from cyclopts import Parameter

from vitrail.checkpoint.bundled import list_bundled_models
from vitrail.cli.options import model_flags as flags
from vitrail.models.preset_table import describe_presets, find_presets, list_preset_cells
from vitrail.text import format_table


def models(
    pattern: str = "*", /, *, pretrained: Annotated[bool, Parameter(negative=())] = False, as_json: flags.Json = False
) -> None:
    """List the models and their public weights.

    Shows parameters, GMACs, resolution, weights and their top-1. GMACs are the multiply-adds of convolutions,
    matrix products and attention for one image, and not counted for text. Commands that take a model open public
    weights by name: MODEL for the default ones, which are shown, or MODEL.TAG.

    Examples::

        vitrail models
        vitrail models 'deit*' --pretrained
        vitrail models 'ViT-B/*' --json

    Parameters
    ----------
    pattern
        Names or aliases to list, with * and ? as in a shell (quote it), or a part of a name.
    pretrained
        List only models with public weights. --json lists all their tags, licences and training data.
    """
    found = find_presets(pattern, pretrained=pretrained)
    table = "\n".join(format_table(*list_preset_cells(found)))
    bundled = f"\n\nBundled with their weights: {', '.join(list_bundled_models())}" * (pattern == "*")
    print(json.dumps(describe_presets(found), indent=2) if as_json else table + bundled)
