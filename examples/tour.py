"""A tour of the models: the presets, ViT-B/16 compared with the paper's table, and one forward pass step by step."""

import time

import torch

import vitrail
from vitrail.base.text import format_table
from vitrail.cli.models import models

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
        patches = model.patch_embed(images)
        tokens = torch.cat([model.cls_token, patches], dim=1) + model.pos_embed
        block = model.blocks[0]
        attended = tokens + block.attn(block.norm1(tokens))
        encoded = attended + block.mlp(block.norm2(attended))
        for each in model.blocks[1:]:
            encoded = each(encoded)
        assert torch.allclose(model.norm(encoded), model.tokens(images), atol=1e-4)
        class_token = model.norm(encoded)[:, 0]
    steps = (
        ("images", images, "3 channels of 224×224 pixels"),
        ("patch_embed", patches, "14×14 = 196 patches of 3·16·16 numbers, each mapped to a token of width 768"),
        ("+ cls_token, + pos_embed", tokens, "the class token first; each token gets the embedding of its position"),
        ("x + attn(norm1(x))", attended, f"{model.config.heads} heads: every token reads from all tokens"),
        ("x + mlp(norm2(x))", attended, "each token on its own, 768 → 3,072 → 768; 11 more blocks follow"),
        ("norm, class token", class_token, "the only token that the head reads"),
        ("head", logits, "one logit per class; the head starts at zero, so all classes are equally likely"),
    )
    rows = [(name, "×".join(map(str, tensor.shape)), text) for name, tensor, text in steps]
    print("\n".join(format_table(("step", "shape", "what happens"), rows, "lll")))
    print(f"One image takes {seconds * 1000:.0f} ms on this machine.")


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
