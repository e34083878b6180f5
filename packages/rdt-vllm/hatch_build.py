"""Build hook: the dependency on rdt-core, pinned to the version of this package."""

from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class PinnedCore(MetadataHookInterface):
    """All packages of rdt are released together, from one version number, and only work together."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Sets the dependencies; `metadata` already holds the version."""
        metadata["dependencies"] = [f"rdt-core=={metadata['version']}"]
