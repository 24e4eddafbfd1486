"""Write summaries and comparisons: in a terminal, as Markdown."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from kvobs.cli.summary.comparison import Difference, differences, pairs, shares
from kvobs.cli.summary.rows import MISSED, PromptTokens, ServerSums, shown, written
from kvobs.export.texts import NONE, duration, percent
from kvobs.schema.signals import no_estimate

GAP = 2
NAME_AT_MOST, TITLE_AT_LEAST = 20, 10
"""Characters in one line of a connector's name, or of a number's title in a narrow window: the rest is below."""
MORE, LESS = "+", "-"
BAD = frozenset({"loads failed", "blocks with wrong bytes", "exceptions", "timed out"})


@dataclass(frozen=True)
class Grid:
    """Texts by row and column, the first of each row its title. Columns without room follow below; no number is cut."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widths = [self._width(i) for i in range(len(self.heads))]
        widest = max(widths[1:], default=0) + GAP
        widths[0] = max(TITLE_AT_LEAST, min(widths[0], options.max_width - widest))
        for number, part in enumerate(_parts(widths, options.max_width)):
            if number:
                yield ""
            table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False, header_style="bold")
            for i in part:
                table.add_column(
                    Text(self.heads[i]), width=widths[i], justify="right" if i else "left", vertical="bottom"
                )
            for title, *cells in self.rows:
                style = "bold" if not any(cells) else ""
                texts = (Text(cells[i - 1], _style(title, cells[i - 1])) for i in part[1:])
                table.add_row(Text(title, style), *texts)
            width = sum(widths[i] + GAP for i in part) - GAP
            yield from console.render(table, options.update_width(max(width, options.max_width)))

    def _width(self, column: int) -> int:
        cells = max((cell_len(row[column]) for row in self.rows), default=1)
        return max(1, cells, min(NAME_AT_MOST, cell_len(self.heads[column])))

    def markdown(self) -> Iterator[str]:
        yield _line(self.heads)
        yield _line(["--:" if i else "---" for i in range(len(self.heads))])
        for title, *cells in self.rows:
            yield _line([title.strip() if any(cells) else f"**{title}**", *cells])


def _parts(widths: Sequence[int], room: int) -> Iterator[list[int]]:
    """Yield the columns that fit next to each other, each time with the first one."""
    part, used = [0], widths[0]
    for i, width in enumerate(widths[1:], 1):
        if used + GAP + width > room and len(part) > 1:
            yield part
            part, used = [0], widths[0]
        part.append(i)
        used += GAP + width
    yield part


def _style(title: str, cell: str) -> str:
    return "bold red" if title in BAD and cell not in (NONE, "0") else ""


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def grid(server: ServerSums) -> Grid:
    """Return the numbers of a server's connectors, a column for each."""
    rows = server.connectors
    lines = [[each.title, *(written(each, getattr(row, each.field)) for row in rows)] for each in shown(rows)]
    return Grid(["", *(row.connector for row in rows)], lines)


def heading(server: ServerSums) -> str:
    """Return a line with a server, how long the run was, and the versions."""
    parts = [server.server]
    if server.model and server.model not in server.server:
        parts.append(server.model)
    if server.seconds is not None:
        parts.append(duration(server.seconds))
    if server.vllm_version:
        parts.append(f"vLLM {server.vllm_version}, kvobs {server.kvobs_version}")
    if server.restarted:
        parts.append("it restarted during the run: the numbers since then")
    if server.ended:
        parts.append(server.ended)
    return "   ".join(parts)


def notes(server: ServerSums) -> Iterator[str]:
    """Yield the lines below a table: where prompt tokens came from, what was missed, and who has no estimate."""
    if not server.connectors:
        yield "No connector has any numbers."
    if server.prompt_tokens is not None:
        yield source_line(server.prompt_tokens)
    else:
        yield "Where the prompt tokens came from is unknown: vLLM's own metrics could not be read."
    for row in server.connectors:
        if missed := sum(row.missed_tokens.values()):
            parts = sorted(row.missed_tokens.items(), key=lambda item: -item[1])
            texts = (f"{percent(n / missed)} {MISSED[reason]}" for reason, n in parts if reason in MISSED)
            yield f"{row.connector} was asked for {missed:,} tokens that it did not offer: {', '.join(texts)}."
        if row.loads and not row.estimated_loads:
            yield f"{row.connector}: {no_estimate(server.prefills_seen)}."


