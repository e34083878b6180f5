"""`rdt doctor` names settings that nothing heeds or nothing works with: unknown transports, plug-in folders, modes of tokens."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rdt_core.doctor.checks import examine
from rdt_core.doctor.facts import Facts, Finding, Severity
from rdt_core.doctor.ucxnames import transports, unknown

pytestmark = pytest.mark.unit

FACTS = Facts(
    hostname="n0",
    nixl_module="nixl_cu13",
    nixl_plugins=("LIBFABRIC", "UCX"),
    nixl_folder="/site/nixl_cu13.libs/nixl",
    ucx="1.23.0",
)


def found(check: str, **fields: Any) -> list[Finding]:
    return [one for one in examine(msgspec.structs.replace(FACTS, **fields)) if one.check == check]


@pytest.mark.parametrize(
    ("value", "names"),
    [("all", ["all"]), ("^rc, \\ud:aux", ["rc", "ud"]), (" tcp ,,cma", ["tcp", "cma"]), ("", []), ("^", [])],
)
def test_names_in_a_list_of_transports(value: str, names: list[str]) -> None:
    assert transports(value) == names


def test_names_that_ucx_does_not_have() -> None:
    assert unknown("all,mm,sm,ib,rc_x,self,tcp,cuda,gdr_copy,rc_gda,ud:aux,\\rc") == {}
    assert unknown("tpc,tcp,zzz") == {"tpc": "tcp", "zzz": ""}
    assert unknown("hyper,tcp", ["hyper"]) == {}


@pytest.mark.parametrize(
    ("value", "severity", "said", "why", "env"),
    [
        ("tpc", "broken", "has no transport or group 'tpc' (like 'tcp')", "agent does not start", {"UCX_TLS": "all"}),
        ("zzz,sm,tcp", "note", "UCX 1.23.0 has no transport or group 'zzz'", "the other names alone", {}),
        ("^cma_", "note", "'cma_' (like 'cma')", "leaves out nothing", {}),
    ],
)
def test_an_unknown_transport_is_named(value: str, severity: str, said: str, why: str, env: dict[str, str]) -> None:
    one = found("ucx-transports", environment={"UCX_TLS": value})[0]
    assert (one.severity, one.env) == (severity, env)
    assert one.what.startswith(f"UCX_TLS={value}: ")
    assert said in one.what
    assert why in one.why
    assert "export UCX_TLS=all" in one.mend


def test_a_transport_that_only_the_library_at_hand_has_is_not_called_unknown() -> None:
    (one,) = found("ucx-transports", environment={"UCX_TLS": "hyper,sm"}, ucx_knows=("hyper",))
    assert one.severity == "ok"


@pytest.mark.parametrize(
    ("named", "said"),
    [
        (None, "NIXL_PLUGIN_DIR=/plugins names no folder"),
        ((), "NIXL_PLUGIN_DIR=/plugins holds no plug-in UCX"),
        (("OBJ", "POSIX"), "NIXL_PLUGIN_DIR=/plugins holds no plug-in UCX, only OBJ, POSIX"),
    ],
)
def test_a_folder_of_plugins_without_the_backend(named: tuple[str, ...] | None, said: str) -> None:
    (one,) = found("nixl-plugins", environment={"NIXL_PLUGIN_DIR": "/plugins"}, named_plugins=named)
    assert (one.severity, one.what) == ("broken", said)
    assert one.env == {"NIXL_PLUGIN_DIR": "/site/nixl_cu13.libs/nixl"}
    assert one.mend == "unset NIXL_PLUGIN_DIR, or export NIXL_PLUGIN_DIR=/site/nixl_cu13.libs/nixl"


def test_a_folder_of_plugins_with_the_backend_is_well() -> None:
    assert found("nixl-plugins", environment={"NIXL_PLUGIN_DIR": "/plugins"}, named_plugins=("UCX",)) == []
    assert found("nixl-plugins") == []
    assert len(found("nixl-plugins", environment={"NIXL_PLUGIN_DIR": ""})) == 1  # NIXL takes that for a folder, too


@pytest.mark.parametrize("has_token", [True, False])
def test_a_mode_that_ray_does_not_have(has_token: bool) -> None:
    (one,) = found("ray-token", environment={"RAY_AUTH_MODE": "tokens"}, has_ray_token=has_token)
    assert one.severity == "note"
    assert one.what == "RAY_AUTH_MODE=tokens: Ray knows token and disabled alone"
    assert "takes it for disabled" in one.why
    assert ("there is a token" in one.why) is has_token
    assert "RAY_AUTH_MODE=token" in one.mend


@pytest.mark.parametrize("mode", ["token", "TOKEN", "disabled", "Disabled"])
def test_modes_that_ray_has(mode: str) -> None:
    assert found("ray-token", environment={"RAY_AUTH_MODE": mode}, has_ray_token=True) == []


@pytest.mark.parametrize(("memlock", "said"), [(64 << 10, "64 KiB"), (8 << 20, "8 MiB"), (1 << 40, "1,048,576 MiB")])
def test_locked_memory_is_said_in_a_unit_that_fits(memlock: int, said: str) -> None:
    (one,) = found("locked-memory", memlock=memlock)
    assert one.level == Severity.OK
    assert one.what.startswith(f"locked memory: {said}; ")
