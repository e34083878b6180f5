"""What must be right in a process before its NIXL agent is made: which settings are wrong, and which were decided."""

from __future__ import annotations

import sys
import types

import pytest

from rdt_core import settings
from rdt_core.settings import GET_ZCOPY, expandable, refused_reads, slow_reads, visible_nvlinks

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("value", ["on", "ON", "1", "y", "yes"])
def test_direct_reads_are_asked_for(value: str) -> None:
    assert slow_reads({GET_ZCOPY: value}, 0) is None


@pytest.mark.parametrize("environment", [{}, {GET_ZCOPY: "auto"}, {GET_ZCOPY: "off"}, {GET_ZCOPY: "true"}])
def test_without_nvlink_in_sight_everything_else_is_slow(environment: dict[str, str]) -> None:
    reason = slow_reads(environment, 0)
    assert reason is not None
    assert f"{GET_ZCOPY}=on" in reason
    assert "0.55 GB/s instead of 1,240" in reason
    assert slow_reads(environment, 18) is None


def test_nothing_is_claimed_where_nothing_is_known() -> None:
    assert slow_reads({}, None) is None


def test_who_switched_it_off_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_nvlinks", lambda: 0)
    assert refused_reads({GET_ZCOPY: "off"}) is None
    assert refused_reads({GET_ZCOPY: "on"}) is None
    assert "no NVLink" in str(refused_reads({}))
    monkeypatch.setenv(GET_ZCOPY, "on")
    assert refused_reads() is None


def test_the_machine_is_not_asked_where_the_variable_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked() -> int:
        raise AssertionError

    monkeypatch.setattr(settings, "_nvlinks", asked)
    assert refused_reads({GET_ZCOPY: "on"}) is None


@pytest.mark.parametrize(
    ("environment", "mended"),
    [
        ({}, {}),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, {}),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}, {}),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512, expandable_segments : true"},
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512,expandable_segments:False"},
        ),
        ({"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}, {"PYTORCH_ALLOC_CONF": "backend:native"}),
        (
            {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
            {"PYTORCH_ALLOC_CONF": "expandable_segments:False", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"},
        ),
    ],
)
def test_allocators_whose_memory_nobody_else_can_map(environment: dict[str, str], mended: dict[str, str]) -> None:
    assert expandable(environment) == mended


class Nvml(types.ModuleType):
    """Answers of a driver: how many links the first GPU says it has, and how many of them end somewhere."""

    NVML_SUCCESS = 0
    NVML_FI_DEV_NVLINK_LINK_COUNT = 91

    class NVMLError(Exception):
        pass

    def __init__(self, links: int, ends: int, *, driver: bool = True, answer: int = 0) -> None:
        super().__init__("pynvml")
        self.links, self.ends, self.driver, self.answer = links, ends, driver, answer
        self.open = 0

    def nvmlInit(self) -> None:
        if not self.driver:
            raise self.NVMLError
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetFieldValues(self, device: int, fields: list[int]) -> list[types.SimpleNamespace]:
        assert (device, fields) == (0, [self.NVML_FI_DEV_NVLINK_LINK_COUNT])
        return [types.SimpleNamespace(nvmlReturn=self.answer, value=types.SimpleNamespace(uiVal=self.links))]

    def nvmlDeviceGetNvLinkRemotePciInfo(self, device: int, link: int) -> None:
        if link >= self.ends:
            raise self.NVMLError


@pytest.mark.parametrize(
    ("nvml", "count"),
    [
        (Nvml(18, 18), 18),
        (Nvml(0, 0), 0),
        (Nvml(18, 17), 0),  # one that ends nowhere: UCX then takes none for real
        (Nvml(18, 18, answer=3), 0),
        (Nvml(18, 18, driver=False), None),
    ],
)
def test_links_are_counted_as_ucx_counts_them(monkeypatch: pytest.MonkeyPatch, nvml: Nvml, count: int | None) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert visible_nvlinks() == count
    assert nvml.open == 0
