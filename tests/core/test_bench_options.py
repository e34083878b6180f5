"""Options and placement of the bench: what is read, what is refused before anything starts, who gets which GPU."""

from __future__ import annotations

import pytest

from rdt_core.bench import options as read
from rdt_core.bench.options import BenchOptions, OptionError
from rdt_core.bench.placement import environment, place
from rdt_core.trainers import MegatronLayout

pytestmark = pytest.mark.unit


def test_specs_and_lists() -> None:
    assert read.trainer("fsdp").get("ranks") == 2
    assert (read.engine("sglang:tp=4").name, read.engine("sglang:tp=4").get("tp")) == ("sglang", 4)
    assert read.names("ray, mapped,ray", read.KINDS, "--kinds") == ("ray", "mapped")
    with pytest.raises(OptionError, match=r"--kinds 'smoke': unknown smoke; known: mapped, prepared, ray, auto"):
        read.names("smoke", read.KINDS, "--kinds")
    with pytest.raises(OptionError, match="empty list"):
        read.names(",", read.KINDS, "--kinds")
    with pytest.raises(OptionError, match="available: vllm, sglang"):
        read.engine("llama.cpp:tp=2")
    assert read.engine("vllm:tp=4,ep=2,pp=2").settings == (("tp", 4), ("ep", 2), ("pp", 2), ("replicas", 1))
    with pytest.raises(OptionError, match="rdt bench knows no replicas; it knows tp, ep, pp"):
        read.engine("vllm:replicas=2")
    assert read.megatron(read.trainer("fsdp:ranks=3")) is None
    layout = read.megatron(read.trainer("megatron:tp=2,pp=2,ep=4,etp=1,cp=1,ranks=8"))
    assert layout == MegatronLayout(8, tp=2, pp=2, ep=4)
    with pytest.raises(OptionError, match="rdt bench knows no replicas; it knows ranks"):
        read.trainer("fsdp:ranks=2,replicas=2")


def test_packs() -> None:
    assert [read.pack_bytes(text) for text in ("default", "direct", "64K", "4m", "123")] == [0, 1, 65536, 4 << 20, 123]
    assert read.pack_bytes("packed") > 1 << 50
    for text in ("", "0", "-1", "4T", "K"):
        with pytest.raises(OptionError, match="not understood"):
            read.pack_bytes(text)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"model": "gpt-9"}, "known: tiny"),
        ({"model": "tiny", "layers": 3}, "tiny has 2 layers"),
        ({"device": "tpu"}, "known: cpu, cuda"),
        ({"gpus": "far"}, "known: auto, separate, shared, together"),
        ({"engine": "x"}, "known: vllm, sglang"),
        ({"ranks": 0}, "--trainer ranks 0"),
        ({"rounds": 0}, "--rounds 0"),
        ({"tp": 2}, "tp=2 does not divide the 9 attention heads of smollm2-135m"),
        ({"model": "qwen3-30b-a3b", "tp": 12}, "tp=12 does not divide the 32 attention heads"),
        ({"model": "tiny-moe", "tp": 2, "ep": 4}, "ep=4 does not divide tp=2"),
        ({"model": "tiny", "tp": 2, "ep": 2}, "ep=2 does not divide the 0 experts"),
        ({"model": "tiny", "pp": 3}, "pp=3: tiny has 2 layers"),
        ({"packs": ("tight",)}, "--pack 'tight'"),
        ({"expandable": True}, "needs --device cuda"),
    ],
)
def test_what_cannot_work_is_refused(wrong: dict, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        BenchOptions(**wrong).check()


def test_gpus_that_are_not_there_are_refused() -> None:
    with pytest.raises(OptionError, match="torch sees none"):
        BenchOptions(device="cuda").check(0)
    with pytest.raises(OptionError, match=r"--gpus together needs two GPUs, and torch sees 1 here"):
        BenchOptions(device="cuda", gpus="together").check(1)
    assert BenchOptions(device="cuda").check(1).gpus == "shared"
    assert BenchOptions(device="cuda").check(2).gpus == "separate"
    assert BenchOptions(gpus="together").check(0).gpus == "shared"


def test_peers_all_has_a_row_for_each_and_says_what_it_leaves_out() -> None:
    def left_out(**options: object) -> dict[str, str]:
        one = BenchOptions(**options).with_peers("all")
        assert one.peers == read.PEERS
        return dict(one.left_out)

    assert left_out() == {}
    assert left_out(device="cuda", model="qwen3-8b").keys() == {"disk"}
    large = left_out(device="cuda", model="qwen3-30b-a3b")
    assert "61.064 GB through a file" in large["disk"]
    assert "an object for each of 18867 tensors; --peers objects measures it" in large["objects"]
    named = BenchOptions(model="qwen3-8b").with_peers("disk")
    assert (named.peers, named.left_out) == (("disk",), ())
    assert BenchOptions().with_peers("none").peers == ()
    assert BenchOptions().with_peers("all", ("mine", "disk")).peers == (*read.PEERS, "mine")
    assert BenchOptions().with_peers("mine", ("mine",)).peers == ("mine",)
    with pytest.raises(OptionError, match="unknown pigeons"):
        BenchOptions().with_peers("pigeons")


def test_who_gets_which_gpu() -> None:
    assert place("separate", 2, 1, 1) == place("separate", 3, 1, 1)
    one = place("separate", 4, 3, 2)
    assert (one.sources, one.readers) == ((0, 1, 0), (2, 3))
    one = place("together", 2, 2, 2)
    assert (one.sources, one.readers) == ((0, 1), (0, 1))
    one = place("shared", 2, 2, 2)
    assert (one.sources, one.readers) == ((0, 0), (0, 0))
    assert place("separate", 0, 2, 2).sources == ()


def test_every_process_sees_every_gpu_its_own_first() -> None:
    assert environment(1, 3, given={})["CUDA_VISIBLE_DEVICES"] == "1,0,2"
    assert environment(1, 2, given={"CUDA_VISIBLE_DEVICES": "5, 3"})["CUDA_VISIBLE_DEVICES"] == "3,5"
    one = environment(0, 2, given={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
    assert one["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert one["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] == "1"
    assert one["NCCL_NVLS_ENABLE"] == "0"
    assert "PYTORCH_CUDA_ALLOC_CONF" not in one
    assert environment(0, 1, expandable=True, given={})["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
