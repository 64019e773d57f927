"""A server before the tests' S3 server: each answer takes some milliseconds, and a test may spoil
some."""

import http.client
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

LATENCY = 0.02
# what a spoiler may ask for, of the number of a request for bytes (from 1 on)
FAIL, HANG, CUT, SHORT = "fail", "hang", "cut", "short"


class Proxy(ThreadingHTTPServer):
    """`address`: where clients connect. `spoil(n)` says what goes wrong with the n-th request for a
    range of bytes; `ranges` counts them."""

    daemon_threads = True
    request_queue_size = 100

    def __init__(self, behind: str, latency: float = LATENCY) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.behind = urlsplit(behind).netloc
        self.latency = latency
        self.ranges = 0
        self.counting = threading.Lock()
        self.spoil: Callable[[int], str | None] = lambda number: None
        self.address = f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that give up are no news."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def log_message(self, *_: object) -> None:
        """Silent."""

    def _pass_on(self) -> None:
        what = None
        if self.headers.get("Range") and self.command == "GET":
            with self.server.counting:
                self.server.ranges += 1
                number = self.server.ranges
            what = self.server.spoil(number)
        time.sleep(self.server.latency)
        if what == HANG:
            time.sleep(60)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if what == FAIL:
            self.send_response(503)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        behind = http.client.HTTPConnection(self.server.behind, timeout=60)
        behind.request(self.command, self.path, body, dict(self.headers))
        answer = behind.getresponse()
        data = answer.read()
        behind.close()
        self.send_response(answer.status)
        if what == SHORT:
            data = data[: len(data) // 2]
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                self.send_header(name, value)
        length = answer.getheader("Content-Length") if self.command == "HEAD" else len(data)
        self.send_header("Content-Length", str(length or 0))
        self.end_headers()
        if what == CUT:
            self.wfile.write(data[: len(data) // 2])
            self.wfile.flush()
            self.close_connection = True
            self.connection.shutdown(2)
            return
        self.wfile.write(data)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _pass_on


@contextmanager
def proxy(behind: str, latency: float = LATENCY) -> Iterator[Proxy]:
    """A proxy of the server `behind`, until the end."""
    server = Proxy(behind, latency)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
