"""Optimizers, among them LARS and Muon, parameter groups, frozen layers and the moving average of the weights."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from vitrail.base.errors import ConfigError
from vitrail.models.base.contract import ImageModel
from vitrail.models.base.text_contract import TextModel
from vitrail.recipes.recipe import OptimizationSettings
from vitrail.tasks.task import Task

USUAL_BLOCK_NAME = re.compile(r"(?:blocks|layer\d+)\.\d+(?=\.)")  # in modules of other libraries
USUAL_HEAD_NAMES = ("head", "fc", "classifier")
# Jordan's: steep at zero, so five rounds bring all singular values to about 1
NEWTON_SCHULZ_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


@dataclass(frozen=True)
class NamedWeight:
    """A parameter and its level: 0 for the stem, 1 … L for the blocks, L + 1 for the layers after them."""

    name: str
    tensor: nn.Parameter
    level: int
    in_decoder: bool = False  # in a layer of a text model next to the backbone

    @property
    def decays(self) -> bool:
        """Whether weight decay applies: to matrices and kernels, not to norms, biases, tokens and positions."""
        return self.tensor.ndim >= 2 and self.name.endswith(("weight", "weight_v"))


def list_weights(model: nn.Module) -> list[NamedWeight]:
    """All parameters in order; those before the first block are the stem, later ones outside of blocks the head.

    What is between two blocks of an image model, as where its grid changes, has the level of the second one.
    """
    levels = {block: level for level, block in enumerate(list_block_names(model), start=1)}
    named = [
        (name, tensor, next((level for block, level in levels.items() if name.startswith(f"{block}.")), None))
        for name, tensor in model.named_parameters()
    ]
    stem = len(list(takewhile(lambda each: each[2] is None, named)))
    outside, found = len(levels) + 1, list[NamedWeight]()
    for number, (name, tensor, level) in reversed([*enumerate(named)]):
        outside = level if level is not None and isinstance(model, ImageModel) else outside
        found.append(NamedWeight(name, tensor, outside * (number >= stem) if level is None else level))
    return found[::-1]


def list_block_names(model: nn.Module) -> list[str]:
    """The blocks of a model in order, as it declares them; of other modules, those with the usual names."""
    if isinstance(model, ImageModel):
        return [*model.sequence]
    if isinstance(model, TextModel):
        return [*model.blocks]
    matches = [USUAL_BLOCK_NAME.match(name) for name, _ in model.named_parameters()]
    return list(dict.fromkeys(match[0] for match in matches if match))


def list_head_names(model: nn.Module) -> tuple[str, ...]:
    """The names of the classifier heads of a model, with a dot."""
    names = [name for _, name in model.classifiers] if isinstance(model, ImageModel) else USUAL_HEAD_NAMES
    return tuple(f"{name}." for name in names)


def list_task_weights(task: Task) -> list[NamedWeight]:
    """The parameters of the backbone with their levels, then all others at the level of the head."""
    backbone = list_weights(task.backbone)
    last = max((each.level for each in backbone), default=0)
    rest = [(name, tensor) for name, tensor in task.named_parameters() if not name.startswith("backbone.")]
    decoders = [(name, part) for name, part in task.named_children() if isinstance(part, TextModel)]
    layers = tuple(f"{name}.{block}." for name, part in decoders for block in part.blocks)
    return [*backbone, *(NamedWeight(f"task.{name}", each, last, name.startswith(layers)) for name, each in rest)]


def freeze_all_but_last_blocks(task: Task, blocks: int | None) -> None:
    """Freeze all of the backbone but its head and the last `blocks` blocks with the norm after them; None: nothing."""
    if blocks is None:
        return
    every, heads = list_weights(task.backbone), list_head_names(task.backbone)
    has_head = any(weight.name.startswith(heads) for weight in every)
    if not has_head and len(list_task_weights(task)) == len(every):
        raise ConfigError(f"train_blocks is {blocks}; expected none, since the model has no head")
    last = max(weight.level for weight in every)
    if blocks >= last:
        raise ConfigError(f"train_blocks is {blocks}; expected less than {last}, the number of blocks, or none")
    for weight in every:
        trained = weight.name.startswith(heads) or (blocks > 0 and weight.level >= last - blocks)
        weight.tensor.requires_grad_(trained and weight.tensor.requires_grad)


def set_frozen_batch_norms_to_eval(model: nn.Module) -> None:
    """Put frozen batch norms into eval mode, so that their running statistics do not change."""
    for module in model.modules():
        is_norm = isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d)
        own = [weight.requires_grad for weight in module.parameters()] if is_norm else []
        if own and not any(own):
            module.eval()


def create_optimizers(task: Task, settings: OptimizationSettings) -> list[Optimizer]:
    """Create one optimizer, or two for Muon. The learning rate of each parameter group is multiplied by its `scale`."""
    every = list_task_weights(task)
    trained, last = [each for each in every if each.tensor.requires_grad], max(each.level for each in every)
    if settings.optimizer in ("sgd", "lars"):
        kind = SGD if settings.optimizer == "sgd" else Lars
        return [kind(make_parameter_groups(trained, last, settings), lr=settings.lr, momentum=settings.momentum)]
    first = next((each.name for each in every if each.decays), "")
    maps = [each for each in trained if settings.optimizer == "muon" and is_muon_weight(each, first, last)]
    rest = [each for each in trained if each.name not in {each.name for each in maps}]
    made: list[Optimizer] = []
    if rest:
        fused = rest[0].tensor.device.type in ("cpu", "cuda")
        betas = (settings.momentum, settings.beta2)
        made.append(AdamW(make_parameter_groups(rest, last, settings), lr=settings.lr, betas=betas, fused=fused))
    if maps:
        groups = list[dict[str, Any]]()
        for parts in (1, 2, 3):
            joined = [each for each in maps if count_joined_maps(each.name) == parts]
            groups += [{**group, "parts": parts} for group in make_parameter_groups(joined, last, settings)]
        made.append(Muon(groups, lr=settings.lr))
    return made


def count_joined_maps(name: str) -> int:
    """How many maps a matrix holds: queries, keys and values, or the keys and values of a memory."""
    return 3 if "qkv" in name else 2 if ".cross.kv." in name else 1


def is_muon_weight(weight: NamedWeight, first: str, last: int) -> bool:
    """Whether Muon updates it: matrices and kernels; not the first layer, a head, or a kernel of one input channel."""
    hidden = weight.level < last or weight.in_decoder
    return weight.decays and weight.name != first and hidden and weight.tensor.shape[1] > 1


def make_parameter_groups(
    trained: Sequence[NamedWeight], last: int, settings: OptimizationSettings
) -> list[dict[str, Any]]:
    """Group the weights by level and by whether they decay."""
    return [
        {
            "params": [weight.tensor for weight in members],
            "scale": settings.layer_decay ** (last - level),
            "weight_decay": settings.weight_decay if decays else 0.0,
            "decays": decays,
        }
        for (level, decays), members in groupby(sorted(trained, key=parameter_group_key), key=parameter_group_key)
    ]


def parameter_group_key(weight: NamedWeight) -> tuple[int, bool]:
    return weight.level, weight.decays


def set_scaled_lr(optimizers: Sequence[Optimizer], lr: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr * group["scale"]


def set_scheduled_settings(optimizers: Sequence[Optimizer], values: Mapping[str, float]) -> None:
    """Set the settings that follow a schedule; weight decay applies only to weights that decay."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if "weight_decay" in values and group["decays"]:
                group["weight_decay"] = values["weight_decay"]
            if "betas" in group:
                group["betas"] = values.get("momentum", group["betas"][0]), values.get("beta2", group["betas"][1])
            elif "momentum" in values and not isinstance(optimizer, Muon):
                group["momentum"] = values["momentum"]


