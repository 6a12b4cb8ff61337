"""What is it looking at? One picture, one model: rollout, attention by layer and head, one class, norms."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitrail.data.decoding.rgb_image import open_image
from vitrail.data.preprocessing import Preprocessing, compute_visible_box
from vitrail.errors import DataError, VitrailError
from vitrail.figures import CaptionedFigure
from vitrail.inspection.capture import (
    AttentionCapture,
    capture_attention,
    capture_tokens,
    find_attention_layers,
    head_token_shares,
    why_no_attention_maps,
)
from vitrail.inspection.explain_options import (
    HEAD_TOKEN,
    ExplainMethod,
    ExplainOptions,
    default_method,
    find_token_index,
    resolve_options,
)
from vitrail.inspection.overlay import PixelBox, draw_overlay, shrink_photo
from vitrail.inspection.rollout import (
    HEAD_FUSIONS,
    HeadFusion,
    fill_missing_queries,
    fuse_heads,
    multiply_row,
    patch_map_from_row,
    token_gradient_rollout,
    token_rollout,
)
from vitrail.inspection.token_statistics import token_norms
from vitrail.predict.predictions import NOT_FINITE_MESSAGE, ClassProbability, Prediction, softmax
from vitrail.predict.viewer import Viewer

MAX_STEM_BYTES = 180  # bytes of a name


@dataclass(frozen=True, kw_only=True, eq=False)  # arrays are neither equal nor not
class Explanation:
    """A picture and where a model looked in it; shows itself in a notebook."""

    name: str
    options: ExplainOptions
    maps: NDArray[Any]  # (layers, heads, h, w); of attention each sums to 1
    photo: NDArray[np.uint8]  # (rows, columns, 3), no larger than a figure needs
    box: PixelBox  # what the model saw of it: left, top, right, bottom in pixels
    explained_class: ClassProbability | None = None  # the class that was asked about; a model without a head has none
    prediction: Prediction | None = None

    @property
    def map(self) -> NDArray[Any]:
        """The last of the maps, mostly the only one: (h, w)."""
        return self.maps[-1, -1]

    @property
    def titles(self) -> tuple[tuple[str, ...], ...]:
        """Of each map."""
        return self.options.titles(*self.maps.shape[:2])

    @property
    def is_empty(self) -> bool:
        """Nothing speaks for the class, as in an untrained model or from a token that is not read: all maps are 0."""
        return self.options.method == "grad-rollout" and not self.maps.any()

    @property
    def figure(self) -> CaptionedFigure:
        words, asked, name = self.options.description, self.explained_class, Path(self.name).name or "picture"
        answer = "" if asked is None else f"{asked.name} {asked.probability:.1%}"
        words += ", where nothing speaks for the class" * self.is_empty
        bright = (
            "have the longest tokens" if self.options.method == "norms" else "get most attention; 1 is an even share"
        )
        return CaptionedFigure(
            name=figure_name(self.name, self.options.method),
            title=f"{name}: {words}",
            caption=f"{words[0].upper()}{words[1:]} over {name}"
            + f"; {answer}" * bool(answer)
            + f". Bright patches {bright}.",
            arrays={"maps": self.maps, "photo": self.photo, "box": np.array(self.box)},
            draw=lambda: self.render(" · ".join(filter(None, (answer, words)))),
        )

    def render(self, heading: str) -> Any:
        if self.options.method == "norms":
            panels, unit = self.maps, "length of the token"
        else:
            panels, unit = self.maps * (self.maps.shape[-2] * self.maps.shape[-1]), "attention (1 = even)"
        patch = tuple(map(int, self.options.token.split(","))) if "," in self.options.token else None
        return draw_overlay(self.photo, self.box, panels, self.titles, heading, unit, patch)

    def _repr_png_(self) -> bytes:
        return self.figure.to_png()


def figure_name(image: str, method: str) -> str:
    """The name of an image's figure, without a suffix: photo.rollout."""
    return f"{truncate_stem(Path(image).name or 'picture')}.{method}"


