"""One dry run of an engine's weight loaders that finds what they take of each checkpoint tensor, and where it lands.

The loaders run on the engine's live model (or on its meta twin) over stand-ins, and nothing is written: every in-place
write to a destination is caught at torch's dispatcher. A copy of a stand-in is recorded as a `Slice`, filling with a
number as a `Fill`. Refused: every other write, and all that needs a stand-in's data, with op, tensor, chain and line.
"""

from __future__ import annotations

import concurrent.futures
import functools
import linecache
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from .destinations import Destinations
from .errors import TracingError
from .geometry import Chain, format_chain
from .standins import Origin, StandIn, dtype_name, standins
from .viewops import basic_index
from .wire import DTYPE_BYTES, TensorMeta

__all__ = ["Destinations", "Fill", "Slice", "StandIn", "Trace", "trace"]


@dataclass(frozen=True, slots=True)
class Slice:
    """What a loader takes of a checkpoint tensor, and the destination view it copies it into.

    Attributes:
        name: the checkpoint tensor.
        chain: view ops, then casts, applied to it. A last cast to the destination's own dtype is left out, because
            the copy does it.
        destination: key of the storage that is written (see `Destinations`).
        offset: first element of the view, counted in elements of `dtype` from the start of the storage.
        shape: of the destination view; equal to the chain's shape but for leading axes of size 1.
        strides: of the destination view, in elements.
        dtype: of the destination view.
        source_dtype: of the checkpoint tensor on the wire.
    """

    name: str
    chain: Chain
    destination: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    source_dtype: str


@dataclass(frozen=True, slots=True)
class Fill:
    """A destination view that a loader sets to one number, such as the padding of a vocabulary.

    Fills come before all slices: one that would undo an earlier slice is refused. Fields as in `Slice`.
    """

    destination: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    value: float


@dataclass(frozen=True, slots=True)
class Trace:
    """What one run of the loaders did.

    Attributes:
        slices: every copy of a stand-in that holds elements, in the order made.
        offered: names that the loaders were given.
        taken: names with at least one slice, in the order of `offered`.
        tensors: every checkpoint tensor, as handed to `trace`.
        fills: every write of a number, in the order made.
    """

    slices: tuple[Slice, ...]
    offered: tuple[str, ...]
    taken: tuple[str, ...]
    tensors: tuple[TensorMeta, ...]
    fills: tuple[Fill, ...] = ()


class OnWrite(Protocol):
    """Called after each recorded copy, with the destination view and the stand-in. What it writes is not written."""

    def __call__(self, destination: torch.Tensor, source: StandIn, /) -> None: ...


