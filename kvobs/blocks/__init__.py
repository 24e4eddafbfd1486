"""Copy blocks between two KV caches: ``copy_kv_blocks``, and the path that it takes to and from a device."""

from kvobs.blocks.copy import copy_kv_blocks

__all__ = ["copy_kv_blocks"]
