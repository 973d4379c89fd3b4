"""A server on 127.0.0.1 that speaks Hugging Face's protocol, for the real client.

It has the parts that downloads and uploads need: files with their revisions and ETags,
large ones behind a redirect, ranges, errors by code, and commits.
"""

import base64
import contextlib
import hashlib
import http.server
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"
# The token that opens gated repositories and may write.
TOKEN = "hf_member"
# Nothing listens there.
NOWHERE = "http://127.0.0.1:9"
# Files in a repository that change the answers; the last is a suffix of a file that
# ends too early.
GATED, DOWN, BROKEN = ".gated", ".down", ".broken"
_RESOLVE = re.compile(r"/(?P<repository>.+)/resolve/main/(?P<name>.+)")
_LARGE = (".h5", ".safetensors")


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = self.path.partition("?")[0]
        if path.startswith("/cdn/"):
            return self._send_file(self.server.folder / path.removeprefix("/cdn/"))
        found = _RESOLVE.fullmatch(path)
        if found is None:
            return self._fail(404, "RepoNotFound")
        repository, name = found["repository"], found["name"]
        folder = self.server.folder / repository
        if (folder / DOWN).exists():
            return self._send(503, b"")
        if not folder.is_dir():
            # To who is logged in. Others get 401, since it could be private.
            return self._fail(404 if self._is_member() else 401, "RepoNotFound")
        if (folder / GATED).exists() and not self._is_member():
            is_known = "authorization" in self.headers
            return self._fail(403 if is_known else 401, "GatedRepo")
        if not (folder / name).is_file():
            return self._fail(404, "EntryNotFound", {"X-Repo-Commit": COMMIT})
        return self._send_file(folder / name, self.command == "HEAD")

    def _is_member(self):
        return self.headers.get("authorization") == f"Bearer {TOKEN}"

    def _send_file(self, path, redirect=False):
        content = path.read_bytes()
        etag = hashlib.sha256(content).hexdigest()
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"'}
        name = path.relative_to(self.server.folder).as_posix()
        if redirect and path.suffix in _LARGE:
            headers["X-Linked-Etag"] = f'"{etag}"'
            headers["X-Linked-Size"] = str(len(content))
            # Large files are on another host.
            host = f"localhost:{self.server.server_port}"
            headers["Location"] = f"http://{host}/cdn/{name}"
            return self._send(302, b"", headers)
        start = re.fullmatch(r"bytes=(\d+)-", self.headers.get("range", ""))
        first = int(start[1]) if start else 0
        if self.command == "GET":
            self.server.downloads.append(name)
        if self.command == "GET" and path.with_name(path.name + BROKEN).exists():
            # Half of the file, and then nothing however often one asks.
            self.close_connection = True
            if first:
                return None
            return self._send(200, content, headers, len(content) // 2)
        if first:
            headers["Content-Range"] = (
                f"bytes {first}-{len(content) - 1}/{len(content)}"
            )
        return self._send(206 if first else 200, content[first:], headers)

    def _send(self, status, content, headers=(), sent=None):
        self.send_response(status)
        for name, value in dict(headers).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[:sent])

    def _fail(self, status, code, headers=()):
        self._send(status, b"", {"X-Error-Code": code, **dict(headers)})

    def _answer(self, content):
        self._send(
            200, json.dumps(content).encode(), {"Content-Type": "application/json"}
        )

    # Uploads

    def do_PUT(self):
        """Takes a large file, by its SHA-256."""
        self.server.large[self.path.rpartition("/")[2]] = self._body()
        self._send(200, b"")

    def do_POST(self):
        body = self._body()
        if not self._is_member():
            return self._send(401, b'{"error": "Invalid username or password."}')
        address = f"http://{self.headers['host']}"
        path = self.path.partition("?")[0]
        if path == "/api/repos/create":
            wanted = json.loads(body)
            name = f"{wanted['organization']}/{wanted['name']}"
            (self.server.folder / name).mkdir(parents=True, exist_ok=True)
            return self._answer({"url": f"{address}/{name}"})
        if path == "/api/validate-yaml":
            return self._answer({"errors": [], "warnings": []})
        if "/preupload/" in path:
            files = []
            for file in json.loads(body)["files"]:
                mode = "lfs" if file["path"].endswith(_LARGE) else "regular"
                options = {"uploadMode": mode, "shouldIgnore": False}
                files.append({"path": file["path"], **options})
            return self._answer({"files": files})
        if path.endswith(".git/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            for wanted in objects:
                href = f"{address}/lfs/{wanted['oid']}"
                wanted["actions"] = {"upload": {"href": href}}
            return self._answer({"transfer": "basic", "objects": objects})
        repository = re.fullmatch("/api/models/(.+)/commit/main", path)[1]
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                content = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                content = self.server.large[value["oid"]]
            else:
                continue
            target = self.server.folder / repository / value["path"]
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        url = f"{address}/{repository}/commit/{COMMIT}"
        return self._answer({"commitUrl": url, "commitOid": COMMIT})

    def _body(self):
        return self.rfile.read(int(self.headers["content-length"]))


class HubServer(http.server.ThreadingHTTPServer):
    """Serves a folder of repositories, `USER/NAME` each; lists what it has sent."""

    daemon_threads = True

    def __init__(self, folder: Path):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.downloads, self.large = folder, [], {}


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[HubServer]:
    """Serves a folder from another thread."""
    server = HubServer(folder)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def environment(home: Path, port: int, **others: str) -> dict[str, str]:
    """The variables of a process with this server alone, and empty caches."""
    return {
        "HF_ENDPOINT": f"http://127.0.0.1:{port}",
        "HF_HOME": str(home / "hf"),
        "HF_HUB_DISABLE_XET": "1",
        "KERAS_HOME": str(home / "keras"),
        "KAGGLEHUB_CACHE": str(home / "kaggle"),
        # What has no variable of its own goes to a port where nothing listens.
        **dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), NOWHERE),
        "no_proxy": "127.0.0.1,localhost",
        **others,
    }
