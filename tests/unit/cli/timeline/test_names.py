"""Names are as short as they can be, and apart."""

from __future__ import annotations

from kvobs.cli.timeline.names import of_engines, of_processes, of_request, short
from tests.support.recordings import recorded


def test_runs_and_engines_are_named_where_there_are_several() -> None:
    one, rank = recorded(), recorded(rank=3)
    assert of_processes([one, rank]) == ["scheduler", "rank 3"]
    assert of_engines([one, rank]) == ["", ""]
    second, earlier = recorded(engine=1), recorded(run="q")
    assert of_processes([rank, second]) == ["engine 0 rank 3", "engine 1 scheduler"]
    assert of_processes([earlier, rank]) == ["run 1, scheduler", "run 2, rank 3"]
    assert of_processes([earlier, second]) == ["run 1, engine 0 scheduler", "run 2, engine 1 scheduler"]
    assert of_engines([earlier, second]) == ["run 1, engine 0", "run 2, engine 1"]


def test_a_request_is_its_hash() -> None:
    assert (of_request(-1), of_request(5)) == ("f" * 16, "0" * 15 + "5")
    assert short(-(2**63)) == "80000000"
