"""The KV cache events that a real server publishes, as a subscriber of vLLM's own publisher gets them."""

from __future__ import annotations

import socket
import threading
from typing import Any, Self

import msgspec
import zmq
from vllm.distributed.kv_events import KVEventBatch

from kvobs.testing.server import HOST


class Subscriber:
    """Collects all events of a server from its start on: what kvobs counts is compared with it."""

    def __init__(self) -> None:
        with socket.create_server((HOST, 0)) as free:
            self._port = free.getsockname()[1]
        self.options = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self._port}",
        }
        """vLLM's ``--kv-events-config``."""
        self.events: list[Any] = []
        self.numbers: list[int] = []
        """Of the messages: a gap would be a lost one."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._receive)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _receive(self) -> None:
        decoder = msgspec.msgpack.Decoder(KVEventBatch)
        with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
            subscriber.setsockopt(zmq.RECONNECT_IVL, 20)
            subscriber.setsockopt(zmq.SUBSCRIBE, b"")
            subscriber.connect(f"tcp://localhost:{self._port}")
            while not self._ended.is_set():
                if subscriber.poll(100):
                    _, number, payload = subscriber.recv_multipart()
                    self.numbers.append(int.from_bytes(number, "big"))
                    self.events += decoder.decode(payload).events