class WeightEMA:
    """Exponential moving average (EMA) of a model's weights; the decay is smaller in the first steps."""

    def __init__(self, module: nn.Module, averaged_module: Any, decay: float) -> None:
        self.module, self.averaged_module, self.decay = module, averaged_module.requires_grad_(False).eval(), decay

    @torch.no_grad()
    def update(self, step: int) -> None:
        decay = min(self.decay, (1 + step) / (10 + step))
        for mine, its in zip(self.averaged_module.parameters(), self.module.parameters(), strict=True):
            mine.lerp_(its, 1 - decay)
        for mine, its in zip(self.averaged_module.buffers(), self.module.buffers(), strict=True):
            mine.copy_(its)


Trained = tuple[Tensor, Tensor, dict[str, Any]]  # a weight, its gradient and its parameter group


class FirstOrderOptimizer(Optimizer):
    """An optimizer that needs only gradients; a subclass writes `update_weights`."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss = None if closure is None else closure()
        every = ((weight, weight.grad, group) for group in self.param_groups for weight in group["params"])
        self.update_weights([each for each in every if each[1] is not None])
        return loss

    def update_weights(self, trained: Sequence[Trained]) -> None:
        raise NotImplementedError


class Lars(FirstOrderOptimizer):
    """LARS (You 2017, arXiv 1708.03888) as in SimCLR, BYOL and MAE: momentum SGD whose step follows each weight's norm.

    Biases and norms (at most one axis) have neither a trust ratio nor weight decay. You divides by |gradient| + decay ·
    |weight|, as timm.optim.Lars does; here it is |gradient + decay · weight|, as in the code of the three. Without
    weight decay both are equal. The learning rate multiplies the momentum, as in BYOL, MAE and torch's SGD; in SimCLR
    it is inside, which differs only while the learning rate changes.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.001,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust})

    def update_weights(self, trained: Sequence[Trained]) -> None:
        for weight, gradient, group in trained:
            if weight.ndim > 1:
                gradient = gradient.add(weight, alpha=group["weight_decay"])
                size, slope = weight.norm(), gradient.norm()
                ratio = torch.where((size > 0) & (slope > 0), group["trust"] * size / slope, 1.0)
                gradient = gradient * ratio
            state = self.state[weight]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(weight)
            weight.add_(state["momentum_buffer"].mul_(group["momentum"]).add_(gradient), alpha=-group["lr"])