def truncate_stem(name: str) -> str:
    """Of a file's name, so much that an ending can follow: 255 bytes are the most for most disks."""
    stem = Path(name).stem
    data = stem.encode("utf-8", "surrogateescape")
    return stem if len(data) <= MAX_STEM_BYTES else data[:MAX_STEM_BYTES].decode("utf-8", "ignore")


class Explainer:
    """A model to be asked what it looks at; takes what `vitrail.Predictor` takes, and models without a head."""

    def __init__(
        self,
        model: str | Path | nn.Module,
        *,
        preprocessing: Preprocessing | None = None,
        labels: Sequence[str] | None = None,
        device: str | torch.device = "cpu",
    ) -> None:
        module = getattr(model, "_orig_mod", model)  # what torch.compile wrapped: its code is blind to hooks
        self.viewer = Viewer(module, preprocessing=preprocessing, labels=labels, device=device)
        self.model: Any = self.viewer.model
        self.no_maps_reason = why_no_attention_maps(self.model)  # why there are no maps, but only tokens
        self.layers = [] if self.no_maps_reason else find_attention_layers(self.model)
        self.default_method: ExplainMethod = default_method(self.model, self.layers)  # where no method is named

    def explain(
        self,
        image: Any,
        method: ExplainMethod | None = None,
        *,
        layer: int | Literal["all"] = -1,
        head: int | HeadFusion | Literal["all"] = "mean",
        token: str = HEAD_TOKEN,
        of_class: int | str | None = None,
        discard: float = 0.0,
    ) -> Explanation:
        """Where the model looks in a picture of any kind that `vitrail.data.decoding.rgb_image.open_image` takes."""
        question = ExplainOptions(
            method=method or self.default_method,
            layer=layer,
            head=head,
            token=token,
            of_class=of_class,
            discard=discard,
        )
        return self.explain_resolved(
            image, self.resolve_options(question), str(image) if isinstance(image, str | Path) else "picture"
        )

    def resolve_options(self, options: ExplainOptions) -> ExplainOptions:
        """The question as `ask` takes it; what cannot be asked of this model is refused."""
        return resolve_options(options, self.model, self.layers, self.viewer.labels)

    def explain_resolved(self, image: Any, options: ExplainOptions, name: str = "picture") -> Explanation:
        """As `explain`, of a question that is settled."""
        picture = open_image(image)
        photo, box = shrink_photo(
            picture, compute_visible_box((picture.height, picture.width), self.viewer.preprocessing)
        )
        try:
            pixels = self.viewer.see([picture])
        except DataError as error:  # which knows the picture, but not its name
            raise DataError(f"{name!r}: {error}") from None
        logits, maps = self.compute_maps(pixels, options)
        if not np.isfinite(maps).all():
            raise VitrailError(NOT_FINITE_MESSAGE)
        prediction = asked = None
        if self.viewer.classes:
            (prediction,) = self.viewer.likeliest(logits, 5)
            index = prediction.top[0].index if options.of_class is None else int(options.of_class)
            asked = self.viewer.answer(index, softmax(logits.float().numpy(force=True))[0, index].item())
        return Explanation(
            name=name,
            options=options,
            maps=maps[0],
            photo=photo,
            box=box,
            explained_class=asked,
            prediction=prediction,
        )

    def compute_maps(self, pixels: Tensor, options: ExplainOptions) -> tuple[Tensor, NDArray[Any]]:
        """Logits and what a settled question asks for: (B, C, H, W) → (B, classes), (B, layers, heads, h, w)."""
        if options.method == "norms":
            return self.compute_norms(pixels, self.select_layers(options))
        logits, seen, slopes = self.run_with_capture(pixels, options)
        if options.method == "pool":
            assert seen.pool_shares is not None  # a settled question has seen to that
            rows = [[seen.pool_shares.cpu().numpy()]]
        else:
            attention = [each.cpu().numpy() for each in seen.maps]  # each (B, H, N, N)
            rows = trace_attention(options, self.token_shares(seen, options.token), attention, slopes)
        maps = [np.stack([patch_map_from_row(each, seen.patch_grid) for each in row], axis=1) for row in rows]
        return logits, np.stack(maps, axis=1)

    def run_with_capture(
        self, pixels: Tensor, options: ExplainOptions
    ) -> tuple[Tensor, AttentionCapture, list[NDArray[Any]]]:
        """One forward pass: logits, the attention that the question needs, and for grad-rollout the slopes in it."""
        heads = [options.head] if isinstance(options.head, int) else None
        by_class = options.method == "grad-rollout"
        with torch.inference_mode(False), torch.set_grad_enabled(by_class):
            pixels = pixels.clone() if pixels.is_inference() else pixels  # those have no gradients
            with capture_attention(self.model, self.select_layers(options), heads, gradients=by_class) as seen:
                logits: Tensor = self.model(pixels)
            slopes = self.compute_gradients(seen, logits, options.of_class) if by_class else []
        return logits.detach(), seen, slopes

    def select_layers(self, options: ExplainOptions) -> Sequence[int]:
        """Those that have to be seen: the one asked about, and for a rollout all up to it."""
        if options.method == "pool":
            return []
        if options.layer == "all":
            return range(len(self.layers) or len(self.model.blocks))
        return range(options.layer + 1) if "rollout" in options.method else [options.layer]

    def compute_gradients(
        self, seen: AttentionCapture, logits: Tensor, of_class: int | str | None
    ) -> list[NDArray[Any]]:
        """Of the class, or of each picture's likeliest, in every probability."""
        asked = (
            logits.argmax(-1) if of_class is None else torch.full_like(logits[:, 0], int(of_class), dtype=torch.long)
        )
        return [each.float().cpu().numpy() for each in seen.compute_gradients(logits.gather(1, asked[:, None]).sum())]

    def token_shares(self, seen: AttentionCapture, name: str) -> NDArray[Any]:
        """Shares of all tokens, (B or 1, N), of which the token asked about has all."""
        index = find_token_index(name, self.model, seen.prefix, seen.patch_grid)
        if index is None:
            return head_token_shares(seen).cpu().numpy()
        return np.eye(seen.token_count, dtype=np.float32)[index : index + 1]

    @torch.no_grad()
    def compute_norms(self, pixels: Tensor, layers: Sequence[int]) -> tuple[Tensor, NDArray[Any]]:
        """Lengths of the patches' tokens after the blocks that hold these layers; the last computes them all."""
        with capture_tokens(self.model) as states, capture_attention(self.model, []) as seen:
            logits = self.model.logits(self.model.tokens(pixels))
        h, w = seen.patch_grid
        each = max(1, len(self.layers) // (len(states) - 2))  # attentions in a block
        lengths = [token_norms(states[layer // each + 1].float().cpu().numpy())[:, -h * w :] for layer in layers]
        return logits, np.stack(lengths, axis=1).reshape(len(pixels), len(layers), 1, h, w)


def trace_attention(
    options: ExplainOptions, token: NDArray[Any], maps: Sequence[NDArray[Any]], slopes: Sequence[NDArray[Any]]
) -> list[list[NDArray[Any]]]:
    """What the token is made of, (B, N), in rows of layers and columns of heads; the maps are (B, H, N, N)."""
    fuse = options.head if options.head in HEAD_FUSIONS else "mean"
    if options.method == "attention":
        return [
            [
                multiply_row(token, fill_missing_queries(fuse_heads(one, fuse)))
                for (one,) in separate_heads([each], options)
            ]
            for each in maps
        ]
    ends = range(1, len(maps) + 1) if options.layer == "all" else [len(maps)]
    if options.method == "grad-rollout":
        return [[token_gradient_rollout(token, maps[:end], slopes[:end])] for end in ends]
    return [
        [token_rollout(token, part, fuse, discard=options.discard) for part in separate_heads(maps[:end], options)]
        for end in ends
    ]


def separate_heads(maps: Sequence[NDArray[Any]], options: ExplainOptions) -> Sequence[Sequence[NDArray[Any]]]:
    """The layers with all of their heads, or where each is asked for by itself, once for each head."""
    if options.head != "all":
        return [maps]
    return [[each[:, [number]] for each in maps] for number in range(min(each.shape[1] for each in maps))]
