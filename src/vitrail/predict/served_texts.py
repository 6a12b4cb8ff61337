"""Models that write text, as `vitrail serve` runs them: translations of sentences, and captions of photos."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vitrail.base.errors import ConfigError, DataError
from vitrail.base.kinds import ServedTensor
from vitrail.data.images.decoding.model_input import decode_for_model
from vitrail.data.images.preprocessing import normalize_pixels
from vitrail.opening import Opened
from vitrail.predict.captioner import Caption, Captioner, write_captions
from vitrail.predict.model_checksums import compute_model_key
from vitrail.predict.search.settings import SearchSettings
from vitrail.predict.served_images import BYTES_PER_PIXEL, SERVED_LIMITS, choose_streams, read_example_photo
from vitrail.predict.translator import Translation, Translator

MAX_CHARACTERS = 4000  # of a sentence
MAX_BEAM = 16
MAX_LENGTH = 512  # tokens of a text
TEXT_BYTES = 2**27  # while one is written, at most
SETTINGS = {"beam": MAX_BEAM, "n_best": MAX_BEAM, "length": MAX_LENGTH}  # parameters of a request, and their largest


def parse_search(given: Mapping[str, Any]) -> SearchSettings:
    """The settings of a search, with limits on what one request may cost."""
    changes = dict[str, Any]()
    for name, value in given.items():
        if name not in SETTINGS:
            raise ConfigError(f"unknown parameter {name[:40]!r}; expected {', '.join(SETTINGS)}")
        text = str(value)
        if not text.isascii() or not text.isdecimal() or not 0 < int(text[:9]) <= SETTINGS[name]:
            raise ConfigError(f"{name} is {text[:20]}; expected 1 to {SETTINGS[name]}")
        changes[name] = int(text)
    return SearchSettings(**changes)


class ServedTranslator:
    """A request has one sentence in UTF-8."""

    inputs = (ServedTensor(name="text", datatype="BYTES", text=True),)
    outputs = (ServedTensor(name="translation", datatype="BYTES", text=True),)
    features, example, item_bytes = None, b"A dog runs.", TEXT_BYTES

    def __init__(
        self, model: str, *, streams: int | None = None, latency: bool = False, device: str | None = None
    ) -> None:
        self.streams, self.threads = choose_streams(streams, latency=latency)
        self.translator = Translator(model, device=device or "auto", batch=1)
        self.facts = describe_writer(self.opened, compute_model_key(model), self.threads)

    @property
    def opened(self) -> Opened:
        return self.translator.loaded

    def parse_settings(self, given: Mapping[str, Any]) -> SearchSettings:
        return parse_search(given)

    def prepare(self, name: str, value: bytes, settings: SearchSettings) -> tuple[str, SearchSettings]:
        del name
        try:
            text = value.decode("utf-8")
        except UnicodeDecodeError:
            raise DataError("the text is not valid UTF-8; expected a sentence") from None
        if len(text) > MAX_CHARACTERS:
            raise DataError(f"the text has {len(text):,} characters; expected at most {MAX_CHARACTERS:,}: split it")
        return " ".join(text.split()), settings

    def run(self, item: tuple[str, SearchSettings], outputs: Sequence[str]) -> Mapping[str, Any]:
        del outputs
        torch.set_num_threads(self.threads)  # of this thread: each has its own number
        text, search = item
        (found,) = self.translator.iterate([text], search)
        if isinstance(found, DataError):
            raise found
        return {"translation": found.text.encode(), "found": found}

    def to_json(self, found: Mapping[str, Any], settings: SearchSettings) -> list[dict[str, Any]]:
        del settings
        best: Translation = found["found"]
        return [{"translation_text": each.text, "score": each.score} for each in (best, *best.alternatives)]


class ServedCaptioner:
    """A request has the bytes of a photo."""

    inputs = (ServedTensor(name="image", datatype="BYTES"),)
    outputs = (ServedTensor(name="caption", datatype="BYTES", text=True),)
    features, item_bytes = None, TEXT_BYTES + BYTES_PER_PIXEL * (SERVED_LIMITS.pixels or 0)

    def __init__(
        self, model: str, *, streams: int | None = None, latency: bool = False, device: str | None = None
    ) -> None:
        self.streams, self.threads = choose_streams(streams, latency=latency)
        self.captioner = Captioner(model, device=device or "auto", batch=1)
        self.example = read_example_photo()
        self.facts = describe_writer(self.opened, compute_model_key(model), self.threads)

    @property
    def opened(self) -> Opened:
        return self.captioner.loaded

    def parse_settings(self, given: Mapping[str, Any]) -> SearchSettings:
        return parse_search(given)

    def prepare(self, name: str, value: bytes, settings: SearchSettings) -> tuple[Tensor, SearchSettings]:
        del name
        pixels = decode_for_model(value, self.opened.preprocessing, SERVED_LIMITS, reduce_jpeg=True)
        return torch.from_numpy(normalize_pixels(pixels, self.opened.preprocessing)), settings

    def run(self, item: tuple[Tensor, SearchSettings], outputs: Sequence[str]) -> Mapping[str, Any]:
        del outputs
        torch.set_num_threads(self.threads)  # of this thread: each has its own number
        image, search = item
        captioner, weight = self.captioner, next(self.captioner.model.parameters())
        with torch.inference_mode():
            memory = captioner.model.encode(image[None].to(weight.device, weight.dtype))
        (hypotheses,) = write_captions(captioner.model.decoder, captioner.tokenizer, memory, search)
        found = captioner.make_caption("", hypotheses)
        return {"caption": found.text.encode(), "found": found}

    def to_json(self, found: Mapping[str, Any], settings: SearchSettings) -> list[dict[str, Any]]:
        del settings
        best: Caption = found["found"]
        return [{"generated_text": each.text, "score": each.score} for each in (best, *best.alternatives)]


def describe_writer(opened: Opened, digest: str, threads: int) -> dict[str, Any]:
    facts = {"kind": opened.kind, "languages": opened.languages, "precision": "fp32", "engine": "eager"}
    return {**facts, "vocabulary": opened.tokenizer.vocabulary, "threads": threads, "digest": digest}
