"""A small Hugging Face Hub for its real client: repositories of models, large files, commits.

The client needs `HF_ENDPOINT`, and `HF_HUB_DISABLE_XET=1`, since this Hub has the older way for large files alone.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qsl, unquote

from tests.support.loopback import LoopbackServer, address_of

TOKEN = "hf_ofthetests"


@dataclass
class Repository:
    """One repository, with the state of its files at each commit.

    Attributes:
        states: by commit, the newest last.
        commits: the summary of every commit that was made, also of those that were squashed since.
    """

    private: bool
    states: dict[str, dict[str, bytes]] = field(default_factory=lambda: {_oid(0): {}})
    commits: list[str] = field(default_factory=list)

    @property
    def head(self) -> str:
        return list(self.states)[-1]

    @property
    def files(self) -> dict[str, bytes]:
        return self.states[self.head]

    def add(self, summary: str, files: dict[str, bytes]) -> str:
        self.commits.append(summary)
        self.states[_oid(len(self.commits))] = files
        return self.head

    def squash(self) -> None:
        files = self.files
        self.states.clear()
        self.states[_oid(10**6 + len(self.commits))] = files


def _oid(number: int) -> str:
    return hashlib.sha1(str(number).encode()).hexdigest()


class Hub:
    """The state of a Hub.

    Attributes:
        repositories: by `namespace/name`.
        asked: every request, as `METHOD path`.
        failures: statuses to answer to the next commits; with a minus sign, after the commit took effect.
        behind: how many commits the branch `main` is behind, for those who read it.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.asked: list[str] = []
        self.failures: list[int] = []
        self.behind = 0
        self.large: dict[str, bytes] = {}  # by SHA-256
        self.lock = threading.Lock()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 2**16  # an answer is sent at once: in two pieces it would wait for an acknowledgement of the first
    server: _Server

    def respond(self) -> None:
        body = self._body()
        path = self.path.partition("?")[0]
        hub = self.server.hub
        with hub.lock:
            hub.asked.append(f"{self.command} {path}")
            if path.startswith("/lfs/"):  # signed addresses, which get no token
                if self.command == "GET" and "Authorization" in self.headers:
                    self._say({"error": "a token was sent to another host"}, 400)
                else:
                    self._large(hub, path.removeprefix("/lfs/"), body)
            elif self.headers.get("Authorization") != f"Bearer {TOKEN}":
                self._say({"error": "Invalid username or password."}, 401)
            else:
                self._route(hub, [unquote(part) for part in path.strip("/").split("/")], body)

    def _address(self) -> str:
        """Where the client reaches this server, perhaps through a proxy."""
        return f"http://{self.headers['Host']}"

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _route(self, hub: Hub, parts: list[str], body: bytes) -> None:
        match parts:
            case ["api", "repos", "create"]:
                self._create(hub, json.loads(body))
            case ["api", "validate-yaml"]:
                self._say({"errors": [], "warnings": []})
            case ["api", "models", space, name]:
                self._with(
                    hub, space, name, lambda it: {"id": f"{space}/{name}", "private": it.private, "sha": it.head}
                )
            case ["api", "models", space, name, "revision", _]:
                self._with(
                    hub, space, name, lambda it: {"id": f"{space}/{name}", "private": it.private, "sha": it.head}
                )
            case ["api", "models", space, name, "preupload", _]:
                files = json.loads(body)["files"]
                self._with(hub, space, name, lambda it: {"files": [_mode(it, file) for file in files]})
            case [space, name, "info", "lfs", "objects", "batch"]:
                wanted = json.loads(body)["objects"]
                self._with(hub, space, name.removesuffix(".git"), lambda it: self._batch(hub, wanted))
            case ["api", "models", space, name, "commit", _]:
                lines = [json.loads(line) for line in body.splitlines() if line]
                self._commit(hub, f"{space}/{name}", lines)
            case ["api", "models", space, name, "tree", revision, *folder]:
                self._with(hub, space, name, lambda it: self._tree(it, revision, "/".join(folder)))
            case ["api", "models", space, name, "paths-info", revision]:
                paths = [value for key, value in parse_qsl(body.decode()) if key == "paths"]
                if self.headers.get("Content-Type", "").startswith("application/json"):
                    paths = json.loads(body)["paths"]
                self._with(
                    hub,
                    space,
                    name,
                    lambda it: [_as_file(path, it.states[revision]) for path in paths if path in it.states[revision]],
                )
            case ["api", "models", space, name, "super-squash", _]:
                self._with(hub, space, name, lambda it: it.squash())
            case [space, name, "resolve", revision, *path]:
                self._resolve(hub, f"{space}/{name}", revision, "/".join(path))
            case _:
                self._say({"error": "not found"}, 404)

    def _state(self, repository: Repository, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """What a reader sees at a revision: its commit and files."""
        if revision == "main":
            commits = list(repository.states)
            revision = commits[max(0, len(commits) - 1 - self.server.hub.behind)]
        return (revision, repository.states[revision]) if revision in repository.states else None

    def _tree(self, repository: Repository, revision: str, folder: str) -> Any:
        state = self._state(repository, revision)
        assert state is not None
        below = [path for path in sorted(state[1]) if not folder or path.startswith(f"{folder}/")]
        if not below and folder:
            return 404, {"error": f"{folder} does not exist"}, {"X-Error-Code": "EntryNotFound"}
        return [_as_file(path, state[1]) for path in below]

    def _resolve(self, hub: Hub, id: str, revision: str, path: str) -> None:
        repository = hub.repositories.get(id)
        if repository is None:
            self._say({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
            return
        state = self._state(repository, revision)
        if state is None:
            self._say({"error": "no such revision"}, 404, {"X-Error-Code": "RevisionNotFound"})
            return
        about = {"X-Repo-Commit": state[0]}
        data = state[1].get(path)
        if data is None:
            self._say({"error": "no such entry"}, 404, {**about, "X-Error-Code": "EntryNotFound"})
        elif _is_large(path):
            oid = hashlib.sha256(data).hexdigest()
            elsewhere = self._address().replace("127.0.0.1", "localhost")  # another host
            about |= {
                "X-Linked-Etag": f'"{oid}"',
                "X-Linked-Size": str(len(data)),
                "Location": f"{elsewhere}/lfs/{oid}",
            }
            self._send(b"", 302, about)
        else:
            self._send(data, 200, {**about, "ETag": f'"{hashlib.sha1(data).hexdigest()}"'})

    def _create(self, hub: Hub, wanted: dict[str, Any]) -> None:
        id = f"{wanted.get('organization') or 'someone'}/{wanted['name']}"
        url = f"{self._address()}/{id}"
        if id in hub.repositories:
            self._say({"error": "You already created this model repo", "url": url}, 409)
            return
        hub.repositories[id] = Repository(private=wanted.get("visibility") == "private" or bool(wanted.get("private")))
        self._say({"url": url, "name": id, "id": id})

    def _with(self, hub: Hub, space: str, name: str, answer: Any) -> None:
        repository = hub.repositories.get(f"{space}/{name}")
        if repository is None:
            self._say({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
        else:
            said = answer(repository)
            self._say(said[1], said[0], said[2]) if isinstance(said, tuple) else self._say(said)

    def _batch(self, hub: Hub, wanted: list[dict[str, Any]]) -> dict[str, Any]:
        def action(one: dict[str, Any]) -> dict[str, Any]:
            if one["oid"] in hub.large:
                return one
            href = f"{self._address()}/lfs/{one['oid']}"
            return {**one, "actions": {"upload": {"href": href}, "verify": {"href": href}}}

        return {"transfer": "basic", "objects": [action(one) for one in wanted]}

    def _large(self, hub: Hub, oid: str, body: bytes) -> None:
        if self.command == "PUT":
            right = hashlib.sha256(body).hexdigest() == oid
            if right:
                hub.large[oid] = body
            self._say({}, 200 if right else 400)
        elif self.command == "GET":
            self._send(hub.large[oid], 200, {})
        else:  # verify
            self._say({}, 200 if oid in hub.large else 404)

    def _commit(self, hub: Hub, id: str, lines: list[dict[str, Any]]) -> None:
        failure = hub.failures.pop(0) if hub.failures else 0
        if failure > 0:
            self._say({"error": "later"}, failure, {"Retry-After": "7"})
            return
        repository = hub.repositories[id]
        files = dict(repository.files)
        for line in lines:
            value = line["value"]
            match line["key"]:
                case "header":
                    summary = value["summary"]
                    if value.get("parentCommit") not in {None, repository.head}:
                        self._say({"error": "a commit has happened since"}, 412)
                        return
                case "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    files[value["path"]] = hub.large[value["oid"]]
                case "deletedFile":
                    if value["path"] not in files:
                        self._say(
                            {"error": "A file with this name doesn't exist"}, 404, {"X-Error-Code": "EntryNotFound"}
                        )
                        return
                    del files[value["path"]]
        oid = repository.add(summary, files)
        if failure:
            self._say({"error": "the answer was lost"}, -failure)
            return
        self._say({"success": True, "commitUrl": f"{self._address()}/{id}/commit/{oid}", "commitOid": oid})

    def _say(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self._send(json.dumps(value).encode(), status, {"Content-Type": "application/json", **(headers or {})})

    def _send(self, content: bytes, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, text in headers.items():
            self.send_header(name, text)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_PUT = do_POST = do_HEAD = respond  # noqa: N815 - names that the library looks for

    def log_message(self, *words: object) -> None:
        """Nothing is said."""


def _is_large(path: str) -> bool:
    return path.endswith((".safetensors", ".png"))


def _as_file(path: str, files: dict[str, bytes]) -> dict[str, Any]:
    data = files[path]
    return {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}


def _mode(repository: Repository, file: dict[str, Any]) -> dict[str, Any]:
    """How a file is to be sent, and what is there under its name."""
    large = _is_large(file["path"])
    there = repository.files.get(file["path"])
    oid = None
    if there is not None:
        oid = (
            hashlib.sha256(there).hexdigest() if large else hashlib.sha1(b"blob %d\0" % len(there) + there).hexdigest()
        )
    return {"path": file["path"], "uploadMode": "lfs" if large else "regular", "shouldIgnore": False, "oid": oid}


class _Server(LoopbackServer):
    def __init__(self, hub: Hub) -> None:
        super().__init__(_Handler)
        self.hub = hub


def serving_hub(hub: Hub) -> AbstractContextManager[str]:
    """The address of a Hub."""
    return address_of(_Server(hub))
