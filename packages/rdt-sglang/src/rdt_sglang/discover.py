"""Finds the scheduler actors of an engine of which only the URL is known, without ambiguity or not at all.

The server itself is asked first: rdt's route there gives the actors' ids, which cannot be mistaken. A server without the
route (several tokenizer workers) is matched by the names that SGLang gives its actors; that is refused as soon as two
engines could be meant. Errors list what was found, and both namespaces.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Mapping
from typing import Any

from rdt_core.errors import EngineError
from rdt_core.web import StatusError, Web

from .protocol import ACTORS_ROUTE

_NAME = re.compile(
    r"sglang_scheduler_node(?P<node>.+)_dp(?P<dp>\d+)_pp(?P<pp>\d+)_tp(?P<tp>\d+)_pg(?P<pg>[0-9a-f]{8})_bundle(?P<bundle>\d+)"
)


def find_actors(
    url: str, *, namespace: str | None = None, headers: Mapping[str, str] | None = None, timeout_s: float = 30.0
) -> list[Any]:
    """Returns the handles of all SchedulerActors behind a server in Ray mode, in rank order.

    Unpickling such a handle in another process imports SGLang there, where it is installed.

    Args:
        url: of SGLang's HTTP server, e.g. `http://node7:30000`.
        namespace: Ray namespace in which SGLang made its actors; default: what the server says, else this process's.
        headers: sent with every request; for a server with `--admin-api-key`, `{"Authorization": "Bearer KEY"}`.
        timeout_s: deadline, in seconds.

    Raises:
        EngineError: the server has no scheduler actors, they are those of another cluster, none or more than one engine
            fits; lists the actors found, and the namespaces looked in.
        DeadlineError: the server did not answer in time.
    """
    import ray

    if not ray.is_initialized():
        raise EngineError(f"cannot look for the schedulers of {url}: this process is not connected to a Ray cluster")
    web = Web(url, headers)
    deadline = time.monotonic() + timeout_s
    try:
        told = web.get(ACTORS_ROUTE, deadline=deadline)
    except StatusError as error:
        if error.status not in (404, 405):
            raise
        return _by_name(web, namespace, deadline)
    return _as_told(url, told, namespace)


def _as_told(url: str, told: Any, namespace: str | None) -> list[Any]:
    import ray

    if not isinstance(told, dict) or told.get("mode") != "ray":
        raise EngineError(
            f"{url} has plain scheduler processes {told.get('pids') if isinstance(told, dict) else ''}, no actors: start it "
            "with --use-ray, or reach it with SglangHttpEngine(url)"
        )
    here = ray.get_runtime_context()
    if told["address"] != here.gcs_address:
        raise EngineError(
            f"the schedulers of {url} live in the Ray cluster at {told['address']}, and this process is connected to the one "
            f"at {here.gcs_address}; connect to theirs, or reach the engine with SglangHttpEngine(url)"
        )
    theirs = str(told["namespace"])
    if namespace is not None and namespace != theirs:
        raise EngineError(
            f"the schedulers of {url} are in namespace {theirs!r}, and namespace {namespace!r} was asked for; this process's "
            f"own is {here.namespace!r}. Found: {', '.join(one['name'] for one in told['actors'])}"
        )
    handles = []
    for actor in told["actors"]:
        try:
            handle = ray.get_actor(actor["name"], namespace=theirs)
        except ValueError as error:
            raise EngineError(
                f"{url} names scheduler {actor['name']!r} ({actor['state'] or 'unknown'}), and there is no such actor in "
                f"namespace {theirs!r}; this process's own is {here.namespace!r}. {_listed(_named())}"
            ) from error
        if handle._actor_id.hex() != actor["actor_id"]:
            raise EngineError(
                f"{url} names scheduler {actor['name']!r} with id {actor['actor_id']}, and the actor of that name has id "
                f"{handle._actor_id.hex()}: another engine took its place; ask again"
            )
        handles.append(handle)
    return handles


def _by_name(web: Web, namespace: str | None, deadline: float) -> list[Any]:
    import ray

    info = web.get("server_info", deadline=deadline)
    if not isinstance(info, dict):
        raise EngineError(f"{web.url}/server_info answered no object: {str(info)[:200]}")
    own = ray.get_runtime_context().namespace
    place = own if namespace is None else namespace
    found = _named()
    wanted = {
        (dp, pp, tp)
        for dp in range(int(info.get("dp_size") or 1))
        for pp in range(int(info.get("pp_size") or 1))
        for tp in range(int(info.get("tp_size") or 1))
    }
    engines = engines_among([name for name, where in found if where == place])
    fitting = {key: ranks for key, ranks in engines.items() if set(ranks) == wanted}
    if len(fitting) > 1:
        # the address in a name is that of the node; a URL may say less
        fitting = {key: ranks for key, ranks in fitting.items() if key[0] == web.host} or fitting
    if len(fitting) != 1:
        raise EngineError(
            f"{web.url} has no route {ACTORS_ROUTE}, and its {len(wanted)} schedulers cannot be told by name: {len(fitting)} "
            f"engines fit in namespace {place!r} (this process's own is {own!r}). {_listed(found)}. Say the namespace in which "
            "SGLang was started, or hand over the actors' handles"
        )
    ((_, ranks),) = fitting.items()
    handles = []
    for rank in sorted(wanted):
        with contextlib.suppress(ValueError):
            handles.append(ray.get_actor(ranks[rank], namespace=place))
    if len(handles) != len(wanted):
        raise EngineError(
            f"a scheduler of {web.url} went away while it was looked for; it had {', '.join(ranks.values())}"
        )
    return handles


def engines_among(names: list[str]) -> dict[tuple[str, str], dict[tuple[int, int, int], str]]:
    """Sorts the names of actors into engines.

    Args:
        names: of actors, all in one namespace; those that SGLang did not give are left out.

    Returns:
        By node of rank 0 and placement group: the actor's name by (data, pipeline, tensor) parallel rank. Two engines of
        one placement group and node that hold the same rank are under keys of their own, since which is whose cannot be
        told: the group then ends with `+` and the bundle.
    """
    engines: dict[tuple[str, str], dict[tuple[int, int, int], str]] = {}
    for name in sorted(names):
        match = _NAME.fullmatch(name)
        if match is None:
            continue
        key = (match["node"], match["pg"])
        rank = (int(match["dp"]), int(match["pp"]), int(match["tp"]))
        if rank in engines.get(key, {}):
            key = (match["node"], f"{match['pg']}+{match['bundle']}")
        engines.setdefault(key, {})[rank] = name
    return engines


def _named() -> list[tuple[str, str]]:
    import ray

    actors = ray.util.list_named_actors(all_namespaces=True)
    return [(one["name"], one["namespace"]) for one in actors if one["name"].startswith("sglang_scheduler")]


def _listed(found: list[tuple[str, str]]) -> str:
    return "Schedulers found: " + (", ".join(f"{name} in {where!r}" for name, where in found) or "none")
