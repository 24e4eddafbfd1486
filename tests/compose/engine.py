"""A Docker engine for the tests, and the images that it cannot pull: made here, under the names that they have."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

from tests.engine.serving import ROOT, eventually

SID = ROOT / ".hosts" / "prometheus3"
COLLECTOR = ROOT / ".hosts" / "otelcol"
IMAGES = Path(__file__).parent / "images"
BASE = "python:3.11.14-slim-bookworm"
PACKAGES = "ca-certificates,python-is-python3,python3-pip,wget"
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"


class NoEngineError(RuntimeError):
    """A Docker engine that cannot be started; the message says why."""


@dataclass(frozen=True)
class Docker:
    """Runs commands of docker in a folder, against one engine."""

    folder: Path
    env: Mapping[str, str]

    def run(self, *arguments: object, **more: Any) -> str:
        """Run a command of docker that has to succeed; return what it prints."""
        done = self.attempt(*arguments, **more)
        assert done.returncode == 0, f"docker {' '.join(map(str, arguments))}: {done.stdout}{done.stderr}"
        return done.stdout

    def attempt(self, *arguments: object, env: Mapping[str, str] | None = None, **more: Any) -> Any:
        command, merged = ["docker", *map(str, arguments)], {**self.env, **(env or {})}
        return subprocess.run(
            command, cwd=self.folder, env=merged, capture_output=True, text=True, timeout=1200, check=False, **more
        )


folder_on_disk = partial(tempfile.TemporaryDirectory, prefix="kvobs-", dir="/var/tmp")
"""Makes a folder that is not in memory, and whose path is short enough for sockets."""


@contextmanager
def engine(folder: Path) -> Iterator[Docker]:
    """Run dockerd, beside another one if there is one: it leaves the host's addresses and its firewall as they are."""
    with folder_on_disk() as place:
        log = Path(place) / "log"
        host = f"unix://{place}/docker.sock"
        (Path(place) / "cli-plugins").symlink_to(SID / "usr/libexec/docker/cli-plugins")
        client = Docker(folder, os.environ | {"DOCKER_HOST": host, "DOCKER_CONFIG": place})
        command = [
            "dockerd", f"--host={host}", f"--pidfile={place}/pid", f"--exec-root={place}/run",
            f"--data-root={place}/data", "--bridge=none", "--iptables=false", "--host-gateway-ip=127.0.0.1",
        ]  # fmt: skip
        try:
            with log.open("wb") as file:
                process = subprocess.Popen(command, stdout=file, stderr=file)
        except OSError as error:
            raise NoEngineError(str(error)) from error
        try:
            eventually(lambda: process.poll() is not None or client.attempt("version").returncode == 0)
            if process.poll() is not None:
                raise NoEngineError(f"dockerd ended: {log.read_text()[-2000:]}")
            yield client
        finally:
            process.terminate()
            process.wait(60)
            for left in Path(place).glob("run/netns/*"):
                subprocess.run(["umount", left], check=True)


def make_base(docker: Docker) -> None:
    """Make the image of Python of a new Debian, with this machine's certificates."""
    mirror = (SID / "sid.list").read_text().split()[1]
    certificates = os.environ.get("SSL_CERT_FILE", CERTIFICATES)
    # An image of Python has no EXTERNALLY-MANAGED.
    change = f'cp "{certificates}" "$1{CERTIFICATES}" && rm "$1/usr/lib/python3.11/EXTERNALLY-MANAGED"'
    command = [
        "mmdebstrap", "--quiet", "--variant=minbase", f"--include={PACKAGES}", "--dpkgopt=force-unsafe-io",
        f"--customize-hook={change}", "bookworm", "-", mirror,
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE) as made:
        docker.run("import", f"--change=ENV SSL_CERT_FILE={CERTIFICATES}", "-", BASE, stdin=made.stdout)
    assert made.returncode == 0


def make(docker: Docker, stage: str, *names: str) -> None:
    """Make what stands in for images, by the stage of images/Dockerfile."""
    context = docker.folder / "images"
    if not context.exists():
        shutil.copytree(IMAGES, context)
        for file in (SID / "usr/bin/prometheus", COLLECTOR, ROOT / "tests/support/grpc_collector.py"):
            shutil.copy(file, context)
    docker.run("build", "--network=host", f"--target={stage}", *(f"--tag={name}" for name in names), context)


@contextmanager
def wheels() -> Iterator[str]:
    """Yield the build argument WHEELS: the folder of wheels that pip uses is served where builds find it."""
    folder = os.environ.get("PIP_FIND_LINKS", "")
    if not Path(folder).is_absolute():
        yield f"--find-links {folder}" if folder else "--torch-backend cpu"
        return
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=folder))
    with server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"--find-links http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
