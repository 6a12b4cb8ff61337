"""Write a captioner as a folder: encoder/ and decoder/, each a model that other commands can open."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitrail.checkpoint.files.weight_folders import DECODER_FOLDER, ENCODER_FOLDER
from vitrail.checkpoint.resample import ResamplingPolicy
from vitrail.checkpoint.writing import write
from vitrail.data.images.preprocessing import Preprocessing
from vitrail.models.base.family import Family
from vitrail.models.text.caption_model import CaptionModel


def write_caption_model(
    model: CaptionModel,
    folder: Path,
    *,
    preprocessing: Preprocessing,
    tokenizer: str,
    provenance: Mapping[str, Any] | None = None,
    resampling: ResamplingPolicy = "timm",
    family: Family | None = None,
) -> None:
    """Write both parts; `tokenizer` is the text of a tokenizer.json, `family` that of an encoder from outside."""
    write(
        model.encoder,
        folder / ENCODER_FOLDER,
        preprocessing=preprocessing,
        provenance=provenance,
        resampling=resampling,
        family=family,
    )
    write(model.decoder, folder / DECODER_FOLDER, tokenizer=tokenizer, provenance=provenance)
