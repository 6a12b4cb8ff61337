"""The page's questions about a photo and its caption: where each word looked, and what depends on these patches.

L layers, H heads, W words, n = h·w patches, K sets of patches to hide.
"""

from collections import OrderedDict
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.base.errors import ConfigError
from vitrail.data.images.decoding.rgb_image import open_image
from vitrail.data.images.preprocessing import compute_visible_box
from vitrail.inspection.explain.patch_removal import gray_out_patches
from vitrail.inspection.explore.figure_file import pack_figures
from vitrail.inspection.explore.image_explorer import CHECKED_SHARE, KEPT_PHOTOS, read_removals
from vitrail.inspection.sentences.word_attention import attend_words, find_patch_grid, group_pieces
from vitrail.models.base.text_contract import Memory
from vitrail.opening import Opened
from vitrail.predict.captioner import Caption, Captioner, write_captions
from vitrail.predict.search.settings import GREEDY, SearchSettings


class CaptionExplorer:
    """Built by `vitrail serve` for a model that describes images; see `vitrail.base.kinds.Explorer`."""

    def __init__(self, model: str, opened: Opened) -> None:
        del model
        self.captioner = Captioner(opened)
        self.model, self.tokenizer = self.captioner.model, self.captioner.tokenizer
        self.captions = OrderedDict[bytes, tuple[Tensor, Memory, Caption, dict[str, Any]]]()
        if reason := self.model.decoder.no_maps_reason:
            raise ConfigError(f"this decoder has no attention to the image: {reason}")

    def describe(self) -> dict[str, Any]:
        return {"kind": "caption", "parts": {"maps": True, "check": True}}

    def explore(self, body: bytes, query: Mapping[str, str]) -> bytes:
        part = query.get("part", "all")
        pixels, memory, caption, about = self.describe_photo(body)
        grid = find_patch_grid(self.model, self.captioner.loaded.preprocessing, memory.tokens.shape[1])
        if part == "hide":
            return self.hide_patches(pixels, caption, read_removals(query.get("hide", ""), grid))
        if part != "all":
            raise ConfigError(f"part is {part[:20]!r}; expected all or hide")
        found = attend_words(self.model, self.tokenizer, memory, caption.ids, grid)
        maps = found.maps.transpose(1, 2, 0, 3, 4).reshape(*found.maps.shape[1:3], len(found.words), -1)
        about = {**about, "grid": grid, "words": found.words, "result": caption.text, "score": caption.score}
        about["check"] = {"share": CHECKED_SHARE}
        arrays = {"weights": maps, "probability": self.rate_words(memory, caption)[0]}
        return pack_figures(about, {name: each.astype(np.float32) for name, each in arrays.items()})

    def describe_photo(self, body: bytes) -> tuple[Tensor, Memory, Caption, dict[str, Any]]:
        """The model's input (1, C, H, W), what the encoder makes of it, its caption, and where it lies in the photo."""
        key = sha256(body).digest()
        if key not in self.captions:
            image, loaded = open_image(body), self.captioner.loaded
            size = (image.height, image.width)
            left, top, right, bottom = compute_visible_box(size, loaded.preprocessing)
            pixels = loaded.make_batch([image])
            with torch.inference_mode():
                memory = self.model.encode(pixels)
            written = write_captions(self.model.decoder, self.tokenizer, memory, SearchSettings())
            about = {"photo": size, "box": (top, left, bottom - top, right - left)}
            self.captions[key] = pixels, memory, self.captioner.make_caption("", written[0]), about
            while len(self.captions) > KEPT_PHOTOS:
                self.captions.popitem(last=False)
        return self.captions[key]

    @torch.inference_mode()
    def rate_words(self, memory: Memory, caption: Caption) -> NDArray[np.float32]:
        """The probability of each word of the caption after the words before it: (K, W)."""
        words = group_pieces(self.tokenizer, caption.ids)
        if not words:
            return np.zeros((len(memory.tokens), 0), np.float32)
        rows = len(memory.tokens)
        ids = torch.tensor(caption.ids, device=memory.tokens.device).expand(rows, -1)
        before = torch.cat([torch.full_like(ids[:, :1], self.tokenizer.start), ids[:, :-1]], dim=1)
        logits: Tensor = self.model.decoder.decode(memory, before)
        found = logits.float().log_softmax(-1).gather(2, ids[..., None])[..., 0].cpu().numpy()  # (K, pieces)
        return np.stack([np.exp(found[:, word.start : word.stop].sum(1)) for word in words], axis=1)

    def hide_patches(self, pixels: Tensor, caption: Caption, gone: NDArray[np.bool_]) -> bytes:
        """The probability of each word without these patches, (K, W), and what would be written instead."""
        whole = pixels[0].float().cpu().numpy()
        grayed = torch.from_numpy(np.stack([gray_out_patches(whole, each) for each in gone]))
        with torch.inference_mode():
            memory = self.model.encode(grayed.to(pixels.device, pixels.dtype))
        written = write_captions(self.model.decoder, self.tokenizer, memory, GREEDY)
        texts = [self.captioner.make_caption("", each).text for each in written]
        return pack_figures({"texts": texts}, {"probability": self.rate_words(memory, caption)})
