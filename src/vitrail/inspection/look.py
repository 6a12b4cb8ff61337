"""All that can be seen of a model: its filters and positions, and over some pictures how it attends and what it makes.

B images, L layers, S = L + 1 states of the tokens, H heads, N tokens, D width, K shares of the patches.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitrail.errors import ConfigError, DataError, VitrailError, unknown
from vitrail.figures import Plate
from vitrail.inspection.alignment import FEWEST, alignment, alignment_plate
from vitrail.inspection.capture import capture, prefix_names, token_states
from vitrail.inspection.distance import attention_distance, distance_plate, even_distance
from vitrail.inspection.dropping import drops_tokens, probabilities
from vitrail.inspection.explain import Explainer
from vitrail.inspection.filters import filters_plate, first_filters, principal_filters
from vitrail.inspection.occlusion import occlusion_plate
from vitrail.inspection.positions import position_similarity, position_table, similarity_plate
from vitrail.inspection.question import Question
from vitrail.inspection.tokens import norms_plate, similarity_by_layer_plate, token_norms, token_similarity
from vitrail.predict.answers import NOT_FINITE

Arrays = list[NDArray[Any]]  # of one batch each
SHARES = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9)  # of the patches, for the occlusion check


@dataclass(frozen=True)
class Look:
    """What was seen of a model, each plate a picture with its numbers."""

    plates: tuple[Plate, ...]
    images: int
    notes: tuple[str, ...] = ()  # what could not be drawn, and why
    skipped: tuple[str, ...] = ()  # pictures that could not be read, and why

    def __getitem__(self, name: str) -> Plate:
        found = {each.name: each for each in self.plates}
        if name not in found:
            raise unknown("plate", name, found)
        return found[name]


def look(
    model: str | Path | nn.Module | Explainer,
    pictures: Iterable[Any] = (),
    *,
    batch: int = 4,
    question: Question | None = None,
    progress: Callable[[int], object] | None = None,
) -> Look:
    """Draws filters and positions, and over the pictures attention distance, tokens, alignment and the occlusion check.

    Pictures are of any kind that `vitrail.data.images.open_image` takes. The occlusion check is of the map that
    `question` asks for, `Explainer.usual` unless given. Whatever their number, no more than a batch of them is held.
    """
    if batch < 1:
        raise ConfigError(f"batch is {batch}; expected 1 or more")
    explainer = model if isinstance(model, Explainer) else Explainer(model)
    question = explainer.settled(question or Question(method=explainer.usual))
    plates, notes = of_weights(explainer.model)
    seen, skipped, part = Seen(), list[str](), list[Tensor]()
    for image in pictures:
        try:
            part.append(explainer.viewer.see([image]))
        except DataError as error:
            skipped.append(str(error))
        if len(part) == batch:
            seen.add(explainer, torch.cat(part), question)
            part.clear()
        if progress is not None:
            progress(1)
    if part:
        seen.add(explainer, torch.cat(part), question)
    if skipped and not seen.images:
        raise DataError(f"no picture to look at; {len(skipped)} cannot be read, for instance {skipped[0]}")
    if seen.images:
        drawn, more = of_pictures(seen)
        plates, notes = plates + drawn, notes + more
    else:
        notes.append("no pictures were shown: attention distance, tokens, alignment and the occlusion check need some")
    return Look(tuple(plates), seen.images, tuple(notes), tuple(skipped))


def of_weights(model: Any) -> tuple[list[Plate], list[str]]:
    """What the weights alone show."""
    plates, notes = list[Plate](), list[str]()
    table = position_table(model)
    if table is None:
        notes.append("position similarity: this model adds no table of positions to its tokens")
    else:
        plates.append(similarity_plate(position_similarity(table, model.grid)))
    filters = first_filters(model)
    if filters is None or len(filters) < 2:
        notes.append("filters: this model has no convolution that sees the image")
    else:
        plates.append(filters_plate(*principal_filters(filters)))
    return plates, notes


@dataclass
class Seen:
    """Numbers of all images so far; of each so few that thousands fit in memory: no map and no token."""

    images: int = 0
    distances: Arrays = field(default_factory=Arrays)  # (B, L, H)
    no_distances: str = ""  # why there are none
    no_occlusion: str = "this model has no head, so no class whose probability could be watched"
    norms: Arrays = field(default_factory=Arrays)  # (B, S, N)
    means: Arrays = field(default_factory=Arrays)  # (B, S, D)
    cosines: Arrays = field(default_factory=Arrays)  # (B, S)
    way: str = ""  # in which patches were removed
    left: dict[str, Arrays] = field(default_factory=dict[str, Arrays])  # probabilities, by what went first: (B, K)
    grid: tuple[int, int] = (0, 0)
    names: tuple[str, ...] = ()  # of the prefix tokens
    size: tuple[int, int] = (0, 0)

    def add(self, explainer: Explainer, pixels: Tensor, question: Question) -> None:
        """One batch: (B, C, H, W)."""
        model, self.size = explainer.model, (pixels.shape[2], pixels.shape[3])

        def distance(weights: Tensor, grid: tuple[int, int]) -> NDArray[Any]:
            return attention_distance(weights.cpu().numpy(), grid, self.patch(grid))

        mixed = [why for each in explainer.layers if (why := getattr(each, "no_shares", ""))]
        self.no_distances = explainer.unseen or next(iter(mixed), "")
        asked = [] if self.no_distances else None
        with torch.no_grad(), capture(model, asked, keep=distance) as seen, token_states(model) as states:
            model.tokens(pixels)
        self.grid, self.names = seen.patches, prefix_names(model, seen.prefix)
        if not self.no_distances:
            self.distances.append(np.stack(seen.maps, axis=1))
        tokens = [each.float().cpu().numpy() for each in states[:-1]]  # before the final norm, which evens lengths out
        if not np.isfinite(tokens[-1]).all():
            raise VitrailError(NOT_FINITE)
        late = [(0, 0), (seen.count, 0)]  # a class token that joins later has no length before
        lengths = [np.pad(token_norms(each), late, constant_values=np.nan)[:, -seen.count :] for each in tokens]
        self.norms.append(np.stack(lengths, axis=1))
        self.means.append(np.stack([each.mean(1) for each in tokens], axis=1))
        if "distill" in self.names:
            self.cosines.append(np.stack([token_similarity(each[:, 0], each[:, 1]) for each in tokens], axis=1))
        if explainer.unseen:
            self.no_occlusion = explainer.unseen
        elif explainer.viewer.classes:
            self.occlude(explainer, pixels, question)
        self.images += len(pixels)

    def patch(self, grid: tuple[int, int]) -> tuple[float, float]:
        """Pixels to a patch."""
        return self.size[0] / grid[0], self.size[1] / grid[1]

    def occlude(self, explainer: Explainer, pixels: Tensor, question: Question) -> None:
        logits, maps = explainer.maps(pixels, question)
        self.way = "left out" if drops_tokens(explainer.model) else "replaced by the mean colour"
        chance = np.stack([np.random.default_rng(self.images + n).random(self.grid) for n in range(len(pixels))])
        attended, classes = maps[:, -1, -1], logits.argmax(-1)
        whole = logits.float().softmax(-1).gather(1, classes[:, None]).cpu().numpy()  # nothing is removed yet
        for name, by, most in (("most", attended, True), ("least", attended, False), ("chance", chance, True)):
            found = probabilities(explainer.model, pixels, by, classes, SHARES[1:], most=most)
            self.left.setdefault(name, []).append(np.concatenate([whole, found], axis=1))


def of_pictures(seen: Seen) -> tuple[list[Plate], list[str]]:
    """What pictures show."""
    plates, notes = list[Plate](), list[str]()
    if seen.no_distances:
        notes.append(f"attention distance: none, {seen.no_distances}")
    else:
        distances = np.nanmean(np.concatenate(seen.distances), axis=0)  # (L, H)
        even = even_distance(seen.grid, seen.patch(seen.grid))
        plates.append(distance_plate(distances, images=seen.images, image_size=seen.size, even=even))
    plates.append(norms_plate(np.concatenate(seen.norms).swapaxes(0, 1), seen.names, seen.grid))
    if seen.cosines:
        plates.append(similarity_by_layer_plate(np.concatenate(seen.cosines).mean(0)))
    if seen.images < FEWEST:
        notes.append(f"alignment of the layers: too few pictures, {seen.images}; expected {FEWEST} or more")
    else:
        plates.append(alignment_plate(alignment(np.concatenate(seen.means).swapaxes(0, 1))))
    if seen.left:
        curves = {name: np.concatenate(parts) for name, parts in seen.left.items()}
        plates.append(
            occlusion_plate(np.array(SHARES), curves["most"], curves["least"], curves["chance"], way=seen.way)
        )
    else:
        notes.append(f"occlusion check: none, {seen.no_occlusion}")
    return plates, notes
