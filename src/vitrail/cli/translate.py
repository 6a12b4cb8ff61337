"""vitrail translate: translate sentences."""

from typing import Annotated, Literal

from cyclopts import Parameter

from vitrail.cli.options import model_flags as flags
from vitrail.cli.options.search_flags import SearchFlags
from vitrail.cli.options.values import MAX_BATCH, at_most
from vitrail.cli.output.help_text import DATA, SPEED
from vitrail.cli.output.job import check_job_options, run_job
from vitrail.cli.usage_errors import check_arguments

Texts = Annotated[
    str,
    Parameter(
        name="TEXT",
        allow_leading_hyphen=True,  # for - alone
        required=True,
        help="Sentences in quotes, files with one sentence per line (.gz, too), or - for standard input. A word with a "
        "suffix or a slash is a file; it is an error if it does not exist.",
    ),
]


def translate(
    model: flags.TextModel,
    /,
    *texts: Texts,
    search: Annotated[SearchFlags | None, Parameter(name="*")] = None,
    kind: Annotated[Literal["text", "jsonl", "csv", "tsv"] | None, Parameter(name=("--format", "-f"))] = None,
    out: flags.OptionalOut = None,
    resume: Annotated[bool, Parameter(negative=())] = False,
    overwrite: Annotated[bool, Parameter(negative=(), group=DATA)] = False,
    batch: Annotated[int, Parameter(group=SPEED, validator=at_most(MAX_BATCH))] = 64,
    device: flags.Device = "auto",
) -> None:
    """Translate sentences by beam search, greedy search or sampling.

    Prints one translation per sentence, in order, or with --n-best the best ones with their scores: the
    log-probability, divided by the length penalty. A sentence that is too long for the model is reported and left
    empty; the exit code is then 2.

    Examples::

        vitrail translate transformer_tatoeba "Ich habe viel zu tun."        # bundled, German to English
        vitrail translate transformer_tatoeba "Tom ist müde." --n-best 3
        vitrail translate runs/translation sentences.de -o sentences.en.txt
        vitrail translate runs/translation sentences.de -o translations.jsonl --resume

    Parameters
    ----------
    model
        Name of a bundled model, run folder of `vitrail train --data PAIRS`, or the folder of its model.
    kind
        Format of the results. [default: by the suffix of OUT (.txt, .jsonl, .csv, .tsv), else text]
    out
        File for the results. It appears when it is complete; until then, finished rows are in OUT.partial.
    resume
        Continue from OUT.partial, with the same results as without an interruption.
    overwrite
        Replace OUT. Without --resume, an OUT.partial is deleted, too.
    batch
        Sentences per batch.
    """
    check_arguments("translate", model, texts)
    check_job_options(out, resume=resume, overwrite=overwrite)

    from vitrail.opening import run_command

    how = (search or SearchFlags()).make_settings()
    rows = run_command("translate", model, inputs=texts, format=kind, search=how, batch=batch, device=device)
    run_job(rows, out, resume=resume, overwrite=overwrite).raise_if_failed()
