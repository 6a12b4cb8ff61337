"""Training steps in float32 and in bfloat16, of vitrail and of other libraries as they come and with autocast on.

    make bench

The four steps of a case take turns, round after round. Ratios to the other library in float32 are computed within each
round; the median of the rounds is printed with the quartiles. Higher is faster. A step is forward, backward and AdamW;
SimCLR's also makes the views, in vitrail's way and in that of lightly's examples. On a CPU without bfloat16
instructions only float32 is measured.
"""

import statistics
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from support.text_peers import PAD, START, make_marian, make_sources

# isort: split
import lightly.models.utils as lightly_utils
import timm
import torch
import torch.nn.functional as F
from cyclopts import Parameter, run
from lightly.models.modules import MaskedVisionTransformerTIMM
from lightly.models.modules.masked_autoencoder_timm import MAEDecoderTIMM
from pretraining_steps import CLOCK, make_simclr_losses, make_task_loss, open_mae_recipe
from results_page import NO_BFLOAT16, describe_run, format_ratio, markdown_table, present
from rich.progress import track
from throughput import BASE, Step, build_transformers_model, time_step
from torch import Tensor, nn
from vit_pytorch.cct import CCT

import vitrail
from vitrail.base.machine import find_bfloat16_instructions
from vitrail.data.batch import Batch
from vitrail.tasks.pretraining.mae import MaskedAutoencoder
from vitrail.tasks.translation import TranslationTask

TURN_SECONDS = 0.3  # of steps in a turn, at least one
HEADING = ("training step", "batch", "compared with", "its items/s", "vitrail", "it, bfloat16", "vitrail, bfloat16")
Loss = tuple[nn.Module, Callable[[], Tensor]]  # a model, and its loss for the next batch


@dataclass(frozen=True)
class Case:
    name: str
    batch: int
    peer: str
    make_losses: Callable[[int], tuple[Loss, Loss]]  # the other library's and ours, by batch


def classify(model: nn.Module, batch: int, pixels: int = 224, classes: int = 1000) -> Loss:
    images, labels = torch.randn(batch, 3, pixels, pixels), torch.randint(classes, (batch,))
    return model, lambda: F.cross_entropy(model(images), labels)


def compare_with_timm(preset: str) -> Callable[[int], tuple[Loss, Loss]]:
    return lambda batch: (classify(timm.create_model(preset), batch), classify(vitrail.create(preset), batch))


def compare_with_transformers(batch: int) -> tuple[Loss, Loss]:
    return classify(build_transformers_model(BASE), batch), classify(vitrail.create(BASE.preset), batch)


def compare_cct(batch: int) -> tuple[Loss, Loss]:
    """CCT-7/3×1 without dropout of attention and blocks, which only vit-pytorch's has."""
    own = vitrail.create("cct_7_3x1_32")
    theirs = CCT(
        img_size=32,
        embedding_dim=256,
        n_conv_layers=1,
        kernel_size=3,
        stride=1,
        padding=1,
        num_layers=7,
        num_heads=4,
        mlp_ratio=2,
        num_classes=10,
        attention_dropout=0.0,
        stochastic_depth_rate=0.0,
    )
    return classify(theirs, batch, 32, 10), classify(own, batch, 32, 10)


def compare_mae(batch: int) -> tuple[Loss, Loss]:
    """The model of the recipe mae-cpu, and the loop of lightly's example with the same sizes."""
    warnings.simplefilter("ignore", FutureWarning)  # of lightly's decoder
    model, settings = open_mae_recipe()
    config = model.config
    (size, _), (patch, _) = config.image_size, config.patch_size
    vit: Any = timm.models.VisionTransformer(
        img_size=size, patch_size=patch, embed_dim=config.width, depth=config.depth, num_heads=config.heads
    )
    encoder: Any = MaskedVisionTransformerTIMM(vit=vit)
    decoder: Any = MAEDecoderTIMM(
        num_patches=vit.patch_embed.num_patches,
        patch_size=patch,
        embed_dim=config.width,
        decoder_embed_dim=settings.decoder_width,
        decoder_depth=settings.decoder_depth,
        decoder_num_heads=settings.decoder_heads,
    )
    images, loss = torch.randn(batch, 3, size, size), nn.MSELoss()

    def compute_loss() -> Tensor:
        kept, hidden = lightly_utils.random_token_mask(
            size=(batch, encoder.sequence_length), mask_ratio=settings.mask_ratio
        )
        encoded = decoder.embed(encoder.encode(images=images, idx_keep=kept))
        tokens = lightly_utils.repeat_token(decoder.mask_token, (batch, encoder.sequence_length))
        tokens = lightly_utils.set_at_index(tokens, kept, encoded.type_as(tokens))
        decoded = lightly_utils.get_at_index(decoder.decode(tokens), hidden)
        patches = lightly_utils.patchify(images, patch)
        return loss(decoder.predict(decoded), lightly_utils.get_at_index(patches, hidden - 1))

    return (nn.ModuleList([encoder, decoder]), compute_loss), make_task_loss(MaskedAutoencoder(model, settings), batch)


