"""Checkpoints of ViT encoders: their fields from the shapes, and their names in the public layouts.

Our names are timm's. ViT and DeiT share most of their sources; hybrids and CaiTs extend the table of timm. Google's
files were written by Flax; its names of ViTs and their ResNet stems are here, too.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vitrail.models.base import checkpoint_side as side
from vitrail.models.base.checkpoint_side import NameEntry, TensorTransform, parse_table

OLD_PART_NAMES = ("LayerNorm_0", "MultiHeadDotProductAttention_1", "LayerNorm_2", "MlpBlock_3")  # of a block: numbered
NEW_PART_NAMES = ("LayerNorm_0", "MultiHeadDotProductAttention_0", "LayerNorm_1", "MlpBlock_0")  # through, and by type
POSITIONS, BIG_VISION_POSITIONS = "Transformer/posembed_input/pos_embedding", "pos_embedding"

HEADS = TensorTransform(  # (D, H, K) ↔ (H·K, D)
    lambda parts: parts[0].reshape(parts[0].shape[0], -1).T,
    lambda matrix, heads: [matrix.T.reshape(matrix.shape[1], heads, -1)],
)
HEAD_BIASES = TensorTransform(lambda parts: parts[0].reshape(-1), lambda vector, heads: [vector.reshape(heads, -1)])
OUTPUT = TensorTransform(  # (H, K, D) ↔ (D, H·K)
    lambda parts: parts[0].reshape(-1, parts[0].shape[-1]).T,
    lambda matrix, heads: [matrix.T.reshape(heads, -1, matrix.shape[0])],
)
DENSE = TensorTransform(lambda parts: parts[0].t(), lambda matrix, _: [matrix.T])
CONV = TensorTransform(lambda parts: parts[0].permute(3, 2, 0, 1), lambda kernel, _: [kernel.permute(2, 3, 1, 0)])
GROUP_NORM = TensorTransform(lambda parts: parts[0].reshape(-1), lambda vector, _: [vector.reshape(1, 1, 1, -1)])


def make_resnet_table(root: str) -> tuple[NameEntry, ...]:
    """Root, which is `root` in our names, and stages of a ResNet stem."""
    rows = parse_table(f"conv_root/kernel -> {root}conv.weight | conv", conv=CONV)
    rows += parse_table(f"gn_root/{{scale,bias}} -> {root}norm.{{weight,bias}} | norm", norm=GROUP_NORM)
    return rows + RESNET_STAGES


RESNET_STAGES = parse_table(
    """
    block%/unit%/ -> patch_embed.backbone.stages.#.blocks.#.:
        conv{1,2,3,_proj}/kernel -> {conv1,conv2,conv3,downsample.conv}.weight | conv
        gn{1,2,3,_proj}/{scale,bias} -> {norm1,norm2,norm3,downsample.norm}.{weight,bias} | norm
    """,
    conv=CONV,
    norm=GROUP_NORM,
)
ENCODER_TABLE = parse_table(
    """
    {cls,Transformer/posembed_input/pos_embedding,pos_embedding} -> {cls_token,pos_embed,pos_embed}
    embedding/kernel -> patch_embed.proj.weight | conv
    embedding/bias -> patch_embed.proj.bias
    Transformer/encoderblock_#/ -> blocks.#.:
        {LayerNorm_0,LayerNorm_2,LayerNorm_1}/{scale,bias} -> {norm1,norm2,norm2}.{weight,bias}
        {MultiHeadDotProductAttention_1,MultiHeadDotProductAttention_0}/ -> attn.:
            [query,key,value]/kernel -> qkv.weight | heads
            [query,key,value]/bias -> qkv.bias | head_biases
            out/kernel -> proj.weight | output
            out/bias -> proj.bias
        {MlpBlock_3,MlpBlock_0}/ -> mlp.:
            {Dense_0,Dense_1}/kernel -> {fc1,fc2}.weight | dense
            {Dense_0,Dense_1}/bias -> {fc1,fc2}.bias
    Transformer/encoder_norm/{scale,bias} -> norm.{weight,bias}
    MAPHead_0/ -> attn_pool.:
        probe -> latent
        LayerNorm_0/{scale,bias} -> norm.{weight,bias}
        MultiHeadDotProductAttention_0/ -> :
            {query,[key,value]}/kernel -> {q,kv}.weight | heads
            {query,[key,value]}/bias -> {q,kv}.bias | head_biases
            out/kernel -> proj.weight | output
            out/bias -> proj.bias
        MlpBlock_0/{Dense_0,Dense_1}/kernel -> mlp.{fc1,fc2}.weight | dense
        MlpBlock_0/{Dense_0,Dense_1}/bias -> mlp.{fc1,fc2}.bias
    {pre_logits,head}/kernel -> {pre_logits,head}.weight | dense
    {pre_logits,head}/bias -> {pre_logits,head}.bias
    """,
    conv=CONV,
    heads=HEADS,
    head_biases=HEAD_BIASES,
    output=OUTPUT,
    dense=DENSE,
)


PATCH_KERNEL = "patch_embed.proj.weight"
DEFAULT_LAYER_SCALE = 1e-5  # initial value of LayerScale; it cannot be read from trained weights


def infer_encoder_fields(shapes: side.TensorShapes) -> dict[str, Any]:
    """The fields that all encoders of patches have."""
    kernel = side.get_shape(shapes, PATCH_KERNEL, 4)
    side.get_shape(shapes, "blocks.0.mlp.fc1.weight", 2)
    width, mlp_width = kernel[0], side.get_shape(shapes, "blocks.0.mlp.fc2.weight", 2)[1]
    return {
        "patch_size": (kernel[2], kernel[3]),
        "channels": kernel[1],
        "classes": side.count_classes(shapes, "head.weight"),
        "width": width,
        "depth": side.count_numbers(shapes, r"blocks\.(\d+)\."),
        "mlp_width": None if mlp_width == 4 * width else mlp_width,
        "layer_scale": DEFAULT_LAYER_SCALE if "blocks.0.ls1.gamma" in shapes else None,
    }


def infer_vit_config(shapes: side.TensorShapes) -> side.InferredConfig:
    fields, class_token = infer_encoder_fields(shapes), "cls_token" in shapes
    mean_norm = "fc_norm.weight" in shapes and "norm.weight" not in shapes
    fields |= {
        "qkv_bias": "blocks.0.attn.qkv.bias" in shapes,
        "class_token": class_token,
        "registers": side.get_shape(shapes, "reg_token", 3)[1] if "reg_token" in shapes else 0,
        "pool": "mean_norm" if mean_norm else "class" if class_token else "mean",
        "head": "mlp" if "pre_logits.weight" in shapes else "linear",
    }
    if "attn_pool.latent" in shapes:
        fields["pool"] = "map"
    if shapes["blocks.0.mlp.fc1.weight"][0] == 2 * shapes["blocks.0.mlp.fc2.weight"][1]:
        fields["activation"] = "swiglu"
    return side.InferredConfig(fields=fields, stride=fields["patch_size"], prefix=class_token + fields["registers"])


SUPPORTED: Mapping[str, tuple[Any, ...]] = {  # what a plain ViT of another library can be
    "class_token": (True,),
    "registers": (0,),
    "distilled": (False,),
    "pool": ("class",),
    "head": ("linear",),
    "positions": ("learned", "sincos", "sincos_2d", "sincos_simple"),
    "positions_at": ("stem",),
    "layer_scale": (None,),
    "mlp_width": (None,),
    "qkv_bias": (True,),
    "activation": ("gelu", "gelu_tanh"),
}


def support_more(*names: str, **values: tuple[Any, ...]) -> dict[str, tuple[Any, ...]]:
    """`SUPPORTED` without the fields that may have any value, and with other values of some fields."""
    return {**{name: allowed for name, allowed in SUPPORTED.items() if name not in names}, **values}


def is_swiglu(config: side.ConfigFields) -> bool:
    return config.get("activation") == "swiglu"


TIMM_BASE_TABLE = side.parse_table(
    """
    {cls_token,reg_token,dist_token,pos_embed,attn_pool.latent}
    {patch_embed.proj,norm,fc_norm,head,head_dist}.*
    blocks.#.{norm1,attn.qkv,attn.proj,norm2,mlp.fc1,mlp.fc2}.*
    attn_pool.{q,kv,proj,norm,mlp.fc1,mlp.fc2}.*
    pre_logits.fc.* -> pre_logits.*
    """
)
TIMM_TABLE = (*TIMM_BASE_TABLE, *side.parse_table("blocks.#.ls{1,2}.gamma"))
TIMM_ASSUMED = {"activation": "gelu", "norm_eps": 1e-6}
TIMM_POOLS = {"class": "token", "mean": "avg", "mean_norm": "avg", "map": "map"}
TIMM_DETAILS = {
    "refused_names": r"(^|_)(rope|rpn)(_|$)",
    "refused_because": "has rotary positions or post-norm blocks; expected a plain ViT or DeiT",
}


def make_timm_arguments(config: side.ConfigFields) -> dict[str, Any]:
    """The `model_args` of all encoders."""
    hidden = (config.get("mlp_width") or 4 * config["width"]) * (2 if config.get("activation") == "swiglu" else 1)
    return {
        "img_size": config["image_size"],
        "patch_size": config["patch_size"],
        "in_chans": config["channels"],
        "embed_dim": config["width"],
        "depth": config["depth"],
        "num_heads": config["heads"],
        "mlp_ratio": hidden / config["width"] if hidden % config["width"] == 0 else (hidden + 0.5) / config["width"],
        "init_values": config.get("layer_scale"),
        "qkv_bias": config.get("qkv_bias", True),
    }


def make_timm_card(config: side.ConfigFields, architecture: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """`architecture` names any timm model of this kind; `arguments` override its own."""
    return {
        "architecture": architecture,
        "num_classes": config["classes"],
        "num_features": config["width"],
        "model_args": arguments,
    }


def make_timm_vit_card(config: side.ConfigFields) -> dict[str, Any]:
    arguments = make_timm_arguments(config) | {
        "no_embed_class": not config["prefix_positions"],
        "class_token": config["class_token"],
        "reg_tokens": config["registers"],
        "global_pool": TIMM_POOLS[config["pool"]],
        "fc_norm": config["pool"] == "mean_norm",
    }
    if config["positions"] == "none":
        arguments["pos_embed"] = "none"
    if config["activation"] == "gelu_tanh":
        arguments["act_layer"] = "gelu_tanh"
    swiglu = config["activation"] == "swiglu"
    return make_timm_card(config, "vit_giant_patch14_dinov2" if swiglu else "vit_tiny_patch16_224", arguments)


TIMM = side.SourceNames(
    layout="timm",
    table=TIMM_TABLE,
    markers=(PATCH_KERNEL,),
    supported={
        "positions": ("learned", "sincos", "sincos_2d", "sincos_simple", "none"),
        "positions_at": ("stem",),
        "head": ("linear",),
    },
    assumed=TIMM_ASSUMED,
    card=make_timm_vit_card,
    details={
        **TIMM_DETAILS,
        "tanh_gelu_names": (
            r"vit_(base_patch32_siglip(_gap)?_256|large_patch16_siglip(_gap)?_512|(giantopt|so400m)_patch16_siglip.*)"
        ),
    },
)

TORCHVISION = side.SourceNames(
    layout="torchvision",
    table=side.parse_table(
        """
        {class_token,encoder.pos_embedding} -> {cls_token,pos_embed}
        {conv_proj,encoder.ln,heads.pre_logits,heads.head}.* -> {patch_embed.proj,norm,pre_logits,head}.*
        encoder.layers.encoder_layer_#. -> blocks.#.:
            {ln_1,ln_2}.* -> {norm1,norm2}.*
            self_attention.{in_proj_,out_proj.}* -> attn.{qkv,proj}.*
            mlp.{0,3}.* -> mlp.{fc1,fc2}.*
            mlp.{linear_1,linear_2}.* -> mlp.{fc1,fc2}.*
        """
    ),
    markers=("encoder.pos_embedding",),
    supported=support_more("head", "mlp_width", channels=(3,)),
    assumed={"activation": "gelu", "norm_eps": 1e-6},
    heads={768: 12, 1024: 16, 1280: 16},
)

GOOGLE = side.SourceNames(
    layout="google",
    table=ENCODER_TABLE,
    markers=("embedding/kernel",),
    supported=support_more("class_token", "head", "mlp_width", pool=("class", "mean", "map")),
    assumed={"activation": "gelu_tanh", "norm_eps": 1e-6},
    details={"fields": {"activation": "gelu_tanh"}},
)

MAE = side.SourceNames(
    layout="mae",
    table=TIMM_BASE_TABLE,
    markers=(PATCH_KERNEL,),
    supported=support_more(pool=("class", "mean_norm"), prefix_positions=(True,)),
    assumed=TIMM_ASSUMED,
    heads={768: 12, 1024: 16, 1280: 16},
)
MOCO = side.SourceNames(
    layout="moco",
    table=TIMM_BASE_TABLE,
    markers=(PATCH_KERNEL,),
    supported=SUPPORTED,
    assumed=TIMM_ASSUMED,
    heads={384: 12, 768: 12, 1024: 16, 1280: 16},
)
DINO = side.SourceNames(
    layout="dino",
    table=(
        *side.parse_table("register_tokens -> reg_token"),
        *TIMM_TABLE,
        *side.parse_table("blocks.#.mlp.{w12,w3}.* -> blocks.#.mlp.{fc1,fc2}.*"),
    ),
    markers=(PATCH_KERNEL,),
    supported=support_more(
        *("registers", "layer_scale", "mlp_width", "qkv_bias"), classes=(0,), activation=("gelu", "gelu_tanh", "swiglu")
    ),
    assumed=TIMM_ASSUMED,
    heads={192: 3, 384: 6, 768: 12, 1024: 16, 1536: 24},  # also of iBOT and DINOv2: 64 channels per head
)
FACEBOOK = side.SourceNames(  # where a LayerScale has another name
    layout="deit",
    table=(*TIMM_BASE_TABLE, *side.parse_table("blocks.#.gamma_{1,2} -> blocks.#.ls{1,2}.gamma")),
    supported=support_more("distilled", "layer_scale"),
    assumed=TIMM_ASSUMED,
    heads={192: 3, 384: 6, 512: 8, 768: 12, 1024: 16, 1280: 16},  # of DeiT and DeiT-III
    details=TIMM_DETAILS,
)
DINO_SWIGLU = replace(DINO, table=DINO.table[-2:] + DINO.table[:-2], markers=(), accepts=is_swiglu)
WRITTEN_AS_VIT = (TORCHVISION, GOOGLE, MAE, MOCO, DINO)  # also for a DeiT, which is read as a ViT
