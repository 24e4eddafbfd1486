"""The scenes that each alert goes through: what its series look like when all is well, when it must fire, and after.

A scrape gap, a new Prometheus, 64 engines and two clusters follow from these, for every alert.
"""

from tests.unit.dashboards.scenes import failures, telemetry, waiting, worth
from tests.unit.dashboards.scenes.scene import Scenes

SUBJECTS = (failures.SCENES, waiting.SCENES, worth.SCENES, telemetry.SCENES)
SCENES: dict[str, Scenes] = {name: scenes for subject in SUBJECTS for name, scenes in subject.items()}
"""By alert."""
