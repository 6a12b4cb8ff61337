"""Explain a prediction: attention rollout, attention per layer and head, relevance for a class, token norms."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitrail.base.errors import ConfigError, DataError, VitrailError
from vitrail.base.progress import Progress
from vitrail.data.images.decoding.rgb_image import open_image
from vitrail.data.images.preprocessing import compute_visible_box
from vitrail.export.agreement import NOT_FINITE_MESSAGE
from vitrail.inspection.attention.capture import (
    AttentionCapture,
    capture_attention,
    capture_tokens,
    compute_classifier_token_weights,
    find_attention_layers,
    has_token_states,
    list_blocks,
)
from vitrail.inspection.attention.rollout import (
    HEAD_FUSIONS,
    HeadFusion,
    Merger,
    fill_missing_queries,
    fuse_heads,
    multiply_row,
    normalize_rows,
    patch_map_from_row,
    token_gradient_rollout,
    token_rollout,
)
from vitrail.inspection.explain.explain_options import (
    HEAD_TOKEN,
    ExplainMethod,
    ExplainOptions,
    default_method,
    find_token_index,
    resolve_options,
)
from vitrail.inspection.explain.explanation import Explanation
from vitrail.inspection.explain.overlay import shrink_photo_and_box
from vitrail.inspection.representation.token_statistics import token_norms
from vitrail.models.base.contract import find_image_model
from vitrail.models.catalog.external_families import trust
from vitrail.models.parts.windows import TokenWindows, Windows
from vitrail.opening import GivenPreprocessing, Opened, open_torch_model
from vitrail.predict.predictions import ClassProbability, predictions_from_logits, softmax
from vitrail.predict.predictor import Predictor

if TYPE_CHECKING:
    from vitrail.base.figures import CaptionedFigure
    from vitrail.inspection.representation.nearest_neighbors import NeighborSearch


class Explainer:
    """Explains what a model attends to in photos.

    `model` is a name, a path, a module, what `vitrail.open_model` returned, or a `vitrail.Predictor`, whose model is
    not loaded again. A model without a head can be explained, too; an exported one cannot.

    >>> predictor = vitrail.Predictor("vit_fashion")
    >>> vitrail.Explainer(predictor).explain("example:cat").save("why.png")
    """

    def __init__(
        self,
        model: str | Path | nn.Module | Opened | Predictor,
        *,
        preprocessing: GivenPreprocessing = None,
        labels: Sequence[str] | None = None,
        device: str | torch.device | None = None,
        trust_code: str | Sequence[str] = (),
    ) -> None:
        opened = model.loaded if isinstance(model, Predictor) else model
        with trust(trust_code):
            self.loaded = open_torch_model(opened, preprocessing=preprocessing, labels=labels, device=device)
        found = find_image_model(self.loaded.model)  # not torch.compile's wrapper, whose code ignores hooks
        if found is None:
            raise ConfigError(
                f"{type(self.loaded.model).__name__} does not declare its tokens; expected a model of vitrail's "
                "families, or a subclass of vitrail.models.base.contract.ImageModel"
            )
        self.model = found
        self.no_maps_reason = found.no_maps_reason  # empty if there are maps
        self.layers = [] if self.no_maps_reason and has_token_states(found) else find_attention_layers(found)
        self.default_method: ExplainMethod = default_method(self.model, self.layers)  # if none is given

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
        mass: float | None = None,
    ) -> Explanation:
        """Explain an image: a path, bytes, a Pillow image, an array or a tensor.

        Parameters
        ----------
        method
            grad-rollout, rollout, attention, heads, windows, pool or norms. The default is grad-rollout for a model
            with classes, rollout if `head` or `discard` is given, heads if `mass` is given, and attention for a model
            whose layers do not share a grid.
        layer
            Layer from 0, -1 for the last, or "all"; a rollout goes up to it.
        head
            Head from 0; "mean", "max" or "min" of all heads; or "all", each in its own map.
        token
            The token that attends: "head" (what the classifier reads), "class", "distill", "register0", or a patch as
            "ROW,COLUMN"; for windows a window.
        of_class
            The class to explain, by number or name; by default the top class.
        discard
            Share of the smallest entries in each row of a rollout's attention to treat as noise.
        mass
            For heads: show the patches that hold this share of each head's attention, for example 0.6.

        >>> explainer = vitrail.Explainer("vit_fashion")
        >>> explainer.explain("example:cat", "attention", layer="all", head="all").maps.shape
        (4, 2, 4, 4)
        """
        options = ExplainOptions(
            method=method or default_method(self.model, self.layers, head=head, discard=discard, mass=mass),
            layer=layer,
            head=head,
            token=token,
            of_class=of_class,
            discard=discard,
            mass=mass,
        )
        return self.explain_resolved(
            image, self.resolve_options(options), str(image) if isinstance(image, str | Path) else "image"
        )

    def pca(
        self, images: Iterable[Any], *, names: Sequence[str] | None = None, foreground: bool = False, batch: int = 4
    ) -> "CaptionedFigure":
        """Color the patches of up to 64 images by the first three principal components of all their features.

        `foreground` leaves out the background, found by the first component.

        >>> figure = vitrail.Explainer("cct_cifar10").pca(["example:cat", "example:rocket"])
        >>> figure.arrays["colors"].shape  # images, rows and columns of patches, RGB
        (2, 8, 8, 3)
        """
        from vitrail.inspection.representation.patch_pca import draw_patch_pca

        return draw_patch_pca(self.loaded, images, names=names, foreground=foreground, batch=batch)

    def neighbors(self, images: Iterable[Any], data: Any, *, k: int = 5, progress: Progress = None) -> "NeighborSearch":
        """Find the k images of `data` that are most similar to each image; see `find_neighbors` for what they may be.

        >>> found = vitrail.Explainer("vit_fashion").neighbors(["example:cat"], "photos", k=3)  # doctest: +SKIP
        """
        from vitrail.inspection.representation.nearest_neighbors import find_neighbors

        return find_neighbors(self.loaded, images, data, k=k, progress=progress)

    neighbours = neighbors  # the former name

    def resolve_options(self, options: ExplainOptions) -> ExplainOptions:
        """Check the options against the model and resolve layer, head and class to numbers."""
        return resolve_options(options, self.model, self.layers, self.loaded.labels)

    def explain_resolved(self, image: Any, options: ExplainOptions, name: str = "image") -> Explanation:
        """Explain an image with options from `resolve_options`."""
        opened_image = open_image(image)
        photo, box = shrink_photo_and_box(
            opened_image, compute_visible_box((opened_image.height, opened_image.width), self.loaded.preprocessing)
        )
        try:
            pixels = self.loaded.make_batch([opened_image])
        except DataError as error:  # which does not know the image's name
            raise DataError(f"{name!r}: {error}") from None
        attention = memory = None
        if options.method == "norms":
            logits, maps = self.compute_maps(pixels, options)
        else:
            logits, rows, grid = self.compute_token_rows(pixels, options)
            maps, memory = stack_maps(rows, grid), self.measure_memory(rows)
            attention = np.stack(rows[0], axis=1)[0] if options.method == "heads" else None  # (H, N)
        if not np.isfinite(maps).all():
            raise VitrailError(NOT_FINITE_MESSAGE)
        prediction = asked = None
        if self.loaded.classes:
            values, labels = logits.float().numpy(force=True), self.loaded.labels
            (prediction,) = predictions_from_logits(values, labels, 5)
            index = prediction.top[0].index if options.of_class is None else int(options.of_class)
            probability = softmax(values)[0, index].item()
            asked = ClassProbability(index, None if labels is None else labels[index], probability)
        return Explanation(
            name=name,
            options=options,
            maps=maps[0],
            photo=photo,
            box=box,
            explained_class=asked,
            prediction=prediction,
            attention=attention,
            memory=memory,
        )

    def compute_maps(self, pixels: Tensor, options: ExplainOptions) -> tuple[Tensor, NDArray[Any]]:
        """Logits and maps for resolved options: (B, C, H, W) → (B, classes), (B, layers, heads, h, w)."""
        if options.method == "norms":
            return self.compute_norms(pixels, self.select_layers(options))
        logits, rows, grid = self.compute_token_rows(pixels, options)
        return logits, stack_maps(rows, grid)

    def measure_memory(self, rows: list[list[NDArray[Any]]]) -> NDArray[Any] | None:
        """Share of the first image's attention on memory tokens, (layers, heads); None if the model has none."""
        first, count = self.model.prefix, self.model.memory_tokens
        if not count:
            return None
        return np.array([[normalize_rows(each[0])[first : first + count].sum() for each in row] for row in rows])

    def compute_token_rows(
        self, pixels: Tensor, options: ExplainOptions
    ) -> tuple[Tensor, list[list[NDArray[Any]]], tuple[int, int]]:
        """Logits, the attention to all tokens, (B, N), in rows of layers and columns of heads, and the grid."""
        logits, captured, gradients = self.run_with_capture(pixels, options)
        if options.method == "windows":
            return logits, *compute_window_rows(captured, options)
        if options.method == "pool":
            assert captured.pool_shares is not None  # resolve_options checks it
            rows = [[captured.pool_shares.cpu().numpy()]]
        else:
            attention = [each.cpu().numpy() for each in captured.maps]  # each (B, H, N, N), or (B·W, H, m, m)
            shares = self.token_shares(captured, options.token)
            windows = [captured.windows.get(layer) for layer in captured.layers]
            merger = self.find_merger(captured)
            rows = compute_token_maps_by_layer(options, shares, attention, gradients, windows, merger)
        last = captured.layers[-1] if captured.layers else None
        if last in captured.reduced:
            return logits, rows, captured.reduced[last].keys
        grid = captured.patch_grid
        if last is not None and isinstance(captured.windows.get(last), TokenWindows):  # which may be padded
            level = [level for level in self.model.levels for _ in level.blocks][last]
            real = [-(-side // step) for side, step in zip(pixels.shape[2:], level.stride, strict=True)]
            rows = [[remove_padding(each, grid, (real[0], real[1])) for each in row] for row in rows]
            grid = (real[0], real[1])
        return logits, rows, grid

    def run_with_capture(
        self, pixels: Tensor, options: ExplainOptions
    ) -> tuple[Tensor, AttentionCapture, list[NDArray[Any]]]:
        """Run one forward pass: logits, the attention needed and, for grad-rollout, its gradients."""
        heads = [options.head] if isinstance(options.head, int) else None
        by_class = options.method == "grad-rollout"
        with torch.inference_mode(False), torch.set_grad_enabled(by_class):
            pixels = pixels.clone() if pixels.is_inference() else pixels  # inference tensors have no gradients
            with capture_attention(self.model, self.select_layers(options), heads, gradients=by_class) as captured:
                logits: Tensor = self.model(pixels)
            gradients = self.compute_gradients(captured, logits, options.of_class) if by_class else []
        return logits.detach(), captured, gradients

    def select_layers(self, options: ExplainOptions) -> Sequence[int]:
        """Layers to capture: the selected one, and for a rollout all layers up to it."""
        if options.method == "pool":
            return []
        if options.layer == "all":
            return range(len(self.layers) or len(list_blocks(self.model)))
        return range(options.layer + 1) if "rollout" in options.method else [options.layer]

    def compute_gradients(
        self, captured: AttentionCapture, logits: Tensor, of_class: int | str | None
    ) -> list[NDArray[Any]]:
        """Gradients of the class logit, by default of the top class, with respect to the attention probabilities."""
        classes = (
            logits.argmax(-1) if of_class is None else torch.full_like(logits[:, 0], int(of_class), dtype=torch.long)
        )
        score = logits.gather(1, classes[:, None]).sum()
        return [each.float().cpu().numpy() for each in captured.compute_gradients(score)]

    def token_shares(self, captured: AttentionCapture, name: str) -> NDArray[Any]:
        """Weights of all tokens, (B or 1, N), with 1 for the token that attends."""
        index = find_token_index(name, self.model.prefix_tokens, captured.patch_grid)
        if index is None:
            return compute_classifier_token_weights(captured).cpu().numpy()
        if "," in name:  # there may be more tokens before the patches than names
            index += captured.prefix - self.model.prefix
        return np.eye(captured.token_count, dtype=np.float32)[index : index + 1]

    def find_merger(self, captured: AttentionCapture) -> Merger | None:
        """What merged the patches in the pass, before the first of the captured layers that come after it."""
        if captured.merge_weights is None:
            return None
        before = sum(layer < self.model.merge_after for layer in captured.layers)
        return Merger(before, captured.merge_weights.cpu().numpy())

    @torch.no_grad()
    def compute_norms(self, pixels: Tensor, layers: Sequence[int]) -> tuple[Tensor, NDArray[Any]]:
        """Norms of the patch tokens after the blocks of these layers; the last block computes all tokens."""
        with capture_tokens(self.model) as states, capture_attention(self.model, []) as captured:
            logits = self.model.logits(self.model.tokens(pixels))
        h, w = captured.grids[layers[-1]]
        per_block = max(1, len(self.layers) // (len(states) - 2))  # attention layers
        norms = [token_norms(states[layer // per_block + 1].float().cpu().numpy())[:, -h * w :] for layer in layers]
        return logits, np.stack(norms, axis=1).reshape(len(pixels), len(layers), 1, h, w)


def stack_maps(rows: list[list[NDArray[Any]]], grid: tuple[int, int]) -> NDArray[Any]:
    """The maps of all rows, (B, N), as one array: (B, layers, heads, h, w)."""
    maps = [np.stack([patch_map_from_row(each, grid) for each in row], axis=1) for row in rows]
    return np.stack(maps, axis=1)


def compute_window_rows(
    captured: AttentionCapture, options: ExplainOptions
) -> tuple[list[list[NDArray[Any]]], tuple[int, int]]:
    """The attention to all windows, (B, W), of one of them or on average, and their grid."""
    layer = captured.layers[-1]
    grid, maps = captured.windows[layer].counts, captured.window_maps[layer].cpu().numpy()
    index, every = find_token_index(options.token, (), grid, "window"), np.eye(maps.shape[-1], dtype=maps.dtype)
    row = every.mean(0, keepdims=True) if index is None else every[index : index + 1]
    return compute_token_maps_by_layer(options, row, [maps], [], [None], None), grid


def compute_token_maps_by_layer(
    options: ExplainOptions,
    token: NDArray[Any],
    maps: Sequence[NDArray[Any]],
    gradients: Sequence[NDArray[Any]],
    windows: Sequence[Windows | None],
    merger: Merger | None,
) -> list[list[NDArray[Any]]]:
    """What the token attends to, (B, N), in rows of layers and columns of heads.

    Maps are (B, H, N, N), or (B·W, H, m, m) for attention within windows. Attention between merged tokens is that to
    the patches which they were merged from; before the merger, these are also what attends instead of merged tokens.
    """
    fuse = options.head if options.head in HEAD_FUSIONS else "mean"
    tokens = [token] * len(maps)
    if merger is not None and options.token == HEAD_TOKEN:
        tokens[: merger.before] = [multiply_row(token, merger.weights)] * merger.before
    if options.method in ("attention", "heads", "windows"):
        rows = [
            [
                multiply_row_in_windows(row, fill_rows(fuse_heads(one, fuse), row.shape[-1]), cut)
                for (one,) in separate_heads_if_all([each], options)
            ]
            for row, each, cut in zip(tokens, maps, windows, strict=True)
        ]
        if merger is None:
            return rows
        late = [[multiply_row(each, merger.weights) for each in row] for row in rows[merger.before :]]
        return rows[: merger.before] + late
    ends = range(1, len(maps) + 1) if options.layer == "all" else [len(maps)]
    if options.method == "grad-rollout":
        return [[token_gradient_rollout(tokens[end - 1], maps[:end], gradients[:end], merger)] for end in ends]
    return [
        [
            token_rollout(tokens[end - 1], part, fuse, discard=options.discard, merger=merger)
            for part in separate_heads_if_all(maps[:end], options)
        ]
        for end in ends
    ]


def fill_rows(attended: NDArray[Any], tokens: int) -> NDArray[Any]:
    """Add rows for tokens that are not queries, unless queries and keys are on two grids: (…, Nq, N) → (…, N, N)."""
    return attended if attended.shape[-2] == tokens else fill_missing_queries(attended)


def multiply_row_in_windows(token: NDArray[Any], attended: NDArray[Any], windows: Windows | None) -> NDArray[Any]:
    """A row times the matrix of its window, (B or 1, n), (B·W, m, m) → (B, n), or of all tokens without windows."""
    if windows is None:
        return multiply_row(token, attended)
    shares = windows.split(torch.from_numpy(token)[..., None])[..., 0].numpy()  # (W, m)
    rows = multiply_row(np.tile(shares, (len(attended) // len(shares), 1)), attended)
    return windows.join(torch.from_numpy(rows)[..., None])[..., 0].numpy()


def remove_padding(row: NDArray[Any], grid: tuple[int, int], real: tuple[int, int]) -> NDArray[Any]:
    """The entries of a row without patches beyond the `real` rows and columns of the grid: (…, N) → (…, N')."""
    count = grid[0] * grid[1]
    patches = row[..., -count:].reshape(*row.shape[:-1], *grid)[..., : real[0], : real[1]]
    return np.concatenate([row[..., :-count], patches.reshape(*row.shape[:-1], -1)], axis=-1)


def separate_heads_if_all(maps: Sequence[NDArray[Any]], options: ExplainOptions) -> Sequence[Sequence[NDArray[Any]]]:
    """Maps of all layers, once with all heads, or once per head if `head` is 'all'."""
    if options.head != "all":
        return [maps]
    return [[each[:, [number]] for each in maps] for number in range(min(each.shape[1] for each in maps))]
