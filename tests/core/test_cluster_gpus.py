"""What GPU names and masks mean: indices, UUIDs, prefixes, MIG, empty and duplicate entries, and both sources of the list."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rdt_core import gpus
from rdt_core.errors import PlacementError
from rdt_core.gpus import Device, Gpu, find, local_index, parse_list, read_nvml, visible

pytestmark = pytest.mark.unit

UUIDS = [f"GPU-{digit * 8}-0000-4000-8000-00000000000{digit}" for digit in "abcd"]
NODE = tuple(Gpu(index, uuid, "NVIDIA H200") for index, uuid in enumerate(UUIDS))
MIGS = ("MIG-11111111-0000-5000-8000-000000000001", "MIG-22222222-0000-5000-8000-000000000002")
CUT = (NODE[0], Gpu(1, UUIDS[1], "NVIDIA H200", MIGS))
MIXED = (Gpu(0, UUIDS[0], "NVIDIA T4"), Gpu(1, UUIDS[1], "NVIDIA H200"))


def indices(mask: str | None, **options: str) -> list[int]:
    return [device.index for device in visible(mask, NODE, **options)]


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("2", [2]),
        ("3,0", [3, 0]),
        (" 1, 2", [1, 2]),
        ("1,", [1]),
        ("1,-1", [1]),
        (UUIDS[2], [2]),
        (f"{UUIDS[3]},{UUIDS[0]}", [3, 0]),
        ("GPU-cccc,GPU-a", [2, 0]),
        ("GPU-CCCC", [2]),
    ],
)
def test_masks(mask: str | None, expected: list[int]) -> None:
    assert indices(mask) == expected


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        ("0,0", "names GPU 0 twice"),
        ("GPU-a,GPU-aa", "names GPU 0 twice"),
        ("0,4,1", "'4' means no GPU of this machine, which has 0: GPU-aaaa"),
        ("0,-1,1", "hides all that follow"),
        (",1", "hides all that follow"),
        ("0,GPU-b", "mixes indices, GPU and MIG names"),
        ("GPU-b,1", "mixes indices, GPU and MIG names"),
        ("GPU-", "means 4 GPUs"),
        ("GPU-f", "means no GPU"),
        ("1gpu", "names no GPU"),
        ("all", "names no GPU"),
        ("٣", "names no GPU"),
    ],
)
def test_masks_that_hide_devices_without_a_word_are_refused(mask: str, reason: str) -> None:
    with pytest.raises(PlacementError, match=reason) as raised:
        visible(mask, NODE)
    assert f"CUDA_VISIBLE_DEVICES={mask!r}" in str(raised.value)


def test_mig_instances() -> None:
    assert visible(MIGS[1], CUT) == (Device(1, MIGS[1]),)
    assert find("0", CUT) == Device(0, UUIDS[0])
    with pytest.raises(PlacementError, match="shows a process only the first"):
        visible(",".join(MIGS), CUT)
    with pytest.raises(PlacementError, match="name the instance that is meant"):
        visible("1", CUT)
    with pytest.raises(PlacementError, match="name the instance that is meant"):
        visible(None, CUT)
    with pytest.raises(PlacementError, match="means no GPU"):
        find("MIG-333", CUT)


def test_models_that_differ_need_the_order_of_the_bus() -> None:
    for mask in (None, "0"):
        with pytest.raises(PlacementError, match="CUDA_DEVICE_ORDER=PCI_BUS_ID"):
            visible(mask, MIXED)
    assert [device.index for device in visible("1,0", MIXED, device_order="PCI_BUS_ID")] == [1, 0]
    assert visible(UUIDS[1], MIXED) == (Device(1, UUIDS[1]),)


def test_local_physical_and_uuid() -> None:
    assert local_index("3", "3", NODE) == 0
    assert local_index("3", None, NODE) == 3
    assert local_index(UUIDS[3], "1,3", NODE) == 1
    assert local_index("1", f"{UUIDS[3]},{UUIDS[1]}", NODE) == 1
    assert find("1", NODE).bare_uuid == UUIDS[1].removeprefix("GPU-")
    with pytest.raises(PlacementError, match=r"GPU 2 .* hidden .* shows \[0, 1\]"):
        local_index("2", "0,1", NODE)


def test_nvidia_smi_list() -> None:
    text = (
        f"GPU 0: NVIDIA H200 (UUID: {UUIDS[0]})\n"
        f"GPU 1: NVIDIA H200 (UUID: {UUIDS[1]})\n"
        f"  MIG 3g.71gb     Device  0: (UUID: {MIGS[0]})\n"
        f"  MIG 1g.18gb+me  Device  1: (UUID: {MIGS[1]})\n"
    )
    assert parse_list(text) == CUT
    assert parse_list("No devices found.\n") == parse_list("") == ()
    old = f"GPU 0: A100-SXM4-40GB (UUID: {UUIDS[0]})\n  MIG 3g.20gb Device 0: (UUID: MIG-{UUIDS[0]}/1/0)\n"
    assert parse_list(old)[0].instances == (f"MIG-{UUIDS[0]}/1/0",)
    with pytest.raises(PlacementError, match="Unable to determine"):
        parse_list(text + "Unable to determine the device handle for GPU 0000:01:00.0")


class NvmlError(Exception):
    pass


def nvml(node: tuple[Gpu, ...], *, as_bytes: bool) -> SimpleNamespace:
    """Answers in the shape of pynvml, for the order and the conversions of `read_nvml`; a real driver is asked elsewhere."""

    def text(value: str) -> str | bytes:
        return value.encode() if as_bytes else value

    def mode(gpu: Gpu) -> list[int]:
        if gpu.name == "NVIDIA T4":
            raise NvmlError("Not Supported")
        return [int(bool(gpu.instances)), 0]

    def instance(gpu: Gpu, number: int) -> SimpleNamespace:
        if number >= len(gpu.instances):
            raise NvmlError("Not Found")
        return SimpleNamespace(uuid=gpu.instances[number])

    return SimpleNamespace(
        NVMLError=NvmlError,
        NVML_DEVICE_MIG_ENABLE=1,
        nvmlDeviceGetCount=lambda: len(node),
        nvmlDeviceGetHandleByIndex=lambda index: node[index],
        nvmlDeviceGetMigMode=mode,
        nvmlDeviceGetMaxMigDeviceCount=lambda gpu: 7,
        nvmlDeviceGetMigDeviceHandleByIndex=instance,
        nvmlDeviceGetUUID=lambda gpu: text(gpu.uuid),
        nvmlDeviceGetName=lambda gpu: text(gpu.name),
    )


@pytest.mark.parametrize("as_bytes", [False, True])
@pytest.mark.parametrize("node", [NODE, CUT, MIXED, ()])
def test_both_sources_agree(node: tuple[Gpu, ...], as_bytes: bool) -> None:
    lines = []
    for gpu in node:
        lines.append(f"GPU {gpu.index}: {gpu.name} (UUID: {gpu.uuid})")
        lines += [f"  MIG 1g.18gb  Device {number}: (UUID: {uuid})" for number, uuid in enumerate(gpu.instances)]
    assert read_nvml(nvml(node, as_bytes=as_bytes)) == parse_list("\n".join(lines)) == node


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Lets a test put a program in the place of `nvidia-smi`, with `nvidia-ml-py` out of the way."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/usr/bin{os.pathsep}/bin")

    def install(script: str) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)

    return install


def test_the_second_source(smi) -> None:
    smi(f'[ "$1" = -L ] && echo "GPU 0: NVIDIA H200 (UUID: {UUIDS[0]})"')
    assert gpus.inventory() == NODE[:1]


def test_a_driver_that_fails_is_not_taken_for_none(smi) -> None:
    smi("echo 'NVIDIA-SMI has failed'; exit 9")
    with pytest.raises(PlacementError, match="failed with 9: NVIDIA-SMI has failed"):
        gpus.inventory()
    smi("exec sleep 60")
    with pytest.raises(PlacementError, match=r"did not answer within 0\.2 s"):
        gpus.inventory(timeout_s=0.2)


def test_no_driver_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus.inventory() == ()


@pytest.mark.gpu
def test_a_real_driver_and_torch_agree() -> None:
    import torch

    devices = visible(os.environ.get(gpus.MASK), gpus.inventory(), device_order=os.environ.get(gpus.ORDER))
    assert [device.bare_uuid for device in devices] == [
        str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())
    ]
    assert gpus.inventory() == gpus._from_smi(30)
