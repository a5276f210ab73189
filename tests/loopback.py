"""A stand-in for the Hugging Face Hub on 127.0.0.1.

It has repos in memory, a second origin for large files, and faults on demand. It was written
from the requests of the client (huggingface_hub 2.x): it shows that our code and that client
agree, not what the real Hub answers. Imports the standard library only.
"""

import base64
import hashlib
import json
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Repo:
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    token: str | None = None  # needed to read it
    gated: bool = False

    def commit(self, files, branch="main"):
        """A commit with these files and those of the branch; its hash."""
        content = {**self.commits.get(self.refs.get(branch, ""), {}), **files}
        listing = "".join(
            f"{name} {hashlib.sha256(data).hexdigest()}" for name, data in sorted(content.items())
        )
        sha = hashlib.sha1(f"{len(self.commits)} {listing}".encode()).hexdigest()
        self.commits[sha], self.refs[branch] = content, sha
        return sha


@dataclass
class Fault:
    match: str
    status: int | None = None  # answer with this status
    truncate: int | None = None  # close the connection after so many bytes
    origin: str | None = None
    method: str | None = None
    times: int = 10**9


class Hub:
    def __init__(self):
        self.repos: dict[str, Repo] = {}
        self.faults: list[Fault] = []
        self.requests: list[tuple[str, str, str, Any]] = []  # origin, method, path, headers

    def repo(self, name, **facts):
        self.repos[name] = Repo(**facts)
        return self.repos[name]

    def fault(self, match, **facts):
        self.faults.append(Fault(match, **facts))

    def sent(self, method="GET"):
        """Paths of the files that were transferred."""
        return [
            path
            for _, verb, path, _ in self.requests
            if verb == method and ("/resolve/" in path or path.startswith("/lfs/"))
        ]

    @contextmanager
    def serve(self):
        servers = {
            origin: _Server(("127.0.0.1", 0), _handler(self, origin)) for origin in ("hub", "cdn")
        }
        self.urls = {
            origin: f"http://127.0.0.1:{server.server_port}" for origin, server in servers.items()
        }
        for server in servers.values():
            threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        try:
            yield self.urls["hub"]
        finally:
            for server in servers.values():
                server.shutdown()
                server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request, client_address):
        """Says nothing: clients that hang up are part of the tests."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub, origin = None, ""

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self.answer(send_body=False)

    def do_GET(self):
        self.answer(send_body=True)

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.hub.requests.append((self.origin, "POST", self.path, self.headers))
        self.reply(*_post(self.hub, self.path, body))

    def answer(self, send_body):
        self.hub.requests.append((self.origin, self.command, self.path, self.headers))
        fault = next((f for f in self.hub.faults if self.hits(f)), None)
        if fault:
            fault.times -= 1
        if fault and fault.status:
            return self.reply(fault.status, {}, b'{"error": "fault"}' if send_body else None)
        status, headers, body = _file(self.hub, self.origin, self.path, self.headers)
        start = self.headers.get("Range")
        if status == 200 and start:
            begin = int(start.removeprefix("bytes=").split("-")[0])
            headers["Content-Range"] = f"bytes {begin}-{len(body) - 1}/{len(body)}"
            status, body = 206, body[begin:]
        truncate = fault.truncate if fault else None
        self.reply(status, headers, body if send_body else None, len(body), truncate)

    def hits(self, fault):
        return (
            fault.times > 0
            and fault.match in self.path
            and fault.origin in (None, self.origin)
            and fault.method in (None, self.command)
        )

    def reply(self, status, headers, body, length=None, truncate=None):
        self.send_response(status)
        headers = {"Content-Length": str(len(body or b"") if length is None else length), **headers}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(body if truncate is None else body[:truncate])
        if truncate is not None:
            self.wfile.flush()
            time.sleep(0.05)
            self.connection.close()
            self.close_connection = True


def _handler(hub, origin):
    return type("Handler", (_Handler,), {"hub": hub, "origin": origin})


def _error(status, code):
    return status, {"X-Error-Code": code, "X-Error-Message": code}, b""


def _file(hub, origin, path, headers):
    """(status, headers, body) of a file request."""
    if origin == "cdn":
        digest = path.removeprefix("/lfs/")
        found = (
            data
            for repo in hub.repos.values()
            for files in repo.commits.values()
            for data in files.values()
        )
        body = next((data for data in found if hashlib.sha256(data).hexdigest() == digest), None)
        return (
            (200, {"ETag": f'"{digest}"', "Accept-Ranges": "bytes"}, body)
            if body is not None
            else (404, {}, b"")
        )
    name, _, rest = path.lstrip("/").partition("/resolve/")
    if name not in hub.repos:
        return _error(404, "RepoNotFound")
    repo, (revision, _, file) = hub.repos[name], rest.partition("/")
    if repo.token is not None and headers.get("Authorization") != f"Bearer {repo.token}":
        if repo.gated:
            return _error(401 if "Authorization" not in headers else 403, "GatedRepo")
        return _error(401, "RepoNotFound")
    sha = repo.refs.get(revision, revision)
    if sha not in repo.commits:
        return _error(404, "RevisionNotFound")
    body = repo.commits[sha].get(file)
    if body is None:
        status, told, empty = _error(404, "EntryNotFound")
        return status, told | {"X-Repo-Commit": sha}, empty
    digest = hashlib.sha256(body).hexdigest()
    told = {"X-Repo-Commit": sha, "ETag": f'"{digest}"', "Accept-Ranges": "bytes"}
    if len(body) < 5000:
        return 200, told, body
    size = str(len(body))
    location = f"{hub.urls['cdn']}/lfs/{digest}"
    return (
        302,
        told | {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": size, "Location": location},
        b"",
    )


def _post(hub, path, body):
    """Answers push_to_hub: a repo, how to send each file, a commit."""
    if path == "/api/repos/create":
        said = json.loads(body)
        name = f"{said.get('organization') or 'me'}/{said['name']}"
        repo = hub.repo(name) if name not in hub.repos else hub.repos[name]
        repo.commits or repo.commit({".gitattributes": b""})
        return 200, {}, json.dumps({"url": f"{hub.urls['hub']}/{name}", "id": name}).encode()
    if path == "/api/validate-yaml":
        return 200, {}, json.dumps({"errors": [], "warnings": []}).encode()
    name = "/".join(path.removeprefix("/api/models/").split("/")[:2])
    if "/preupload/" in path:
        files = json.loads(body)["files"]
        modes = [
            {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False, "oid": None}
            for file in files
        ]
        return 200, {}, json.dumps({"files": modes}).encode()
    if "/commit/" in path:
        lines = [json.loads(line) for line in body.splitlines() if line]
        files = {
            line["value"]["path"]: base64.b64decode(line["value"]["content"])
            for line in lines
            if line["key"] == "file"
        }
        sha = hub.repos[name].commit(files)
        told = {
            "commitUrl": f"{hub.urls['hub']}/{name}/commit/{sha}",
            "commitOid": sha,
            "success": True,
        }
        return 200, {}, json.dumps(told).encode()
    return 404, {}, b"{}"
