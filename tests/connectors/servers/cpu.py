"""A machine without an accelerator, for connectors whose workers ask torch for the current device and for events.

On a CPU everything is done when a call returns, so an event has nothing to wait for.
"""

from typing import Any

import torch
from vllm.platforms import current_platform


class Event:
    """An event of a stream that never has anything queued."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        """Take what torch's own takes."""

    def record(self, *_: Any) -> None:
        """Return at once."""

    synchronize = wait = record

    def query(self) -> bool:
        return True


def use_cpu() -> None:
    """Answer what these workers ask of an accelerator, where there is none."""
    if not torch.accelerator.is_available():
        torch.cuda.Event = Event  # type: ignore[assignment, misc]
        torch.accelerator.current_device_index = lambda: 0
        type(current_platform).set_device = classmethod(lambda _cls, _device: None)
