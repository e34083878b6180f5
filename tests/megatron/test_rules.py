"""What each rule says of a parameter: every rank's boxes together are the checkpoint tensors, each element in its place."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from rdt_core.errors import SourceError
from rdt_megatron import (
    Columns,
    GroupedColumns,
    GroupedRows,
    Local,
    QueryKeyValue,
    Rows,
    RowsIfCut,
    Rule,
    Skip,
    Stacked,
    Vocabulary,
    Whole,
    in_layer,
)
from rdt_megatron.rules import is_expert, match

pytestmark = pytest.mark.unit


def local(tensor: torch.Tensor, size: int, rank: int, *, vocab: int = 0, **config: int) -> Local:
    return Local(
        name="decoder.layers.3.x.weight",
        fields={"layer": "3", "kind": "weight", "expert": "4"},
        shape=tuple(tensor.shape),
        strides=tensor.stride(),
        tp_size=size,
        tp_rank=rank,
        experts=config.pop("experts", 0),
        config=SimpleNamespace(**config),
        vocab_size=vocab,
    )


def assemble(rule: Rule, parts: list[torch.Tensor], **given: int) -> dict[str, torch.Tensor]:
    """Puts every rank's boxes together; each element must come exactly once, replicas excepted."""
    full: dict[str, torch.Tensor] = {}
    for rank, part in enumerate(part.clone() for part in parts):
        for piece in rule.pieces(local(part, len(parts), rank, **given)):
            view = part.as_strided(piece.shape, piece.strides, piece.start)
            target = full.setdefault(piece.tensor, torch.full(piece.full, -1, dtype=part.dtype))
            assert tuple(target.shape) == piece.full
            box = target[tuple(slice(low, low + size) for low, size in zip(piece.offset, piece.shape, strict=True))]
            assert (box == -1).all() or torch.equal(box, view)
            box.copy_(view)
    assert all((one != -1).all() for one in full.values())
    return full


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(int(torch.tensor(shape).prod())).reshape(shape)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    ("rule", "cut"),
    [
        (Rows("x.{kind}", "w.{kind}"), lambda full, size: full.chunk(size)),
        (Columns("x.{kind}", "w.{kind}"), lambda full, size: full.chunk(size, 1)),
        (Whole("x.{kind}", "w.{kind}"), lambda full, size: [full] * size),
        (Vocabulary("x.{kind}", "w.{kind}"), lambda full, size: full.chunk(size)),
    ],
)
def test_one_tensor_cut_over_ranks(rule: Rule, cut: Callable, size: int) -> None:
    full = numbered(8, 12)
    parts = [part.contiguous() for part in cut(full, size)]
    assert torch.equal(assemble(rule, parts, vocab=8)["w.weight"], full)


@pytest.mark.parametrize("cut", [True, False])
def test_a_parameter_that_may_be_cut_says_so_by_its_rows(cut: bool) -> None:
    full, rule = numbered(8, 12), RowsIfCut("x", "w", ("lora", "rope"))
    parts = [part.contiguous() for part in full.chunk(2)] if cut else [full, full]
    assert torch.equal(assemble(rule, parts, lora=6, rope=2)["w"], full)
    with pytest.raises(SourceError, match=r"neither all nor an equal share of 10 rows \(lora \+ rope\)"):
        assemble(rule, parts, lora=6, rope=4)


@pytest.mark.parametrize(
    ("rule", "text"),
    [(Whole("x", "w.{expert}.{head}"), r"'head' is no placeholder"), (Columns("x", "w"), r"only a matrix or a bias")],
)
def test_rules_that_fit_no_parameter_say_so(rule: Rule, text: str) -> None:
    with pytest.raises(SourceError, match=rf"parameter 'decoder.layers.3.x.weight' of shape .*{text}"):
        rule.pieces(local(numbered(2, 3, 4), 1, 0))


def test_a_bias_after_a_row_parallel_product_is_whole() -> None:
    full = numbered(8)
    assert torch.equal(assemble(Columns("x", "w"), [full, full])["w"], full)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("shape", [(8, 3), (8,)])
def test_gate_and_up(size: int, shape: tuple[int, ...]) -> None:
    gate, up = numbered(*shape), 1000 + numbered(*shape)
    parts = [torch.cat(pair) for pair in zip(gate.chunk(size), up.chunk(size), strict=True)]
    found = assemble(Stacked("x", ("g", "u")), parts)
    assert torch.equal(found["g"], gate)
    assert torch.equal(found["u"], up)