def source_line(tokens: PromptTokens) -> str:
    """Return a line with the share of each source; they add up to 100 %."""
    parts = shares(tokens)
    ends = [round(100 * end) for end in accumulate(parts.values(), initial=0.0)]
    texts = (f"{end - begin} % {words}" for words, (begin, end) in zip(parts, pairwise(ends), strict=True))
    return f"Of {tokens.all:,} prompt tokens: {', '.join(texts)}."


# --- two runs


def comparison(before: ServerSums, now: ServerSums) -> Grid:
    """Return the numbers of both runs with their differences, a row for each."""
    rows = []
    for name, group in groupby(differences(before, now), lambda each: each.connector):
        rows.append([name, "", "", ""])
        for each in group:
            numbers = written(each.measure, each.before), written(each.measure, each.now)
            rows.append([f"  {each.measure.title}", *numbers, size(each)])
    rows += _compared_sources(before.prompt_tokens, now.prompt_tokens)
    return Grid(["", "before", "now", "difference"], rows)


def size(each: Difference) -> str:
    """Return how large a difference is, and how large it is by the number before."""
    if each.size is None:
        return NONE
    if each.measure.show is percent:
        return points(each.size)
    if not each.size:
        return "0"
    text = f"{MORE if each.size > 0 else LESS}{written(each.measure, abs(each.size))}"
    return f"{text} ({_share(each.share)})" if each.share is not None else text


def _share(share: float) -> str:
    text = f"{100 * share:+,.0f} %"
    return text if text not in ("+0 %", "-0 %") else f"{100 * share:+.1g} %"


def points(share: float) -> str:
    """Return the difference of two shares."""
    return f"{100 * share:+.1f} points" if share else "0"


def _compared_sources(before: PromptTokens | None, now: PromptTokens | None) -> Iterator[list[str]]:
    if before is None or now is None:
        return
    tokens = f"{now.all - before.all:+,}" if now.all != before.all else "0"
    yield ["all prompts", "", "", ""]
    yield ["  tokens", f"{before.all:,}", f"{now.all:,}", tokens]
    old, new = shares(before), shares(now)
    for words in dict.fromkeys([*new, *old]):
        was, is_ = old.get(words, 0.0), new.get(words, 0.0)
        yield [f"  {words}", percent(was), percent(is_), points(is_ - was)]


# --- all servers


@dataclass(frozen=True)
class Picture:
    """The summaries of servers, or with ``before`` how they differ from those."""

    servers: Sequence[ServerSums]
    before: Sequence[ServerSums] | None = None

    def parts(self) -> Iterator[tuple[str, Grid, list[str]]]:
        """Yield each server's heading, its table, and the lines below."""
        if self.before is None:
            for server in self.servers:
                yield heading(server), grid(server), list(notes(server))
            return
        found = list(pairs(self.before, self.servers))
        for old, new in found:
            yield f"{heading(new)}\nbefore: {heading(old)}", comparison(old, new), []
        names = {new.server for _, new in found}
        for server in self.servers:
            if server.server not in names:
                lines = ["The earlier summary has no server of this name."]
                yield heading(server), grid(server), [*lines, *notes(server)]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for i, (title, table, lines) in enumerate(self.parts()):
            if i:
                yield ""
            yield Text(title, "bold")
            yield table
            yield from map(Text, lines)

    def markdown(self) -> str:
        """Return the same as Markdown."""
        lines: list[str] = []
        for title, table, more in self.parts():
            lines += [*(f"**{line}**  " for line in title.splitlines()), "", *table.markdown(), ""]
            for line in more:
                lines += [line, ""]
        return "\n".join(lines).rstrip() + "\n"
