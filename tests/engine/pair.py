"""A prefill and a decode engine on this machine: NixlConnector inside kvobs on both sides, blocks over loopback.

Each worker of NIXL spins on a core, even while nothing is to do: whoever has a pair keeps it for a short time.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kvobs.demo.run import entry, multi_connector
from kvobs.testing.server import Completion, Server, claim_port, cores
from tests.engine.serving import TOKENS, ServedEngine

# NIXL's own four threads spin too, and so do all other transports of UCX: on two cores handshakes then take seconds.
NIXL = {**entry("NixlConnector", num_threads=0), "kv_buffer_device": "cpu"}
LOOPBACK_ONLY = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}

UNKNOWN = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False, **UNKNOWN}
"""What a proxy asks a prefill engine for, as vLLM's `toy_proxy_server.py` does."""


@dataclass(frozen=True)
class Pair:
    """A prefill and a decode engine, up."""

    prefill: Server
    decode: Server


@contextmanager
def pair(
    served_engine: ServedEngine,
    *args: str,
    nixl: Mapping[str, Any] = NIXL,
    kvobs: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    roles: tuple[str, str] = ("kv_both", "kv_both"),
    **more: Any,
) -> Iterator[Pair]:
    """Run both, with these options of kvobs, variables and arguments, each with a core for its worker."""
    one, other = (
        (routed(nixl, role, kvobs), {**side_channel(), "VLLM_CPU_OMP_THREADS_BIND": str(core), **(env or {})})
        for role, core in zip(roles, cores(2), strict=True)
    )
    with (
        served_engine(one[0], *args, env=one[1], **more) as prefill,
        served_engine(other[0], *args, env=other[1], **more) as decode,
    ):
        yield Pair(prefill, decode)


def routed(nixl: Mapping[str, Any], role: str, kvobs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the configuration of one of them."""
    config = multi_connector({**nixl, "kv_role": role}, names=["nixl"])
    config["kv_load_failure_policy"] = "recompute"
    config["kv_connector_extra_config"]["kvobs"] |= kvobs or {}
    return config


def side_channel() -> dict[str, str]:
    """Return the variables of one of them for its connections to the other."""
    return {**LOOPBACK_ONLY, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(claim_port(0))}


def hand_over(
    pair: Pair,
    prompt: str,
    tokens: int = TOKENS,
    *,
    headers_to_prefill: Mapping[str, str] | None = None,
    headers_to_decode: Mapping[str, str] | None = None,
    change: Callable[[dict[str, Any]], dict[str, Any]] = lambda params: params,
) -> tuple[dict[str, Any], Completion]:
    """Play the proxy: have a prompt prefilled by the one and completed by the other.

    Returns the params that the prefill engine returned, and the decode engine's answer. `change` makes of the former
    what the latter gets.
    """
    prefilled = pair.prefill.complete(prompt, 1, headers=headers_to_prefill, kv_transfer_params=PREFILL)
    params: dict[str, Any] = prefilled.raw["kv_transfer_params"]
    return params, pair.decode.complete(prompt, tokens, headers=headers_to_decode, kv_transfer_params=change(params))
