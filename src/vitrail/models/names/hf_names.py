"""ViT encoders in transformers: its model types vit, deit and dinov2, with the names on disk and those in memory."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vitrail.base.errors import CheckpointError
from vitrail.models.base import checkpoint_side as side
from vitrail.models.names.encoder_names import SUPPORTED, is_swiglu, support_more

# of the names on disk and, since v5, in memory; those on disk are written
HF_OLD_LAYER, HF_NEW_LAYER = "encoder.layer.#.", "layers.#."
HF_KERNEL = "embeddings.patch_embeddings.projection.weight"
HF_EMBEDDINGS = side.parse_table(
    """
    embeddings.{cls_token,position_embeddings} -> {cls_token,pos_embed}
    embeddings.patch_embeddings.projection.* -> patch_embed.proj.*
    {layernorm,pooler.dense,classifier}.* -> {norm,pre_logits,head}.*
    """
)
HF_REGISTERS = side.make_entry("embeddings.register_tokens", "reg_token")
HF_DISTILLED = side.parse_table("{cls_classifier,distillation_classifier}.* -> {head,head_dist}.*")
HF_VIT_TABLE = HF_EMBEDDINGS + side.parse_table(
    """
    {encoder.layer.#,layers.#}. -> blocks.#.:
        {layernorm_before,layernorm_after}.* -> {norm1,norm2}.*
        attention.{attention.[query,key,value],output.dense}.* -> attn.{qkv,proj}.*
        attention.{[q,k,v]_proj,o_proj}.* -> attn.{qkv,proj}.*
    encoder.layer.#.{intermediate,output}.dense.* -> blocks.#.mlp.{fc1,fc2}.*
    layers.#.mlp.{fc1,fc2}.* -> blocks.#.mlp.{fc1,fc2}.*
    """
)
HF_DINO_TABLE = (
    *HF_EMBEDDINGS,
    HF_REGISTERS,
    *side.parse_table(
        """
        encoder.layer.#. -> blocks.#.:
            {norm1,norm2}.*
            layer_scale{1,2}.lambda1 -> ls{1,2}.gamma
            attention.{attention.[query,key,value],output.dense}.* -> attn.{qkv,proj}.*
            attention.{[q,k,v]_proj,o_proj}.* -> attn.{qkv,proj}.*
        """
    ),
)
HF_MLP = side.parse_table("encoder.layer.#.mlp.{fc1,fc2}.* -> blocks.#.mlp.{fc1,fc2}.*")
HF_SWIGLU = side.parse_table(
    """
    encoder.layer.#.mlp. -> blocks.#.mlp.:
        {weights_in,weights_out}.* -> {fc1,fc2}.*
        {[gate,up]_proj,down_proj}.* -> {fc1,fc2}.*
    """
)
HF_SUPPORTED = {name: SUPPORTED[name] for name in ("class_token", "pool", "positions", "positions_at")}


def make_hf_heading(config: side.ConfigFields, model_type: str, class_name: str) -> dict[str, Any]:
    """What the config.json of every image model has."""
    size, ending = config["image_size"], "ForImageClassification" if config["classes"] else "Model"
    return {
        "architectures": [class_name + ending],
        "model_type": model_type,
        "image_size": size[0] if size[0] == size[1] else size,
        "num_channels": config["channels"],
    }


def make_hf_card(config: side.ConfigFields, model_type: str, class_name: str) -> dict[str, Any]:
    width, size, patch = config["width"], config["image_size"], config["patch_size"]
    ending = "ForImageClassificationWithTeacher" if config.get("distilled") else "ForImageClassification"
    activation = {"gelu_tanh": "gelu_pytorch_tanh"}.get(config.get("activation", "gelu"), "gelu")
    return {
        "architectures": [class_name + (ending if config["classes"] else "Model")],
        "model_type": model_type,
        "hidden_size": width,
        "num_hidden_layers": config["depth"],
        "num_attention_heads": config["heads"],
        "hidden_act": activation,
        "layer_norm_eps": config["norm_eps"],
        "image_size": size[0] if size[0] == size[1] else size,
        "patch_size": patch[0] if patch[0] == patch[1] else patch,
        "num_channels": config["channels"],
        "qkv_bias": config.get("qkv_bias", True),
        "hidden_dropout_prob": config["dropout"],
        "attention_probs_dropout_prob": config["attention_dropout"],
        "dtype": "float32",
    }


def make_hf_vit_card(config: side.ConfigFields, model_type: str, class_name: str) -> dict[str, Any]:
    if config.get("head") == "mlp" and config["classes"]:
        raise CheckpointError(
            f"classes is {config['classes']}, which transformers' {model_type} cannot represent; expected 0"
        )
    hidden = config.get("mlp_width") or 4 * config["width"]
    return make_hf_card(config, model_type, class_name) | {
        "intermediate_size": hidden,
        "encoder_stride": config["patch_size"][0],
    }


def make_hf_dino_card(config: side.ConfigFields, model_type: str, class_name: str) -> dict[str, Any]:
    """The MLP of a SwiGLU is two thirds of 4·width wide, rounded up to a multiple of 8."""
    width, swiglu = config["width"], is_swiglu(config)
    hidden, expected = config.get("mlp_width") or 4 * width, 4 * width
    expected = (int(expected * 2 / 3) + 7) // 8 * 8 if swiglu else expected
    if hidden != expected:
        raise CheckpointError(
            f"mlp_width is {hidden}, which transformers' dinov2 cannot represent; expected {expected}"
        )
    card = make_hf_card(config, model_type, class_name)
    card |= {"mlp_ratio": 4, "use_swiglu_ffn": swiglu, "use_mask_token": False}
    return card | ({"num_register_tokens": config["registers"]} if config.get("registers") else {})


def is_dinov2(config: side.ConfigFields) -> bool:
    return config.get("layer_scale") is not None or is_swiglu(config)


HF_DEIT_DETAILS = {
    "model_type": "deit",
    "norm_eps": 1e-12,
    "imagenet_mean": True,
    "preprocessing": {"crop": 0.875, "interpolation": "bicubic"},
}


def make_hf_vit_source(*, registers: bool) -> side.SourceNames:
    """A plain ViT; one with a register is a DeiT, whose distillation token without its own head is the register."""
    model_type, class_name = ("deit", "DeiT") if registers else ("vit", "ViT")
    return side.SourceNames(
        layout="hf",
        table=(
            side.make_entry("embeddings.distillation_token", "reg_token"),
            *HF_VIT_TABLE,
            HF_REGISTERS,
            *HF_DISTILLED,
        ),
        markers=(HF_KERNEL, "embeddings.distillation_token") if registers else (HF_KERNEL,),
        accepts=lambda config: (
            not is_dinov2(config)
            and not config.get("distilled")
            and config.get("pool") != "map"  # SigLIP's
            and bool(config.get("registers")) == registers
        ),
        supported={"registers": (0, 1), **HF_SUPPORTED},
        card=lambda config: make_hf_vit_card(config, model_type, class_name),
        details=HF_DEIT_DETAILS if registers else {"model_type": "vit", "norm_eps": 1e-12},
    )


HF_VIT, HF_REGISTER = make_hf_vit_source(registers=False), make_hf_vit_source(registers=True)


def make_hf_dino_source(*, registers: bool, swiglu: bool) -> side.SourceNames:
    model_type, class_name = ("dinov2_with_registers", "Dinov2WithRegisters") if registers else ("dinov2", "Dinov2")
    own = "embeddings.register_tokens" if registers else f"{HF_OLD_LAYER}layer_scale1.lambda1"
    return side.SourceNames(
        layout="hf",
        table=(*HF_DINO_TABLE, *((*HF_SWIGLU, *HF_MLP) if swiglu else (*HF_MLP, *HF_SWIGLU))),
        markers=() if swiglu else (HF_KERNEL, own),
        accepts=lambda config: (
            is_dinov2(config) and bool(config.get("registers")) == registers and is_swiglu(config) == swiglu
        ),
        supported={"classes": (0,), "head": ("linear",), "distilled": (False,), **HF_SUPPORTED},
        card=lambda config: make_hf_dino_card(config, model_type, class_name),
        details={
            "model_type": model_type,
            "norm_eps": 1e-6,
            "imagenet_mean": True,
            "preprocessing": {"crop": 0.875, "interpolation": "bicubic", "fit": "short_side"},
            "policy": "timm" if registers else "deit",  # with registers, transformers antialiases
            "dinov2": True,
        },
    )


HF_DINO = tuple(make_hf_dino_source(registers=r, swiglu=s) for r in (True, False) for s in (False, True))


LAYER, STACKED = "encoder.layers.#.", "head.attention.in_proj_"
ADD_AXIS = side.TensorTransform(lambda parts: parts[0][None], lambda table, _: [table[0]])


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


def make_siglip_card(config: side.ConfigFields) -> dict[str, Any]:
    card = make_hf_card(config, "siglip_vision_model", "SiglipVision")
    return card | {
        "intermediate_size": config["mlp_width"] or 4 * config["width"],
        "attention_dropout": config["attention_dropout"],
    }


HF_SIGLIP = side.SourceNames(
    layout="hf",
    table=side.parse_table(
        """
        embeddings.patch_embedding.* -> patch_embed.proj.*
        embeddings.position_embedding.weight -> pos_embed | table
        encoder.layers.#. -> blocks.#.:
            {layer_norm1,layer_norm2}.* -> {norm1,norm2}.*
            self_attn.{[q,k,v]_proj,out_proj}.* -> attn.{qkv,proj}.*
            mlp.{fc1,fc2}.*
        post_layernorm.* -> norm.*
        head. -> attn_pool.:
            probe -> latent
            attention.{q,kv}.* -> {q,kv}.*
            attention.in_proj_* -> in_proj.*
            {attention.out_proj,layernorm,mlp.fc1,mlp.fc2}.* -> {proj,norm,mlp.fc1,mlp.fc2}.*
        """,
        table=ADD_AXIS,
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
