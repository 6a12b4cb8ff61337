"""vitrail eval: measure a model on labeled images, on sentence pairs, or on images with captions."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from vitrail.cli.options import model_flags as flags
from vitrail.cli.options.model_flags import EngineFlags, GivenEngine
from vitrail.cli.options.values import check_minimum, parse_fields, parse_size, read_labels
from vitrail.cli.output.help_text import MODEL, TRANSLATION
from vitrail.cli.output.messages import print_notes
from vitrail.cli.output.progress import progress_bar
from vitrail.cli.output.results import check_output_file, prepare_output, print_result

if TYPE_CHECKING:
    from vitrail.evaluation.checkpoint_evaluation import CheckpointEvaluation
    from vitrail.evaluation.metrics import Evaluation

WRONG_SUFFIXES = (".csv", ".html")


def eval(  # noqa: A001
    checkpoint: flags.Model,
    /,
    *,
    data: flags.Data = None,
    out: flags.OptionalOut = None,
    wrong: Path | None = None,
    real: flags.RealLabels = None,
    head: Annotated[Literal["both", "softmax", "class", "distill"] | None, Parameter(group=MODEL)] = None,
    pair: Annotated[str | None, Parameter(group=TRANSLATION)] = None,
    part: Annotated[str | None, Parameter(group=TRANSLATION)] = None,
    beam: Annotated[int | None, Parameter(group=TRANSLATION)] = None,
    labels: flags.Labels = None,
    image_size: flags.ImageSize = None,
    fields: flags.ConfigFields = None,
    preprocessing: flags.PreprocessingFields = None,
    overwrite: flags.Overwrite = False,
    workers: flags.Workers = 0,
    device: flags.Device = "auto",
    strict: flags.Strict = False,
    as_json: flags.Json = False,
    options: GivenEngine = None,
) -> None:
    """Evaluate a model on labeled images, or a run on its sentence pairs or captions.

    Prints top-1 and top-5 accuracy, loss, calibration, the worst classes and the most confused pairs; for translations,
    BLEU and chrF with the signatures of sacreBLEU, perplexity and exact matches; for captions, exact matches and BLEU,
    for collages also whether the words attend to what they name. Uses the
    validation part of the data: all images of a folder without one, and for the data of a run the images that the
    run was not trained on; for captions, the test part, if there is one. Files are written only with --out and --wrong.

    Examples::

        vitrail eval vit_fashion --data fashion
        vitrail eval vit_fashion --data fashion --out results
        vitrail eval vit_fashion --data fashion --wrong wrong.html
        vitrail eval runs/demo --json
        vitrail eval runs/translation --beam 4

    Parameters
    ----------
    out
        Folder for confusion.png, reliability.png and evaluation.json, for translations.tsv or captions.tsv and
        evaluation.json.
        Or a file for the table alone: .txt, .json, .csv, .md, .tex or .html.
    wrong
        File for the images that are predicted wrong, most confident mistakes first: .csv is a list of them, .html a
        page with the images and what the model looked at.
    head
        For a model with a distillation token: both heads by the mean of their logits or of their probabilities
        (softmax), or one of them. [default: both]
    pair
        Languages of the sentence pairs, source and target: de-en. [default: those of the model]
    part
        Sentence pairs to use: val, train or the name of a test set, such as test_2016_flickr. [default: val]
    beam
        Hypotheses kept at each step of beam search, for translations and captions; 1 is greedy search. [default: 4]
    """
    how, given = parse_fields(preprocessing, "--preprocessing"), parse_fields(fields)
    check_minimum("--workers", workers, 0)
    check_output_file("--wrong", wrong, WRONG_SUFFIXES, overwrite=overwrite)

    from vitrail.opening import run_command

    opened = run_command(
        "evaluate",
        checkpoint,
        data=data,
        wrong=wrong,
        real=real,
        head=head,
        pair=pair,
        part=part,
        beam=beam,
        labels=read_labels(labels),
        image_size=None if image_size is None else parse_size(image_size),
        fields=given or None,
        preprocessing=how or None,
        workers=workers or None,
        device=device,
        strict=strict or None,
        **(options or EngineFlags()).list_given(),
    )
    print_notes(opened.notes)
    prepare_output(out, opened.files, overwrite=overwrite)
    with progress_bar(opened.examples) as advance:
        result = opened.run(advance)
    report = {"checkpoint": checkpoint, "data": opened.data, **result.to_json()}
    if wrong is not None:
        write_wrong(opened, result, wrong)
    print_result(result, result.table, report, out, lambda folder: result.write(report, folder), as_json=as_json)
    if not as_json and (mistakes := describe_wrong(result, wrong)):
        print(f"\n{mistakes}")


def write_wrong(opened: "CheckpointEvaluation", result: "Evaluation", path: Path) -> None:
    """Write the wrong predictions as a list or as a page, by the suffix."""
    if path.suffix.lower() == ".csv":
        from vitrail.evaluation.wrong_predictions import write_wrong_csv

        write_wrong_csv(result.wrong, path)
        return

    from vitrail.report.evaluation_report import MAX_SHOWN, render_wrong_page
    from vitrail.report.html_page import write_page

    with progress_bar(min(len(result.wrong), MAX_SHOWN), "explaining") as advance:
        page = render_wrong_page(result, opened.loaded, opened.data, opened.images, progress=advance)
    write_page(page, path)


def describe_wrong(result: object, path: Path | None) -> str:
    """How many predictions are wrong, and where they are or can be listed; empty if there are no classes."""
    from vitrail.evaluation.metrics import Evaluation

    if not isinstance(result, Evaluation):
        return ""
    if not result.wrong:
        return "no image is predicted wrong" + (f": {path} lists none" if path else "")
    count = f"{len(result.wrong):,} of {result.images:,} are predicted wrong"
    if path is not None:
        return f"{count}: {path}, most confident mistakes first"
    return f"{count}: list them with --wrong wrong.csv, see them with --wrong wrong.html"
