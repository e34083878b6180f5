"""What a run refuses before it starts anything, on the command line and from Python."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rdt_core import cli
from rdt_core.demo import options as module
from rdt_core.demo.options import DemoOptions, OptionError, Spec, parse_spec

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def _one_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = {"paper": EntryPoint("paper", "no.such.module:start", "rdt.demo_engines")}
    monkeypatch.setattr(module, "installed_engines", lambda: engines)


@pytest.fixture(autouse=True)
def _nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("something was started")

    monkeypatch.setattr("ray.init", refuse)
    monkeypatch.setattr("rdt_core.demo.model.prepare", refuse)


def test_a_spec_has_a_name_and_settings() -> None:
    assert parse_spec("--trainer", "fsdp", ("fsdp",), {"ranks": 2}) == Spec("fsdp", (("ranks", 2),))
    assert parse_spec("--trainer", "fsdp:ranks=4", ("fsdp",), {"ranks": 2}).get("ranks") == 4
    assert str(parse_spec("--trainer", "fsdp", ("fsdp",), {"ranks": 2})) == "fsdp:ranks=2"


REFUSED = [
    (["--engine", "tgi"], "there is no 'tgi'; available: paper"),
    (["--engine", "paper:pp=2"], "unknown setting 'pp'; known: tp"),
    (["--engine", "paper:tp=0"], "tp must be a whole number of at least 1, not '0'"),
    (["--engine", "paper:tp"], "tp must be a whole number of at least 1, not ''"),
    (["--engine", "paper:tp=²"], "tp must be a whole number"),
    (["--trainer", "ddp"], "there is no 'ddp'; available: fsdp"),
    (["--trainer", "fsdp:ranks=two"], "ranks must be a whole number of at least 1, not 'two'"),
    (["--trainer", "fsdp:ranks=3"], "32 samples do not divide by 3 ranks"),
    (["--mode", "broadcast"], "--mode 'broadcast': choose one of auto, live, snapshot, bucket"),
    (["--link", "rdma"], "--link 'rdma': choose one of auto, mapped, prepared, ray"),
    (["--dtype", "int8"], "--dtype 'int8': choose one of float32, bfloat16"),
    (["--mode", "live", "--dtype", "bfloat16"], "use --mode snapshot (or auto), or --dtype float32"),
    (["--model", "/no/such/place"], "--model /no/such/place: no such directory"),
    (["--steps", "0"], "--steps"),
    (["--steps", "many"], "--steps"),
    (["--seed", "-1"], "--seed"),
    (["--fast"], "No such option"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED, ids=[" ".join(arguments) for arguments, _ in REFUSED])
def test_the_command_line_refuses(arguments: list[str], message: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(
        cli.app, ["demo", "--engine", "paper", "--out", str(tmp_path), *arguments], env={"COLUMNS": "500"}
    )
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert result.stdout == ""


def test_a_directory_that_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(OptionError, match=r"no tokenizer_config.json, \*.safetensors in it"):
        DemoOptions(engine="paper", model=tmp_path, out=tmp_path).check()


def test_an_output_that_is_a_file(tmp_path: Path) -> None:
    place = tmp_path / "out"
    place.write_text("")
    with pytest.raises(OptionError, match=r"--out .*: cannot be made a directory"):
        DemoOptions(engine="paper", out=place).check()


def test_no_engine_installed_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "installed_engines", dict)
    with pytest.raises(OptionError, match=r"pip install 'rdt-vllm\[vllm\]'"):
        DemoOptions(out=tmp_path).check()


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "MODEL_MODULES", ("no_such_module_at_all",))
    with pytest.raises(OptionError, match=r"needs no_such_module_at_all; install with: pip install 'rdt-core\[demo\]'"):
        DemoOptions(engine="paper", out=tmp_path).check()


@pytest.mark.parametrize("change", [{"samples": 1}, {"max_tokens": 0}, {"seed": -1}, {"steps": 0}])
def test_numbers_out_of_range(change: dict[str, int], tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=f"--{next(iter(change)).replace('_', '-')} "):
        DemoOptions(engine="paper", out=tmp_path, **change).check()  # type: ignore[arg-type]


def test_what_is_right_is_accepted(tmp_path: Path) -> None:
    options = DemoOptions(engine="paper:tp=2", link="prepared", out=tmp_path / "deep" / "out")
    options.check()
    assert options.kinds == ("prepared",)
    assert DemoOptions().kinds is None
    assert (tmp_path / "deep" / "out").is_dir()


def test_help_shows_examples() -> None:
    result = CliRunner().invoke(cli.app, ["demo", "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert "rdt demo --steps 2" in result.stdout
