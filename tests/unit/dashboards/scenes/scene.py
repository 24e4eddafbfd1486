"""What a scene of an alert is, and what several subjects have in common."""

from collections.abc import Mapping
from dataclasses import dataclass, field

Series = Mapping[str, str]
"""What samples each series has, one every 30 s, in promtool's notation: a+bxN is a, and N more, b apart."""

OF_DISK = "disk on engine 0 of gpu-1:8000 (org/model a&b)"
OF_ENGINE = "engine 0 of gpu-1:8000 (org/model a&b)"
NOTHING: Series = {}
UP, UNKNOWN = "1+0x400", "_x400"
START, OLD = "kvobs_start_time_seconds", "-86400+0"
"""Of a process that began a day before: followed by the number of its samples."""
NEW = {"up": "_x40 1+0x100", START: "_x40 1170+0x90"}
BUILD = 'kvobs_build_info{version="0.1.0",vllm_version="0.32.0"}'


@dataclass(frozen=True)
class Fires:
    """Series that fire, when, and what the alert says; ``more`` are labels beside those of what it is about.

    ``until`` is a second moment at which it still fires, and what it says then.
    """

    series: Series
    at: str
    says: str
    more: Mapping[str, str] = field(default_factory=dict)
    until: tuple[str, str] | None = None


@dataclass(frozen=True)
class Scenes:
    """For one alert: healthy traffic, what fires, and what doesn't, at any time."""

    healthy: Series
    fires: tuple[Fires, ...]
    ended: Series
    """It fires in the 45th minute, and the trouble ends in the 50th: nothing fires from the 70th minute on."""
    idle: Series
    """All stands still, after trouble long ago: looked at from the 40th minute on."""
    quiet: tuple[Series, ...] = ()
    day_before: Series = field(default_factory=dict)
    """By metric: a day of samples before all of these."""


def rare(metric: str, says: str, more: Mapping[str, str] = NOTHING, beside: Series = NOTHING) -> Scenes:
    """Something that must not happen at all, and whose series begins with its first event."""
    return Scenes(
        healthy=beside,
        fires=(
            Fires({metric: "_x40 1+0x20"}, "22m", says.format("1"), more),
            Fires({metric: "1+0x100 2+0x20"}, "52m", says.format("1"), more),
            # The first after a restart.
            Fires({metric: "3+0x60 _x2 1+0x20", START: f"{OLD}x60 _x1 1830+0x90"}, "34m", says.format("1"), more),
            # The first, a minute after the engine's start: a new pod.
            Fires({metric: "_x42 1+0x20"} | NEW, "23m", says.format("1"), more),
            # The first, before the engine was scraped.
            Fires({metric: "_x40 1+0x20"} | NEW, "21m", says.format("1"), more),
            # The first, while nothing was scraped for ten minutes, which began after the engine.
            Fires({metric: "_x60 1+0x40", START: f"{OLD}x40 _x19 {OLD}x100"}, "32m", says.format("1"), more),
        ),
        ended={metric: "_x88 1+0x300"},
        idle={metric: "3+0x400"},
        quiet=(
            {metric: "3+0x100 _x4", START: f"{OLD}x100 _x4 3130+0x300"},  # of the engine's last life
            {metric: "3+0x40 _x70 3+0x290", START: f"{OLD}x40 _x70 {OLD}x290"},  # Prometheus was away for 35 minutes,
            {metric: "3+0x40 _x40 3+0x320", START: f"{OLD}x40 _x40 {OLD}x320"},  # for 20,
            {metric: "_x40 50+0x360", START: f"_x40 {OLD}x360"},  # or had not begun
        ),
    )
