"""vitrail translate: translate sentences."""

import sys
from typing import Annotated, Literal

from cyclopts import Parameter

from vitrail.cli.options import model_flags as flags
from vitrail.cli.options.groups import DATA, SPEED
from vitrail.cli.output.messages import print_error, print_note, write_to_stdout
from vitrail.cli.output.progress import progress_bar
from vitrail.errors import ConfigError
from vitrail.output_streams import get_binary_buffer
from vitrail.text import format_count

RunOfTranslation = Annotated[
    str, Parameter(name="MODEL", help="Run folder of `vitrail train --data PAIRS`, or the folder of its model.")
]
Texts = Annotated[
    str,
    Parameter(
        name="TEXT",
        allow_leading_hyphen=True,  # for - alone
        required=True,
        help="Sentences in quotes, files with one sentence per line (.gz, too), or - for standard input.",
    ),
]


def translate(
    model: RunOfTranslation,
    /,
    *texts: Texts,
    beam: int = 4,
    n_best: int = 1,
    penalty: Literal["gnmt", "length"] = "gnmt",
    alpha: float = 0.6,
    length: int | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int = 0,
    kind: Annotated[Literal["text", "jsonl", "csv", "tsv"] | None, Parameter(name=("--format", "-f"))] = None,
    out: flags.OptionalOut = None,
    resume: Annotated[bool, Parameter(negative=())] = False,
    overwrite: Annotated[bool, Parameter(negative=(), group=DATA)] = False,
    batch: Annotated[int, Parameter(group=SPEED)] = 64,
    device: flags.Device = "auto",
) -> None:
    """Translate sentences with a run of translation.

    Prints one translation per sentence, in order, or with --n-best the best ones with their scores: the
    log-probability, divided by the length penalty. A sentence that is too long for the model is reported and left
    empty; the exit code is then 2.

    Examples::

        vitrail translate runs/demo "Ein Hund läuft."
        vitrail translate runs/demo "Ein Hund läuft." --n-best 3
        vitrail translate runs/demo sentences.de -o sentences.en.txt
        vitrail translate runs/demo sentences.de -o translations.jsonl --resume

    Parameters
    ----------
    beam
        Beginnings of a translation that are kept at each step; 1 is greedy search.
    n_best
        Translations per sentence.
    penalty
        Length penalty: gnmt is ((5 + length)/6)^alpha, length is length^alpha.
    alpha
        Exponent of the length penalty; 0 disables it.
    length
        Tokens of a translation, at most. [default: 50 more than its sentence has]
    temperature
        Draw tokens at random with this temperature instead of searching; so do --top-k and --top-p.
        [default: search]
    top_k
        Draw from the most probable tokens, as many as this. [default: all]
    top_p
        Draw from the most probable tokens that together have this probability.
    seed
        Random seed of the draws.
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
    from vitrail.cli.usage_errors import check_arguments

    check_arguments("translate", model, texts)
    for name, is_set in (("resume", resume), ("overwrite", overwrite)):
        if is_set and out is None:
            raise ConfigError(f"--{name} needs -o OUT, the file with the results")

    from vitrail.predict.translate_job import TranslateJob
    from vitrail.predict.translator import SearchSettings

    search = SearchSettings(
        beam=beam,
        n_best=n_best,
        penalty=penalty,
        alpha=alpha,
        length=length,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
    )
    job = TranslateJob(
        model=model,
        inputs=texts,
        out=out,
        format=kind,
        search=search,
        batch=batch,
        device=device,
        resume=resume,
        overwrite=overwrite,
        stdin=get_binary_buffer(sys.stdin),
        write_text=write_to_stdout,
        on_note=print_note,
        on_error=print_error,
        progress=progress_bar,
    )
    result = job.run()
    if result.out is not None:
        done = (
            "complete"
            if result.was_complete
            else f"{format_count(result.sentences, 'sentence')}, {result.seconds:.1f} s"
        )
        print(f"{result.out}: {done}")
    result.raise_if_failed()
