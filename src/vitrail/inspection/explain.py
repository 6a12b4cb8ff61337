"""What is it looking at? One picture, one model: rollout, attention by layer and head, one class, norms."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitrail.data.images import open_image
from vitrail.data.preprocessing import Preprocessing, seen_box
from vitrail.errors import DataError, VitrailError
from vitrail.figures import Plate
from vitrail.inspection.capture import Capture, attention_layers, capture, read_by_head, token_states, unseen
from vitrail.inspection.overlay import Box, overlay_figure, shown
from vitrail.inspection.question import HEAD, Method, Question, settled, token_index, usual_method
from vitrail.inspection.rollout import (
    FUSES,
    Fuse,
    as_picture,
    fused,
    square,
    times,
    token_gradient_rollout,
    token_rollout,
)
from vitrail.inspection.tokens import token_norms
from vitrail.predict.answers import NOT_FINITE, Answer, Prediction, softmax
from vitrail.predict.viewer import Viewer

LONGEST = 180  # bytes of a name


@dataclass(frozen=True, kw_only=True, eq=False)  # arrays are neither equal nor not
class Explanation:
    """A picture and where a model looked in it; shows itself in a notebook."""

    name: str
    question: Question
    maps: NDArray[Any]  # (layers, heads, h, w); of attention each sums to 1
    photo: NDArray[np.uint8]  # (rows, columns, 3), no larger than a figure needs
    box: Box  # what the model saw of it: left, top, right, bottom in pixels
    asked: Answer | None = None  # the class that was asked about; a model without a head has none
    prediction: Prediction | None = None

    @property
    def map(self) -> NDArray[Any]:
        """The last of the maps, mostly the only one: (h, w)."""
        return self.maps[-1, -1]

    @property
    def titles(self) -> tuple[tuple[str, ...], ...]:
        """Of each map."""
        return self.question.titles(*self.maps.shape[:2])

    @property
    def is_empty(self) -> bool:
        """Nothing speaks for the class, as in an untrained model or from a token that is not read: all maps are 0."""
        return self.question.method == "grad-rollout" and not self.maps.any()

    @property
    def plate(self) -> Plate:
        words, asked, name = self.question.words, self.asked, Path(self.name).name or "picture"
        answer = "" if asked is None else f"{asked.name} {asked.probability:.1%}"
        words += ", where nothing speaks for the class" * self.is_empty
        bright = (
            "have the longest tokens" if self.question.method == "norms" else "get most attention; 1 is an even share"
        )
        return Plate(
            name=f"{short_stem(name)}.{self.question.method}",
            title=f"{name}: {words}",
            caption=f"{words[0].upper()}{words[1:]} over {name}"
            + f"; {answer}" * bool(answer)
            + f". Bright patches {bright}.",
            arrays={"maps": self.maps, "photo": self.photo, "box": np.array(self.box)},
            draw=lambda: self.drawn(" · ".join(filter(None, (answer, words)))),
        )

    def drawn(self, heading: str) -> Any:
        if self.question.method == "norms":
            panels, unit = self.maps, "length of the token"
        else:
            panels, unit = self.maps * (self.maps.shape[-2] * self.maps.shape[-1]), "attention (1 = even)"
        patch = tuple(map(int, self.question.token.split(","))) if "," in self.question.token else None
        return overlay_figure(self.photo, self.box, panels, self.titles, heading, unit, patch)

    def _repr_png_(self) -> bytes:
        return self.plate.png()


def short_stem(name: str) -> str:
    """Of a file's name, so much that an ending can follow: 255 bytes are the most for most disks."""
    stem = Path(name).stem
    data = stem.encode("utf-8", "surrogateescape")
    return stem if len(data) <= LONGEST else data[:LONGEST].decode("utf-8", "ignore")


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
        self.unseen = unseen(self.model)  # why there are no maps, but only tokens
        self.layers = [] if self.unseen else attention_layers(self.model)
        self.usual: Method = usual_method(self.model, self.layers)  # where no method is named

    def explain(
        self,
        image: Any,
        method: Method | None = None,
        *,
        layer: int | Literal["all"] = -1,
        head: int | Fuse | Literal["all"] = "mean",
        token: str = HEAD,
        of_class: int | str | None = None,
        discard: float = 0.0,
    ) -> Explanation:
        """Where the model looks in a picture of any kind that `vitrail.data.images.open_image` takes."""
        question = Question(
            method=method or self.usual, layer=layer, head=head, token=token, of_class=of_class, discard=discard
        )
        return self.ask(image, self.settled(question), str(image) if isinstance(image, str | Path) else "picture")

    def settled(self, question: Question) -> Question:
        """The question as `ask` takes it; what cannot be asked of this model is refused."""
        return settled(question, self.model, self.layers, self.viewer.labels)

    def ask(self, image: Any, question: Question, name: str = "picture") -> Explanation:
        """As `explain`, of a question that is settled."""
        picture = open_image(image)
        photo, box = shown(picture, seen_box((picture.height, picture.width), self.viewer.preprocessing))
        try:
            pixels = self.viewer.see([picture])
        except DataError as error:  # which knows the picture, but not its name
            raise DataError(f"{name!r}: {error}") from None
        logits, maps = self.maps(pixels, question)
        if not np.isfinite(maps).all():
            raise VitrailError(NOT_FINITE)
        prediction = asked = None
        if self.viewer.classes:
            (prediction,) = self.viewer.likeliest(logits, 5)
            index = prediction.top[0].index if question.of_class is None else int(question.of_class)
            asked = self.viewer.answer(index, softmax(logits.float().numpy(force=True))[0, index].item())
        return Explanation(
            name=name,
            question=question,
            maps=maps[0],
            photo=photo,
            box=box,
            asked=asked,
            prediction=prediction,
        )

    def maps(self, pixels: Tensor, question: Question) -> tuple[Tensor, NDArray[Any]]:
        """Logits and what a settled question asks for: (B, C, H, W) → (B, classes), (B, layers, heads, h, w)."""
        if question.method == "norms":
            return self.norms(pixels, self.layers_for(question))
        logits, seen, slopes = self.watched(pixels, question)
        if question.method == "pool":
            assert seen.pooled is not None  # a settled question has seen to that
            rows = [[seen.pooled.cpu().numpy()]]
        else:
            attention = [each.cpu().numpy() for each in seen.maps]  # each (B, H, N, N)
            rows = followed(question, self.token(seen, question.token), attention, slopes)
        maps = [np.stack([as_picture(each, seen.patches) for each in row], axis=1) for row in rows]
        return logits, np.stack(maps, axis=1)

    def watched(self, pixels: Tensor, question: Question) -> tuple[Tensor, Capture, list[NDArray[Any]]]:
        """One forward pass: logits, the attention that the question needs, and for grad-rollout the slopes in it."""
        heads = [question.head] if isinstance(question.head, int) else None
        by_class = question.method == "grad-rollout"
        with torch.inference_mode(False), torch.set_grad_enabled(by_class):
            pixels = pixels.clone() if pixels.is_inference() else pixels  # those have no gradients
            with capture(self.model, self.layers_for(question), heads, gradients=by_class) as seen:
                logits: Tensor = self.model(pixels)
            slopes = self.slopes(seen, logits, question.of_class) if by_class else []
        return logits.detach(), seen, slopes

    def layers_for(self, question: Question) -> Sequence[int]:
        """Those that have to be seen: the one asked about, and for a rollout all up to it."""
        if question.method == "pool":
            return []
        if question.layer == "all":
            return range(len(self.layers) or len(self.model.blocks))
        return range(question.layer + 1) if "rollout" in question.method else [question.layer]

    def slopes(self, seen: Capture, logits: Tensor, of_class: int | str | None) -> list[NDArray[Any]]:
        """Of the class, or of each picture's likeliest, in every probability."""
        asked = (
            logits.argmax(-1) if of_class is None else torch.full_like(logits[:, 0], int(of_class), dtype=torch.long)
        )
        return [each.float().cpu().numpy() for each in seen.gradients(logits.gather(1, asked[:, None]).sum())]

    def token(self, seen: Capture, name: str) -> NDArray[Any]:
        """Shares of all tokens, (B or 1, N), of which the token asked about has all."""
        index = token_index(name, self.model, seen.prefix, seen.patches)
        if index is None:
            return read_by_head(seen).cpu().numpy()
        return np.eye(seen.count, dtype=np.float32)[index : index + 1]

    @torch.no_grad()
    def norms(self, pixels: Tensor, layers: Sequence[int]) -> tuple[Tensor, NDArray[Any]]:
        """Lengths of the patches' tokens after the blocks that hold these layers; the last computes them all."""
        with token_states(self.model) as states, capture(self.model, []) as seen:
            logits = self.model.logits(self.model.tokens(pixels))
        h, w = seen.patches
        each = max(1, len(self.layers) // (len(states) - 2))  # attentions in a block
        lengths = [token_norms(states[layer // each + 1].float().cpu().numpy())[:, -h * w :] for layer in layers]
        return logits, np.stack(lengths, axis=1).reshape(len(pixels), len(layers), 1, h, w)


def followed(
    question: Question, token: NDArray[Any], maps: Sequence[NDArray[Any]], slopes: Sequence[NDArray[Any]]
) -> list[list[NDArray[Any]]]:
    """What the token is made of, (B, N), in rows of layers and columns of heads; the maps are (B, H, N, N)."""
    fuse = question.head if question.head in FUSES else "mean"
    if question.method == "attention":
        return [[times(token, square(fused(one, fuse))) for (one,) in by_heads([each], question)] for each in maps]
    ends = range(1, len(maps) + 1) if question.layer == "all" else [len(maps)]
    if question.method == "grad-rollout":
        return [[token_gradient_rollout(token, maps[:end], slopes[:end])] for end in ends]
    return [
        [token_rollout(token, part, fuse, discard=question.discard) for part in by_heads(maps[:end], question)]
        for end in ends
    ]


def by_heads(maps: Sequence[NDArray[Any]], question: Question) -> Sequence[Sequence[NDArray[Any]]]:
    """The layers with all of their heads, or where each is asked for by itself, once for each head."""
    if question.head != "all":
        return [maps]
    return [[each[:, [number]] for each in maps] for number in range(min(each.shape[1] for each in maps))]
