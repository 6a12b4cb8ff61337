"""The page's questions about a photo: what the model says, its maps, and what it says without some patches."""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.base.errors import ConfigError
from vitrail.data.images.decoding.rgb_image import open_image
from vitrail.data.images.preprocessing import compute_visible_box
from vitrail.inspection.attention.capture import has_token_states, list_blocks, why_several_grids
from vitrail.inspection.explain.explain_options import ExplainOptions, find_layer_grid, lacks_square_maps
from vitrail.inspection.explain.explainer import Explainer
from vitrail.inspection.explain.patch_removal import can_drop_tokens, predict_without_patches
from vitrail.inspection.explore.figure_file import pack_figures, read_number, scale_rows_to_bytes
from vitrail.inspection.explore.image_pass import ImagePass, run_image_pass
from vitrail.inspection.representation.weight_patterns import find_position_table, position_similarity
from vitrail.layers.attention import Attention
from vitrail.models.base.checks import pair
from vitrail.opening import Opened
from vitrail.predict.predictions import ClassProbability, predictions_from_logits

TOP = 5
MAX_MAP_BYTES = 8_000_000  # of all layers in one answer; larger maps are sent layer by layer
CHECKED_SHARE = 0.2  # of the patches, removed to check a map
MAX_REMOVALS = 16  # sets of patches in one request
KEPT_PHOTOS = 4  # decoded, since the page asks about the same photo again


@dataclass(frozen=True, eq=False)
class Photo:
    """A decoded photo: the model's input, and which part of the photo it is."""

    pixels: Tensor  # (1, C, H, W)
    size: tuple[int, int]  # rows and columns of the photo
    box: tuple[float, float, float, float]  # top, left, rows and columns that the model receives


