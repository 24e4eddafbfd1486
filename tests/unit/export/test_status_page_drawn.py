"""The status page in a real browser: at three widths, light and dark, in each state; served under a prefix."""

from collections.abc import Iterator
from contextlib import closing

import pytest

from kvobs.export.http_server import Server
from tests.support.chromium import Chromium, chromium
from tests.support.status_pages import STATES
from tests.support.top_engines import web

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
HEADS = {
    "good": "nothing fires", "failing": "3 of 5 connectors need", "hanging": "3 of 5 connectors need",
    "empty": "no connector", "idle": "nothing fires", "hostile": "5 of 5 connectors need",
}  # fmt: skip


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    with chromium() as running:
        yield running


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("state", STATES)
def test_a_page_fits_its_window_and_requests_and_reports_nothing(state: str, dark: bool, browser: Chromium) -> None:
    made = STATES[state]()
    with closing(Server("127.0.0.1", 0, lambda _: ("", b""), lambda: (True, {}), status=made.page.html)) as server:
        for width in (360, 800, 1600):
            url = f"http://127.0.0.1:{server.port}/"
            view = browser.view(url, width, dark=dark)
            assert set(view.requests) <= {url, "data:,"}
            assert view.complaints == []
            assert view.width <= width
            assert HEADS[state] in view.text
            assert is_dark(view.back) == dark


def is_dark(colour: str) -> bool:
    """Return whether a colour as CSS has it, such as rgb(1, 2, 3), is dark."""
    return sum(int(part) for part in colour.strip("rgb()").split(",")) < 3 * 128


def test_the_links_of_a_page_under_a_prefix_stay_under_it(browser: Chromium) -> None:
    html = STATES["good"]().html(reloads=False)
    with web(lambda path: (200, html) if path == "/kvobs/engine-1/" else (404, "")) as address:
        view = browser.view(f"http://{address}/kvobs/engine-1/", 800)
    assert [link.removeprefix(f"http://{address}") for link in view.links if address in link] == [
        "/kvobs/engine-1/", "/kvobs/engine-1/metrics", "/kvobs/engine-1/healthz",
    ]  # fmt: skip


def test_a_page_reloads_itself(browser: Chromium, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvobs.export.status_page.RELOAD_S", 1)
    made = STATES["idle"]()
    asked = []

    def html(*, is_local: bool, reloads: bool) -> bytes:
        asked.append(is_local)
        return made.page.html(is_local=is_local, reloads=reloads)

    with closing(Server("127.0.0.1", 0, lambda _: ("", b""), lambda: (True, {}), status=html)) as server:
        browser.view(f"http://127.0.0.1:{server.port}/", 800)
        browser.wait_for_load()
    assert len(asked) >= 2
