"""Find the pages of the processes on this host, and name their engines."""

from __future__ import annotations

from collections.abc import Iterator

from kvobs.cli.output import fail, warn
from kvobs.export.texts import printable
from kvobs.page import files
from kvobs.page.description import EngineInfo, process_name
from kvobs.page.reader import Page, names_of

DIGITS = 8
"""Of an engine's hash."""


def wanted_pages(wanted: str | None) -> list[tuple[str, Page]]:
    """Return the pages of this host's processes, of all or of the wanted ones; end the command if there is no page.

    ``wanted`` is an engine's name as it is printed, or its first characters, or the pid of a process.
    """
    if not (here := list(pages())):
        raise fail(
            f"found no page of an engine's process in {files.folder()}: run this as the engine's user, on its machine, "
            "and in its container; an engine that exits cleanly leaves no page"
        )
    found = [each for each in here if wanted is None or wanted == str(each[1].pid) or each[0].startswith(wanted)]
    if not found:
        names = ", ".join(f"{process_name(page.rank)}, pid {page.pid} of engine {engine}" for engine, page in here)
        raise fail(f"found no engine and no pid {wanted!r}; known: {names}")
    return found


def pages() -> Iterator[tuple[str, Page]]:
    """Yield the pages of running and dead processes, each with its engine's id; warn of one that can't be read."""
    for name in names_of():
        path = files.folder() / name
        try:
            engine, number = f"{name}-".split("-")[:2]
            yield f"{engine[:DIGITS]}-{number}", Page(path)
        except FileNotFoundError:
            continue  # it has just ended well
        except (OSError, ValueError) as error:
            warn(f"{path} is skipped: {getattr(error, 'strerror', None) or error}")


def engine_name(engine: str, info: EngineInfo) -> str:
    """Return an engine's model and port, with its id, by which commands take it."""
    port = f", port {info.port}" if info.port is not None else ""
    return f"{printable(info.model)}{port} ({engine})" if info.model else engine
