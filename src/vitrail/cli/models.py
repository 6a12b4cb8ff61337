"""vitrail models: list the presets. Reads their costs and public weights from files, so torch is not imported."""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated

from cyclopts import Parameter

from vitrail.base.errors import ConfigError
from vitrail.base.text import format_table
from vitrail.checkpoint.weight_folders import list_bundled_models
from vitrail.cli.options import model_flags as flags
from vitrail.cli.output.messages import print_notes
from vitrail.models.catalog.preset_display import (
    describe_presets,
    find_presets,
    list_comparison_cells,
    list_preset_cells,
)


def models(
    *patterns: str,
    pretrained: Annotated[bool, Parameter(negative=())] = False,
    table: Annotated[bool, Parameter(negative=())] = False,
    measure: Annotated[bool, Parameter(negative=())] = False,
    as_json: flags.Json = False,
) -> None:
    """List the models and their public weights.

    Shows parameters, GMACs, resolution, weights and their top-1. GMACs are the multiply-adds of convolutions,
    matrix products and attention for one image, and not counted for text. Commands that take a model open public
    weights by name: MODEL for the default ones, which are shown, or MODEL.TAG. The models at the end of the list are
    bundled and need no network.

    Examples::

        vitrail models
        vitrail models 'deit*' --pretrained
        vitrail models 'ViT-B/*' --json
        vitrail models 'swin*tiny*' 'vit_small_*' --table
        vitrail models ViT-Ti/16 PVTv2-B0 --measure

    Parameters
    ----------
    patterns
        Names or aliases to list, with * and ? as in a shell (quote it), or a part of a name. [default: *]
    pretrained
        List only models with public weights. --json lists all their tags, licenses and training data.
    table
        Compare the models: sort them by GMACs, and show the family, and the license of the default weights.
    measure
        Add to this table how many images per second each model computes on this machine with torch, in batches of 8.
    """
    found = list(
        dict.fromkeys(name for each in patterns or ("*",) for name in find_presets(each, pretrained=pretrained))
    )
    if measure and not patterns:
        raise ConfigError(
            "--measure needs PATTERNS, the models to measure: vitrail models ViT-Ti/16 PVTv2-B0 --measure"
        )
    speeds = measure_speeds(found) if measure else None
    if as_json:
        print(json.dumps(describe_presets(found, speeds), indent=2))
        return
    cells = list_comparison_cells(found, speeds) if table or measure else list_preset_cells(found)
    bundled = f"\n\nBundled with their weights: {', '.join(list_bundled_models())}" * (not patterns)
    print("\n".join(format_table(*cells)) + bundled)


def measure_speeds(names: Sequence[str]) -> Mapping[str, float]:
    """Images per second of each model that reads images; the models take turns."""
    from vitrail.base.machine import count_cores
    from vitrail.cli.output.progress import progress_bar
    from vitrail.study.bench import BenchRequest, run_benchmark

    request = BenchRequest(
        models=names, engines=("eager",), batches=(8,), threads=(count_cores(),), seconds=1.0, starts=0
    )
    with progress_bar(request.progress_total, "measuring") as advance:
        results = run_benchmark(request, progress=advance)
    print_notes(results.notes)
    return {line.model: line.images_per_second.median for line in results.lines}
