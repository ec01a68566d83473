"""The Hub's upload API on loopback, for the real client: repositories, preupload, LFS batch and objects, commits."""

import base64
import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

TOKEN = "hf_" + "s" * 34


class HubStub:
    """A Hub in memory.

    Attributes:
        repos: id -> path -> content, as the last commit left it.
        commits: id -> messages.
        requests: `METHOD /path` of each request, in order.
        visibility: id -> what a repository was made with.
        failing: part of a path -> how requests for it end: a status, or "drop", which closes the connection.
        delay: seconds that every answer takes.
    """

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.commits: dict[str, list[str]] = {}
        self.requests: list[str] = []
        self.visibility: dict[str, Any] = {}
        self.failing: dict[str, int | str] = {}
        self.delay = 0.0
        self.objects: dict[str, bytes] = {}
        self.closing = threading.Event()
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def do_POST(self) -> None:
                stub.answer(self)

            def do_PUT(self) -> None:
                stub.answer(self)

            def do_GET(self) -> None:
                stub.answer(self)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self.server.server_address[1]}"

    @contextmanager
    def running(self) -> Iterator["HubStub"]:
        thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.closing.set()
            self.server.shutdown()
            self.server.server_close()
            thread.join(10)

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        path = urlparse(request.path).path
        self.requests.append(f"{request.command} {path}")
        self.closing.wait(self.delay)
        fault = next((fault for part, fault in self.failing.items() if part in path), None)
        if fault == "drop":
            request.close_connection = True
            request.connection.close()
            return
        authorised = request.headers.get("Authorization") == f"Bearer {TOKEN}" or path.startswith("/objects/")
        status, reply = (200, {}) if authorised else (401, {"error": "Invalid credentials in Authorization header"})
        if fault is not None:
            status, reply = int(fault), {"error": f"told to answer {fault}"}
        elif authorised:
            status, reply = self._handled(request.command, path, body)
        content = json.dumps(reply).encode()
        try:
            request.send_response(status)
            request.send_header("Content-Type", "application/json")
            request.send_header("Content-Length", str(len(content)))
            request.end_headers()
            request.wfile.write(content)
        except OSError:  # the client gave up
            request.close_connection = True

    def _handled(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        if path == "/api/whoami-v2":
            return 200, {"name": "someone", "type": "user", "orgs": []}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if path == "/api/repos/create":
            return self._created(json.loads(body))
        if path.startswith("/objects/"):
            self.objects[path.rpartition("/")[2]] = body
            return 200, {}
        if path.endswith(".git/info/lfs/objects/batch"):
            return 200, {"objects": [self._lfs(wanted) for wanted in json.loads(body)["objects"]]}
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"] and len(parts) == 6 and "/".join(parts[2:4]) in self.repos:
            repo = "/".join(parts[2:4])
            if parts[4] == "preupload":
                return 200, {"files": [self._mode(repo, file) for file in json.loads(body)["files"]]}
            if parts[4] == "revision":
                return 200, {"id": repo, "sha": hashlib.sha1(repo.encode(), usedforsecurity=False).hexdigest()}
            if parts[4] == "commit":
                return self._committed(repo, body)
        return 404, {"error": f"no such place: {method} {path}"}

    def _created(self, wanted: dict[str, Any]) -> tuple[int, Any]:
        repo = f"{wanted.get('organization') or 'someone'}/{wanted['name']}"
        url = {"url": f"{self.endpoint}/{repo}"}
        if repo in self.repos:
            return 409, {"error": "You already created this model repo", **url}
        self.repos[repo], self.commits[repo] = {}, []
        self.visibility[repo] = wanted.get("visibility")
        return 200, url

    def _mode(self, repo: str, file: dict[str, Any]) -> dict[str, Any]:
        """Weights, pictures and pickles go by LFS, as on the Hub; the rest is text."""
        is_large = file["path"].endswith((".safetensors", ".bin", ".pt", ".pth", ".png"))
        known = self.repos[repo].get(file["path"])
        oid = None
        if known is not None:
            blob = hashlib.sha1(b"blob %d\0" % len(known) + known, usedforsecurity=False).hexdigest()
            oid = hashlib.sha256(known).hexdigest() if is_large else blob
        mode = "lfs" if is_large else "regular"
        return {"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid}

    def _lfs(self, wanted: dict[str, Any]) -> dict[str, Any]:
        if wanted["oid"] in self.objects:
            return dict(wanted)
        return {**wanted, "actions": {"upload": {"href": f"{self.endpoint}/objects/{wanted['oid']}"}}}

    def _committed(self, repo: str, body: bytes) -> tuple[int, Any]:
        lines = [json.loads(line) for line in body.splitlines() if line.strip()]
        files = dict(self.repos[repo])
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.objects[value["oid"]]
        self.repos[repo] = files
        self.commits[repo].append(lines[0]["value"]["summary"])
        oid = hashlib.sha1(body, usedforsecurity=False).hexdigest()
        return 200, {"success": True, "commitOid": oid, "commitUrl": f"{self.endpoint}/{repo}/commit/{oid}"}

    def downloaded(self, repo: str, folder: Path) -> Path:
        """A repository's files in a folder, as `hf download` would have them."""
        for name, content in self.repos[repo].items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        return folder


def no_waiting() -> Any:
    """Stands in for the module `time` in the client, whose waits between tries would take minutes."""

    class Time:
        sleep = staticmethod(lambda seconds: None)

        def __getattr__(self, name: str) -> Any:
            return getattr(time, name)

    return Time()