class Muon(FirstOrderOptimizer):
    """Muon (Jordan 2024): each matrix is updated by the orthogonal matrix nearest to its momentum.

    torch.optim.Muon uses the same rule, but always orthogonalizes in bfloat16, which is 17 times slower than float32 on
    a CPU without bfloat16, and supports neither convolution kernels nor matrices that hold several maps. Here
    `orthogonalize_in` is the precision of the training step, momenta are float32, and parameter groups may have
    `parts`, the number of maps stacked in each matrix: 3 for q, k, v.
    """

    orthogonalize_in = torch.float32  # on a GPU always bfloat16

    def __init__(
        self, params: Iterable[dict[str, Any]], lr: float, *, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "parts": 1})

    def update_weights(self, trained: Sequence[Trained]) -> None:
        maps = [self.update_momentum(*each).flatten(1).chunk(each[2]["parts"]) for each in trained]  # a row per filter
        found = iter(orthogonalize_all([part for parts in maps for part in parts], self.orthogonalize_in))
        for parts, (weight, _, group) in zip(maps, trained, strict=True):
            # of the size of AdamW's updates, so that both use the same learning rate (Liu 2025, arXiv 2502.16982)
            moves = [next(found) * (0.2 * max(part.shape) ** 0.5) for part in parts]
            weight.mul_(1 - group["lr"] * group["weight_decay"])
            weight.add_((torch.cat(moves) if len(moves) > 1 else moves[0]).view_as(weight), alpha=-group["lr"])

    def update_momentum(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        """Update the momentum of a weight, and return Nesterov's."""
        state = self.state[weight]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        average = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        return gradient.lerp(average, group["momentum"])


def orthogonalize_all(matrices: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """`orthogonalize` each matrix; in bfloat16 those of one shape at once, which takes a third of the time."""
    if dtype == torch.float32:
        return [orthogonalize(matrix) for matrix in matrices]
    places = dict[torch.Size, list[int]]()
    for place, matrix in enumerate(matrices):
        places.setdefault(matrix.shape, []).append(place)
    found = list(matrices)
    for same in places.values():
        each = orthogonalize(torch.stack([matrices[place] for place in same]), dtype=dtype)
        for place, matrix in zip(same, each, strict=True):
            found[place] = matrix
    return found


def orthogonalize(matrices: Tensor, rounds: int = 5, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Approximate U Vᵀ of the SVD U S Vᵀ by Newton–Schulz iteration; singular values end between 0.7 and 1.2."""
    a, b, c = NEWTON_SCHULZ_COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.float().mT if tall else matrices.float()
    x = (x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)).to(torch.bfloat16 if matrices.is_cuda else dtype)
    x = x.contiguous() if x.ndim == 3 else x  # products of transposed matrices are slow if there are several
    for _ in range(rounds):
        square = x @ x.mT
        if x.ndim == 3:  # sums within the products, which round once
            x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
        else:
            x = a * x + (b * square + c * square @ square) @ x
    return (x.mT if tall else x).to(matrices.dtype)
