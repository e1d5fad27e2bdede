"""A server on 127.0.0.1 that speaks as much of the Hugging Face hub's API as a download needs."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class ModelHub:
    """One repository, and what was asked for.

    Args:
        name: owner/name.
        files: contents by file name.
        gated: its files are given to nobody.
        url: of the server.
        requests: method and path of each request.
    """

    name: str
    files: dict[str, bytes]
    gated: bool = False
    url: str = ""
    requests: list[str] = field(default_factory=list)

    def downloaded(self) -> list[str]:
        """Names of the files that were sent, in order."""
        begin = f"GET /{self.name}/resolve/{COMMIT}/"
        return [request.removeprefix(begin) for request in self.requests if request.startswith(begin)]


@contextmanager
def serve(hub: ModelHub) -> Iterator[ModelHub]:
    """Serve a repository, with the revisions `main` and its commit, until the end of the block."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def _answer(self) -> None:
            path = self.path.partition("?")[0]
            hub.requests.append(f"{self.command} {path}")
            begin, _, rest = path.partition(hub.name)
            kind, _, rest = rest.removeprefix("/").partition("/")
            revision, _, file = rest.partition("/")
            if not rest:
                self._send(404, b"", {"X-Error-Code": "RepoNotFound"})
            elif revision not in ("main", COMMIT):
                self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
            elif begin == "/api/models/" and kind == "revision":
                siblings = [{"rfilename": name} for name in hub.files]
                self._send(200, json.dumps({"id": hub.name, "sha": COMMIT, "siblings": siblings}).encode())
            elif begin == "/api/models/" and kind == "tree":
                tree = [
                    {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                    for name, content in hub.files.items()
                ]
                self._send(200, json.dumps(tree).encode())
            elif hub.gated:
                self._send(403, b"", {"X-Error-Code": "GatedRepo"})
            elif kind == "resolve" and file in hub.files:
                etag = f'"{hashlib.sha1(hub.files[file]).hexdigest()}"'
                self._send(200, hub.files[file], {"ETag": etag, "X-Repo-Commit": COMMIT})
            else:
                self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})

        def _send(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
