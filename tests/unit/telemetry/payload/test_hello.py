"""An engine's first message is read as it was written, or refused."""

from __future__ import annotations

import re

import pytest

from kvobs.telemetry.payload import wire
from kvobs.telemetry.payload.hello import PROTOCOL, Engine
from tests.support.payloads import engine


def test_a_first_message_is_read_as_it_was_written() -> None:
    one = engine(port=9464, index=3, has_spans=True, endpoint="http://x:4317", otlp_metrics=True, linger_s=1.5)
    assert Engine.read(wire.from_line(wire.to_line(one.message()))) == one
    assert one.label_values == ("tiny", "3")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"hello": PROTOCOL + 1}, f"version {PROTOCOL + 1}, allowed: {PROTOCOL}"),
        ({"hello": None}, "version None"),
        ({"connectors": [{"name": "x"}]}, "can't be read"),
        ({"connectors": 1}, "can't be read"),
        ({"unknown": 1}, "can't be read"),
    ],
)
def test_another_message_is_refused(change: dict[str, object], problem: str) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)):
        Engine.read({**engine().message(), **change})
    with pytest.raises(ValueError, match="version None"):
        Engine.read({"v": 3})
