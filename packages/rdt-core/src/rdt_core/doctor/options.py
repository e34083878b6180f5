"""What `rdt doctor` can be told, and how sizes are written.

Checked before anything is started. Refuses sizes that measure latency instead of a rate, or that are no sizes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from ..demo.options import OptionError
from .checks import DEFAULT_MODEL_BYTES

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)
_LEAST = 1 << 20


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes that are moved at a time.

    Attributes:
        cpu, cuda: by where they lie.
    """

    cpu: int = 256 << 20
    cuda: int = 1 << 30

    def of(self, device: str) -> int:
        """For a device such as "cpu" or "cuda:3"."""
        return self.cpu if device == "cpu" else self.cuda


@dataclass(frozen=True, slots=True)
class DoctorOptions:
    """What is examined and how.

    Attributes:
        cluster: all nodes of a Ray cluster, instead of this one alone.
        address: of the cluster; None: RAY_ADDRESS, or the one that runs on this machine.
        measure: whether transfers are measured.
        sizes: bytes of a measured transfer.
        model_bytes: of the model whose weights will move, for the checks of memory.
        timeout_s: deadline of one measured transfer, in seconds.
    """

    cluster: bool = False
    address: str | None = None
    measure: bool = True
    sizes: Sizes = field(default_factory=Sizes)
    model_bytes: int = DEFAULT_MODEL_BYTES
    timeout_s: float = 60.0


def read_options(
    *, cluster: bool, address: str, measure: bool, size: str, model_size: str, timeout_s: float
) -> DoctorOptions:
    """Reads the command line's words.

    Raises:
        OptionError: a size that is none, or too small; an address without `--cluster`.
    """
    if address and not cluster:
        raise OptionError("--address is of a Ray cluster: add --cluster to examine its nodes")
    sizes = Sizes()
    if size:
        nbytes = read_size(size, "--size")
        if nbytes < _LEAST:
            raise OptionError(f"--size {size}: a transfer below 1 MiB measures latency and not a rate")
        sizes = Sizes(cpu=nbytes, cuda=nbytes)
    return DoctorOptions(
        cluster=cluster, address=address or None, measure=measure, sizes=sizes,
        model_bytes=read_size(model_size, "--model-size") if model_size else DEFAULT_MODEL_BYTES, timeout_s=timeout_s,
    )  # fmt: skip


def read_size(text: str, option: str) -> int:
    """Reads a number of bytes: "256MiB", "16.4GB", "1g" (without an i, in thousands).

    Raises:
        OptionError: it is no size.
    """
    match = _SIZE.fullmatch(text.strip())
    if not match:
        raise OptionError(f"{option} {text!r} is no size; write 256MiB or 16.4GB")
    number, prefix, binary = match.groups()
    power = " KMGT".index(prefix.upper()) if prefix else 0
    return round(float(number) * (1024 if binary else 1000) ** power)
