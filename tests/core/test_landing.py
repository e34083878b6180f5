"""What landings of engines share: the refusal of a model of which tensors moved, and devices by their index."""

from __future__ import annotations

import pytest
import torch

from rdt_core.errors import EngineError
from rdt_core.landing import check_places, with_index

pytestmark = pytest.mark.unit

BEFORE = {"a": (4096, 8), "b": (8192, 16), "c": (12288, 4)}


def test_tensors_that_lie_where_they_lay_are_accepted_and_those_that_came_since() -> None:
    check_places(BEFORE, BEFORE, "test/0", "now")
    check_places(BEFORE, {"d": (1, 1), **BEFORE}, "test/0", "now")


@pytest.mark.parametrize("now", [(9000, 16), (8192, 8), None], ids=["moved", "resized", "gone"])
def test_one_that_does_not_is_named(now: tuple[int, int] | None) -> None:
    places = {**BEFORE, "b": now} if now else {name: one for name, one in BEFORE.items() if name != "b"}
    with pytest.raises(EngineError) as raised:
        check_places(BEFORE, places, "test/0", "since it connected; connect it again")
    assert str(raised.value) == "test/0: the address of b changed since it connected; connect it again"


def test_all_that_moved_are_named_in_order() -> None:
    with pytest.raises(EngineError, match="the address of a, b, c changed while it ran"):
        check_places(dict(reversed(BEFORE.items())), {}, "test/0", "while it ran")


@pytest.mark.parametrize("device", ["cpu", "meta", "cuda:3"])
def test_a_device_that_needs_no_index_stays(device: str) -> None:
    assert with_index(device) == with_index(torch.device(device)) == torch.device(device)


def test_cuda_is_the_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    assert with_index("cuda") == torch.device("cuda", 2)
