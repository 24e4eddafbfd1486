"""Each planted fault can still be planted, and each module's tests are found from its name."""

import ast

from tests.mutants.joint_faults import JOINT_FAULTS, ROOT


def test_each_fault_where_two_parts_meet_can_still_be_planted() -> None:
    """Else its file has changed since, and nothing would be planted."""
    sources = [(fault, (ROOT / fault.file).read_text()) for fault in JOINT_FAULTS]
    assert [fault.name for fault, source in sources if source.count(fault.before) != 1] == []
    for fault, source in sources:
        ast.parse(fault.planted_in(source))
        file, _, test = fault.tests.partition("::")
        assert f"def {test}" in (ROOT / file).read_text(), fault.name
    assert len({fault.name for fault in JOINT_FAULTS}) == len(JOINT_FAULTS)
