"""vitrail compare: measure how often models disagree."""

from vitrail.cli.options import model_flags as flags
from vitrail.cli.options.model_flags import EngineFlags, GivenEngine
from vitrail.cli.options.values import check_minimum, parse_fields
from vitrail.cli.output.messages import print_notes
from vitrail.cli.output.progress import progress_bar
from vitrail.cli.output.results import prepare_output, print_result


def compare(
    *models: flags.Models,
    data: flags.Data = None,
    out: flags.OptionalOut = None,
    fields: flags.ConfigFields = None,
    preprocessing: flags.PreprocessingFields = None,
    overwrite: flags.Overwrite = False,
    workers: flags.Workers = 0,
    device: flags.Device = "auto",
    strict: flags.Strict = False,
    as_json: flags.Json = False,
    options: GivenEngine = None,
) -> None:
    """Measure how accurate models are and how often they disagree.

    Prints accuracy, and the share of images that each pair of models, heads and the ground truth classifies
    differently. A model with a distillation token counts three times: its class head, its distillation head and
    their mean; the similarity of its two tokens is shown per layer. Every model receives the images with its own
    preprocessing and chooses among the classes of the data. Uses the same images as `vitrail eval`. Files are
    written only with --out.

    Examples::

        vitrail compare vit_fashion --data fashion
        vitrail compare vit_fashion runs/demo --data fashion --out results
        vitrail compare runs/demo -o table.tex
        vitrail compare runs/demo --json

    Parameters
    ----------
    models
        Models as for `vitrail eval`, or timm:NAME, which timm downloads.
    out
        Folder for comparison.png and comparison.json.
        Or a file for the table alone: .txt, .json, .csv, .md, .tex or .html.
    """
    check_minimum("--workers", workers, 0)
    how, given = parse_fields(preprocessing, "--preprocessing"), parse_fields(fields)

    from vitrail.distributed import Ranks, resolve_device
    from vitrail.evaluation.evaluation_data import get_validation_images
    from vitrail.opening import open_model
    from vitrail.predict.engine_selection import EngineOptions
    from vitrail.study.compare import COMPARISON_FILES, open_comparison_data
    from vitrail.study.compare import compare as compare_models

    place, how_to_run = resolve_device(device, Ranks()), EngineOptions(**(options or EngineFlags()).list_given())
    loaded = [open_model(name, kind="image", fields=given, preprocessing=how or None) for name in models]
    found = open_comparison_data(loaded, data)
    prepare_output(out, COMPARISON_FILES, overwrite=overwrite)
    with progress_bar(len(loaded) * len(get_validation_images(found))) as advance:
        result = compare_models(
            loaded, found, options=how_to_run, workers=workers, device=place, strict=strict, progress=advance
        )
    print_notes(result.notes)
    report = {"models": list(models), **result.to_json()}
    print_result(result, result.table, report, out, lambda folder: result.write(report, folder), as_json=as_json)