def trace(
    load: Callable[[Iterable[tuple[str, torch.Tensor]]], Any],
    tensors: Sequence[TensorMeta],
    destinations: Destinations,
    device: torch.device | str | None = None,
    on_write: OnWrite | None = None,
) -> Trace:
    """Runs `load` over stand-ins of `tensors`.

    Args:
        load: the engine's loader of `(name, tensor)` pairs.
        tensors: the whole checkpoint.
        destinations: what the loaders may write to. Their contents and addresses are the same afterwards.
        device: where the stand-ins say they are; default: where the destinations are.
        on_write: see `OnWrite`.

    Raises:
        TracingError: a loader did something that needs data, wrote to an unknown tensor, wrote something that is
            neither a stand-in nor a number, broadcast a copy, or put a tensor in place of a parameter; also if the
            loader itself swallowed that error. Names op, tensor, chain, file and line.
    """
    if device is None:
        device = next((tensor.device for tensor in destinations.values() if not tensor.is_meta), torch.device("cpu"))
    dtypes = {name: getattr(torch, name, None) for name in DTYPE_BYTES}
    for meta in tensors:
        if dtypes.get(meta.dtype) is None:
            raise TracingError(
                f"checkpoint tensor {meta.name!r} has dtype {meta.dtype!r}, which torch {torch.__version__} or this "
                f"rdt does not have; known: {', '.join(name for name, dtype in dtypes.items() if dtype is not None)}"
            )
    recorder = _Recorder(destinations, on_write)
    offered: list[str] = []

    place = torch.device(device)
    # a model has few geometries and many tensors; made before torch's modes are on, which see every tensor that is made
    twins = {
        key: torch.empty(key[0], dtype=dtypes[key[1]], device="meta")
        for key in dict.fromkeys((meta.shape, meta.dtype) for meta in tensors)
    }

    def offer() -> Iterator[tuple[str, torch.Tensor]]:
        for meta in tensors:
            offered.append(meta.name)
            origin = Origin(meta.name, meta.dtype)
            yield meta.name, StandIn.make(recorder, origin, twins[(meta.shape, meta.dtype)], place)

    try:
        with torch.no_grad(), _inline_executors(), _Functions(recorder), _Writes(recorder):
            load(offer())
    except Exception as error:
        if recorder.failure is not None and error is not recorder.failure:
            raise recorder.failure from error
        error.add_note(f"while loaders were traced; the last tensor they were given: {offered[-1:]}")
        raise
    finally:
        recorder.thread = None
        rebound = destinations.rebound()
    if recorder.failure is not None:
        raise recorder.failure
    if rebound:
        raise TracingError(f"the loaders put new tensors in place of {', '.join(rebound)}; they were put back")
    names = {found.name for found in recorder.slices}
    return Trace(
        slices=tuple(recorder.slices),
        offered=tuple(offered),
        taken=tuple(dict.fromkeys(name for name in offered if name in names)),
        tensors=tuple(tensors),
        fills=tuple(recorder.fills),
    )


class _Recorder:
    """What one trace has seen so far. Lives in the thread that traces."""

    def __init__(self, destinations: Destinations, on_write: OnWrite | None) -> None:
        self.destinations = destinations
        self.slices: list[Slice] = []
        self.fills: list[Fill] = []
        self.failure: TracingError | None = None
        self.thread: int | None = threading.get_ident()
        self.in_hook = False
        self._on_write = on_write

    def refuse(self, op: str, tensor: StandIn, why: str) -> TracingError:
        """See `standins.Recorder.refuse`."""
        origin = tensor.origin
        return self.fail(
            f"{op} on checkpoint tensor {origin.name!r} (chain {format_chain(origin.chain)}, shape "
            f"{tuple(tensor.twin.shape)}, {dtype_name(tensor.twin.dtype)}) {why}. A loader may take views, cast, "
            f"concatenate and copy; anything else has to be done by the trainer before it publishes"
        )

    def fail(self, message: str) -> TracingError:
        """Returns an error with the loader's line, and remembers the first."""
        error = TracingError(f"{message}. Loader: {_loader_line()}")
        self.failure = self.failure or error
        return error

    def copy(self, destination: torch.Tensor, source: StandIn) -> None:
        """Records that `source` was copied into `destination`."""
        if threading.get_ident() != self.thread:
            raise self.refuse("copy_", source, "comes from another thread than the trace, or after it")
        shape, wanted = tuple(source.twin.shape), tuple(destination.shape)
        if wanted != (1,) * (len(wanted) - len(shape)) + shape:
            why = f"would broadcast into a destination of shape {wanted}; a slice lands element by element"
            raise self.refuse("copy_", source, why)
        self._copy(destination, source)
        if self._on_write is not None:
            self.in_hook = True
            try:
                # this mode stands aside while it handles a copy; what the hook writes needs one again
                with _Writes(self):
                    self._on_write(destination, source)
            finally:
                self.in_hook = False

    def _copy(self, destination: torch.Tensor, source: StandIn) -> None:
        if source.parts:
            begin, axis = 0, source.axis + destination.dim() - source.twin.dim()
            for part in source.parts:
                size = part.twin.shape[source.axis]
                self._copy(destination.narrow(axis, begin, size), part)
                begin += size
            return
        if destination.numel() == 0:
            return
        region = self._region(destination, lambda why: self.refuse("copy_", source, why))
        casts = source.origin.casts
        if casts and casts[-1] == region["dtype"]:
            source_chain = Origin(source.origin.name, source.origin.dtype, source.origin.views, casts[:-1]).chain
        else:
            source_chain = source.origin.chain
        self.slices.append(
            Slice(name=source.origin.name, chain=source_chain, source_dtype=source.origin.dtype, **region)
        )

    def fill(self, destination: torch.Tensor, value: float, op: str) -> None:
        """Records that all of `destination` was set to `value`."""
        if self.in_hook or destination.numel() == 0:
            return
        key = self.destinations.find(destination)
        region = self._region(destination, lambda why: self.fail(f"{op} on destination {key!r} {why}"))
        for earlier in self.slices:
            if earlier.destination == key and _overlap(earlier, destination):
                raise self.fail(
                    f"{op} on destination {key!r} sets elements to {value} that an earlier copy of {earlier.name!r} "
                    f"has written; slices land after fills"
                )
        self.fills.append(Fill(value=value, **region))

    def _region(self, view: torch.Tensor, refusal: Callable[[str], TracingError]) -> dict[str, Any]:
        key = self.destinations.find(view)
        if key is None:
            raise refusal(
                f"goes into a tensor of shape {tuple(view.shape)} that is no known destination (a temporary, or one "
                f"that is neither a parameter nor a buffer of the model)"
            )
        if any(stride == 0 and size > 1 for size, stride in zip(view.shape, view.stride(), strict=True)):
            raise refusal(f"goes into an expanded view of {key!r}, whose elements share memory")
        return {
            "destination": key,
            "offset": view.storage_offset(),
            "shape": tuple(view.shape),
            "strides": tuple(view.stride()),
            "dtype": dtype_name(view.dtype),
        }


