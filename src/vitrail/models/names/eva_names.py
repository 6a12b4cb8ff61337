"""Checkpoints of DINOv3 and EVA-02: the config from shapes, and the names in timm, transformers and DINOv3's code."""

from typing import Any

from vitrail.models.base import checkpoint_side as side
from vitrail.models.base.name_entries import (
    THREE_PARTS,
    TWO_PARTS,
    NameEntry,
    make_entry,
    make_same_name_entries,
)
from vitrail.models.names import encoder_names
from vitrail.models.names.hf_names import make_hf_card
from vitrail.models.names.tensor_shapes import get_tensor_shape
from vitrail.models.parts.qv_bias import QV_IN_QKV

BLOCK, QV_BIAS = "blocks.#.", "blocks.#.attn.qkv.qv_bias"
DEFAULT_GRID = 16  # rows and columns of patches in images of a model without a table, which fits any size
HEADS = {192: 3, 384: 6, 768: 12, 1024: 16, 1280: 20, 4096: 32}  # of DINOv3
CLIP_MEAN_STD = {"mean": [0.48145466, 0.4578275, 0.40821073], "std": [0.26862954, 0.26130258, 0.27577711]}  # of EVA-02
UNUSED = r".*(rope_embed\.periods|\.bias_mask)|mask_token|local_cls_norm\..*|projectors\..*"  # of training, or computed


def infer_config(shapes: side.TensorShapes) -> side.InferredConfig:
    """EVA-02 has a table and SwiGLU, EVA a table only, DINOv3 no table."""
    fields = encoder_names.infer_encoder_fields(shapes)
    registers = get_tensor_shape(shapes, "reg_token", 3)[1] if "reg_token" in shapes else 0
    swiglu = shapes["blocks.0.mlp.fc1.weight"][0] == 2 * shapes["blocks.0.mlp.fc2.weight"][1]
    table = "pos_embed" in shapes
    fields |= {
        "activation": "swiglu" if swiglu else "gelu",
        "mlp_norm": "blocks.0.mlp.norm.weight" in shapes,
        "qv_bias": QV_BIAS.replace("#", "0") in shapes,
        "registers": registers,
        "rotary": "centred" if not table else "indexed" if swiglu else "none",
        "positions": "learned" if table else "none",
        "pool": "mean_norm" if "fc_norm.weight" in shapes else "mean",
        "norm_eps": 1e-6 if table else 1e-5,
    }
    if table:
        return side.InferredConfig(fields=fields, stride=fields["patch_size"], prefix=1 + registers)
    fields["image_size"] = tuple(DEFAULT_GRID * pixels for pixels in fields["patch_size"])
    return side.InferredConfig(fields=fields)


def make_timm_card(config: side.ConfigFields) -> dict[str, Any]:
    """The arguments of timm's Eva; its DINOv3 and EVA-02 differ in all of them."""
    hidden, centred = config["mlp_width"] or 4 * config["width"], config["rotary"] == "centred"
    arguments = encoder_names.make_timm_arguments(config) | {
        "mlp_ratio": (hidden + 0.5) / config["width"],
        "qkv_bias": config["qv_bias"],
        "qkv_fused": not config["mlp_norm"],
        "swiglu_mlp": config["activation"] == "swiglu",
        "swiglu_align_to": int(centred and config["activation"] == "swiglu"),
        "scale_mlp": config["mlp_norm"],
        "num_reg_tokens": config["registers"],
        "use_abs_pos_emb": config["positions"] == "learned",
        "use_rot_pos_emb": config["rotary"] != "none",
        "rope_type": "dinov3" if centred else "cat",
        "rope_temperature": 100.0 if centred else 10000.0,
        "rope_rotate_half": centred,
        "global_pool": encoder_names.TIMM_POOLS[config["pool"]],
        "use_fc_norm": config["pool"] == "mean_norm",
        "dynamic_img_size": False,
    }
    # any model with the same norms, which the arguments cannot set
    name = "vit_small_patch16_dinov3" if config["norm_eps"] == 1e-5 else "eva02_tiny_patch14_224"
    arguments |= {} if centred else {"ref_feat_shape": [DEFAULT_GRID, DEFAULT_GRID]}
    return encoder_names.make_timm_card(config, name, arguments)


