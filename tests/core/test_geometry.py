"""Boxes, chains and views, compared with what torch does."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given, note
from hypothesis import strategies as st

from rdt_core.errors import GeometryError
from rdt_core.geometry import OPS, Box, Chain, View, chain_shape, op_shape, replay, resolve, row_major, subtract
from rdt_testbed.chains import apply, apply_all, cases, chains, shapes

pytestmark = pytest.mark.unit


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.int32).reshape(shape)


def of_box(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(start, end) for start, end in zip(box.offset, box.end, strict=True))]


@cases(4000)
@given(st.data())
def test_resolved_chain_gives_what_torch_gives(data: st.DataObject) -> None:
    """Every prefix of the chain is a case of its own: about 17,000 in a default run."""
    shape = data.draw(shapes())
    chain = data.draw(chains(shape))
    tensor = numbered(shape)
    expected = tensor
    for length in range(len(chain) + 1):
        if length:
            expected = apply(expected, chain[length - 1])
        check_resolved(tensor, chain[:length], expected)


def check_resolved(tensor: torch.Tensor, chain: Chain, expected: torch.Tensor) -> None:
    shape = tuple(tensor.shape)
    view = resolve(shape, chain)
    note(f"{chain}: {view}")
    box = of_box(tensor, view.box)
    for value in (view.value(box), view.value(box.clone()), replay(tensor, chain)):
        assert value.shape == expected.shape
        assert value.dtype == expected.dtype
        assert torch.equal(value, expected)
    assert chain_shape(shape, chain) == tuple(expected.shape)
    if view.direct:
        dims = view.dims()
        assert [view.box.shape[d] for d in dims if d is not None] == [n for n in view.shape if n != 1]
        assert len(set(dims) - {None}) == len([d for d in dims if d is not None])


@cases(1000)
@given(st.data())
def test_prefix_is_the_longest_that_is_a_box(data: st.DataObject) -> None:
    """A view whose elements, in order, are a box of the tensor in natural order is never left to be replayed."""
    shape = data.draw(shapes(empty=False))
    chain = data.draw(chains(shape, casts=False))
    view = resolve(shape, chain)
    value = apply_all(numbered(shape), chain)
    if not value.numel() or not shape or value.untyped_storage().nbytes() != 4 * torch.Size(shape).numel():
        return
    positions = [torch.unravel_index(value.flatten().long(), shape)]
    low = [int(p.min()) for p in positions[0]]
    box = Box(tuple(low), tuple(int(p.max()) - start + 1 for p, start in zip(positions[0], low, strict=True)))
    strides_known = all(op[0] in ("narrow", "select", "unsqueeze", "view", "reshape") for op in chain)
    if strides_known and torch.equal(of_box(numbered(shape), box).flatten(), value.flatten()):
        assert view.rest == ()
        assert view.box == box


@cases(1500)
@given(st.data())
def test_op_shape_refuses_what_torch_refuses(data: st.DataObject) -> None:
    shape = data.draw(shapes(max_axes=3))
    number = st.integers(-5, 7)
    name = data.draw(
        st.sampled_from(["narrow", "select", "transpose", "unsqueeze", "squeeze", "reshape", "permute", "flatten", "t"])
    )
    count = {"narrow": 3, "select": 2, "transpose": 2, "unsqueeze": 1, "squeeze": 1, "flatten": 2, "t": 0}
    args: tuple[Any, ...] = tuple(data.draw(st.lists(number, min_size=count.get(name, 1), max_size=count.get(name, 3))))
    if name == "permute" and len(set(args)) < len(args):
        return
    try:
        expected = tuple(apply(torch.empty(shape), (name, args)).shape)
    except (RuntimeError, IndexError, ValueError):
        with pytest.raises(GeometryError):
            op_shape(shape, (name, args))
        with pytest.raises(GeometryError, match=f"op 0 of the chain .{name}"):
            resolve(shape, ((name, args),))
    else:
        assert op_shape(shape, (name, args)) == expected


@pytest.mark.parametrize(
    ("shape", "chain", "box", "axes", "direct"),
    [
        ((12, 8), (("narrow", (0, 3, 4)),), Box((3, 0), (4, 8)), (0, 1), True),
        ((12, 8), (("view", (3, 4, 8)), ("narrow", (0, 1, 1))), Box((4, 0), (4, 8)), (0, 1), True),
        ((12, 8), (("view", (3, 4, 8)), ("narrow", (0, 0, 2))), Box((0, 0), (8, 8)), (0, 1), False),
        ((12, 8), (("view", (3, 4, 8)), ("narrow", (1, 1, 2)), ("select", (0, 2))), Box((9, 0), (2, 8)), (0, 1), True),
        ((12, 8), (("t", ()), ("narrow", (0, 2, 3))), Box((0, 2), (12, 3)), (1, 0), True),
        ((12, 8), (("t", ()), ("contiguous", ()), ("unsqueeze", (0,))), Box((0, 0), (12, 8)), (1, 0), True),
        ((4, 6, 5), (("select", (0, -1)), ("t", ())), Box((3, 0, 0), (1, 6, 5)), (0, 2, 1), True),
        ((4, 6, 5), (("permute", (2, 0, 1)), ("flatten", (1,))), Box((0, 0, 0), (4, 6, 5)), (2, 0, 1), False),
        ((), (), Box((), ()), (), True),
        ((), (("view", (1, 1)),), Box((), ()), (), True),
        ((3, 0), (("t", ()),), Box((0, 0), (0, 0)), (0, 1), False),
        ((5,), (("narrow", (0, 5, 0)),), Box((0,), (0,)), (0,), True),
    ],
)
def test_views_of_common_chains(
    shape: tuple[int, ...], chain: Chain, box: Box, axes: tuple[int, ...], direct: bool
) -> None:
    view = resolve(shape, chain)
    assert (view.box, view.axes, view.direct, view.rest) == (box, axes, direct, ())


@pytest.mark.parametrize(
    ("chain", "taken"),
    [
        ((("narrow", (0, 0, 4)), ("to", ("float32",)), ("narrow", (1, 0, 1))), 1),
        ((("__getitem__", ((("slice", 0, 8, 2),),)), ("narrow", (0, 0, 1))), 0),
        ((("narrow", (0, 2, 6)), ("t", ()), ("flatten", ()), ("narrow", (0, 0, 7))), 2),
        ((("view", (3, 4, 8)), ("narrow", (1, 0, 2))), 1),
        ((("view", (3, 4, 8)), ("transpose", (0, 1))), 1),
        # whole rows in number, but starting inside one
        ((("view", (-1,)), ("narrow", (0, 3, 16))), 1),
    ],
)
def test_prefix_ends_where_it_must(chain: Chain, taken: int) -> None:
    view = resolve((12, 8), chain)
    assert view.rest == chain[taken:]
    assert not view.direct
    with pytest.raises(GeometryError, match="is not direct"):
        view.dims()


def test_reader_may_replay_a_view_on_a_transposed_box() -> None:
    """`contiguous().view()` was recorded on a copy; the replay has none to start with."""
    chain: Chain = (("t", ()), ("contiguous", ()), ("view", (-1,)))
    view = resolve((3, 4), chain)
    assert view.rest == (("view", (-1,)),)
    assert torch.equal(view.value(numbered((3, 4))), numbered((3, 4)).t().contiguous().view(-1))


@pytest.mark.parametrize(
    ("op", "text"),
    [
        (("expand", (3, 3)), "'expand' is not a view op; known: __getitem__, contiguous"),
        (("narrow", (0, True, 1)), "narrow takes 3 ints, found (0, True, 1)"),
        (("narrow", (0, 1)), "narrow takes 3 ints"),
        (("narrow", (0, 3, 3)), "3 elements from 3 leave axis 0 of 4"),
        (("narrow", (2, 0, 1)), "dimension 2 is out of range for 2 axes"),
        (("select", (1, 6)), "index 6 is out of range for axis 1 of 6"),
        (("view", (5, -1)), "24 elements do not fit the shape (5, -1)"),
        (("view", ("int8",)), "view takes ints"),
        (("reshape", (-1, -1)), "is not a shape"),
        (("permute", (0, 0)), "is not an order of 2 axes"),
        (("to", (torch.float32,)), "to takes the name of a dtype"),
        (("__getitem__", (True,)), "found True"),
        (("__getitem__", ((0, 0, 0),)), "does not fit the shape (4, 6)"),
        (("__getitem__", ((Ellipsis, Ellipsis),)), "does not fit the shape"),
        (("__getitem__", (("slice", 0, 4, 0),)), "a step of at least 1"),
        (("__getitem__", (("slice", 0, 1.5, None),)), "a slice takes ints or None"),
        (("contiguous", ("channels_last",)), "contiguous takes 0 ints"),
        ("t", "an op is a name and a tuple"),
    ],
)
def test_refuses_ops_that_do_not_fit(op: Any, text: str) -> None:
    with pytest.raises(GeometryError, match=re.escape(text)):
        op_shape((4, 6), op)
    with pytest.raises(GeometryError, match=re.escape(text)):
        replay(numbered((4, 6)), (op,))


def test_errors_behind_the_prefix_are_found_as_well() -> None:
    chain: Chain = (("to", ("float32",)), ("narrow", (0, 3, 2)))
    with pytest.raises(
        GeometryError, match=re.escape("op 1 of the chain .to(float32).narrow(0, 3, 2) on shape (4, 6)")
    ):
        resolve((4, 6), chain)
    with pytest.raises(GeometryError, match="'device' is not a dtype"):
        replay(numbered((4, 6)), (("to", ("device",)),))


def test_ops_may_come_in_both_forms() -> None:
    assert op_shape((4, 6), ("view", ((2, 12),))) == op_shape((4, 6), ("view", (2, 12))) == (2, 12)
    flat, nested = ("__getitem__", (1, ("slice", 0, 2, None))), ("__getitem__", ((1, ("slice", 0, 2, None)),))
    assert resolve((4, 6), (flat,)) == resolve((4, 6), (nested,))
    assert torch.equal(replay(numbered((4, 6)), (flat,)), numbered((4, 6))[1, 0:2])
    assert {"narrow", "view", "to", "t"} <= OPS


def test_box() -> None:
    box = Box((1, 2), (3, 4))
    assert (box.numel, box.end, box.is_empty, str(box)) == (12, (4, 6), False, "[1:4, 2:6]")
    assert box.intersect(Box((3, 0), (5, 3))) == Box((3, 2), (1, 1))
    assert box.intersect(Box((4, 2), (1, 1))) is None
    assert box.contains(Box((2, 3), (1, 1)))
    assert box.contains(Box((9, 9), (0, 1)))
    assert not box.contains(Box((2, 3), (1, 4)))
    assert Box.full(()).numel == 1
    with pytest.raises(GeometryError, match="no box has offset"):
        Box((1,), (3, 4))
    with pytest.raises(GeometryError, match="no box has offset"):
        Box((-1,), (3,))
    with pytest.raises(GeometryError, match="different numbers of axes"):
        box.intersect(Box((0,), (1,)))


@cases(600)
@given(st.data())
def test_subtract_leaves_exactly_what_is_not_covered(data: st.DataObject) -> None:
    shape = data.draw(shapes(max_axes=3, empty=False))
    boxes = []
    for _ in range(data.draw(st.integers(0, 4))):
        offset = tuple(data.draw(st.integers(0, size)) for size in shape)
        boxes.append(Box(offset, tuple(data.draw(st.integers(0, n - o)) for n, o in zip(shape, offset, strict=True))))
    left = torch.zeros(shape, dtype=torch.int32)
    for box in subtract(Box.full(shape), boxes):
        of_box(left, box).add_(1)
    expected = torch.ones(shape, dtype=torch.int32)
    for box in boxes:
        of_box(expected, box).zero_()
    assert torch.equal(left, expected)


def test_row_major() -> None:
    assert row_major((2, 3, 4)) == torch.empty(2, 3, 4).stride()
    assert row_major(()) == ()
    assert View(Box((0,), (3,)), (0,), (3, 1), ()).dims() == (0, None)