def compare_translation(batch: int) -> tuple[Loss, Loss]:
    """The sizes of the recipe translate-cpu, post-norm, as transformers' Marian has it."""
    fields = {"vocabulary": 4000, "width": 256, "heads": 4, "encoder_depth": 3, "decoder_depth": 3, "mlp_width": 512}
    model: Any = vitrail.create("transformer_base", **fields, share="none", output_bias=True, dropout=0.1)
    theirs = make_marian(model, dropout=0.1)
    source, target = (make_sources(batch, 4000, (8, 20), seed) for seed in (0, 1))
    begun = torch.cat([torch.full((batch, 1), START), target[:, :-1]], 1).masked_fill(target == PAD, PAD)
    pairs = Batch({"source": source, "target_in": begun, "target_out": target, "share": torch.ones(())}, {}, batch)
    task = TranslationTask(model)
    task.smoothing = 0.1

    def compute_loss() -> Tensor:
        logits = theirs(input_ids=source, attention_mask=source != PAD, decoder_input_ids=begun).logits
        return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=PAD, label_smoothing=0.1)

    return (theirs, compute_loss), (task, lambda: task(pairs, CLOCK)[0])


CASES = (
    *(
        Case(name, batch, "timm", compare_with_timm(preset))
        for name, batch, preset in (
            ("ViT-Ti/16", 8, "vit_tiny_patch16_224"),
            ("ViT-Ti/16", 32, "vit_tiny_patch16_224"),
            ("ViT-S/16", 8, "vit_small_patch16_224"),
            ("ViT-B/16", 4, "vit_base_patch16_224"),
            ("Swin-T", 4, "swin_tiny_patch4_window7_224"),
        )
    ),
    Case("ViT-B/16", 4, "transformers", compare_with_transformers),
    Case("CCT-7/3×1", 64, "vit-pytorch", compare_cct),
    Case("MAE, `mae-cpu`", 128, "lightly", compare_mae),
    Case("SimCLR, `simclr-cpu`", 128, "lightly", make_simclr_losses),
    Case("translation, `translate-cpu`", 64, "transformers", compare_translation),
)


def make_step(loss: Loss, *, bfloat16: bool) -> Step:
    model, compute_loss = loss
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-4, fused=True)
    model.train()

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            value = compute_loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(case: Case, rounds: int, precisions: tuple[bool, ...]) -> dict[tuple[str, bool], list[float]]:
    """Seconds per step of each library in each precision; the order changes every round."""
    losses = dict(zip((case.peer, "vitrail"), case.make_losses(case.batch), strict=True))
    steps = {
        (name, bfloat16): make_step(loss, bfloat16=bfloat16) for bfloat16 in precisions for name, loss in losses.items()
    }
    repeats = {key: max(1, round(TURN_SECONDS / time_step(step, 2))) for key, step in steps.items()}
    times = {key: list[float]() for key in steps}
    order = list(steps)
    for _ in track(range(rounds), f"{case.name} × {case.batch}".ljust(36), transient=True):
        for key in order:
            times[key].append(time_step(steps[key], repeats[key]))
        order.append(order.pop(0))
    return times


def format_row(case: Case, times: Mapping[tuple[str, bool], list[float]]) -> list[str]:
    base = times[case.peer, False]
    others = (("vitrail", False), (case.peer, True), ("vitrail", True))
    ratios = [format_ratio(base, times[key]) if key in times else NO_BFLOAT16 for key in others]
    second = format_ratio(times[case.peer, True], times["vitrail", True]) if (case.peer, True) in times else NO_BFLOAT16
    return [case.name, str(case.batch), case.peer, f"{case.batch / statistics.median(base):.1f}", *ratios, second]


def main(
    *,
    rounds: int = 8,
    threads: int = 2,
    only: Annotated[str, Parameter(help="Part of the names to measure.")] = "",
    page: Annotated[Path | None, Parameter(help="Page whose section is replaced.")] = None,
) -> None:
    """Measure every case and print the table."""
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    precisions = (False, True) if find_bfloat16_instructions() else (False,)
    rows = [format_row(case, measure(case, rounds, precisions)) for case in CASES if only in case.name]
    heading = (*HEADING, "vitrail / it, both bfloat16")
    table = markdown_table(heading, rows, "lrlrrrrr")
    present("precision", (table, describe_run("precision.py", f"--rounds {rounds}", threads)), page)


if __name__ == "__main__":
    run(main)
