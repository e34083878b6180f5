"""How options name a trainer's or an engine's layout: `name:key=value,key=value`, the same for every command.

All commands know the same names and settings; one that does less than another refuses what it does not do, by name. What
cannot work is an `OptionError`, raised before anything is started. Numbers are whole, and whether a layout fits a model is
for who uses it to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .errors import RdtError

#: settings of each trainer and engine, with the values that they have when left out
TRAINERS: dict[str, dict[str, int]] = {
    "fsdp": {"ranks": 2, "replicas": 1, "apart": 0},
    "megatron": {"ranks": 1, "tp": 1, "pp": 1, "ep": 1, "etp": 1, "cp": 1, "vpp": 1, "first": 0, "last": 0},
}
_DIGITS = 9
_ENGINE = {"tp": 1, "ep": 1, "pp": 1, "replicas": 1}
ENGINES: dict[str, dict[str, int]] = {"vllm": _ENGINE, "sglang": _ENGINE}


class OptionError(RdtError):
    """An option of a command that cannot work; the message says which and what would be right."""


@dataclass(frozen=True, slots=True)
class Spec:
    """A name with integer settings, written `name` or `name:key=value,key=value`."""

    name: str
    settings: tuple[tuple[str, int], ...]

    def get(self, key: str) -> int:
        """Returns the value of the setting `key`."""
        return dict(self.settings)[key]

    def __str__(self) -> str:
        return f"{self.name}:" + ",".join(f"{key}={value}" for key, value in self.settings)


def parse_spec(option: str, text: str, names: tuple[str, ...], defaults: Mapping[str, int]) -> Spec:
    """Reads a `Spec`.

    Args:
        option: how the option is called, for messages.
        text: `name[:key=value,...]`; values are integers of at least 1.
        names: the names that exist.
        defaults: the settings that exist, with the values they have when left out.

    Raises:
        OptionError: another name, another setting, or a value that is no positive integer.
    """
    name, _, rest = text.partition(":")
    if name not in names:
        raise OptionError(f"{option} {text!r}: there is no {name!r}; available: {', '.join(names) or 'none'}")
    settings = dict(defaults)
    for item in rest.split(",") if rest else ():
        key, _, value = item.partition("=")
        if key not in defaults:
            raise OptionError(f"{option} {text!r}: unknown setting {key!r}; known: {', '.join(defaults)}")
        # before it is read: Python refuses to read thousands of digits
        if value.isascii() and value.isdigit() and len(value) > _DIGITS:
            raise OptionError(f"{option}: {key} has {len(value)} digits; no size has more than {_DIGITS}")
        if not value.isascii() or not value.isdigit() or int(value) < 1:
            raise OptionError(f"{option} {text!r}: {key} must be a whole number of at least 1, not {value!r}")
        settings[key] = int(value)
    return Spec(name, tuple(settings.items()))


def trainer_spec(text: str) -> Spec:
    """Reads `--trainer`, e.g. `fsdp:ranks=8` or `megatron:tp=8,pp=8,ranks=64`; see `TRAINERS` for the settings."""
    return _layout("--trainer", text, TRAINERS)


def engine_spec(text: str) -> Spec:
    """Reads `--engine`, e.g. `vllm:tp=4` or `sglang:tp=32,ep=32,replicas=4`; see `ENGINES` for the settings."""
    return _layout("--engine", text, ENGINES)


def only(option: str, spec: Spec, names: tuple[str, ...], keys: tuple[str, ...], command: str) -> Spec:
    """Returns `spec` if a command does all that it says.

    Args:
        option: how the option is called, for messages.
        spec: as read.
        names: that the command does.
        keys: settings that it does; the others must have their default.
        command: its name, for messages.

    Raises:
        OptionError: it says something else.
    """
    known = {**TRAINERS, **ENGINES}[spec.name]
    if spec.name not in names:
        raise OptionError(f"{option} {spec.name}: {command} has no such ranks; available: {', '.join(names)}")
    for key, value in spec.settings:
        if key not in keys and value != known[key]:
            raise OptionError(f"{option} {spec}: {command} knows no {key}; it knows {', '.join(keys)}")
    return spec


def _layout(option: str, text: str, known: Mapping[str, Mapping[str, int]]) -> Spec:
    return parse_spec(option, text, tuple(known), known.get(text.partition(":")[0], {}))
