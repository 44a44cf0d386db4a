"""Daytona's API as its package knows it, on machines of this one (tests/machine.py).

Owns: `FakeDaytona`. It answers what `minirllm.sandboxes.daytona` asks, with every field that the package insists on,
and 404 to the rest. `created` holds the bodies of POST /sandbox; `faults` are the statuses of the next calls.
"""

from __future__ import annotations

import asyncio
import io
import json
import shutil
import tempfile
import uuid
from pathlib import Path
from typing import Any

from aiohttp import MultipartWriter, web

from tests.machine import Machine

TIME = "2026-01-01T00:00:00Z"


class FakeDaytona:
    """Used as an async context manager; `url` is what DAYTONA_API_URL should say."""

    def __init__(self) -> None:
        self.machines: dict[str, tuple[Machine, dict[str, Any]]] = {}
        self.snapshots: dict[str, Path] = {}
        self.ids: dict[str, str] = {}  # of snapshots -> their names
        self.created: list[dict[str, Any]] = []
        self.faults: list[int] = []
        self.lost = 0  # answers that do not arrive
        self.seconds = 0.0  # that making a machine takes
        self.asked: list[str] = []
        self.place = Path(tempfile.mkdtemp(prefix="minirllm-daytona-"))
        self.url = ""

    async def __aenter__(self) -> FakeDaytona:
        app = web.Application(middlewares=[self._fault], client_max_size=2**28)
        app.add_routes(
            [
                web.post("/api/sandbox", self.create),
                web.get("/api/sandbox", self.list),
                web.get("/api/sandbox/{id}", self.get),
                web.delete("/api/sandbox/{id}", self.delete),
                web.post("/api/sandbox/{id}/snapshot", self.snapshot),
                web.get("/api/snapshots/{name}", self.find),
                web.delete("/api/snapshots/{name}", self.drop),
                web.post("/toolbox/{id}/process/execute", self.execute),
                web.post("/toolbox/{id}/files/bulk-upload", self.upload),
                web.post("/toolbox/{id}/files/bulk-download", self.download),
            ]
        )
        self.runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        self.root = f"http://127.0.0.1:{self.runner.addresses[0][1]}"
        self.url = f"{self.root}/api"
        return self

    async def __aexit__(self, *_: object) -> None:
        for machine, _body in self.machines.values():
            await machine.stop()
        await self.runner.cleanup()
        shutil.rmtree(self.place)

    @web.middleware
    async def _fault(self, request: web.Request, handler: Any) -> Any:
        if "socket.io" in request.path:
            raise web.HTTPNotFound
        self.asked.append(f"{request.method} {request.path}")
        if request.headers.get("Authorization") != "Bearer key":
            return web.json_response({"message": "Invalid credentials", "statusCode": 401}, status=401)
        if self.faults:
            return web.json_response({"message": "try later"}, status=self.faults.pop(0), headers={"Retry-After": "0"})
        answer = await handler(request)
        if self.lost and request.path.endswith("/execute"):
            self.lost -= 1
            return web.json_response({"message": "bad gateway"}, status=502)
        return answer

    def _body(self, id: str) -> dict[str, Any]:
        asked = self.machines[id][1]
        return {
            "id": id, "organizationId": "org", "name": id, "user": "daytona", "env": {}, "labels": asked["labels"],
            "public": False, "networkBlockAll": asked["networkBlockAll"], "kvm": False, "target": "us",
            "cpu": asked.get("cpu", 1), "gpu": 0, "memory": asked.get("memory", 1), "disk": asked.get("disk", 3),
            "state": "started", "toolboxProxyUrl": f"{self.root}/toolbox",
        }  # fmt: skip

    async def create(self, request: web.Request) -> web.Response:
        asked = await request.json()
        self.created.append(asked)
        files = self.snapshots.get(asked["snapshot"]) if asked.get("snapshot") else None
        id, machine = str(uuid.uuid4()), Machine(files)
        await machine.start()
        self.machines[id] = machine, asked
        await asyncio.sleep(self.seconds)
        return web.json_response(self._body(id))

    async def list(self, request: web.Request) -> web.Response:
        rows = [self._body(id) for id in self.machines]
        return web.json_response({"items": rows, "nextCursor": None, "total": len(rows)})

    def _known(self, request: web.Request) -> Machine:
        if request.match_info["id"] not in self.machines:
            raise web.HTTPNotFound(text=json.dumps({"message": "no such sandbox"}), content_type="application/json")
        return self.machines[request.match_info["id"]][0]

    async def get(self, request: web.Request) -> web.Response:
        self._known(request)
        return web.json_response(self._body(request.match_info["id"]))

    async def delete(self, request: web.Request) -> web.Response:
        machine = self._known(request)
        body = self._body(request.match_info["id"]) | {"state": "destroyed"}
        del self.machines[request.match_info["id"]]
        await machine.stop()
        return web.json_response(body)

    async def snapshot(self, request: web.Request) -> web.Response:
        name = (await request.json())["name"]
        await asyncio.to_thread(self._known(request).keep, self.place / name)
        self.snapshots[name] = self.place / name
        return web.json_response(self._body(request.match_info["id"]))

    def _id(self, name: str) -> str:
        id = str(uuid.uuid5(uuid.NAMESPACE_URL, name))
        self.ids[id] = name
        return id

    async def find(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in self.snapshots:
            return web.json_response({"message": "no such snapshot"}, status=404)
        return web.json_response(
            {
                "id": self._id(name), "general": False, "name": name, "state": "active", "size": 1.0, "cpu": 1,
                "entrypoint": None, "gpu": 0, "mem": 1, "disk": 3, "errorReason": None, "createdAt": TIME,
                "updatedAt": TIME, "lastUsedAt": None, "sourceSandboxId": None,
            }
        )  # fmt: skip

    async def drop(self, request: web.Request) -> web.Response:
        self.snapshots.pop(self.ids[request.match_info["name"]])
        return web.json_response({})

    async def execute(self, request: web.Request) -> web.Response:
        """Both outputs are one, and it ends when nobody holds them."""
        asked = await request.json()
        run = self._known(request).run(
            ["/bin/sh", "-c", asked["command"]], asked.get("cwd") or "/work", {"DAYTONA_SANDBOX_ID": "x"}
        )
        code, out, err = await asyncio.wait_for(run, asked.get("timeout") or 10)
        return web.json_response({"exitCode": code, "result": (out + err).decode(errors="replace")})

    async def upload(self, request: web.Request) -> web.Response:
        machine = self._known(request)
        path = ""
        async for part in await request.multipart():
            data = bytes(await part.read(decode=False))
            if part.name and part.name.endswith(".path"):
                path = data.decode()
            else:
                await machine.run(["/usr/bin/bash", "-c", 'cat > "$1"', "_", path], "/", stdin=data)
        return web.json_response({})

    async def download(self, request: web.Request) -> web.StreamResponse:
        with MultipartWriter("form-data") as writer:
            for path in (await request.json())["paths"]:
                code, out, err = await self._known(request).run(["/usr/bin/cat", "--", path], "/")
                said = out if code == 0 else json.dumps({"message": err.decode(), "statusCode": 404}).encode()
                part = writer.append(io.BytesIO(said))  # bytes that are many would be warned of
                kind = "error" if code else "file"
                part.headers["Content-Disposition"] = f'form-data; name="{kind}"; filename="{path}"'
        return web.Response(body=writer)
