"""Open a captioner: the image model that reads, the decoder that writes, and its tokenizer."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vitrail.base.errors import CheckpointError
from vitrail.checkpoint.run_files import FinishedRun, find_finished_run
from vitrail.checkpoint.weight_folders import DECODER_FOLDER, ENCODER_FOLDER, is_captioner_folder
from vitrail.data.images.preprocessing import Preprocessing
from vitrail.loaded_model import LoadedModel
from vitrail.opening import move_to_device_for_eval, open_torch_model
from vitrail.text_loading import open_text_model

if TYPE_CHECKING:
    import torch

    from vitrail.data.text.tokenizer import TextTokenizer
    from vitrail.models.text.caption_model import CaptionModel


@dataclass(frozen=True, kw_only=True)
class LoadedCaptionModel:
    """A captioner in eval mode, from `open_caption_model`."""

    source: str  # the name that it was opened by
    model: "CaptionModel"
    tokenizer: "TextTokenizer"
    encoder: LoadedModel  # the same image model, with its preprocessing
    run: FinishedRun | None = None

    @property
    def preprocessing(self) -> Preprocessing:
        return self.encoder.preprocessing

    def __repr__(self) -> str:
        parts = (self.model.encoder, self.model.decoder)
        names = " and ".join(
            f"{type(part).__name__} of {sum(each.numel() for each in part.parameters()):,} parameters" for part in parts
        )
        return f"LoadedCaptionModel({self.source!r}, {names}, {self.tokenizer.vocabulary:,} tokens)"


def open_caption_model(
    model: "str | Path | LoadedCaptionModel", *, device: "str | torch.device | None" = None
) -> LoadedCaptionModel:
    """Open a run of the task caption, or the folder of its model: encoder/ and decoder/."""
    if isinstance(model, LoadedCaptionModel):
        move_to_device_for_eval(model.model, device)
        return model
    if not isinstance(model, str | Path) or not str(model):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise CheckpointError(
            f"the model is {repr(model)[:60]}; expected a run of captions, or the folder of its model"
        )
    folder, run = locate_captioner(str(model))
    if not is_captioner_folder(folder):
        given = "does not exist" if not folder.exists() else f"has no {ENCODER_FOLDER}/ and {DECODER_FOLDER}/"
        raise CheckpointError(f"{model} is not a captioner: {folder} {given}; expected a run of the task caption")
    from vitrail.models.base.contract import ImageModel
    from vitrail.models.text.caption_model import CaptionModel

    encoder = open_torch_model(folder / ENCODER_FOLDER, device=device)
    decoder = open_text_model(folder / DECODER_FOLDER, device=device)
    assert isinstance(encoder.model, ImageModel)
    return LoadedCaptionModel(
        source=str(model),
        model=CaptionModel(encoder.model, decoder.model).eval(),
        tokenizer=decoder.tokenizer,
        encoder=encoder,
        run=run,
    )


def locate_captioner(name: str) -> tuple[Path, FinishedRun | None]:
    """The folder of a captioner, and its run if it is one."""
    run = find_finished_run(Path(name))
    return Path(name) if run is None else run.model, run


def is_caption_model(name: str) -> bool:
    """Whether it is a run of the task caption, or the folder of its model."""
    place = Path(name)
    return place.is_dir() and is_captioner_folder(locate_captioner(name)[0])
