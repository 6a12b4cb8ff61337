"""vitrail eval: measure a model on labelled images, on sentence pairs, or on images with captions."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from vitrail.base.errors import ConfigError
from vitrail.cli.options import model_flags as flags
from vitrail.cli.options.groups import MODEL, TRANSLATION
from vitrail.cli.options.values import check_minimum, parse_fields, parse_model_fields, read_labels
from vitrail.cli.output.messages import print_notes
from vitrail.cli.output.progress import progress_bar
from vitrail.cli.output.results import check_output_file, prepare_figure_folder, print_report

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
    head: Annotated[Literal["both", "class", "distill"] | None, Parameter(group=MODEL)] = None,
    pair: Annotated[str | None, Parameter(group=TRANSLATION)] = None,
    part: Annotated[str | None, Parameter(group=TRANSLATION)] = None,
    beam: Annotated[int | None, Parameter(group=TRANSLATION)] = None,
    labels: flags.Labels = None,
    image_size: flags.ImageSize = None,
    fields: flags.ConfigFields = None,
    preprocessing: flags.PreprocessingFields = None,
    overwrite: flags.Overwrite = False,
    batch: flags.Batch = 64,
    workers: flags.Workers = 0,
    device: flags.Device = "auto",
    strict: flags.Strict = False,
    as_json: flags.Json = False,
) -> None:
    """Evaluate a model on labelled images, or a run on its sentence pairs or captions.

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
    wrong
        File for the images that are predicted wrong, most confident mistakes first: .csv is a list of them, .html a
        page with the images and what the model looked at.
    head
        For a model with a distillation token: the mean of both heads, or one of them. [default: both]
    pair
        Languages of the sentence pairs, source and target: de-en. [default: those of the model]
    part
        Sentence pairs to use: val, train or the name of a test set, such as test_2016_flickr. [default: val]
    beam
        Hypotheses kept at each step of beam search, for translations and captions; 1 is greedy search. [default: 4]
    """
    text_options = {"pair": pair, "part": part, "beam": beam}
    image_options = {
        "wrong": wrong,
        "real": real,
        "head": head,
        "labels": labels,
        "image-size": image_size,
        "set": fields,
        "preprocessing": preprocessing,
    }
    if reads_text(checkpoint):
        refuse_options(image_options, f"{checkpoint} reads text")
        evaluate_translation(checkpoint, data, out, text_options, batch, device, overwrite=overwrite, as_json=as_json)
        return
    if writes_captions(checkpoint):
        refuse_options({**image_options, "pair": pair, "part": part}, f"{checkpoint} describes images")
        evaluate_captions(
            checkpoint, data, out, beam, batch, device, strict=strict, overwrite=overwrite, as_json=as_json
        )
        return
    refuse_options(text_options, f"{checkpoint} reads images")
    how, given = parse_fields(preprocessing, "--preprocessing"), parse_model_fields(fields, image_size)
    check_minimum("--batch", batch, 1)
    check_minimum("--workers", workers, 0)
    check_output_file("--wrong", wrong, WRONG_SUFFIXES, overwrite=overwrite)

    from vitrail.base.files import make_writable_folder
    from vitrail.evaluation.checkpoint_evaluation import open_checkpoint_evaluation
    from vitrail.evaluation.plots import EVALUATION_FILES, write_evaluation

    opened = open_checkpoint_evaluation(
        checkpoint,
        data,
        real=real,
        head=head,
        labels=read_labels(labels),
        fields=given,
        preprocessing=how or None,
        device=device,
    )
    print_notes(opened.notes)
    prepare_figure_folder(out, EVALUATION_FILES, overwrite=overwrite)
    if wrong is not None:
        make_writable_folder(wrong.parent)
    with progress_bar(len(opened.images)) as advance:
        result = opened.run(batch=batch, workers=workers, strict=strict, progress=advance)
    report = {"checkpoint": checkpoint, "data": opened.data, **result.to_json()}
    if wrong is not None:
        write_wrong(opened, result, wrong)
    print_report(result, report, write_evaluation(result, report, out) if out else (), as_json=as_json)
    if not as_json:
        print(f"\n{describe_wrong(result, wrong)}")


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


def describe_wrong(result: "Evaluation", path: Path | None) -> str:
    """How many predictions are wrong, and where they are or can be listed."""
    if not result.wrong:
        return "no image is predicted wrong" + (f": {path} lists none" if path else "")
    count = f"{len(result.wrong):,} of {result.images:,} are predicted wrong"
    if path is not None:
        return f"{count}: {path}, most confident mistakes first"
    return f"{count}: list them with --wrong wrong.csv, see them with --wrong wrong.html"


def reads_text(checkpoint: str) -> bool:
    """Whether a folder holds a text model."""
    from vitrail.export.description import is_exported
    from vitrail.text_loading import is_text_model

    return not is_exported(checkpoint) and is_text_model(checkpoint)


def refuse_options(given: dict[str, Any], reason: str) -> None:
    for name, value in given.items():
        if value is not None:
            raise ConfigError(f"--{name} is not for this model, since {reason}; remove it")


def evaluate_translation(
    model: str,
    data: str | None,
    out: Path | None,
    options: dict[str, Any],
    batch: int,
    device: str,
    *,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Evaluate a run of translation, and print or write the result."""
    check_minimum("--batch", batch, 1)

    from vitrail.evaluation.text_evaluation import TEXT_EVALUATION_FILES, open_text_evaluation
    from vitrail.predict.search.settings import SearchSettings

    search = SearchSettings() if options["beam"] is None else SearchSettings(beam=options["beam"])
    opened = open_text_evaluation(model, data, pair=options["pair"], part=options["part"], device=device)
    print_notes(opened.notes)
    prepare_figure_folder(out, TEXT_EVALUATION_FILES, overwrite=overwrite)
    with progress_bar(len(opened.pairs)) as advance:
        result = opened.run(search, batch=batch, progress=advance)
    report = {"checkpoint": model, "data": opened.data, **result.to_json()}
    print_report(result, report, result.write(report, out) if out else (), as_json=as_json)


def writes_captions(checkpoint: str) -> bool:
    from vitrail.caption_loading import is_caption_model

    return is_caption_model(checkpoint)


def evaluate_captions(
    model: str,
    data: str | None,
    out: Path | None,
    beam: int | None,
    batch: int,
    device: str,
    *,
    strict: bool,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Evaluate a run of captions, and print or write the result."""
    check_minimum("--batch", batch, 1)

    from vitrail.inspection.sentences.caption_evaluation import (
        CAPTION_EVALUATION_FILES,
        choose_part,
        evaluate_captioner,
        open_evaluation_data,
    )
    from vitrail.predict.captioner import Captioner
    from vitrail.predict.search.settings import SearchSettings

    search = SearchSettings() if beam is None else SearchSettings(beam=beam)
    captioner = Captioner(model, device=device, batch=batch)
    opened = open_evaluation_data(captioner, data)
    print_notes(opened.notes)
    prepare_figure_folder(out, CAPTION_EVALUATION_FILES, overwrite=overwrite)
    with progress_bar(len(choose_part(opened))) as advance:
        result = evaluate_captioner(captioner, opened, search=search, strict=strict, progress=advance)
    report = {"checkpoint": model, "data": opened.name, **result.to_json()}
    print_report(result, report, result.write(report, out) if out else (), as_json=as_json)
