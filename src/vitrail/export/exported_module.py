"""An exported model in place of a torch module, for evaluation, comparison and as a teacher."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitrail.export.exported_model import ExportedModel
from vitrail.models.base.checks import Size


@dataclass(frozen=True, kw_only=True)
class ExportedConfig:
    """What evaluation needs to know, and the digest that tells exports apart."""

    image_size: Size
    channels: int
    classes: int
    precision: str
    digest: str


class ExportedModule(nn.Module):
    """Normalised images (B, C, rows, columns) → logits (B, classes), computed by ONNX Runtime without gradients."""

    def __init__(self, exported: ExportedModel) -> None:
        super().__init__()
        about = exported.description
        self.exported = exported
        self.config = ExportedConfig(
            image_size=about.preprocessing.image_size,
            channels=len(about.preprocessing.mean),
            classes=about.classes,
            precision=about.precision,
            digest=f"{about.digest} {sorted(about.files.items())}",
        )
        self.placeholder = nn.Parameter(torch.empty(0), requires_grad=False)  # tells device and dtype
        for name, values in (("mean", about.preprocessing.mean), ("std", about.preprocessing.std)):
            self.register_buffer(name, torch.tensor(values)[:, None, None], persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        # exact: float32 keeps (p/255 - mean)/std of a pixel p far closer to it than to its neighbours
        pixels = (images * self.get_buffer("std") + self.get_buffer("mean")).mul(255).round().clamp(0, 255)
        array = pixels.byte().permute(0, 2, 3, 1).contiguous().numpy(force=True)
        return torch.from_numpy(self.exported.run(array)).to(images.device)
