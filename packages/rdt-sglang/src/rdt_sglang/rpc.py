"""The calls of a weight sync over SGLang's own RPC, for schedulers that are plain processes.

Every rank of the engine gets the same call and runs it in its event loop, which stands still meanwhile. The ranks then tell
each other how it went, within a deadline, and the first of them answers for all. A failure is an answer, never the end of
a scheduler. Calls and arguments are those of `protocol`; anything else is refused.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from rdt_core.errors import DeadlineError, WireError

from .protocol import RPC_METHOD, check_call
from .ranks import GRACE_S, Ranks
from .weights import weights_of

log = logging.getLogger(__name__)

_PUMP_S = 0.001


def around_rpc(original: Callable[..., Any], scheduler: Any, recv_req: Any) -> Any:
    """AROUND `Scheduler.handle_rpc_request`: answers method `rdt_weights`, leaves all others to SGLang."""
    if recv_req.method != RPC_METHOD:
        return original(scheduler, recv_req)
    from sglang.srt.managers.io_struct import RpcReqOutput
    from sglang.srt.runtime_context import get_parallel

    success, message = answer(scheduler, recv_req.parameters, Ranks.control(get_parallel()))
    return RpcReqOutput(success=success, message=message)


def answer(scheduler: Any, parameters: Mapping[str, Any] | None, ranks: Ranks) -> tuple[bool, str]:
    """Runs one call on this rank and gathers what all of them have to say.

    Args:
        scheduler: SGLang's `Scheduler`.
        parameters: `call` and `arguments`, the latter as JSON text.
        ranks: that handle the same call now.

    Returns:
        Whether all ranks succeeded, and JSON text of the list of their results in rank order; or what failed where.
    """
    result: Any = None
    error: Exception | None = None
    timeout_s = 0.0
    try:
        name, arguments = _parse(parameters)
        timeout_s = float(arguments.get("timeout_s") or 0.0)
        weights = weights_of(scheduler, plain_processes=True, pump=_pump(scheduler, ranks))
        result = getattr(weights, name)(**arguments)
    except Exception as failure:
        log.exception("rank %d failed in a call of a weight sync", ranks.rank)
        error = failure
    told = None if error is None else f"{type(error).__name__}: {error}"
    try:
        # a rank that waits for others in every phase of a pull may come later than another by more than one deadline
        outcomes = sorted(ranks.gather((ranks.rank, told, result), 2 * timeout_s + GRACE_S), key=lambda one: one[0])
    except DeadlineError as silent:
        own = f"rank {ranks.rank}: {told}; " if told else ""
        return False, f"{own}{type(silent).__name__}: {silent}"
    failures = [f"rank {rank}: {failure}" for rank, failure, _ in outcomes if failure is not None]
    if failures:
        return False, "; ".join(failures)
    return True, json.dumps([outcome for _, _, outcome in outcomes])


def _parse(parameters: Mapping[str, Any] | None) -> tuple[str, dict[str, Any]]:
    if not parameters or set(parameters) != {"call", "arguments"}:
        raise WireError(f"RPC method {RPC_METHOD} takes call and arguments; found {sorted(parameters or {})}")
    try:
        arguments = json.loads(parameters["arguments"])
    except (TypeError, ValueError) as error:
        raise WireError(f"the arguments of {parameters['call']!r} are no JSON text: {error}") from error
    _, checked = check_call(parameters["call"], arguments)
    return str(parameters["call"]), checked


def _pump(scheduler: Any, ranks: Ranks) -> Callable[[float], bool]:
    """Lets the scheduler take in requests while a call holds its event loop: the pause may be among them.

    All ranks take part in step, and stop together when one of them has no more time.
    """

    def pump(deadline: float) -> bool:
        if any(ranks.gather(time.monotonic() >= deadline)):
            return False
        scheduler.ingest_requests()
        time.sleep(_PUMP_S)
        return True

    return pump
