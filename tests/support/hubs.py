"""A hub of models and data sets on loopback: the few endpoints that huggingface_hub's client uses, with git's storage as a dict."""

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit

from huggingface_hub import close_session, constants, file_download
from huggingface_hub.utils import disable_progress_bars, enable_progress_bars

TOKEN = "hf_of_a_test"


@dataclass
class Repo:
    private: bool = False
    gated: bool = False
    branches: dict[str, str] = field(default_factory=dict)  # name -> commit
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)

    def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
        sha = hashlib.sha1(f"{branch} {len(self.commits)}".encode()).hexdigest()
        self.commits[sha] = dict(files)
        self.branches[branch] = sha
        return sha

    def resolve(self, revision: str) -> str | None:
        return self.branches.get(revision, revision if revision in self.commits else None)


@dataclass
class Hub:
    """models, datasets: by name. asked: (method, path, Range) of every request. cut: end a file's first answer after so many bytes.

    down: close every connection without an answer."""

    models: dict[str, Repo] = field(default_factory=dict)
    datasets: dict[str, Repo] = field(default_factory=dict)
    large: dict[str, bytes] = field(default_factory=dict)  # what came by LFS, by SHA-256
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)
    cut: int | None = None
    down: bool = False
    url: str = ""

    def add(self, name: str, files: dict[str, bytes], *, kind: str = "models", branch: str = "main", **facts: Any) -> str:
        repo = getattr(self, kind).setdefault(name, Repo(**facts))
        return repo.commit(files, branch)

    def fetched(self) -> list[str]:
        """Names of the files whose content was asked for."""
        return [path.rpartition("/")[2] for method, path, _ in self.asked if method == "GET" and "/resolve/" in path]


