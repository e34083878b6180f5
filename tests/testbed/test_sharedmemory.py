from __future__ import annotations

import mmap
import multiprocessing
import uuid
from pathlib import Path

import pytest

from rdt_testbed import sharedmemory

pytestmark = pytest.mark.unit


@pytest.fixture
def make():
    made = []

    def one(prefix: str) -> Path:
        path = Path("/dev/shm") / f"{prefix}{uuid.uuid4().hex[:12]}"
        path.write_bytes(b"x" * 64)
        made.append(path)
        return path

    yield one
    for path in made:
        path.unlink(missing_ok=True)


def test_only_what_appeared_since_and_nobody_has_is_removed(make):
    old = make("psm_")
    before = sharedmemory.present()
    assert old in before
    left, other, mapped = make("psm_"), make("somebodys_"), make("sem.mp-")
    with mapped.open("r+b") as file, mmap.mmap(file.fileno(), 64):
        sharedmemory.remove_since(before)
        assert [path.exists() for path in (old, left, other, mapped)] == [True, False, True, True]
    sharedmemory.remove_since(before)
    assert not mapped.exists()


def test_a_semaphore_that_its_maker_has_and_nobody_else_opened_stays():
    before = sharedmemory.present()
    semaphore = multiprocessing.get_context("spawn").Semaphore(1)
    (path,) = [
        one for one in sharedmemory.present() - before if one.name == f"sem.{semaphore._semlock.name.lstrip('/')}"
    ]
    sharedmemory.remove_since(before)
    assert path.exists(), "a process that is started with it could not open it"
