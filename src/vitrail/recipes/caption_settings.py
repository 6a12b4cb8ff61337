"""Settings of the task caption: `task` in a recipe. Importing this never imports torch."""

from dataclasses import dataclass

from vitrail.data.images.augment.config import field_with_help
from vitrail.models.base.checks import MAY_BE_ZERO, RATE
from vitrail.recipes.pretraining_settings import CheckedSettings


@dataclass(frozen=True, kw_only=True)
class CaptionSettings(CheckedSettings):
    """Captions: describe an image, word by word."""

    freeze_encoder: bool = field_with_help(
        False, "Train only the decoder; the image model, whose tokens it reads, keeps its weights."
    )
    cache_features: bool = field_with_help(
        True,
        "Compute the tokens of a frozen encoder once per image and keep them on disk, in float32; only without random "
        "augmentation.",
    )
    decoder: str = field_with_help("caption_cpu", "Decoder: a preset without an encoder.")
    decoder_width: int | None = field_with_help(None, "Width of the decoder.")
    decoder_depth: int | None = field_with_help(None, "Layers of the decoder.")
    decoder_heads: int | None = field_with_help(None, "Attention heads of the decoder.")
    decoder_mlp_width: int | None = field_with_help(None, "Hidden width of the MLPs of the decoder.")
    decoder_dropout: float | None = field_with_help(None, "Dropout of the decoder.", RATE)
    tokenizer: str = field_with_help(
        "bpe", "Tokenizer: bpe or wordpiece is trained on the training captions; or a tokenizer.json or vocab.txt."
    )
    vocabulary: int = field_with_help(4000, "Tokens of a tokenizer that is trained, at most.")
    max_length: int = field_with_help(60, "Leave out training captions with more tokens; the longest caption written.")
    scored_images: int = field_with_help(
        500,
        "Validation images to describe at the end of a run, for exact matches and BLEU; 0 disables it.",
        MAY_BE_ZERO,
    )

    @property
    def decoder_fields(self) -> dict[str, int | float]:
        """The fields of the decoder's config that are set."""
        fields = {
            "width": self.decoder_width,
            "decoder_depth": self.decoder_depth,
            "heads": self.decoder_heads,
            "mlp_width": self.decoder_mlp_width,
            "dropout": self.decoder_dropout,
        }
        return {name: value for name, value in fields.items() if value is not None}
