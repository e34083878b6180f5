"""Layouts as options write them: one parser for all commands, which refuse by name what they do not do."""

from __future__ import annotations

import pytest

from rdt_core.bench import options as bench
from rdt_core.demo import options as demo
from rdt_core.notation import OptionError, Spec, engine_spec, only, trainer_spec
from rdt_core.plan import options as plan

pytestmark = pytest.mark.unit


def test_what_is_left_out_has_its_default() -> None:
    assert trainer_spec("fsdp:ranks=8") == Spec("fsdp", (("ranks", 8), ("replicas", 1), ("apart", 0)))
    assert trainer_spec("megatron:tp=8,ranks=64").get("pp") == 1
    assert dict(engine_spec("sglang:tp=4,ep=2").settings) == {"tp": 4, "ep": 2, "pp": 1, "replicas": 1}


@pytest.mark.parametrize(
    ("read", "text", "words"),
    [
        (trainer_spec, "deepspeed", "--trainer 'deepspeed': there is no 'deepspeed'; available: fsdp, megatron"),
        (trainer_spec, "fsdp:tp=2", "unknown setting 'tp'; known: ranks, replicas, apart"),
        (engine_spec, "vllm:tp=two", "tp must be a whole number of at least 1, not 'two'"),
        (engine_spec, "vllm:tp=0", "at least 1, not '0'"),
        (engine_spec, "", "there is no ''; available: vllm, sglang"),
    ],
)
def test_what_cannot_be_read_is_refused(read: object, text: str, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        read(text)


def test_a_command_refuses_what_it_does_not_do() -> None:
    assert only("--engine", engine_spec("vllm:tp=2,pp=1"), ("vllm",), ("tp",), "it").get("tp") == 2
    with pytest.raises(OptionError, match="--engine vllm:tp=1,ep=1,pp=2,replicas=1: it knows no pp; it knows tp"):
        only("--engine", engine_spec("vllm:pp=2"), ("vllm",), ("tp",), "it")
    with pytest.raises(OptionError, match="--trainer megatron: it has no such ranks; available: fsdp"):
        only("--trainer", trainer_spec("megatron:ranks=2"), ("fsdp",), ("ranks",), "it")


def test_every_command_reads_with_it() -> None:
    assert bench.OptionError is demo.OptionError is plan.OptionError is OptionError
    assert bench.engine_spec is plan.engine_spec is engine_spec
    assert bench.trainer_spec is plan.trainer_spec is trainer_spec