class _RefusedError(Exception):
    def __init__(self, status: int, code: str, message: str = "") -> None:
        self.status, self.code, self.message = status, code, message or code


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: "_Server"

    def _handle(self) -> None:
        hub, path = self.server.hub, unquote(urlsplit(self.path).path)
        hub.asked.append((self.command, path, self.headers.get("Range")))
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if hub.down:
            self.close_connection = True
            return
        try:
            for pattern, answer in _ROUTES:
                if (found := re.fullmatch(pattern, f"{self.command} {path}")) is not None:
                    answer(self, hub, body, **found.groupdict())
                    return
            raise _RefusedError(404, "NoSuchEndpoint")
        except _RefusedError as refused:
            self._send(
                json.dumps({"url": hub.url + refused.code}).encode(),
                refused.status,
                {"X-Error-Code": refused.code, "X-Error-Message": refused.message},
            )

    do_GET = do_HEAD = do_POST = do_PUT = _handle  # noqa: N815  (the base class asks for these names)

    def log_message(self, *_: Any) -> None:
        pass

    def _send(self, content: bytes, status: int = 200, headers: dict[str, str] | None = None, cut: int | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[:cut])
        self.close_connection = self.close_connection or cut is not None

    def _json(self, content: Any) -> None:
        self._send(json.dumps(content).encode(), headers={"Content-Type": "application/json"})

    def _logged_in(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _repo(self, hub: Hub, kind: str | None, name: str, *, writes: bool = False) -> Repo:
        repo = getattr(hub, kind or "models").get(name)
        if (repo is None or repo.private or writes) and not self._logged_in():
            raise _RefusedError(401, "RepoNotFound", "Invalid username or password.")
        if repo is None:
            raise _RefusedError(404, "RepoNotFound")
        if repo.gated and not self._logged_in():
            raise _RefusedError(401, "GatedRepo")
        return repo

    def _files(self, repo: Repo, revision: str) -> tuple[str, dict[str, bytes]]:
        sha = repo.resolve(revision)
        if sha is None:
            raise _RefusedError(404, "RevisionNotFound")
        return sha, repo.commits[sha]

    def info(self, hub: Hub, body: bytes, kind: str, name: str, revision: str | None) -> None:
        repo = self._repo(hub, kind, name)
        sha, files = self._files(repo, revision or "main")
        facts = {"id": name, "sha": sha, "private": repo.private, "gated": False, "disabled": False, "downloads": 0, "likes": 0}
        self._json({**facts, "tags": [], "siblings": [{"rfilename": path} for path in files]})

    def tree(self, hub: Hub, body: bytes, kind: str, name: str, revision: str, folder: str | None) -> None:
        _, files = self._files(self._repo(hub, kind, name), revision)
        inside = {path: one for path, one in files.items() if path.startswith(f"{folder}/" if folder else "")}
        if not inside:
            raise _RefusedError(404, "EntryNotFound")
        self._json([{"type": "file", "path": path, "size": len(one), "oid": _oid(one)} for path, one in inside.items()])

    def paths(self, hub: Hub, body: bytes, kind: str, name: str, revision: str) -> None:
        _, files = self._files(self._repo(hub, kind, name), revision)
        wanted = json.loads(body)["paths"]
        self._json([{"type": "file", "path": p, "size": len(files[p]), "oid": _oid(files[p])} for p in wanted if p in files])

    def file(self, hub: Hub, body: bytes, kind: str | None, name: str, revision: str, file: str) -> None:
        sha, files = self._files(self._repo(hub, kind, name), revision)
        if file not in files:
            raise _RefusedError(404, "EntryNotFound")
        content, headers = files[file], {"X-Repo-Commit": sha, "ETag": f'"{_oid(files[file])}"', "Accept-Ranges": "bytes"}
        begin, status = 0, 200
        if (asked := self.headers.get("Range")) is not None:
            begin, _, end = asked.removeprefix("bytes=").partition("-")
            begin, stop, status = int(begin), int(end or len(content) - 1) + 1, 206
            headers["Content-Range"] = f"bytes {begin}-{min(stop, len(content)) - 1}/{len(content)}"
            content = content[begin:stop]
        cut = hub.cut if self.command == "GET" and file.endswith(".safetensors") else None
        if cut is not None:
            hub.cut = None
            hub.down = hub.down or cut < 0
        self._send(content, status, headers, None if cut is None else abs(cut))

    def create(self, hub: Hub, body: bytes) -> None:
        if not self._logged_in():
            raise _RefusedError(401, "", "Invalid username or password.")
        asked = json.loads(body)
        name = f"{asked['organization']}/{asked['name']}"
        if name in hub.models:
            raise _RefusedError(409, f"/{name}", "You already created this model repo")
        hub.add(name, {".gitattributes": b""}, private=asked.get("visibility") == "private" or bool(asked.get("private")))
        self._json({"url": f"{hub.url}/{name}", "name": name, "id": name})

    def branch(self, hub: Hub, body: bytes, name: str, revision: str) -> None:
        repo = self._repo(hub, "models", name, writes=True)
        if revision in repo.branches:
            raise _RefusedError(409, "", "Reference already exists")
        repo.branches[revision] = repo.branches["main"]
        self._json({})

    def validate(self, hub: Hub, body: bytes) -> None:
        assert json.loads(body)["content"].startswith("---\n")
        self._json({"errors": [], "warnings": []})

    def preupload(self, hub: Hub, body: bytes, name: str, revision: str) -> None:
        _, there = self._files(self._repo(hub, "models", name, writes=True), revision)
        found = []
        for one in json.loads(body)["files"]:
            mode, known = ("lfs" if one["path"].endswith(".safetensors") else "regular"), there.get(one["path"])
            oid = None if known is None else _oid(known) if mode == "regular" else hashlib.sha256(known).hexdigest()
            found.append({"path": one["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self._json({"files": found})

    def batch(self, hub: Hub, body: bytes, name: str) -> None:
        self._repo(hub, "models", name, writes=True)
        found = []
        for one in json.loads(body)["objects"]:
            upload = {"actions": {"upload": {"href": f"{hub.url}/lfs/{one['oid']}"}}}
            found.append({"oid": one["oid"], "size": one["size"], **({} if one["oid"] in hub.large else upload)})
        self._json({"transfer": "basic", "objects": found})

    def upload(self, hub: Hub, body: bytes, oid: str) -> None:
        assert hashlib.sha256(body).hexdigest() == oid
        hub.large[oid] = body
        self._send(b"")

    def commit(self, hub: Hub, body: bytes, name: str, revision: str) -> None:
        repo = self._repo(hub, "models", name, writes=True)
        files = dict(self._files(repo, revision)[1])
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = hub.large[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        sha = repo.commit(files, revision)
        self._json({"commitUrl": f"{hub.url}/{name}/commit/{sha}", "commitOid": sha})


def _oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


_KIND, _NAME, _REVISION = r"(?P<kind>models|datasets)", r"(?P<name>[\w.-]+/[\w.-]+)", r"(?P<revision>[^/]+|refs/pr/\d+)"
_ROUTES: list[tuple[str, Any]] = [
    (rf"GET /api/{_KIND}/{_NAME}(/revision/{_REVISION})?", _Handler.info),
    (rf"GET /api/{_KIND}/{_NAME}/tree/{_REVISION}/?(?P<folder>.+)?", _Handler.tree),
    (rf"POST /api/{_KIND}/{_NAME}/paths-info/{_REVISION}", _Handler.paths),
    (rf"(GET|HEAD) /((?P<kind>datasets)/)?{_NAME}/resolve/{_REVISION}/(?P<file>.+)", _Handler.file),
    (r"POST /api/repos/create", _Handler.create),
    (rf"POST /api/models/{_NAME}/branch/{_REVISION}", _Handler.branch),
    (r"POST /api/validate-yaml", _Handler.validate),
    (rf"POST /api/models/{_NAME}/preupload/{_REVISION}", _Handler.preupload),
    (rf"POST /{_NAME}\.git/info/lfs/objects/batch", _Handler.batch),
    (r"PUT /lfs/(?P<oid>\w+)", _Handler.upload),
    (rf"POST /api/models/{_NAME}/commit/{_REVISION}", _Handler.commit),
]


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, hub: Hub) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.hub = hub

    def handle_error(self, *_: Any) -> None:  # a client that was cut off
        pass


@contextmanager
def serving() -> Iterator[Hub]:
    hub = Hub()
    with _Server(hub) as server:
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def use(hub: Hub, folder: Path, monkeypatch: Any) -> Iterator[None]:
    """Let the client of this process ask this hub."""
    own = {
        "ENDPOINT": hub.url,
        "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(folder / "cache"),
        "HF_TOKEN_PATH": str(folder / "token"),
        "HF_HUB_DISABLE_XET": True,
        "HF_HUB_DISABLE_TELEMETRY": True,
        "HF_HUB_OFFLINE": False,
        "DOWNLOAD_CHUNK_SIZE": 1024,
    }
    for name, value in own.items():
        monkeypatch.setattr(constants, name, value)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(file_download.time, "sleep", lambda _: None)  # between tries
    disable_progress_bars()
    yield
    enable_progress_bars()
    close_session()
