"""See what vLLM's KV connectors do: a drop-in, instrumenting ``MultiConnector``.

``docs/architecture.md`` has the map of the packages; vLLM loads ``kvobs.connector``.
"""

from typing import TYPE_CHECKING, Any

from kvobs.schema import __version__

__all__ = ["MultiConnector", "__version__", "get_kv_connector_cache_layout"]

if TYPE_CHECKING:
    from kvobs.connector import MultiConnector, get_kv_connector_cache_layout


def __getattr__(name: str) -> Any:
    """Import the connector on first use, so that ``import kvobs`` needs no vLLM."""
    if name in ("MultiConnector", "get_kv_connector_cache_layout"):
        from kvobs import connector

        return getattr(connector, name)
    raise AttributeError(f"module 'kvobs' has no attribute {name!r}")
