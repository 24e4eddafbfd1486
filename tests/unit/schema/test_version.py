"""The package and what it tells of itself have one version."""

from packaging.version import Version

import kvobs


def test_it_is_one_that_installers_understand() -> None:
    assert str(Version(kvobs.__version__)) == kvobs.__version__
