"""Describe an engine in its first message to the exporter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

PROTOCOL = 1
"""The version of the messages: exporter and engine come from one installation of kvobs."""


@dataclass(frozen=True, slots=True)
class Connector:
    """One configured connector."""

    name: str
    class_name: str
    role: str


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine and its exporter's options.

    Args:
        pid: of EngineCore.
        began_ns: when its numbers began, in ns since the epoch.
        model: the value of vLLM's label ``model_name``.
        index: the engine's number in its data-parallel group, the value of vLLM's label ``engine``.
        connectors: in the order of the configuration.
        load_policy: kvobs's option.
        failure_policy: vLLM's ``kv_load_failure_policy``.
        vllm_version: the version of vLLM.
        host: address to listen on.
        port: where /metrics is served; None: nowhere.
        otlp_metrics: whether the metrics are sent by OTLP, too.
        linger_s: how long the last numbers are served after an engine that did not end by itself.
        has_spans: whether span records come.
        endpoint: vLLM's OTLP endpoint; None: the one of the environment.
        pages: the begin of the names of its processes' pages.
        ranks: number of its workers.
    """

    pid: int
    began_ns: int
    model: str
    index: int
    connectors: tuple[Connector, ...]
    load_policy: str
    failure_policy: str
    vllm_version: str
    host: str = ""
    port: int | None = None
    otlp_metrics: bool = False
    linger_s: float = 15.0
    has_spans: bool = False
    endpoint: str | None = None
    pages: str = ""
    ranks: int = 0

    @property
    def label_values(self) -> tuple[str, str]:
        """Return the values of vLLM's own labels."""
        return self.model, str(self.index)

    def message(self) -> dict[str, Any]:
        """Return the first message, plain builtins."""
        return {"hello": PROTOCOL, **asdict(self)}

    @classmethod
    def read(cls, message: Mapping[str, Any]) -> Engine:
        """Return the engine of a first message.

        Raises:
            ValueError: it is not one, or of another version of kvobs.
        """
        fields = dict(message)
        if (found := fields.pop("hello", None)) != PROTOCOL:
            raise ValueError(f"the engine's first message has version {found!r}, allowed: {PROTOCOL}")
        try:
            connectors = tuple(Connector(**connector) for connector in fields.pop("connectors"))
            return cls(connectors=connectors, **fields)
        except (KeyError, TypeError) as error:
            raise ValueError(f"the engine's first message can't be read: {error}") from None
