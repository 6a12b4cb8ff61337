"""Models that describe images: an image model that reads, and a decoder that writes."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.base.errors import CheckpointError, ConfigError
from vitrail.base.kinds import Kind, Messages, name_run_and_code, parse_number
from vitrail.checkpoint.run_files import FinishedRun
from vitrail.checkpoint.weight_folders import DECODER_FOLDER, ENCODER_FOLDER, is_captioner_folder
from vitrail.opening import Opened, open_model

if TYPE_CHECKING:
    import torch

    from vitrail.base.figures import FigureFolder
    from vitrail.data.captions.collages import CollageImages
    from vitrail.evaluation.caption_evaluation import OpenCaptionEvaluation
    from vitrail.inspection.explain.explain_files import ExplainResult
    from vitrail.inspection.sentences.known_attention import NounScores
    from vitrail.predict.captioner import Captioner
    from vitrail.predict.search.settings import SearchSettings
    from vitrail.train.plan import Plan


def open_captioner(name: str, run: FinishedRun | None = None, *, device: "str | torch.device | None" = None) -> Opened:
    """A run of the task caption, or the folder of its model: encoder/ and decoder/."""
    folder = Path(name) if run is None else run.model
    if not is_captioner_folder(folder):
        raise CheckpointError(
            f"{name} is not a captioner: {folder} has no {ENCODER_FOLDER}/ and {DECODER_FOLDER}/; expected a run of "
            "the task caption"
        )
    from vitrail.models.text.caption_model import CaptionModel

    encoder = open_model(folder / ENCODER_FOLDER, kind="image", device=device)
    decoder = open_model(folder / DECODER_FOLDER, kind="text", device=device)
    return Opened(
        source=name,
        kind="caption",
        model=CaptionModel(encoder.model, decoder.model).eval(),
        preprocessing=encoder.preprocessing,
        tokenizer=decoder.tokenizer,
        run=run,
    )


def open_evaluation(
    model: str,
    data: str | None = None,
    *,
    beam: int = 4,
    batch: int = 64,
    device: str = "auto",
    strict: bool = False,
) -> "OpenCaptionEvaluation":
    """A captioner and the images that it is evaluated on, by default the test images of its run."""
    from vitrail.evaluation.caption_evaluation import OpenCaptionEvaluation, open_evaluation_data
    from vitrail.predict.captioner import Captioner
    from vitrail.predict.search.settings import SearchSettings

    captioner = Captioner(model, device=device, batch=batch)
    return OpenCaptionEvaluation(
        captioner=captioner,
        splits=open_evaluation_data(captioner, data),
        search=SearchSettings(beam=beam),
        strict=strict,
        score_nouns=make_noun_scorer(captioner),
    )


def make_noun_scorer(captioner: "Captioner", count: int | None = None) -> "Callable[[CollageImages], NounScores]":
    """A function that scores what the nouns of collages attend to, of all or the first `count`."""
    from vitrail.inspection.sentences.known_attention import score_nouns

    device, how = next(captioner.model.parameters()).device, captioner.loaded.preprocessing
    return lambda images: score_nouns(captioner.model, captioner.tokenizer, how, images, device=device, count=count)


def explain(
    model: str,
    inputs: Sequence[str],
    output: "FigureFolder",
    *,
    search: "SearchSettings | None" = None,
    beam: int = 4,
    layer: str | None = None,
    batch: int = 16,
    device: str = "auto",
    messages: Messages,
) -> "ExplainResult":
    """Write figures of what a captioner attends to when it writes each word: the mean of all layers, or one."""
    from vitrail.inspection.sentences.word_attention import DescribedImage, describe_arguments
    from vitrail.predict.captioner import Captioner
    from vitrail.predict.search.settings import SearchSettings
    from vitrail.predict.text_rows import format_caption_lines

    how = search or SearchSettings(beam=beam)

    def print_caption(found: DescribedImage) -> None:
        lines = format_caption_lines(found.caption, with_scores=how.n_best > 1, files=found.written)
        messages.on_result(lines.removesuffix("\n"))

    return describe_arguments(
        Captioner(model, device=device, batch=batch),
        inputs,
        how,
        output,
        layer=None if layer is None else parse_number("layer", layer),
        stdin=messages.stdin,
        on_described=print_caption,
        on_error=messages.on_error,
        progress=messages.progress,
    )


def open_source(task: Any, data: Any, *_: Any, **__: Any) -> Any:
    raise ConfigError(
        f"{type(task).__name__} trains on images with captions; expected a vitrail.tasks.caption_source.CaptionSource, "
        f"not {data!r}"
    )


def describe_next_steps(run: Path, model: Path, plan: "Plan", code: str | None) -> str:  # noqa: ARG001  # as of all kinds
    name, more = name_run_and_code(run, code)
    return f'vitrail caption {name} photo.jpg, vitrail eval {name}, or in Python vitrail.Captioner("{run}"{more})'


KIND = Kind(
    name="caption",
    does="describes images",
    use="vitrail caption",
    commands={
        "caption": "vitrail.predict.text_rows:CaptionRows",
        "explore": "vitrail.inspection.explore.caption_explorer:CaptionExplorer",
        "evaluate": "vitrail.kinds.caption:open_evaluation",
        "explain": "vitrail.kinds.caption:explain",
        "serve": "vitrail.predict.served_texts:ServedCaptioner",
    },
    open=open_captioner,
    open_source=open_source,
    describe_next_steps=describe_next_steps,
)
