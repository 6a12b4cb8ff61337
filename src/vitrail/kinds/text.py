"""Models that read and write text: they translate sentences."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.base.errors import CheckpointError, ConfigError
from vitrail.base.kinds import Kind, Messages, name_run_and_code, parse_number
from vitrail.checkpoint.model_location import locate_or_download_checkpoint
from vitrail.checkpoint.run_files import FinishedRun
from vitrail.checkpoint.weight_folders import read_tokenizer_file
from vitrail.opening import Opened, move_to_device_for_eval, open_model, refuse_load_arguments_as_fields

if TYPE_CHECKING:
    import torch

    from vitrail.base.figures import FigureFolder
    from vitrail.data.text.tokenizer import TextTokenizer
    from vitrail.inspection.explain.explain_files import ExplainResult
    from vitrail.train.plan import Plan


def open_text_model(
    name: str,
    run: FinishedRun | None = None,
    *,
    fields: Mapping[str, Any] | None = None,
    device: "str | torch.device | None" = None,
) -> Opened:
    """A run of translation, or the folder of its model: weights, config.json and tokenizer.json."""
    import torch

    from vitrail.checkpoint.reading import read, warn_about_report
    from vitrail.data.text.tokenizer import TextTokenizer
    from vitrail.models.base.text_contract import check_reads_text

    refuse_load_arguments_as_fields(fields or {})
    place = name if run is None else run.model
    with torch.inference_mode(False):  # weights that are read in inference mode never have gradients
        found = read(place, **(fields or {}))
    check_reads_text(type(found.model), name)
    warn_about_report(found, name)
    about = found.description
    text, path = read_tokenizer_file(locate_or_download_checkpoint(place), about.tokenizer)
    tokenizer = TextTokenizer.from_json(text, str(path))
    check_vocabulary_matches(found.model.config, tokenizer, name)
    return Opened(
        source=name,
        kind="text",
        model=move_to_device_for_eval(found.model, device or "cpu"),
        tokenizer=tokenizer,
        languages=about.languages,
        run=run,
        checkpoint=found,
    )


def check_vocabulary_matches(config: Any, tokenizer: "TextTokenizer", name: str) -> None:
    if (config.vocabulary, config.pad) != (tokenizer.vocabulary, tokenizer.pad):
        raise CheckpointError(
            f"{name} has {config.vocabulary} tokens and padding {config.pad}, but its tokenizer {tokenizer.vocabulary} "
            f"and {tokenizer.pad}; expected the tokenizer that the model was trained with"
        )


def explain(
    model: str,
    inputs: Sequence[str],
    output: "FigureFolder",
    *,
    sentence: str | None = None,
    layer: str | None = None,
    head: str | None = None,
    beam: int = 4,
    fields: Mapping[str, Any] | None = None,
    device: str = "auto",
    messages: Messages,
) -> "ExplainResult":
    """Write figures and a page about how a model translates a sentence; the options are those of `vitrail explain`."""
    if sentence is None:
        raise ConfigError(f"{model} reads text; expected a model that reads images, or a `sentence` to explain")
    if inputs:
        raise ConfigError("an image with `sentence`; expected one of them")
    from vitrail.distributed import Ranks, resolve_device
    from vitrail.inspection.explain.explain_files import ExplainResult
    from vitrail.report.translation_report import write_sentence_explanation

    number = -1 if layer is None else parse_number("layer", layer)
    heads: Any = "mean" if head in (None, "mean") else parse_number("head", str(head))
    opened = open_model(model, kind="text", fields=fields, device=resolve_device(device, Ranks()))
    found, written = write_sentence_explanation(opened, sentence, output, beam=beam, layer=number, head=heads)
    messages.on_result(f"{found}; {written[-1]}")
    return ExplainResult([{**found.to_json(), "written": list(map(str, written))}], None)


def export(
    model: str,
    out: Path,
    *,
    to: str = "ctranslate2",
    fields: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    messages: Messages | None = None,  # as of all kinds
) -> list[str]:
    """Export a model to CTranslate2; what was written."""
    del messages
    from vitrail.export.ctranslate2_export import export_to_ctranslate2, import_ctranslate2

    if to != "ctranslate2":
        raise ConfigError(f"`to` {to} for {model}, which reads text; expected ctranslate2")
    import_ctranslate2()  # before a model is read
    opened = open_model(model, kind="text", fields=fields)
    checked = export_to_ctranslate2(
        opened.model,
        opened.tokenizer,
        out,
        languages=opened.languages,
        provenance={"checkpoint": str(model)},
        overwrite=overwrite,
    )
    pair = "-".join(opened.languages or ()) or "text"
    return [f"{out}: ctranslate2, {pair}, {opened.tokenizer.vocabulary:,} tokens", str(checked)]


def open_source(task: Any, data: Any, *_: Any, **__: Any) -> Any:
    raise ConfigError(
        f"{type(task).__name__} trains on sentence pairs; expected a vitrail.tasks.translation.TextSource, not {data!r}"
    )


def describe_next_steps(run: Path, model: Path, plan: "Plan", code: str | None) -> str:  # noqa: ARG001  # as of all kinds
    name, more = name_run_and_code(run, code)
    return f'vitrail translate {name} "…", vitrail eval {name}, or in Python vitrail.Translator("{run}"{more})'


KIND = Kind(
    name="text",
    does="reads text",
    use="vitrail translate",
    commands={
        "translate": "vitrail.predict.text_rows:TranslationRows",
        "explore": "vitrail.inspection.explore.text_explorer:TextExplorer",
        "evaluate": "vitrail.evaluation.text_evaluation:open_text_evaluation",
        "explain": "vitrail.kinds.text:explain",
        "export": "vitrail.kinds.text:export",
        "serve": "vitrail.predict.served_texts:ServedTranslator",
    },
    open=open_text_model,
    open_source=open_source,
    describe_next_steps=describe_next_steps,
)
