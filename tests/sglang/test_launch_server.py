"""The command line of rdt's launcher. A server started by it: test_routes."""

from __future__ import annotations

import pytest

from rdt_sglang import launch as package_launch
from rdt_sglang.launch_server import main, parser

pytestmark = pytest.mark.unit


def test_help_says_when_it_is_needed(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert "--ray-address" in told
    assert "python -m sglang.launch_server" in told


def test_no_cluster_is_no_cluster(monkeypatch, capsys):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert main(["--", "--model-path", "m"]) == 2
    assert "--ray-address" in capsys.readouterr().err


def test_what_is_behind_the_dashes_is_sglangs(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    options = parser().parse_args(["--ray-namespace", "n", "--", "--model-path", "m", "--tp-size", "2"])
    assert (options.ray_address, options.ray_namespace) == ("head:6379", "n")
    assert options.sglang[-4:] == ["--model-path", "m", "--tp-size", "2"]


def test_the_name_of_the_package_is_the_function():
    assert callable(package_launch)
