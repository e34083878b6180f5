"""Refuses a rdt-core of another release, before anything that may not fit is imported. See `rdt_core.distributions`."""

from rdt_core.distributions import check_release

check_release("rdt-megatron")
