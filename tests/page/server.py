"""A server that serves the built page as the brain does. A script gives its answers to chats."""

from __future__ import annotations

import gzip
import json
import threading
import time
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.page.engine import Engine, Json, Router

ROOT = Path(__file__).resolve().parents[2]
DIST = ROOT / "web/dist"
POLICY = (
    "default-src 'self'; connect-src 'self'; img-src 'self' data: blob:; style-src 'self'; script-src 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
SECOND = {"id": "second", "state": "asleep", "size": 93_000_000}
KINDS = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
}
TICK_S = 0.1

Chunk = str | Json | float
"""A piece of content, a delta with any fields, or seconds to wait."""
Script = Callable[[Json], Iterable[Chunk]]


def echo(body: Json) -> Iterable[Chunk]:
    """The default script: repeats the last message word by word."""
    content = body["messages"][-1]["content"]
    for word in str(content).split(" "):
        yield f"{word} "


def error(status: int, message: str, param: str | None = None) -> Json:
    return {"error": {"message": message, "type": "invalid_request_error", "param": param, "code": status}}


class PageServer:
    """Serves on a free port of the loopback interface, in threads, until `close`."""

    def __init__(self, feed: Engine | Router | None) -> None:
        self.feed = feed
        self.script: Script = echo
        self.refuse: Json | None = None
        """If it is set, every chat gets this answer."""
        self.key = ""
        self.images = False
        self.chats: list[Json] = []
        """The bodies of the received chats."""
        self.hung_up = threading.Event()
        """Set when a client disconnects before its stream ends."""
        self.closing = threading.Event()
        self.lock = threading.Lock()
        server = self

        class Handler(_Handler):
            owner = server

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.closing.set()
        self._http.shutdown()
        self._http.server_close()


class _Handler(BaseHTTPRequestHandler):
    owner: PageServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Logs nothing, because tests check the requests themselves."""

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        if path == "/":
            path = "/index.html"
        file = DIST / path[1:]
        if path == "/index.html" or (path.startswith("/assets/") and file.parent == DIST / "assets" and file.is_file()):
            self._file(file)
        elif not self._allowed():
            self._json(401, error(401, "Invalid API key"))
        elif path == "/v1/models":
            self._json(200, {"object": "list", "data": [{"id": "scripted"}, SECOND]})
        elif path == "/server_info":
            sees = self.owner.images and "model=second" not in self.path
            self._json(200, {"facts": {"tower_layers": 24 if sees else 0}, "config": {}})
        elif path.startswith("/v1/live"):
            self._live(path)
        else:
            self._json(404, error(404, f"There is no {path} here"))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self._allowed():
            self._json(401, error(401, "Invalid API key"))
        elif self.owner.refuse:
            self._json(self.owner.refuse["error"]["code"], self.owner.refuse)
        else:
            self.owner.chats.append(body)
            self._stream(self._chat, body)

    def _allowed(self) -> bool:
        return not self.owner.key or self.headers.get("Authorization") == f"Bearer {self.owner.key}"

    def _file(self, file: Path) -> None:
        content = gzip.compress(file.read_bytes(), mtime=0)
        self.send_response(200)
        self.send_header("Content-Type", f"{KINDS[file.suffix]}; charset=utf-8")
        self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _json(self, status: int, value: Json, **headers: str) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        for name, text in headers.items():
            self.send_header(name.replace("_", "-"), text)
        self.end_headers()
        self.wfile.write(content)

    def _stream(self, act: Callable[..., None], *arguments: Any) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Cache-Control", "no-cache")
        self.send_header("Connection", "close")
        self.close_connection = True
        self.end_headers()
        try:
            act(*arguments)
        except OSError:
            self.owner.hung_up.set()

    def _event(self, value: Any, name: str = "") -> None:
        data = value if isinstance(value, str) else json.dumps(value)
        head = f"event: {name}\n" if name else ""
        self.wfile.write(f"{head}data: {data}\n\n".encode())
        self.wfile.flush()

    def _chat(self, body: Json) -> None:
        tokens = 0
        reason = "stop"
        for piece in self.owner.script(body):
            if isinstance(piece, float):
                time.sleep(piece)
                continue
            if isinstance(piece, dict) and "error" in piece:
                self._event(piece)
                return
            delta = {"content": piece} if isinstance(piece, str) else piece
            choice: Json = {"index": 0, "delta": delta, "finish_reason": None}
            if body.get("logprobs") and isinstance(piece, str):
                at = -0.02 - 0.37 * (tokens % 9)
                top = [{"token": piece, "logprob": at}, {"token": " other", "logprob": at - 1}]
                choice["logprobs"] = {"content": [{"token": piece, "logprob": at, "top_logprobs": top}]}
            if "tool_calls" in delta:
                reason = "tool_calls"
            tokens += 1
            self._event({"choices": [choice], "usage": None})
        self._event({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
        if body.get("stream_options", {}).get("include_usage"):
            usage = {"prompt_tokens": 42, "completion_tokens": tokens, "prompt_tokens_details": {"cached_tokens": 32}}
            self._event({"choices": [], "usage": usage})
        self._event("[DONE]")

    def _live(self, path: str) -> None:
        feed = self.owner.feed
        if feed is None:
            self._json(404, error(404, "There is no live feed"))
        elif path == "/v1/live":
            self._stream(self._ticks, feed)
        elif isinstance(feed, Engine) and path == "/v1/live/trace":
            self._json(200, feed.trace(), Content_Disposition='attachment; filename="forebay-trace.json"')
        elif isinstance(feed, Engine) and path.startswith("/v1/live/requests/"):
            item = feed.requests.get(path.rsplit("/", 1)[1])
            if item:
                self._json(200, {"id": item.id, "replica": item.replica, "events": item.events})
            else:
                self._json(404, error(404, "The ring no longer knows this request"))
        else:
            self._json(404, error(404, f"There is no {path} here"))

    def _ticks(self, feed: Engine | Router) -> None:
        with self.owner.lock:
            self._event(feed.start(), "start")
        while not self.owner.closing.wait(TICK_S):
            with self.owner.lock:
                feed.advance(TICK_S)
                self._event(feed.tick(), "tick")
            self.wfile.write(b": ping\n\n")
