"""Describe an engine and a process of it, in their pages: what readers need and what metrics show."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, fields
from hashlib import blake2b
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

SCHEDULER = "scheduler"
_DATA_PARALLEL = re.compile(r"_dp(\d{1,9})$")

# A page of another process may be anything: what readers count up to, or hand on as a process's number, has bounds.
_Number = Annotated[int, Meta(ge=0, lt=2**31)]
_Few = Annotated[int, Meta(ge=0, le=1 << 20)]
_Time = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class Identity(NamedTuple):
    """Identifies one start of an engine, for its processes and for their readers."""

    secret: bytes
    number: int
    """Of the engine in its data-parallel group."""

    @classmethod
    def of(cls, vllm_config: Any) -> Identity:
        engine_id = vllm_config.kv_transfer_config.engine_id or ""
        # For dense models vLLM has the number only there.
        suffix = _DATA_PARALLEL.search(engine_id)
        engine_id, number = (engine_id[: suffix.start()], int(suffix[1])) if suffix else (engine_id, 0)
        return cls(f"{engine_id}/{vllm_config.instance_id}".encode(), number)

    def digest(self, use: bytes) -> bytes:
        """Return a hash for one use, which does not reveal the others."""
        return blake2b(self.secret, digest_size=16, person=use).digest()

    @property
    def server(self) -> str:
        """Return the prefix of the names of all files of its server."""
        return self.digest(b"pages").hex()


@dataclass(frozen=True, slots=True)
class ConnectorInfo:
    """One configured connector."""

    name: str
    class_name: str = ""
    role: str = ""
    link_gbps: float | None = None  # Gbit/s of its links


@dataclass(frozen=True, slots=True)
class End:
    """The end of an engine: the call in which it ended, if any, and an exception's class, a signal, or an exit code."""

    connector: str
    hook: str
    rank: _Number | None
    reason: str


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """An engine, as all of its processes describe it."""

    connectors: tuple[ConnectorInfo, ...]  # in the order of the configuration
    model: str = ""  # the value of vLLM's label ``model_name``
    index: _Number = 0  # in its data-parallel group, the value of vLLM's label ``engine``
    load_policy: str = ""
    failure_policy: str = ""  # vLLM's ``kv_load_failure_policy``
    vllm_version: str = ""
    kvobs_version: str = ""
    ranks: _Few = 1  # of its workers, on all hosts
    has_spans: bool = False  # whether its spans are exported
    endpoint: str | None = None  # vLLM's OTLP endpoint; None: the one of the environment
    port: int | None = None  # of the server that started it, if known
    launch: str = ""  # the same in all lives of a server, and different for another one

    @property
    def names(self) -> list[str]:
        return [connector.name for connector in self.connectors]


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """A process of an engine."""

    engine: EngineInfo
    pid: _Number
    started: str | None  # see ``proc.start_time``
    namespace: str  # of process ids
    began_ns: _Time  # when its page began, since the epoch
    calls: _Few  # places in its ring of calls
    rank: _Number | None = None  # of a worker; None: the scheduler's process
    parent: _Number = 0
    is_native: bool = False  # whether it has the compiled probe
    cost_ns: Annotated[float, Meta(ge=0, le=1e9)] = 0.0  # of counting a call
    previous: End | None = None  # the unexpected end of the engine's previous life
    previous_ago_s: float = field(default=0.0)

    def to_json(self) -> bytes:
        try:
            return msgspec.json.encode(self)
        except UnicodeEncodeError:  # such as a path that is not UTF-8
            return json.dumps(msgspec.to_builtins(self), ensure_ascii=False).encode(errors="replace")

    @classmethod
    def from_json(cls, text: bytes) -> ProcessInfo:
        """Read a description; ValueError if it is none."""
        try:
            return msgspec.json.decode(text, type=cls)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"its description can't be read: {error}") from None


FIELDS = tuple(field.name for kind in (ProcessInfo, EngineInfo, ConnectorInfo, End) for field in fields(kind))
"""Of a description: readers need them all."""


def process_name(rank: int | None) -> str:
    """Return the name of a process in texts."""
    return SCHEDULER if rank is None else f"rank {rank}"