class ImageExplorer:
    """Built by `vitrail serve` for a model that reads images; see `vitrail.base.kinds.Explorer`."""

    def __init__(self, model: str, opened: Opened) -> None:
        del model
        self.explainer = Explainer(opened)
        self.model, self.loaded = self.explainer.model, self.explainer.loaded
        self.heads = [each.heads for each in self.explainer.layers]
        self.depth = len(self.heads) or len(list_blocks(self.model))
        self.photos = OrderedDict[bytes, Photo]()
        channels = len(self.loaded.preprocessing.mean)
        gray = torch.zeros(1, channels, *pair(self.loaded.preprocessing.image_size))
        parameter = next(self.model.parameters())
        tried = run_image_pass(self.explainer, gray.to(parameter.device, parameter.dtype), gradients=False)
        self.reasons = self.find_reasons(tried)
        self.has_maps = "maps" not in self.reasons
        self.first_class_layer = next(
            (n for n, each in enumerate(self.explainer.layers) if isinstance(each, Attention)), 0
        )
        size = sum(each[..., 0].size * each.shape[-1] for each in tried.maps) if self.has_maps else 0
        self.by_layer = not self.has_maps or len(set(self.heads)) > 1 or size > MAX_MAP_BYTES
        self.grid = tried.grid if self.has_maps else self.find_grid()

    def find_grid(self) -> tuple[int, int]:
        """The grid of the last layer that has a map, or of the last block."""
        if "panels" not in self.reasons:
            return find_layer_grid(self.model, -1)
        return self.model.levels[-1].grid

    def find_reasons(self, tried: ImagePass) -> dict[str, str]:
        """Why parts of the page are missing for this model, by name; what is not named can be shown."""
        model, layers, found = self.model, self.explainer.layers, dict[str, str]()
        grids = why_several_grids(model) or (
            "its tokens attend within windows or to fewer keys" if lacks_square_maps(layers) else ""
        )
        if not grids and model.merging_module:
            grids = f"its patches are merged after layer {model.merge_after - 1}"
        shares = next((each.no_shares_reason for each in layers if each.no_shares_reason), "")
        maps = self.explainer.no_maps_reason or shares
        if maps or grids:
            found["maps"] = maps or grids
        if maps:
            found["panels"] = maps
        if maps or grids:
            found |= dict.fromkeys(("rollout", "distance"), maps or grids)
        if not self.loaded.classes:
            found |= dict.fromkeys(("relevance", "lens", "check"), "it has no classes")
        elif self.explainer.no_maps_reason or grids:
            found["relevance"] = self.explainer.no_maps_reason or grids
        if not has_token_states(model):
            found |= dict.fromkeys(("norms", "lens"), "it declares no final norm")
        elif why_several_grids(model):
            found |= dict.fromkeys(("norms", "lens"), why_several_grids(model))
        elif "lens" not in found and not reads_last_state(tried):
            found["lens"] = "its classifier does not read the tokens of single layers"
        if model.merging_module:
            found |= dict.fromkeys(("norms", "lens"), grids)
        if find_position_table(model) is None:
            found["positions"] = "it adds no position embeddings to its patches"
        elif prod(model.levels[0].grid) != prod(find_layer_grid(model, -1)):
            found["positions"] = grids
        return found

    def describe(self) -> dict[str, Any]:
        labels = self.loaded.labels
        parts = ("maps", "panels", "rollout", "relevance", "norms", "distance", "positions", "lens", "check")
        return {
            "kind": "image",
            "layers": self.depth,
            "heads": self.heads,
            "classes": self.loaded.classes,
            "labels": None if labels is None else [self.name_class(n) for n in range(len(labels))],
            "grid": self.grid,
            "prefix": list(self.model.prefix_tokens),
            "reads": list(self.model.classifier_tokens),
            "by_layer": self.by_layer,
            "parts": {name: self.reasons.get(name, True) for name in parts},
        }

    def name_class(self, index: int) -> str:
        labels = self.loaded.labels
        return ClassProbability(index, None if labels is None else labels[index], 0).name

    def explore(self, body: bytes, query: Mapping[str, str]) -> bytes:
        photo, part = self.open_photo(body), query.get("part", "all")
        if part == "hide":
            return self.hide_patches(photo, query)
        if part == "positions":
            return self.compare_positions()
        if part == "top":
            return self.classify(photo)
        if part == "layer":
            return self.show_layer(photo, read_number(query, "layer", self.depth))
        if part not in ("all", "class"):
            raise ConfigError(f"part is {part[:20]!r}; expected all, top, layer, class, positions or hide")
        of_class = (
            read_number(query, "class", self.loaded.classes) if "class" in query and self.loaded.classes else None
        )
        return self.show_class(photo, of_class) if part == "class" else self.show_all(photo, of_class)

    def open_photo(self, body: bytes) -> Photo:
        key = sha256(body).digest()
        if key not in self.photos:
            image = open_image(body)
            size = (image.height, image.width)
            left, top, right, bottom = compute_visible_box(size, self.loaded.preprocessing)
            self.photos[key] = Photo(self.loaded.make_batch([image]), size, (top, left, bottom - top, right - left))
            while len(self.photos) > KEPT_PHOTOS:
                self.photos.popitem(last=False)
        return self.photos[key]

    def show_all(self, photo: Photo, of_class: int | None) -> bytes:
        """Everything that follows from one pass; of large maps only the last layer."""
        by_class = bool(self.loaded.classes) and "relevance" not in self.reasons
        found = run_image_pass(self.explainer, photo.pixels, gradients=by_class)
        about, arrays = self.describe_photo(photo, found.logits), dict[str, NDArray[Any]]()
        arrays["logits"] = found.logits.detach().float().cpu().numpy()[0]
        about["check"] = {"share": CHECKED_SHARE}
        if self.has_maps:
            about["map_layers"], more = self.pack_layers(
                found, [self.depth - 1] if self.by_layer else range(self.depth)
            )
            arrays |= more
        elif "panels" not in self.reasons:
            about["panel_layers"] = [self.depth - 1]
            arrays["panels"] = self.compute_panel(photo, self.depth - 1)
        if self.has_maps or by_class:
            arrays["readout"] = found.readout
        if "distance" not in self.reasons:
            arrays["distance"] = found.compute_distances()
        if "norms" not in self.reasons:
            arrays["norms"] = found.compute_norms()
        if "lens" not in self.reasons:
            arrays["lens_index"], arrays["lens_probability"] = found.compute_lens()
        if by_class:
            index = about["explained"] if of_class is None else of_class
            about["explained"] = index
            arrays["relevance"] = found.compute_relevance(index, self.first_class_layer)
        return pack_figures(about, arrays)

    def describe_photo(self, photo: Photo, logits: Tensor) -> dict[str, Any]:
        about: dict[str, Any] = {"photo": photo.size, "box": photo.box, "grid": self.grid}
        if self.loaded.classes:
            (found,) = predictions_from_logits(logits.detach().float().cpu().numpy(), self.loaded.labels, TOP)
            about["top"] = [
                {"index": each.index, "label": each.name, "probability": each.probability} for each in found.top
            ]
            about["explained"] = found.top[0].index
        return about

    def pack_layers(self, found: ImagePass, layers: "range | list[int]") -> tuple[list[int], dict[str, NDArray[Any]]]:
        maps, scale = scale_rows_to_bytes(np.stack([found.maps[layer] for layer in layers]))
        return list(layers), {"maps": maps, "scale": scale}

    def show_layer(self, photo: Photo, layer: int) -> bytes:
        if self.has_maps:
            found = run_image_pass(self.explainer, photo.pixels, gradients=False)
            shown, arrays = self.pack_layers(found, [layer])
            return pack_figures({"map_layers": shown}, arrays)
        if reason := self.reasons.get("panels"):
            raise ConfigError(f"this model has no attention maps: {reason}")
        return pack_figures({"panel_layers": [layer]}, {"panels": self.compute_panel(photo, layer)})

    def compute_panel(self, photo: Photo, layer: int) -> NDArray[np.float32]:
        """What is read on average in a layer with its own grid: (1, H, h, w)."""
        options = self.explainer.resolve_options(ExplainOptions(method="attention", layer=layer, head="all"))
        _, maps = self.explainer.compute_maps(photo.pixels, options)
        return maps[0].astype(np.float32)

    def show_class(self, photo: Photo, of_class: int | None) -> bytes:
        if reason := self.reasons.get("relevance"):
            raise ConfigError(f"this model has no map for a class: {reason}")
        found = run_image_pass(self.explainer, photo.pixels, gradients=True)
        index = int(found.logits.argmax()) if of_class is None else of_class
        return pack_figures({"explained": index}, {"relevance": found.compute_relevance(index, self.first_class_layer)})

    def classify(self, photo: Photo) -> bytes:
        with torch.inference_mode():
            logits: Tensor = self.model(photo.pixels)
        return pack_figures(self.describe_photo(photo, logits), {"logits": logits.float().cpu().numpy()[0]})

    def compare_positions(self) -> bytes:
        table = find_position_table(self.model)
        if table is None or "positions" in self.reasons:
            raise ConfigError(f"this model has no positions to compare: {self.reasons['positions']}")
        h, w = self.model.levels[0].grid
        similarity = position_similarity(table, (h, w)).reshape(h * w, h * w)
        return pack_figures({}, {"positions": similarity.astype(np.float32)})

    def hide_patches(self, photo: Photo, query: Mapping[str, str]) -> bytes:
        """Logits without patches, (K, C): `hide` has K sets as 3.4.5_7.8, patches of `grid`, by default the model's."""
        gone = read_removals(query.get("hide", ""), self.read_grid(query.get("grid")))
        groups = [gone] if np.ptp(gone.sum((1, 2))) == 0 else [each[None] for each in gone]  # equally many at once
        with torch.inference_mode():
            logits = [
                predict_without_patches(self.model, photo.pixels.expand(len(each), -1, -1, -1), each) for each in groups
            ]
        return pack_figures({}, {"logits": torch.cat(logits).float().cpu().numpy()})

    def read_grid(self, given: str | None) -> tuple[int, int]:
        """Another grid only where patches are grayed out instead of dropped."""
        h, _, w = (given or "").partition("x")
        if given is None:
            return self.grid
        largest = pair(self.loaded.preprocessing.image_size)
        found = (int(h), int(w)) if h.isdecimal() and w.isdecimal() and len(given) < 12 else (0, 0)
        can_be_other = not can_drop_tokens(self.model) and 0 < found[0] <= largest[0] and 0 < found[1] <= largest[1]
        if found != self.grid and not can_be_other:
            raise ConfigError(f"grid is {given[:20]!r}; expected {self.grid[0]}x{self.grid[1]}, that of the patches")
        return found


