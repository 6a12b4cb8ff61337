"""vitrail models: list the presets. Reads their costs from a file, so torch is not imported."""

import json

from vitrail.cli.options import model_flags as flags
from vitrail.models.preset_list import find_presets, list_preset_cells
from vitrail.text import format_table


def models(pattern: str = "*", /, *, as_json: flags.Json = False) -> None:
    """List the models: name, parameters, GMACs, resolution.

    GMACs are the multiply-adds of convolutions, matrix products and attention for one image.

    Examples::

        vitrail models
        vitrail models 'deit*'
        vitrail models '*_384'
        vitrail models 'ViT-B/*'

    Parameters
    ----------
    pattern
        Names or aliases to list, with * and ? as in a shell (quote it), or a part of a name.
    """
    found = find_presets(pattern)
    print(json.dumps(found, indent=2) if as_json else "\n".join(format_table(*list_preset_cells(found))))
