"""Name tables work in both directions, and errors name the tensors."""

import pytest
import torch

from vitrail.base.errors import CheckpointError
from vitrail.checkpoint.name_table import convert_to_our_tensors, convert_to_their_tensors
from vitrail.models.base.checkpoint_side import TensorTransform, parse_table

TABLE = parse_table(
    """
    tok -> cls_token
    layer%. -> blocks.#.:
        unit#.w.* -> conv#.*
        [q,k,v].* -> attn.qkv.*
    old%.qkv.* -> blocks.#.attn.qkv.*
    trunk#.trunk=-~.se -> s#.b~.se
    """
)
TRANSPOSED = TensorTransform(lambda parts: parts[0].T, lambda tensor, _: [tensor.T])


def test_renaming_is_reversible() -> None:
    theirs = {
        "tok": torch.randn(1),
        "layer1.unit2.w.bias": torch.randn(2),
        "layer10.unit0.w.weight": torch.randn(2),
        **{f"layer1.{part}.weight": torch.randn(2, 3) for part in "kqv"},
    }
    ours, unknown = convert_to_our_tensors({**theirs, "more": torch.randn(1)}, TABLE)
    assert unknown == ("more",)
    assert set(ours) == {"cls_token", "blocks.0.conv2.bias", "blocks.9.conv0.weight", "blocks.0.attn.qkv.weight"}
    expected = torch.cat([theirs[f"layer1.{part}.weight"] for part in "qkv"])
    assert torch.equal(ours["blocks.0.attn.qkv.weight"], expected)
    back = convert_to_their_tensors(ours, TABLE, heads=1)
    assert back.keys() == theirs.keys()
    assert all(torch.equal(back[name], theirs[name]) for name in theirs)


def test_all_names_are_read_and_the_first_is_written() -> None:
    ours, _ = convert_to_our_tensors({"old1.qkv.weight": torch.arange(6.0).view(6, 1)}, TABLE)
    assert sorted(convert_to_their_tensors(ours, TABLE, heads=1)) == [
        "layer1.k.weight",
        "layer1.q.weight",
        "layer1.v.weight",
    ]


def test_a_number_may_be_repeated_and_counted_from_zero() -> None:
    theirs = {"trunk2.trunk2-0.se": torch.randn(1)}
    ours, _ = convert_to_our_tensors(theirs, TABLE)
    assert list(ours) == ["s2.b1.se"]
    assert convert_to_their_tensors(ours, TABLE, heads=1).keys() == theirs.keys()
    assert convert_to_our_tensors({"trunk2.trunk1-0.se": torch.randn(1)}, TABLE)[1] == ("trunk2.trunk1-0.se",)


def test_errors_name_the_tensors() -> None:
    one = torch.randn(2, 3)
    with pytest.raises(CheckpointError, match=r"is made of 3 tensors, .* only layer1\.q\.weight"):
        convert_to_our_tensors({"layer1.q.weight": one}, TABLE)
    with pytest.raises(CheckpointError, match=r"exists twice, as old1\.qkv\.weight and as layer1\.q\.weight"):
        convert_to_our_tensors({"layer1.q.weight": one, "old1.qkv.weight": one}, TABLE)
    parts = {"layer1.q.weight": one, "layer1.k.weight": torch.randn(2, 4), "layer1.v.weight": one}
    with pytest.raises(CheckpointError, match=r"cannot be made of layer1\.q\.weight \(2, 3\), layer1"):
        convert_to_our_tensors(parts, TABLE)
    with pytest.raises(CheckpointError, match=r"head\.weight has no name in this layout"):
        convert_to_their_tensors({"head.weight": one}, TABLE, heads=1)


def test_a_line_of_a_table_stands_for_several_names() -> None:
    table = parse_table(
        """
        {a,b}.{w,v} -> {x,y}.{1,2}
        {old,new}. -> ours.:
            out.:
                {c.[p,q],d} -> {pq,r}
            s
        last
        """
    )
    pairs = [(row.theirs, row.ours) for row in table]
    assert pairs == [
        *((("a.w",), "x.1"), (("a.v",), "x.2"), (("b.w",), "y.1"), (("b.v",), "y.2")),
        *((("old.out.c.p", "old.out.c.q"), "ours.out.pq"), (("new.out.c.p", "new.out.c.q"), "ours.out.pq")),
        *((("old.out.d",), "ours.out.r"), (("new.out.d",), "ours.out.r")),
        *((("old.s",), "ours.s"), (("new.s",), "ours.s"), (("last",), "last")),
    ]
    with pytest.raises(ValueError, match="zip"):
        parse_table("{a,b,c} -> {x,y}")


def test_parts_are_transformed_one_by_one() -> None:
    (row,) = parse_table("[a,b] -> ours | turned", turned=TRANSPOSED)
    theirs = [torch.randn(3, 2), torch.randn(3, 2)]
    assert torch.equal(row.transform.to_ours(theirs), torch.cat([theirs[0].T, theirs[1].T]))
    back = row.transform.to_theirs(row.transform.to_ours(theirs), 1)
    assert all(torch.equal(one, other) for one, other in zip(back, theirs, strict=True))


def test_the_parts_of_a_batch_norm_have_a_placeholder() -> None:
    names = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    ours, unknown = convert_to_our_tensors(
        {f"norm.{each}": torch.zeros(1) for each in (*names, "scale")}, parse_table("norm.+ -> bn.+")
    )
    assert (list(ours), unknown) == ([f"bn.{each}" for each in names], ("norm.scale",))
