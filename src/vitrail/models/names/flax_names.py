"""Names and arrangements of tensors in Google's files, which were written by Flax; for ViTs and their ResNet stems."""

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