#: elements of a destination's stretch up to which two interleaved regions are compared one by one
_COMPARED = 1 << 26


def _overlap(earlier: Slice, view: torch.Tensor) -> bool:
    """Whether a slice and a view of the same storage share an element; True where that would be too much work."""

    def hull(offset: int, shape: Sequence[int], strides: Sequence[int]) -> tuple[int, int]:
        return offset, offset + 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))

    if earlier.dtype != dtype_name(view.dtype):
        return True
    a = hull(earlier.offset, earlier.shape, earlier.strides)
    b = hull(int(view.storage_offset()), view.shape, view.stride())
    if a[1] <= b[0] or b[1] <= a[0]:
        return False
    begin, end = min(a[0], b[0]), max(a[1], b[1])
    if end - begin > _COMPARED:
        return True
    marks = torch.zeros(end - begin, dtype=torch.bool)
    marks.as_strided(earlier.shape, earlier.strides, earlier.offset - begin).fill_(True)
    return bool(marks.as_strided(view.shape, view.stride(), view.storage_offset() - begin).any())


def _loader_line() -> str:
    """File, line, function and text of the innermost frame outside torch, Ray, the standard library and this package."""
    # Ray wraps an actor's methods in frames of its own
    ray = getattr(sys.modules.get("ray"), "__file__", None)
    own = tuple(os.path.dirname(file) + os.sep for file in (torch.__file__, __file__, ray) if file)
    standard = os.path.dirname(os.__file__) + os.sep
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        # third-party packages may lie inside the standard library's folder
        library = file.startswith(standard) and "-packages" not in file
        if not library and not file.startswith((*own, "<")):
            text = linecache.getline(file, frame.f_lineno).strip()[:120]
            return f"{file}:{frame.f_lineno} in {frame.f_code.co_name}: {text}"
        frame = frame.f_back
    return "rdt's own, which copies by name"


_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