def read_removals(given: str, grid: tuple[int, int]) -> NDArray[np.bool_]:
    """Sets of patches by number, 3.4.5_7.8, as masks: (K, h, w)."""
    sets, patches = given.split("_"), prod(grid)
    masks = np.zeros((len(sets), patches), np.bool_)
    if len(sets) > MAX_REMOVALS:
        raise ConfigError(f"{len(sets)} sets of patches to hide; expected at most {MAX_REMOVALS}")
    for mask, each in zip(masks, sets, strict=True):
        for number in each.split("."):
            if not number.isdecimal() or len(number) > 9 or int(number) >= patches:
                raise ConfigError(f"patch {number[:20]!r} to hide; expected 0 to {patches - 1}, such as 3.4.5")
            mask[int(number)] = True
        if mask.all():
            raise ConfigError(f"all {patches} patches are to be hidden; expected one to stay")
    return masks.reshape(-1, *grid)


def reads_last_state(tried: ImagePass) -> bool:
    """Whether the norm and the head, applied to the tokens after the last block, give the model's prediction."""
    model = tried.explainer.model
    with torch.no_grad():
        again = model.logits(model.get_submodule(model.final_norm)(tried.states_by_layer[-1]))
    return again.shape == tried.logits.shape and torch.allclose(again, tried.logits, rtol=1e-3, atol=1e-3)
