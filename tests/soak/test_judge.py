"""The judgement of a soak: a leak of each sort is noticed, noise, steps and warm-up are not taken for one."""

from __future__ import annotations

import mmap
import os
import threading

import numpy as np
import pytest

from rdt_core.demo.options import OptionError
from rdt_core.memory import Arena
from rdt_core.soak import SoakOptions, judge, measure
from rdt_core.soak.judge import LIMITS, trend
from rdt_core.soak.loop import SoakReport
from rdt_core.soak.show import summary, table

pytestmark = pytest.mark.unit


def series(measure: str, per_sync: float, count: int = 300, noise: float = 0.0, seed: int = 0) -> np.ndarray:
    base = {"rss": 300 << 20, "shared": 20 << 20, "registered": 20 << 20, "seconds": 0.03}.get(measure, 40)
    values = base + per_sync * np.arange(count) + np.random.default_rng(seed).normal(0, noise, count)
    return values if measure == "seconds" else values.round()


@pytest.mark.parametrize(
    ("measure", "per_sync", "noise"),
    [
        ("rss", 64 << 10, 1 << 20), ("files", 0.1, 0.5), ("threads", 1, 0.5), ("segments", 0.04, 0), ("shared", 4096, 0),
        ("registrations", 0.04, 0), ("registered", 40 << 10, 0), ("references", 1, 3), ("seconds", 0.0002, 0.004),
    ],
)  # fmt: skip
def test_a_leak_is_noticed(measure, per_sync, noise):
    assert judge("engine 0", measure, series(measure, per_sync, noise=noise)).grows


@pytest.mark.parametrize("measure", sorted(LIMITS))
@pytest.mark.parametrize("seed", range(5))
def test_noise_is_flat(measure, seed):
    noise = {"rss": 2 << 20, "shared": 1 << 16, "registered": 1 << 16, "seconds": 0.01}.get(measure, 2)
    assert not judge("engine 0", measure, series(measure, 0, noise=noise, seed=seed)).grows


def test_warm_up_outliers_and_what_shrinks_are_flat():
    warm = np.concatenate([np.linspace(100, 200, 100), np.full(200, 200.0)]) * (1 << 20)
    assert not judge("source 0", "rss", warm).grows
    spiky = np.full(300, 40.0)
    spiky[::7] += 1000
    assert not judge("source 0", "files", spiky).grows
    assert not judge("source 0", "files", np.arange(300)[::-1]).grows


def test_steps_far_apart_are_noticed_and_one_step_is_not():
    assert judge("source 0", "registrations", np.arange(300) // 25).grows  # one for each join
    assert not judge("source 0", "threads", np.where(np.arange(300) < 220, 25, 26)).grows


def test_the_trend_is_that_of_theil_and_sen():
    rng = np.random.default_rng(0)
    values = np.arange(40) * 0.5 + rng.normal(0, 3, 40)
    values[5] = 1e9
    slope, rises = trend(values)
    assert slope == pytest.approx(0.5, abs=0.2)
    assert rises > 3
    assert trend(np.zeros(10)) == (0.0, 0.0)
    assert trend(np.zeros(1)) == (0.0, 0.0)


def test_a_process_tells_what_it_holds():
    before = measure()
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    files = [os.open("/dev/null", os.O_RDONLY) for _ in range(5)]
    nbytes = (1 << 20) + 7 * 4096  # a size that no arena had before: one that is given back serves the next of its size
    arena = Arena(nbytes)
    # mapped by itself: the allocator may have so much in hand already
    kept = mmap.mmap(-1, 32 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    kept.write(bytes(32 << 20))
    after = measure()
    stop.set()
    thread.join()
    for file in files:
        os.close(file)
    assert after.threads == before.threads + 1
    assert after.files >= before.files + 5
    assert (after.segments, after.shared) == (before.segments + 1, before.shared + nbytes)
    assert after.rss > before.rss + (24 << 20)
    assert measure(os.getpid()).shared == after.shared  # as seen from outside
    kept.close()
    del arena


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"syncs": 3}, "--syncs 3 is too little"),
        ({"kinds": ("pigeon",)}, "--kinds: unknown pigeon"),
        ({"mode": "dead"}, "--mode 'dead' is unknown"),
        ({"workers": 0}, "--workers 0 is too little"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(options, message):
    with pytest.raises(OptionError, match=message):
        SoakOptions(**options).check()


def test_the_report_says_what_grows():
    verdicts = (judge("engine 0", "files", np.arange(40)), judge("engine 0", "threads", np.full(40, 9)))
    report = SoakReport(
        syncs=40, mode="live", links=("mapped",), rejoins=1, reattaches=2, seconds=3.0, verdicts=verdicts, series={}
    )
    assert [one.measure for one in report.growing] == ["files"]
    assert "grows: engine 0 files by 1 a sync" in summary(report)
    assert table(report).row_count == 2