class _Functions(TorchFunctionMode):
    """Catches what never reaches the dispatcher, or only in a shape that has lost its meaning."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == _SET_DATA:
            target, value = args
            key = self._recorder.destinations.find(target)
            if isinstance(value, StandIn) or key is not None:
                what = f"destination {key!r}" if key is not None else f"a tensor of shape {tuple(target.shape)}"
                raise self._recorder.fail(f"assigning .data would re-bind {what}; loaders must copy into it")
        if func is torch.Tensor.__setitem__ and type(args[2]) in (bool, int, float):
            # torch turns the number into a tensor on the way down, and then it could have come from anywhere
            target, index, value = args
            if not isinstance(target, StandIn) and self._recorder.destinations.find(target) is not None:
                try:
                    basic = basic_index(index)
                except TypeError as error:
                    key = self._recorder.destinations.find(target)
                    raise self._recorder.fail(f"__setitem__ on destination {key!r} does not work: {error}") from error
                target[basic].fill_(value)
                return None
        return func(*args, **(kwargs or {}))


class _Writes(TorchDispatchMode):
    """Sees every in-place write, records those that a trace is about, swallows them, and refuses the others."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Loaders are not compiled; without this, torch imports its whole compiler at the first op, which takes seconds.
        return False

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        written = _written(func)
        if not written:
            return func(*args, **kwargs)
        aten = torch.ops.aten
        if func is aten.copy_.default and isinstance(args[1], StandIn) and not isinstance(args[0], StandIn):
            self._recorder.copy(args[0], args[1])
            return args[0]
        for position, name in written:
            value = args[position] if position < len(args) else kwargs.get(name)
            for target in value if isinstance(value, list | tuple) else [value]:
                if not isinstance(target, torch.Tensor) or isinstance(target, StandIn):
                    continue
                key = self._recorder.destinations.find(target)
                if key is None:
                    continue
                if func is aten.zero_.default:
                    self._recorder.fill(target, 0, str(func))
                elif func is aten.fill_.Scalar:
                    self._recorder.fill(target, args[1], str(func))
                elif not self._recorder.in_hook:
                    raise self._refusal(func, key, args, kwargs)
                return target
        return func(*args, **kwargs)

    def _refusal(self, func: Any, key: str, args: Any, kwargs: Any) -> TracingError:
        tensor = next(iter(standins((args, kwargs))), None)
        if tensor is not None:
            return self._recorder.refuse(f"{func} into destination {key!r}", tensor, "needs its data")
        return self._recorder.fail(
            f"{func} writes to destination {key!r} what is neither a view of a checkpoint tensor nor a number; while "
            f"loaders are traced there is no data, so such a step belongs after loading"
        )


@functools.lru_cache(maxsize=4096)
def _written(func: Any) -> tuple[tuple[int, str], ...]:
    """Positions and names of the arguments that an aten op writes to."""
    arguments = func._schema.arguments
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


_tracing_threads: Counter[int] = Counter()
_tracing_lock = threading.Lock()
_submit = concurrent.futures.ThreadPoolExecutor.submit


def _submit_inline(self: Any, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    if not _tracing_threads[threading.get_ident()]:
        return _submit(self, fn, *args, **kwargs)
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()
    try:
        future.set_result(fn(*args, **kwargs))
    except Exception as error:
        future.set_exception(error)
    return future


@contextmanager
def _inline_executors() -> Iterator[None]:
    """Makes thread pools run what the calling thread submits in that thread, at once.

    Some loaders spread their copies over a pool. Torch's modes hold for one thread only, so writes in a pool would go
    through, and slices would come in random order. Pools fed by other threads of the process work as ever.
    """
    pool: Any = concurrent.futures.ThreadPoolExecutor
    thread = threading.get_ident()
    with _tracing_lock:
        _tracing_threads[thread] += 1
        pool.submit = _submit_inline
    try:
        yield
    finally:
        with _tracing_lock:
            _tracing_threads[thread] -= 1
            if not _tracing_threads[thread]:
                del _tracing_threads[thread]
            if not _tracing_threads:
                pool.submit = _submit
