"""vitrail probe: measure frozen features."""

from typing import Annotated, Any

from cyclopts import Parameter

from vitrail.base.errors import ConfigError
from vitrail.cli.options import model_flags as flags
from vitrail.cli.options.model_flags import EngineFlags, GivenEngine
from vitrail.cli.options.values import (
    MAX_SEEDS,
    at_most,
    check_data_exists,
    check_minimum,
    parse_fields,
    parse_integers,
)
from vitrail.cli.output.help_text import DATA
from vitrail.cli.output.messages import print_notes, print_text
from vitrail.cli.output.results import prepare_output, print_result


def probe(
    *models: flags.Models,
    data: Annotated[
        list[str] | None,
        Parameter(negative=(), help=f"{flags.DATA_HELP[:-1]}; may be repeated]", validator=check_data_exists),
    ] = None,
    suite: Annotated[bool, Parameter(negative=(), group=DATA)] = False,
    knn: str | None = None,
    shots: str | None = None,
    seeds: Annotated[int, Parameter(validator=at_most(MAX_SEEDS))] = 3,
    linear: bool = True,
    examples: Annotated[int | None, Parameter(name=("--examples", "--bank"), group=DATA)] = None,
    layer: str = "last",
    pixels: bool = True,
    untrained: bool = True,
    val_share: Annotated[float, Parameter(group=DATA)] = 0.2,
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
    """Measure how well the features of models classify, without training the models.

    Three probes of the frozen features: k nearest neighbors, few-shot least squares, and a linear classifier
    (logistic regression). Raw pixels and the untrained model are baselines in the same table: compare a model with
    the better of them. Features are cached, so later calls are fast. Files are written only with --out.

    Examples::

        vitrail probe vit_fashion --data fashion
        vitrail probe runs/demo vit_fashion --data fashion --no-linear --out results
        vitrail probe vit_fashion --data photos --shots 1,2 --json

    Parameters
    ----------
    models
        Models as for `vitrail eval`; they need no head.
    suite
        Use all public data sets that are downloaded (`vitrail data`), 1,000 training images of each, and show the mean
        and what papers print for the same sets. Repeat --data to choose some.
    knn
        Numbers of neighbors, separated by commas. [default: 10,20,100,200, limited by the number of images]
    shots
        Training images per class of the few-shot probe. [default: those of 1,5,10,25 that the data have]
    seeds
        Number of random draws of the few-shot images; the table shows mean ± standard deviation.
    linear
        Fit a linear classifier on all training images; its weight decay is chosen on a fifth of them.
    examples
        Training images per data set, chosen at random. [default: all, 1000 if --data is repeated]
    layer
        Where features are taken: last (what the head reads), middle, or a block from 0 on, averaged over the patches.
    pixels
        Show the row of raw pixels.
    untrained
        Show the row of the untrained model.
    val_share
        Share of each class to classify, if the data have no validation part.
    out
        Folder for probe.png and probe.json.
        Or a file for the table alone: .txt, .json, .csv, .md, .tex or .html.
    """
    counts, many = (
        None if given is None else parse_integers(given, name) for given, name in ((knn, "--knn"), (shots, "--shots"))
    )
    for name, value, minimum in (("--seeds", seeds, 1), ("--workers", workers, 0)):
        check_minimum(name, value, minimum)
    if examples is not None:
        check_minimum("--examples", examples, 1)
    how, given, place = parse_fields(preprocessing, "--preprocessing"), parse_fields(fields), parse_layer(layer)

    from vitrail.evaluation.probes.probe import probe as probe_models
    from vitrail.evaluation.probes.probe_results import PROBE_FILES, write_probe
    from vitrail.opening import open_model
    from vitrail.predict.engine_selection import EngineOptions
    from vitrail.study.transfer_suite import EXAMPLES, list_suite, select_published_columns

    if suite:
        if data is not None:
            raise ConfigError(f"--suite with --data {data[0]}; expected one of them")
        data, examples = list_suite(), examples or EXAMPLES
    loaded = [open_model(name, kind="image", fields=given, preprocessing=how or None) for name in models]
    prepare_output(out, PROBE_FILES, overwrite=overwrite)
    result = probe_models(
        loaded,
        data,
        knn=counts,
        shots=many,
        seeds=seeds,
        linear=linear,
        examples=examples,
        layer=place,
        pixels=pixels,
        untrained=untrained,
        val_share=val_share,
        workers=workers,
        device=device,
        strict=strict,
        options=EngineOptions(**(options or EngineFlags()).list_given(), device="cpu"),
    )
    print_notes(result.notes)
    report: dict[str, Any] = {"models": list(models), **result.to_json()}
    published = select_published_columns(data or []) if suite else None
    if published is not None:
        report["published"] = published.to_json()
    print_result(result, result.table, report, out, lambda folder: write_probe(result, report, folder), as_json=as_json)
    if published is not None and not as_json:
        print_text(f"\n{published}")


def parse_layer(text: str) -> str | int:
    if text in ("last", "middle"):
        return text
    if text.removeprefix("-").isdecimal() and len(text) < 6:
        return int(text)
    raise ConfigError(f"--layer {text!r}; expected last, middle or the number of a block")
