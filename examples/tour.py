"""A tour of the models: the presets, ViT-B/16 compared with the paper's table, and one forward pass step by step."""

import time

import torch

import vitrail
from vitrail.cli.models import models
from vitrail.text import format_table

PAPER = {  # Dosovitskiy 2020, table 1: layers, width, MLP, heads, parameters
    "ViT-B/16": ("12", "768", "3072", "12", "86M"),
    "ViT-L/32": ("24", "1024", "4096", "16", "307M"),
    "ViT-H/14": ("32", "1280", "5120", "16", "632M"),
}


def print_title(text: str) -> None:
    print(f"\n{text}\n{'═' * len(text)}")


def show_paper_comparison() -> None:
    lines: list[tuple[str, ...]] = []
    for name, published in PAPER.items():
        with torch.device("meta"):  # allocates nothing, so even the largest model is built quickly
            model = vitrail.create(name)
        config, parameters = model.config, sum(parameter.numel() for parameter in model.parameters())
        built = (config.depth, config.width, model.blocks[0].mlp.fc1.out_features, config.heads)
        lines.append((name, "paper", *published))
        lines.append(("", "vitrail", *map(str, built), f"{parameters:,}"))
    print("\n".join(format_table(("model", "", "layers", "width", "MLP", "heads", "parameters"), lines, "llrrrrr")))


def show_forward_pass() -> None:
    torch.manual_seed(0)
    model = vitrail.create("ViT-B/16").eval()
    images = torch.rand(1, 3, 224, 224) * 2 - 1  # pixels from −1 to 1, as ViT expects
    start = time.perf_counter()
    with torch.inference_mode():
        logits = model(images)
    seconds = time.perf_counter() - start
    with torch.inference_mode():
        tokens = model.tokens(images)
    print(
        f"An image of 3×224×224 numbers is cut into 14×14 = 196 patches of 3·16·16 = 768 numbers each.\n"
        f"With the class token, {tokens.shape[1]} tokens of width {tokens.shape[2]} enter the encoder and leave it.\n"
        f"The head maps the class token to {logits.shape[1]} logits: {seconds * 1000:.0f} ms on this machine.\n"
        f"The head starts at zero, so the untrained model gives every class the probability "
        f"{logits.softmax(-1).max():.4f}."
    )


if __name__ == "__main__":
    print_title("Models: vitrail models 'vit_base*'")
    models("vit_base*")
    print(f"… {len(vitrail.list_models())} in total: vitrail models")
    print_title("ViT-B/16, layer by layer: vitrail summary ViT-B/16")
    with torch.device("meta"):
        print(vitrail.summarize(vitrail.create("ViT-B/16")))
    print_title("Compared with the paper's table")
    show_paper_comparison()
    print_title("One forward pass")
    show_forward_pass()
