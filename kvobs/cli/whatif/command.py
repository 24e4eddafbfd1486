"""The command ``kvobs whatif``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from pydantic import ValidationError
from rich.console import Console

from kvobs.cli import table
from kvobs.cli.output import examples, fail, warn
from kvobs.cli.timeline import recordings
from kvobs.cli.whatif import report
from kvobs.cli.whatif.comparison import compare
from kvobs.cli.whatif.history import History, histories
from kvobs.cli.whatif.replay import Settings
from kvobs.config import explain
from kvobs.options import Options

EXAMPLES = examples(
    "kvobs whatif /dev/shm/kvobs --policy longest",
    "kvobs whatif /dev/shm/kvobs --order disk,cpu --min-tokens disk=256",
    "kvobs whatif /dev/shm/kvobs --lookup-timeout-ms 20 --json",
)
POLICIES: tuple[str, ...] = get_args(Options.model_fields["load_policy"].annotation)
_OPTION = {"load_policy": "--policy", "lookup_timeout_ms": "--lookup-timeout-ms", "min_tokens": "--min-tokens"}


def whatif(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder of the recordings (option timeline.dir).", show_default=False)
    ],
    *,
    policy: Annotated[
        str | None,
        typer.Option(metavar="POLICY", help=f"load_policy: {', '.join(POLICIES)}.", show_default=False),
    ] = None,
    order: Annotated[
        str | None,
        typer.Option(metavar="A,B,...", help="Connectors in this order; the others are left out.", show_default=False),
    ] = None,
    min_tokens: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=N", help="Smaller offers of a connector are not taken; repeatable."),
    ] = None,
    lookup_timeout_ms: Annotated[
        float | None,
        typer.Option(metavar="MS", help="How long a connector may answer 'not yet'.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Replay the recorded lookups and loads of an engine under other settings: tokens loaded, time to first token."""
    problems: list[str] = []
    try:
        past = histories(recordings.load(folder, problems=problems))
    except ValueError as error:
        raise fail(str(error)) from None
    for problem in problems:
        warn(problem)
    if any(history.children != past[0].children or history.settings != past[0].settings for history in past):
        raise fail("the engines have different connectors or settings: put the recordings of each in its own folder")
    names = past[0].children
    given: dict[str, Any] = {"load_policy": policy, "lookup_timeout_ms": lookup_timeout_ms}
    changed = {key: value for key, value in given.items() if value is not None}
    if min_tokens:
        changed["min_tokens"] = {**past[0].settings.get("min_tokens", {}), **_minimums(min_tokens, names)}
    recorded = Settings.of(names, past[0].settings)
    other = Settings(tuple(names if order is None else _order(order, names)), _options(past[0].settings, changed))
    _show(past, recorded, other, as_json=as_json)


def _show(past: Sequence[History], recorded: Settings, other: Settings, *, as_json: bool) -> None:
    found = compare(past, [other] * len(past))
    if as_json:
        typer.echo(json.dumps(report.as_dict(found, recorded, other)))
        return
    if not found.lookups:
        raise fail("no lookup is recorded from its begin to its end")
    console = Console()
    for part in (report.headline(found, recorded, other), report.lines(found, recorded.order), report.coverage(found)):
        table.show(console, part, style="" if part[0].startswith(" ") else "dim")
        console.print()


def _order(text: str, names: Sequence[str]) -> list[str]:
    """Return the connectors of ``--order``."""
    order = [name.strip() for name in text.split(",")]
    for name in order:
        _check(name, names, "--order")
    if len(set(order)) < len(order):
        raise typer.BadParameter(f"found {text!r}, allowed: each connector once", param_hint="--order")
    return order


def _minimums(texts: Sequence[str], names: Sequence[str]) -> dict[str, int]:
    """Return the connectors of ``--min-tokens``, and how many tokens each."""
    found: dict[str, int] = {}
    for text in texts:
        name, equals, number = text.partition("=")
        if not equals or not number.isdecimal() or not int(number):
            allowed = "NAME=N with a whole number of tokens from 1 on, such as " + f"{names[0]}=256"
            raise typer.BadParameter(f"found {text!r}, allowed: {allowed}", param_hint="--min-tokens")
        _check(name, names, "--min-tokens")
        found[name] = int(number)
    return found


def _check(name: str, names: Sequence[str], option: str) -> None:
    if name not in names:
        raise typer.BadParameter(f"found connector {name!r}, allowed: {', '.join(names)}", param_hint=option)


def _options(recorded: Mapping[str, Any], changed: Mapping[str, Any]) -> Options:
    """Return kvobs's options with the changes."""
    try:
        options = Options.model_validate({**recorded, **changed})
    except ValidationError as error:
        detail = error.errors()[0]
        problem, allowed = explain(detail["type"], detail["msg"])
        option = _OPTION.get(str(detail["loc"][0]), str(detail["loc"][0]))
        raise typer.BadParameter(f"found {detail['input']!r}{problem}, allowed: {allowed}", param_hint=option) from None
    if options.wait_for == "earlier" and options.compares_answers:
        raise typer.BadParameter(
            f"found {options.load_policy!r}, which compares all answers, and the recorded wait_for is 'earlier', "
            "allowed: first",
            param_hint="--policy",
        )
    return options