def make_dinov3_hf_card(config: side.ConfigFields) -> dict[str, Any]:
    swiglu = config["activation"] == "swiglu"
    return make_hf_card({**config, "activation": "gelu"}, "dinov3_vit", "DINOv3ViT") | {
        "hidden_act": "silu" if swiglu else "gelu",
        "intermediate_size": config["mlp_width"] or 4 * config["width"],
        "use_gated_mlp": swiglu,
        "num_register_tokens": config["registers"],
        "query_bias": True,
        "value_bias": True,
        "layerscale_value": config["layer_scale"],
        "rope_theta": 100.0,
    }


BASE_TABLE = (
    *make_same_name_entries(
        "cls_token", "reg_token", "pos_embed", "patch_embed.proj.*", "norm.*", "fc_norm.*", "head.*"
    ),
    *make_same_name_entries(*(f"{BLOCK}{part}.*" for part in ("norm1", "norm2", "attn.proj", "mlp.norm", "mlp.fc2"))),
    *(make_entry(f"{BLOCK}gamma_{n}", f"{BLOCK}ls{n}.gamma") for n in (1, 2)),
)
FUSED = (
    *make_same_name_entries(f"{BLOCK}attn.qkv.weight"),
    make_entry([f"{BLOCK}attn.q_bias", f"{BLOCK}attn.v_bias"], QV_BIAS, TWO_PARTS),
)
SEPARATE = (
    make_entry([f"{BLOCK}attn.{part}_proj.weight" for part in "qkv"], f"{BLOCK}attn.qkv.weight", THREE_PARTS),
    make_entry([f"{BLOCK}attn.{part}_proj.bias" for part in "qv"], QV_BIAS, TWO_PARTS),
)
PACKED = make_same_name_entries(f"{BLOCK}mlp.fc1.*")
GATED = (make_entry([f"{BLOCK}mlp.fc1_g.*", f"{BLOCK}mlp.fc1_x.*"], f"{BLOCK}mlp.fc1.*", TWO_PARTS),)


def is_gated(config: side.ConfigFields) -> bool:
    """Whether both halves of a SwiGLU's first map have their own names in timm: not in the small EVA-02."""
    return config["activation"] == "swiglu" and (config["mlp_norm"] or config["rotary"] == "centred")


def make_timm_source(*markers: str, gated: bool, separate: bool = False) -> side.SourceNames:
    return side.SourceNames(
        layout="timm",
        table=(*BASE_TABLE, *(SEPARATE if separate else FUSED), *(GATED if gated else PACKED)),
        markers=(encoder_names.PATCH_KERNEL, *markers),
        accepts=lambda config: is_gated(config) == gated and config["mlp_norm"] == separate,
        card=make_timm_card,
        details={
            "only_in_timm": True,
            "imagenet_mean": True,
            "ignored": UNUSED,
            "pretrained_cfg": {"crop_pct": 1.0, **(CLIP_MEAN_STD if "pos_embed" in markers else {})},
        },
    )


def make_hf_table(*, gated: bool) -> tuple[NameEntry, ...]:
    """With the names on disk, then those in memory."""
    rows = [make_entry(f"embeddings.{theirs}", ours) for theirs, ours in HF_EMBEDDINGS.items()]
    for layer in ("layer.#.", "model.layer.#."):
        parts, halves = [f"{layer}attention.{part}_proj." for part in "qkv"], ("gate", "up") if gated else ("up",)
        rows += [make_entry(f"{layer}norm{n}.*", f"{BLOCK}norm{n}.*") for n in (1, 2)]
        rows += [make_entry(f"{layer}layer_scale{n}.lambda1", f"{BLOCK}ls{n}.gamma") for n in (1, 2)]
        rows += [
            make_entry([f"{part}weight" for part in parts], f"{BLOCK}attn.qkv.weight", THREE_PARTS),
            make_entry([f"{parts[0]}bias", f"{parts[2]}bias"], QV_BIAS, TWO_PARTS),
            make_entry(f"{layer}attention.o_proj.*", f"{BLOCK}attn.proj.*"),
            make_entry([f"{layer}mlp.{half}_proj.*" for half in halves], f"{BLOCK}mlp.fc1.*", *([TWO_PARTS] * gated)),
            make_entry(f"{layer}mlp.down_proj.*", f"{BLOCK}mlp.fc2.*"),
        ]
    return (*rows, *make_same_name_entries("norm.*"))


