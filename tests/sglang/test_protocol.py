"""Calls and errors as they travel as text."""

from __future__ import annotations

import pytest

from rdt_core.errors import CoverageError, DeadlineError, EngineError, WireError
from rdt_sglang.protocol import CALLS, check_call, error_from_wire, error_to_wire

pytestmark = pytest.mark.unit

GOOD = {"int": 7, "float": 1.5, "str": "why", "dict": {"group": "g"}}


def test_every_call_is_taken():
    assert check_call("begin", {"version": 7, "timeout_s": 1.5}) == ("begin_weights", {"version": 7, "timeout_s": 1.5})
    assert check_call("status", {})[0] == "weights_status"
    assert set(CALLS) == {"prepare", "begin", "pull", "finish", "abort", "status", "close"}


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ("shutdown", {}),
        (None, {}),
        (["begin"], {}),
        ("begin", {"version": 7}),
        ("begin", {"version": 7, "timeout_s": 1, "more": 1}),
        ("begin", {"version": "7", "timeout_s": 1}),
        ("begin", {"version": True, "timeout_s": 1}),
        ("begin", [7, 1]),
        ("status", None),
        ("abort", {"version": 1, "reason": 1}),
        ("prepare", {"info": "g"}),
    ],
)
def test_anything_else_is_refused(call, arguments):
    with pytest.raises(WireError):
        check_call(call, arguments)


def test_errors_keep_their_class_and_text():
    for error in (DeadlineError("late"), EngineError("no"), WireError("odd")):
        back = error_from_wire(error_to_wire(error))
        assert (type(back), str(back)) == (type(error), str(error))
    assert type(error_from_wire(error_to_wire(CoverageError("x")))) is EngineError


@pytest.mark.parametrize("told", [None, "text", {}, {"message": 1}, [1]])
def test_an_error_that_says_nothing(told):
    assert "says nothing" in str(error_from_wire(told))
