"""Stand in for Grafana: answer everything at its port."""

from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer


class Answering(SimpleHTTPRequestHandler):
    def send_head(self) -> None:
        self.send_response(200)
        self.end_headers()


ThreadingHTTPServer(("", 3000), Answering).serve_forever()
