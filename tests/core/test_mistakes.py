"""Mistakes of a caller, each told at once by an error of rdt's own that says what to write instead."""

from __future__ import annotations

import pytest
import torch

from rdt_core.errors import EngineError, MembershipError, SourceError, SyncError
from rdt_core.replica import ModuleReplica, ModuleWorker
from rdt_core.testing import LocalGroup, TensorSource

pytestmark = pytest.mark.unit


def test_mistakes_of_a_caller_are_named() -> None:
    tensors = {"weight": torch.ones(2, 3)}
    with pytest.raises(EngineError, match="workers is a ModuleWorker; give a list of workers"):
        ModuleReplica(ModuleWorker(lambda: torch.nn.Linear(3, 2)))
    with pytest.raises(SourceError, match=r"rank 0 is a Linear, which lacks .*; ModuleSource\(model\) is one"):
        LocalGroup([torch.nn.Linear(3, 2)])
    with LocalGroup([TensorSource(tensors)]) as group:
        (sync,) = group.syncs
        for number in (-1, 1 << 63):
            with pytest.raises(SyncError, match=f"version {number} is out of range; versions are integers from 0 to"):
                group.syncs[0].publish(number)
        with pytest.raises(SyncError, match="version '2' is a str; versions are integers"):
            sync.publish("2")
        sync.leave()
        with pytest.raises(MembershipError, match="source rank 0 has left group 'conformance'; join again"):
            sync.publish(2)


def test_a_version_that_went_to_nobody_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with LocalGroup([TensorSource({"weight": torch.ones(2, 3)})]) as group:
        for version in (1, 2):
            group.publish(version)
    (line,) = [line for line in caplog.messages if "went to nobody" in line]
    assert line == (
        "version 1 of 'conformance' went to nobody: no replica is attached. One that is attached from now on is paused until "
        "sync.catch_up() on every source rank, or the next publish"
    )
