"""Two runs are compared connector by connector, number by number."""

from dataclasses import replace

import pytest

from kvobs.cli.summary.comparison import differences, pairs, shares
from kvobs.cli.summary.rows import PromptTokens, ServerSums, connector_sums
from kvobs.export.numbers import Numbers

ROW = connector_sums("cpu", Numbers())
OLD = ServerSums("a", connectors=(replace(ROW, lookups=10, hit_share=0.5, load_p99_s=0.2), replace(ROW, connector="x")))
NEW = ServerSums(
    "b", connectors=(replace(ROW, lookups=15, hit_share=0.75, loads=4), replace(ROW, connector="y", loads=2))
)


def test_numbers_of_both_runs_are_put_beside_each_other() -> None:
    found = [(each.connector, each.measure.field, each.before, each.now, each.size, each.share)
             for each in differences(OLD, NEW)]  # fmt: skip
    assert found == [
        ("cpu", "lookups", 10, 15, 5, 0.5),
        ("cpu", "hit_share", 0.5, 0.75, 0.25, 0.5),
        ("cpu", "loads", 0, 4, 4, None),
        ("cpu", "load_p99_s", 0.2, None, None, None),
        ("y", "loads", None, 2, None, None),
    ]


@pytest.mark.parametrize(
    ("before", "now", "found"),
    [("a", "b", ["ab"]), ("ab", "b", ["bb"]), ("ab", "ba", ["bb", "aa"]), ("ab", "cd", []), ("", "a", [])],
)
def test_servers_are_paired_by_name_or_where_there_is_one_each(before: str, now: str, found: list[str]) -> None:
    made = pairs([ServerSums(name) for name in before], [ServerSums(name) for name in now])
    assert [old.server + new.server for old, new in made] == found


def test_shares_of_prompt_tokens() -> None:
    assert shares(PromptTokens(50, 25, {"cpu": 20, "disk": 5})) == {
        "computed": 0.5, "in vLLM's own cache": 0.25, "loaded by cpu": 0.2, "loaded by disk": 0.05
    }  # fmt: skip
    assert set(shares(PromptTokens(0, 0, {})).values()) == {0}