HF_EMBEDDINGS = {"cls_token": "cls_token", "register_tokens": "reg_token", "patch_embeddings.*": "patch_embed.proj.*"}
DINOV3_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "classes": (0,),
    "rotary": ("centred",),
    "positions": ("none",),
    "qv_bias": (True,),
    "pool": ("class",),
}


def make_hf_source(*markers: str, gated: bool) -> side.SourceNames:
    return side.SourceNames(
        layout="hf",
        table=make_hf_table(gated=gated),
        markers=("embeddings.patch_embeddings.weight", "embeddings.register_tokens", *markers),
        accepts=lambda config: (config["activation"] == "swiglu") == gated,
        supported=DINOV3_SUPPORTED,
        card=make_dinov3_hf_card,
        details={
            "model_type": "dinov3_vit",
            "norm_eps": 1e-5,
            "imagenet_mean": True,
            "fields": {"pool": "class"},
        },
    )


def make_facebook_source(*markers: str, gated: bool) -> side.SourceNames:
    """The files of DINOv3, whose SwiGLU is as in its code: w1, w2 and w3."""
    return side.SourceNames(
        layout="authors",
        table=(
            make_entry("storage_tokens", "reg_token"),
            *make_same_name_entries("cls_token", "patch_embed.proj.*", "norm.*", f"{BLOCK}attn.qkv.weight"),
            *make_same_name_entries(*(f"{BLOCK}{part}.*" for part in ("norm1", "norm2", "attn.proj"))),
            *make_same_name_entries(*(f"{BLOCK}ls{n}.gamma" for n in (1, 2))),
            make_entry(f"{BLOCK}attn.qkv.bias", QV_BIAS, QV_IN_QKV),
            *(
                (
                    make_entry([f"{BLOCK}mlp.w1.*", f"{BLOCK}mlp.w2.*"], f"{BLOCK}mlp.fc1.*", TWO_PARTS),
                    make_entry(f"{BLOCK}mlp.w3.*", f"{BLOCK}mlp.fc2.*"),
                )
                if gated
                else make_same_name_entries(f"{BLOCK}mlp.fc1.*", f"{BLOCK}mlp.fc2.*")
            ),
        ),
        markers=(encoder_names.PATCH_KERNEL, "storage_tokens", *markers),
        accepts=lambda config: (config["activation"] == "swiglu") == gated,
        supported=DINOV3_SUPPORTED,
        assumed={"norm_eps": 1e-5},
        heads=HEADS,
        details={
            "kernel": encoder_names.PATCH_KERNEL,
            "wrapper": "",
            "ignored": UNUSED,
            "fields": {"pool": "class"},
            "preprocessing": {"crop": 1.0},
        },
    )


SOURCES = (
    make_timm_source("reg_token", "blocks.0.gamma_1", gated=False),  # DINOv3
    make_timm_source("reg_token", "blocks.0.gamma_1", "blocks.0.mlp.fc1_g.weight", gated=True),
    make_timm_source("pos_embed", "blocks.0.attn.q_bias", gated=False),  # EVA-02
    make_timm_source(
        "pos_embed", "blocks.0.attn.q_proj.weight", "blocks.0.mlp.fc1_g.weight", gated=True, separate=True
    ),
    make_hf_source(gated=False),
    *(make_hf_source(f"{layer}.0.mlp.gate_proj.weight", gated=True) for layer in ("layer", "model.layer")),
    make_facebook_source(gated=False),
    make_facebook_source("blocks.0.mlp.w1.weight", gated=True),
)
CHECKPOINT = side.CheckpointSide(infer_config=infer_config, sources=SOURCES)