# G < T too: a rank holds half a group, or a quarter of one
@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
@pytest.mark.parametrize(("heads", "groups"), [(8, 8), (8, 4), (8, 2), (8, 1)])
@pytest.mark.parametrize("rest", [(5,), ()])
def test_queries_keys_and_values(size: int, heads: int, groups: int, rest: tuple[int, ...]) -> None:
    dim = 4
    query, key, value = (k * 10_000 + numbered(n * dim, *rest) for k, n in enumerate((heads, groups, groups)))
    mixed = torch.cat(
        [
            part
            for group in zip(query.chunk(groups), key.chunk(groups), value.chunk(groups), strict=True)
            for part in group
        ]
    )
    if mixed.shape[0] % size:
        pytest.skip("Megatron cannot cut this")
    rule = QueryKeyValue("x.{kind}", "q.{kind}", "k.{kind}", "v.{kind}")
    config = {"kv_channels": dim, "num_query_groups": groups, "num_attention_heads": heads}
    found = assemble(rule, list(mixed.chunk(size)), **config)
    for name, expected in (("q", query), ("k", key), ("v", value)):
        assert torch.equal(found[f"{name}.weight"], expected), name


def test_query_rows_that_do_not_add_up_are_refused() -> None:
    rule = QueryKeyValue("x", "q", "k", "v")
    config = {"kv_channels": 4, "num_query_groups": 2, "num_attention_heads": 4}
    with pytest.raises(SourceError, match="2 groups of 8 query rows and 4 rows of key and of value make 32 rows"):
        rule.pieces(local(numbered(20, 3), 2, 0, **config))


@pytest.mark.parametrize(
    ("vocab", "size", "padded"), [(250, 2, 256), (250, 4, 256), (9, 4, 16), (16, 4, 16), (5, 4, 8)]
)
def test_padding_of_the_vocabulary_is_cut(vocab: int, size: int, padded: int) -> None:
    full = numbered(padded, 3)
    found = assemble(Vocabulary("x", "w"), list(full.chunk(size)), vocab=vocab)
    assert torch.equal(found["w"], full[:vocab])


def test_a_vocabulary_that_is_too_small_is_refused() -> None:
    with pytest.raises(SourceError, match="all ranks hold 8 rows of a vocabulary of 9"):
        Vocabulary("x", "w").pieces(local(numbered(4, 3), 2, 0, vocab=9))


@pytest.mark.parametrize("size", [1, 2])
def test_grouped_experts_in_one_parameter(size: int) -> None:
    # as the grouped GEMM uses them: x @ weight1[expert], with gate beside up
    experts, hidden, width = 3, 4, 6
    gate, up = (k * 1000 + numbered(experts, width, hidden) for k in (0, 1))
    down = numbered(experts, hidden, width)
    ones, twos = [], []
    for g, u, d in zip(gate.chunk(size, 1), up.chunk(size, 1), down.chunk(size, 2), strict=True):
        one = torch.cat([g.transpose(1, 2), u.transpose(1, 2)], 2)
        ones.append(one.contiguous().reshape(hidden, -1))
        twos.append(d.transpose(1, 2).contiguous().reshape(-1, hidden))
    first = assemble(GroupedRows("weight1", ("{expert}.g", "{expert}.u")), ones, experts=experts)
    second = assemble(GroupedColumns("weight2", "{expert}.d"), twos, experts=experts)
    for index in range(experts):
        name = 4 + index  # this rank's first expert is number 4
        assert torch.equal(first[f"{name}.g"], gate[index])
        assert torch.equal(first[f"{name}.u"], up[index])
        assert torch.equal(second[f"{name}.d"], down[index])


def test_rows_that_do_not_divide_are_refused() -> None:
    with pytest.raises(SourceError, match=r"'decoder.layers.3.x.weight' of shape \(5, 2\).* do not divide into 2"):
        Stacked("x", ("g", "u")).pieces(local(numbered(5, 2), 1, 0))


def test_what_is_skipped_holds_nothing() -> None:
    assert Skip("x").pieces(local(numbered(2), 1, 0)) == []


@pytest.mark.parametrize(
    ("template", "name", "fields"),
    [
        ("a.{layer}.b.{kind}", "a.12.b.bias", {"layer": "12", "kind": "bias"}),
        ("a.linear.{kind}", "a.linear.layer_norm_weight", None),
        ("a.fc1.{kind}{expert}", "a.fc1.weight11", {"kind": "weight", "expert": "11"}),
        ("a.{layer}", "a.1.b", None),
        ("a.b", "axb", None),
    ],
)
def test_names_are_matched_whole(template: str, name: str, fields: dict[str, str] | None) -> None:
    assert match(Whole(template, "w"), name) == fields


def test_an_unknown_placeholder_is_an_error() -> None:
    with pytest.raises(SourceError, match=r"unknown placeholder 'layr'; known: layer, expert, kind"):
        match(Whole("a.{layr}", "w"), "a.1")


def test_only_rules_of_experts_are_cut_with_experts() -> None:
    assert is_expert(Columns("experts.{expert}.x", "w"))
    assert is_expert(GroupedRows("experts.weight1", ("w",)))
    assert not is_expert(Columns("shared_experts.x", "w"))


def test_rules_relative_to_a_layer_get_full_names() -> None:
    (rule,) = in_layer([Stacked("mlp.x.{kind}", ("g.{kind}", "u.{kind}"))])
    assert rule == Stacked(
        "decoder.layers.{layer}.mlp.x.{kind}", ("model.layers.{layer}.g.{kind}", "model.layers.{layer}.u.{kind}")
    )
