"""A headless Chromium, steered through pipes: it draws pages, and reports their requests and errors."""

import base64
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from shutil import which
from typing import Any, BinaryIO

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--force-color-profile=srgb", "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip
"""The pages are our own: no sandbox, which root can't have, is needed."""


@dataclass
class View:
    """A page as it was drawn: its picture, what it asked the network for, its complaints, and how wide it is."""

    picture: bytes
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    width: int = 0
    text: str = ""
    back: str = ""
    """The colour behind all."""
    links: list[str] = field(default_factory=list)


class Chromium:
    """A running browser. Messages are JSON with a zero byte at the end."""

    def __init__(self, to: BinaryIO, of: BinaryIO) -> None:
        self._to, self._of, self._n = to, of, 0
        self._events: list[dict[str, Any]] = []
        self._session: dict[str, str] = {}
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        for domain in ("Page", "Network", "Log", "Runtime"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **params: Any) -> Any:
        """Let the browser do something; return what it answers."""
        self._n += 1
        message = {"id": self._n, "method": method, "params": params, **self._session}
        self._to.write(json.dumps(message).encode() + b"\0")
        self._to.flush()
        while (answer := self._read()).get("id") != self._n:
            self._events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def _read(self) -> dict[str, Any]:
        data = bytearray()
        while (byte := self._of.read(1)) != b"\0":
            assert byte, "the browser has ended"
            data += byte
        found: dict[str, Any] = json.loads(data)
        return found

    def view(self, url: str, width: int, *, dark: bool = False, height: int = 800) -> View:
        """Open a page in a window of this size, and return how it looks as a whole."""
        self._events.clear()
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.ask("Emulation.setEmulatedMedia", features=scheme)
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 700}
        self.ask("Emulation.setDeviceMetricsOverride", **size)
        self.ask("Page.navigate", url=url)
        self.wait_for_load()
        scroll = self._evaluate("document.documentElement.scrollWidth")
        text = self._evaluate("document.body.innerText")
        shot = self.ask("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        back = self._evaluate("getComputedStyle(document.body).backgroundColor")
        links = self._evaluate("[...document.links].map(link => link.href)")
        view = View(base64.b64decode(shot), width=scroll, text=text, back=back, links=links)
        for event in self._events:
            method, params = event.get("method"), event.get("params", {})
            if method == "Network.requestWillBeSent":
                view.requests.append(params["request"]["url"])
            elif method in ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown"):
                view.complaints.append(json.dumps(params))
        return view

    def wait_for_load(self) -> None:
        """Wait until the page has been loaded, once more if it has been."""
        while not any(event.get("method") == "Page.loadEventFired" for event in self._events):
            self._events.append(self._read())
        self._events = [event for event in self._events if event.get("method") != "Page.loadEventFired"]

    def _evaluate(self, expression: str) -> Any:
        return self.ask("Runtime.evaluate", expression=expression, returnByValue=True)["result"]["value"]


@contextmanager
def chromium() -> Iterator[Chromium]:
    """Run a browser; where there is none, the tests fail: `make chromium` installs it."""
    path = os.environ.get("CHROMIUM") or next(filter(None, map(which, BROWSERS)), None)
    assert path, "no Chromium found: make chromium, or name one in CHROMIUM"
    (its_in, to), (of, its_out) = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(prefix="kvobs-chromium-", ignore_cleanup_errors=True) as folder:
        shell = ["bash", "-c", f'exec "$@" 3<&{its_in} 4>&{its_out}', "bash"]
        command = [*shell, path, *FLAGS, f"--user-data-dir={folder}"]
        with (Path(folder) / "log").open("wb") as log:
            process = subprocess.Popen(command, pass_fds=(its_in, its_out), stdout=log, stderr=log)
        os.close(its_in)
        os.close(its_out)
        with os.fdopen(to, "wb") as writes, os.fdopen(of, "rb") as reads:
            try:
                yield Chromium(writes, reads)
            finally:
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(10)
                process.kill()
                process.wait()
