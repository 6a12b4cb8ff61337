"""vitrail study: experiments of the papers, and the tables that the papers print."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from vitrail.base.errors import ConfigError
from vitrail.base.files import refuse_existing_outputs
from vitrail.base.table import TABLE_SUFFIXES
from vitrail.cli.options import model_flags as flags


def study(
    *,
    list_all: Annotated[bool, Parameter(name="--list", negative=())] = False,
    published: str | None = None,
    out: flags.OptionalOut = None,
    overwrite: flags.Overwrite = False,
    as_json: flags.Json = False,
) -> None:
    """Run an experiment of a paper, or print the tables of the papers.

    The numbers are those of the papers, digit by digit: accuracies, parameters, throughput, ablations, costs of layers
    and hyperparameters of ViT, DeiT, CaiT, T2T-ViT, Linformer and the Transformer, and timm's own measurements. What
    was read off a plot is marked as approximate.

    Examples::

        vitrail study --list
        vitrail study --published deit.table8
        vitrail study --published vit.table6 -o table6.md
        vitrail study positions --help

    Parameters
    ----------
    list_all
        List the published tables with their ids.
    published
        Print this table: an id in the list.
    out
        File for the table: .txt, .json, .csv, .md, .tex or .html.
    """
    import json

    from vitrail.study.published_tables import find_published_table, list_published_tables

    if list_all == (published is not None):
        raise ConfigError(
            "expected --list, --published ID, or an experiment: vitrail study positions, vitrail study cost"
        )
    if out is not None and Path(out).suffix not in TABLE_SUFFIXES:
        raise ConfigError(f"`out` {out}; expected a file that ends in {', '.join(TABLE_SUFFIXES)}")
    table = list_published_tables() if published is None else find_published_table(published).to_table()
    if out is not None:
        refuse_existing_outputs([out], overwrite=overwrite)
        table.write(out)
    print(json.dumps(table.to_json(), indent=2) if as_json else table)
    if published is None and not as_json:
        print("\nvitrail study --published ID prints one.")
    if out is not None:
        print(f"{out}: written")
