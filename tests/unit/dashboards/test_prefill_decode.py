"""The board *Prefill and decode*: engines of one role can be chosen."""

import json

from dashboards.__main__ import FILES
from tests.support.boards import panels, variables

BOARD = json.loads(FILES["boards/kvobs-prefill-decode.json"]())
PANELS = {panel["title"]: panel for panel in panels(BOARD)}


def test_role_is_chosen_after_everything_else() -> None:
    role = variables(BOARD, "query")[-1]
    assert role["name"] == "role"
    assert role["query"]["query"].startswith('label_values(kvobs_connector_info{cluster=~"$cluster",')
    assert all('role=~"$role"' in target["expr"] for panel in PANELS.values() for target in panel["targets"])
