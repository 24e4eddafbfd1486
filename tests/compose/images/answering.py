#!/usr/bin/env python3
"""Stand in for Grafana and Tempo: answer everything at their ports; with -health ask it, as Tempo does."""

import sys
import urllib.request
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

GRAFANA, TEMPO = 3000, 3200


class Answering(SimpleHTTPRequestHandler):
    def send_head(self) -> None:
        self.send_response(200)
        self.end_headers()


if "-health" in sys.argv:
    urllib.request.urlopen(f"http://127.0.0.1:{TEMPO}/ready").close()
else:
    for port in (GRAFANA, TEMPO):
        Thread(target=ThreadingHTTPServer(("", port), Answering).serve_forever).start()
