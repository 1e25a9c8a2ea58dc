# SPDX-License-Identifier: Apache-2.0
"""A stand-in of the Hub's API for uploads, on this machine: repositories, preupload, git LFS and commits, as
huggingface_hub 2.4 calls them.
"""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Hub:
    """What was uploaded. token: the one that may write. repositories: name -> visibility."""

    def __init__(self, token: str):
        self.token, self.repositories, self.objects, self.files = token, {}, {}, {}
        self.requests: list[str] = []


@contextmanager
def serving(token: str) -> Iterator[tuple[Hub, str]]:
    """Serve on a free port of this machine; yield the stand-in and its address."""
    hub = Hub(token)

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def answer(self, content=None, code: int = 200):
            body = json.dumps(content or {}).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(b"" if self.command == "HEAD" else body)

        def do_HEAD(self):
            self.answer()

        def do_PUT(self):
            content = self.rfile.read(int(self.headers["Content-Length"]))
            oid = self.path.removeprefix("/lfs/")
            assert hashlib.sha256(content).hexdigest() == oid
            hub.objects[oid] = content
            self.answer()

        def do_POST(self):
            content = self.rfile.read(int(self.headers["Content-Length"]))
            path = self.path.partition("?")[0]
            hub.requests.append(path)
            if self.headers["Authorization"] != f"Bearer {hub.token}":
                return self.answer({"error": "Invalid credentials"}, 401)
            if path == "/api/repos/create":
                asked = json.loads(content)
                hub.repositories[f"{asked['organization']}/{asked['name']}"] = asked["visibility"]
                return self.answer({"url": f"{address}/{asked['organization']}/{asked['name']}"})
            if path == "/api/validate-yaml":
                return self.answer({"errors": [], "warnings": []})
            if "/preupload/" in path:
                kind = {True: "lfs", False: "regular"}
                files = [
                    {"path": file["path"], "uploadMode": kind[file["path"].endswith(".safetensors")]}
                    for file in json.loads(content)["files"]
                ]
                return self.answer({"files": [{**file, "shouldIgnore": False} for file in files]})
            if path.endswith("/lfs/objects/batch"):
                objects = [
                    {**one, "actions": {"upload": {"href": f"{address}/lfs/{one['oid']}"}}}
                    for one in json.loads(content)["objects"]
                ]
                return self.answer({"objects": objects})
            if "/commit/" in path:
                for line in map(json.loads, content.splitlines()):
                    value = line["value"]
                    if line["key"] == "file":
                        hub.files[value["path"]] = base64.b64decode(value["content"])
                    if line["key"] == "lfsFile":
                        hub.files[value["path"]] = hub.objects[value["oid"]]
                name = path.removeprefix("/api/models/").partition("/commit/")[0]
                return self.answer({"success": True, "commitOid": "1" * 40, "commitUrl": f"{address}/{name}/commit/1"})
            return self.answer({"error": f"no such path {path}"}, 404)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub, address
    finally:
        server.shutdown()
        thread.join()
