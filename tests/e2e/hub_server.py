"""A local stand-in for the Hugging Face hub, with the part of its API that downloads need."""

from __future__ import annotations

import hashlib
import json
import re
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """One repository at one commit, and the requests that the server received."""

    repository: str
    directory: Path
    revisions: tuple[str, ...] = ("main", COMMIT)
    gated: bool = False
    token: str | None = None
    """If set, the repository exists only for requests with this token."""
    cut: dict[str, int] = field(default_factory=dict)
    """File name to the number of bytes after which the connection is closed, once."""
    held: dict[str, int] = field(default_factory=dict)
    """File name to the number of bytes after which its downloads wait for `go_on`."""
    go_on: threading.Event = field(default_factory=threading.Event)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    """(method, path, Range) of every request."""
    endpoint: str = ""

    def downloads(self, name: str) -> list[str | None]:
        """The Range headers of the GET requests for a file."""
        return [range_ for method, path, range_ in self.requests if method == "GET" and path.endswith("/" + name)]


@contextmanager
def serve(hub: Hub, certificate: tuple[Path, Path] | None = None) -> Iterator[Hub]:
    """Serves until the block ends; `hub.endpoint` is the address. With `certificate` and its key, over TLS."""

    class Handler(_Handler):
        pass

    Handler.hub = hub
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certificate)
        # The TLS handshake runs in the connection's own thread.
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        hub.endpoint = hub.endpoint.replace("http:", "https:")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        hub.go_on.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        """Logs nothing: `requests` keeps the requests instead."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path, self.headers.get("Range")))
        if path == "/api/whoami-v2" and self.hub.token is not None:
            if self.headers.get("Authorization") == f"Bearer {self.hub.token}":
                self._json({"name": "somebody"})
            else:
                self._refuse(401, "InvalidToken")
            return
        match = re.fullmatch(r"(?:/api/models)?/([^/]+/[^/]+)(?:/(revision|tree|resolve)/([^/]+)(?:/(.+))?)?", path)
        if match is None:
            self._refuse(404, "EntryNotFound")
            return
        repository, kind, revision, name = match.groups()
        authorised = self.hub.token is None or self.headers.get("Authorization") == f"Bearer {self.hub.token}"
        if repository != self.hub.repository or not authorised:
            # Like the hub, answer unauthorized clients as if the repository did not exist.
            self._refuse(401, "RepoNotFound")
        elif self.hub.gated:
            self._refuse(403, "GatedRepo")
        elif (revision or "main") not in self.hub.revisions:
            self._refuse(404, "RevisionNotFound")
        elif kind == "resolve":
            self._file(name)
        else:
            self._json(self._tree() if kind == "tree" else self._info())

    def _files(self) -> list[Path]:
        return sorted(path for path in self.hub.directory.rglob("*") if path.is_file())

    def _name(self, path: Path) -> str:
        return path.relative_to(self.hub.directory).as_posix()

    def _info(self) -> dict[str, Any]:
        siblings = [{"rfilename": self._name(path)} for path in self._files()]
        return {"_id": "1", "id": self.hub.repository, "sha": COMMIT, "private": False, "siblings": siblings}

    def _tree(self) -> list[dict[str, Any]]:
        return [
            {"type": "file", "path": self._name(path), "size": path.stat().st_size, "oid": _etag(path)}
            for path in self._files()
        ]

    def _file(self, name: str) -> None:
        path = self.hub.directory / name
        if not path.is_file():
            self._refuse(404, "EntryNotFound")
            return
        content = path.read_bytes()
        wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        start = int(wanted[1]) if wanted else 0
        self.send_response(206 if wanted else 200)
        self.send_header("ETag", f'"{_etag(path)}"')
        if path.suffix in (".safetensors", ".gguf"):
            # The hub stores large files elsewhere, named by their content.
            self.send_header("X-Linked-Etag", f'"{hashlib.sha256(content).hexdigest()}"')
            self.send_header("X-Linked-Size", str(len(content)))
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(content) - start))
        if wanted:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if self.command == "HEAD":
            return
        end = self.hub.cut.pop(name, None)
        held = max(start, self.hub.held.get(name, len(content)))
        try:
            self.wfile.write(content[start:end][: held - start])
            if held < len(content):
                self.hub.go_on.wait(60)
                self.wfile.write(content[held:end])
        except OSError:
            # The client was killed.
            self.close_connection = True
        if end is not None:
            self.close_connection = True

    def _json(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _etag(path: Path) -> str:
    """The Git blob hash of a file."""
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
