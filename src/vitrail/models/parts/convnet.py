"""A convnet: a stem, then stages of blocks, each at half the resolution of the one before.

B batch, D channels of a feature map, h·w its positions.
"""

from collections.abc import Sequence

from torch import Tensor

from vitrail.layers.positions import Grid
from vitrail.models.base.contract import ImageModel, ImageSizes, Level


class ConvNet(ImageModel):
    """An image model without attention; it takes images of any size. A family writes `run_stem` and `logits`."""

    final_norm = ""
    no_maps_reason = "it has no attention"
    no_masking_reason = no_dropping_reason = "it has no patches"
    stage_names: Sequence[str]  # names of the stages in the module

    def declare_stages(self, image: Grid, stride: int, widths: Sequence[int], blocks: Sequence[Sequence[str]]) -> None:
        """Set levels and sizes; `stride` is that of the first stage, `widths` and names of `blocks` are per stage."""
        strides = [stride * 2**stage for stage in range(len(widths))]
        self.levels = tuple(
            Level(
                grid=((image[0] - 1) // each + 1, (image[1] - 1) // each + 1),  # rounded up
                stride=(each, each),
                width=width,
                blocks=tuple(names),
            )
            for each, width, names in zip(strides, widths, blocks, strict=True)
        )
        side = 2 ** (len(widths) + 1) + 1  # leaves more than one position in the last map
        self.sizes = ImageSizes(multiple=(1, 1), minimum=(side, side))

    def run_stem(self, images: Tensor) -> Tensor:
        """The input of the first stage."""
        raise NotImplementedError

    def encode(self, images: Tensor, queries: int | None = None) -> Tensor:  # noqa: ARG002  # the mean reads all
        """The last feature map, each of its positions a token: (B, C, H, W) → (B, h·w, D)."""
        self.check_images(images)
        x = self.run_stem(images)
        for name in self.stage_names:  # not by `feature_maps`, which keeps the memory of all maps
            x = self.get_submodule(name)(x)
        return x.flatten(2).transpose(1, 2)

    def feature_maps(self, images: Tensor) -> list[Tensor]:
        """The output of each stage: (B, C, H, W) → [(B, D, h, w), …]."""
        self.check_images(images)
        maps = [self.run_stem(images)]
        for name in self.stage_names:
            maps.append(self.get_submodule(name)(maps[-1]))
        return maps[1:]
