"""Our tensors of a text Transformer from those of torch.nn.Transformer and of transformers' Marian."""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

TORCH_NAMES = [
    (r"self_attn\.in_proj_", "attn.qkv."),  # q, k and v stacked in the same order
    (r"self_attn\.out_proj", "attn.proj"),
    (r"multihead_attn\.out_proj", "cross.proj"),
    (r"linear([12])", r"mlp.fc\1"),
]
MARIAN_NORMS = {
    "encoder": {"self_attn_layer_norm": "norm1", "final_layer_norm": "norm2"},
    "decoder": {"self_attn_layer_norm": "norm1", "encoder_attn_layer_norm": "norm2", "final_layer_norm": "norm3"},
}


def convert_torch_names(theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of an encoder or a decoder: layers.0.self_attn.in_proj_weight, …"""
    ours = dict[str, Tensor]()
    for name, tensor in theirs.items():
        if ".multihead_attn.in_proj_" in name:  # rows: q, then k and v
            layer, kind = name.split("multihead_attn.in_proj_")
            q, k, v = tensor.chunk(3)
            ours[f"{layer}cross.q.{kind}"], ours[f"{layer}cross.kv.{kind}"] = q, torch.cat([k, v])
            continue
        for pattern, ours_pattern in TORCH_NAMES:
            name = re.sub(pattern, ours_pattern, name)
        ours[name] = tensor
    return ours


def convert_marian_names(theirs: Mapping[str, Tensor], depth: int) -> dict[str, Tensor]:
    """Of MarianMTModel with one table for source, target and output; its positions are not among ours."""
    ours = {"target_embed.weight": theirs["model.shared.weight"], "output.bias": theirs["final_logits_bias"][0]}
    for side, norms in MARIAN_NORMS.items():
        for layer in range(depth):
            old, new = f"model.{side}.layers.{layer}", f"{side}.layers.{layer}"
            for kind in ("weight", "bias"):
                q, k, v = (theirs[f"{old}.self_attn.{each}_proj.{kind}"] for each in "qkv")
                ours[f"{new}.attn.qkv.{kind}"] = torch.cat([q, k, v])
                ours[f"{new}.attn.proj.{kind}"] = theirs[f"{old}.self_attn.out_proj.{kind}"]
                ours |= {f"{new}.mlp.{fc}.{kind}": theirs[f"{old}.{fc}.{kind}"] for fc in ("fc1", "fc2")}
                ours |= {f"{new}.{norm}.{kind}": theirs[f"{old}.{name}.{kind}"] for name, norm in norms.items()}
                if side == "decoder":
                    q, k, v = (theirs[f"{old}.encoder_attn.{each}_proj.{kind}"] for each in "qkv")
                    ours[f"{new}.cross.q.{kind}"], ours[f"{new}.cross.kv.{kind}"] = q, torch.cat([k, v])
                    ours[f"{new}.cross.proj.{kind}"] = theirs[f"{old}.encoder_attn.out_proj.{kind}"]
    return ours
