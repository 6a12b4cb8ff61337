"""SigLIP's image tower in transformers: alone, or next to the text tower, which is ignored."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vitrail.models.base.checkpoint_side import ConfigFields, SourceNames
from vitrail.models.base.name_entries import THREE_PARTS, TensorTransform, make_entry
from vitrail.models.names.encoder_names import support_more
from vitrail.models.names.hf_names import make_hf_card

LAYER, STACKED = "encoder.layers.#.", "head.attention.in_proj_"
ADD_AXIS = TensorTransform(lambda parts: parts[0][None], lambda table, _: [table[0]])


def split_pool(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Split q from k and v of the attention pooling, which transformers stores in one tensor."""
    split = dict[str, Tensor]()
    for name, tensor in tensors.items():
        if name.startswith(STACKED):
            q, k, v = tensor.chunk(3)
            split |= {name.replace("in_proj_", "q."): q, name.replace("in_proj_", "kv."): torch.cat([k, v])}
        else:
            split[name] = tensor
    return split


def join_pool(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `split_pool`, under our names."""
    joined = {
        name: tensor for name, tensor in tensors.items() if not name.startswith(("attn_pool.q.", "attn_pool.kv."))
    }
    for part in ("weight", "bias"):
        joined[f"attn_pool.in_proj.{part}"] = torch.cat([tensors[f"attn_pool.{each}.{part}"] for each in ("q", "kv")])
    return joined


def make_siglip_card(config: ConfigFields) -> dict[str, Any]:
    card = make_hf_card(config, "siglip_vision_model", "SiglipVision")
    return card | {
        "intermediate_size": config["mlp_width"] or 4 * config["width"],
        "attention_dropout": config["attention_dropout"],
    }


HF_SIGLIP = SourceNames(
    layout="hf",
    table=(
        make_entry("embeddings.patch_embedding.*", "patch_embed.proj.*"),
        make_entry("embeddings.position_embedding.weight", "pos_embed", ADD_AXIS),
        *(make_entry(f"{LAYER}layer_norm{n}.*", f"blocks.#.norm{n}.*") for n in (1, 2)),
        make_entry([f"{LAYER}self_attn.{part}_proj.*" for part in "qkv"], "blocks.#.attn.qkv.*", THREE_PARTS),
        make_entry(f"{LAYER}self_attn.out_proj.*", "blocks.#.attn.proj.*"),
        *(make_entry(f"{LAYER}mlp.fc{n}.*", f"blocks.#.mlp.fc{n}.*") for n in (1, 2)),
        make_entry("post_layernorm.*", "norm.*"),
        make_entry("head.probe", "attn_pool.latent"),
        *(make_entry(f"head.attention.{part}.*", f"attn_pool.{part}.*") for part in ("q", "kv")),  # read
        make_entry(f"{STACKED}*", "attn_pool.in_proj.*"),  # written
        make_entry("head.attention.out_proj.*", "attn_pool.proj.*"),
        make_entry("head.layernorm.*", "attn_pool.norm.*"),
        *(make_entry(f"head.mlp.fc{n}.*", f"attn_pool.mlp.fc{n}.*") for n in (1, 2)),
    ),
    markers=("embeddings.patch_embedding.weight", "head.probe"),
    accepts=lambda config: config["pool"] == "map",
    supported={**support_more("mlp_width", pool=("map",), class_token=(False,)), "classes": (0,)},
    card=make_siglip_card,
    details={
        "model_type": "siglip_vision_model",
        "other_types": ("siglip",),
        "prefix": "vision_model",
        "norm_eps": 1e-6,
        "hidden_act": "gelu_pytorch_tanh",
        "preprocessing": {"interpolation": "bicubic"},
        "ignored": r"text_model\..*|logit_(scale|bias)|embeddings\.position_ids",
        "before_reading": split_pool,
        "before_writing": join_pool,
    },
)
