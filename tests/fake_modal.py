"""Modal's API as its package knows it, on machines of this one (tests/machine.py).

Owns: `FakeModal`. What is not written here is answered with an empty message of the right type. `created` holds the
requests SandboxCreateV2, `faults` the gRPC statuses of the next calls of a method, to be played first.
"""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import tempfile
import uuid
from collections import defaultdict
from pathlib import Path
from typing import Any

import grpclib.const
import grpclib.server
from google.protobuf.empty_pb2 import Empty
from grpclib import GRPCError, Status
from modal_proto import api_grpc, api_pb2, task_command_router_grpc, task_command_router_pb2

from tests.machine import Machine

TOKEN = ".".join(base64.urlsafe_b64encode(part).decode().rstrip("=") for part in (b"{}", b'{"exp": 99999999999}', b""))
SUCCESS = api_pb2.GenericResult(status=api_pb2.GenericResult.GENERIC_STATUS_SUCCESS)


class Exec:
    """One command, from its start to its end; `input` is waited for where it reads any."""

    def __init__(self, machine: Machine, request: Any):
        self.input: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.done = asyncio.ensure_future(self._run(machine, request))

    async def _run(self, machine: Machine, request: Any) -> tuple[int, bytes, bytes]:
        argv, cwd = list(request.command_args), request.workdir or "/work"
        if argv[0].endswith("/modal-sandbox-fs-tools"):
            (what, given), *_ = json.loads(argv[1]).items()
            if what == "WriteFile":
                script = 'mkdir -p "${1%/*}" && cat > "$1"'
                return await machine.run(
                    ["/usr/bin/bash", "-c", script, "_", given["path"]], "/", None, await self.input
                )
            return await machine.run(["/usr/bin/cat", "--", given["path"]], "/")
        return await machine.run(argv, cwd, {"MODAL_TASK_ID": "x"})


class FakeModal:
    """Used as an async context manager; `url` is what MODAL_SERVER_URL should say."""

    def __init__(self) -> None:
        self.machines: dict[str, tuple[Machine, Any]] = {}
        self.images: dict[str, Path | None] = {}
        self.dockerfiles: list[list[str]] = []
        self.created: list[Any] = []
        self.execs: dict[str, Exec] = {}
        self.seconds = 0.0  # that making a machine takes
        self.faults: defaultdict[str, list[Status]] = defaultdict(list)
        self.asked: list[str] = []
        self.place = Path(tempfile.mkdtemp(prefix="minirllm-modal-"))

    async def __aenter__(self) -> FakeModal:
        services = [
            _service(self, api_grpc.ModalClientBase),
            _service(self, task_command_router_grpc.TaskCommandRouterBase),
        ]
        self.server = grpclib.server.Server(services)
        await self.server.start("127.0.0.1", 0)
        port = self.server._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        for machine, _request in self.machines.values():
            await machine.stop()
        self.server.close()
        await self.server.wait_closed()
        shutil.rmtree(self.place)

    def _machine(self, id: str) -> Machine:
        if id not in self.machines:
            raise GRPCError(Status.NOT_FOUND, f"no sandbox {id}")
        return self.machines[id][0]

    # ---- calls, by the names that Modal gives them: a request in, a response out ----

    async def AppGetOrCreate(self, _: Any) -> Any:
        return api_pb2.AppGetOrCreateResponse(app_id="ap-1")

    async def EnvironmentGetOrCreate(self, _: Any) -> Any:
        reply = api_pb2.EnvironmentGetOrCreateResponse(environment_id="en-1")
        reply.metadata.settings.image_builder_version = "2025.06"
        return reply

    async def AuthTokenGet(self, _: Any) -> Any:
        return api_pb2.AuthTokenGetResponse(token=TOKEN)

    async def ImageGetOrCreate(self, request: Any) -> Any:
        self.dockerfiles.append(list(request.image.dockerfile_commands))
        id = f"im-{uuid.uuid4().hex}"
        self.images[id] = None
        return api_pb2.ImageGetOrCreateResponse(image_id=id, result=SUCCESS)

    async def MountPutFile(self, request: Any) -> Any:
        return api_pb2.MountPutFileResponse(exists=bool(request.WhichOneof("data_oneof")))

    async def MountGetOrCreate(self, _: Any) -> Any:
        return api_pb2.MountGetOrCreateResponse(mount_id="mo-1")

    async def ImageFromId(self, request: Any) -> Any:
        if request.image_id not in self.images:
            raise GRPCError(Status.NOT_FOUND, f"Image {request.image_id} not found")
        return api_pb2.ImageFromIdResponse(image_id=request.image_id)

    async def ImageDelete(self, request: Any) -> Any:
        if request.image_id not in self.images:
            raise GRPCError(Status.NOT_FOUND, "no such image")
        del self.images[request.image_id]
        return Empty()

    async def SandboxCreateV2(self, request: Any) -> Any:
        self.created.append(request)
        machine = Machine(self.images[request.definition.image_id])
        await machine.start()
        id = f"sb-{uuid.uuid4().hex}"
        self.machines[id] = machine, request
        await asyncio.sleep(self.seconds)
        return api_pb2.SandboxCreateV2Response(sandbox_id=id, task_id=id)

    async def SandboxListV2(self, request: Any) -> Any:
        if request.before_timestamp:  # the page after the last
            return api_pb2.SandboxListResponse()
        return api_pb2.SandboxListResponse(
            sandboxes=[
                api_pb2.SandboxInfo(id=id, created_at=1.0, tags=made.tags) for id, (_, made) in self.machines.items()
            ]
        )

    async def SandboxTagsGetV2(self, request: Any) -> Any:
        return api_pb2.SandboxTagsGetResponse(tags=self.machines[request.sandbox_id][1].tags)

    async def SandboxWaitV2(self, request: Any) -> Any:
        self._machine(request.sandbox_id)
        return api_pb2.SandboxWaitResponse()

    async def SandboxTerminateV2(self, request: Any) -> Any:
        if request.sandbox_id in self.machines:
            await self.machines.pop(request.sandbox_id)[0].stop()
        return api_pb2.SandboxTerminateResponse()

    async def SandboxGetCommandRouterAccess(self, _: Any) -> Any:
        return api_pb2.SandboxGetCommandRouterAccessResponse(url=self.url, jwt=TOKEN)

    async def TaskExecStart(self, request: Any) -> Any:
        if request.exec_id not in self.execs:
            self.execs[request.exec_id] = Exec(self._machine(request.task_id), request)
        return task_command_router_pb2.TaskExecStartResponse()

    async def TaskExecWait(self, request: Any) -> Any:
        code, _, _ = await self.execs[request.exec_id].done
        return task_command_router_pb2.TaskExecWaitResponse(code=code)

    async def TaskSnapshotFilesystem(self, request: Any) -> Any:
        id = f"im-{uuid.uuid4().hex}"
        await asyncio.to_thread(self._machine(request.task_id).keep, self.place / id)
        self.images[id] = self.place / id
        return task_command_router_pb2.TaskSnapshotFilesystemResponse(image_id=id)

    # ---- streams ----

    async def stream_TaskExecStdioRead(self, stream: Any) -> None:
        request = await stream.recv_message()
        _, out, err = await asyncio.shield(self.execs[request.exec_id].done)
        data = err if request.file_descriptor == task_command_router_pb2.TASK_EXEC_STDIO_FILE_DESCRIPTOR_STDERR else out
        for begin in range(request.offset, len(data), 2**18):
            await stream.send_message(
                task_command_router_pb2.TaskExecStdioReadResponse(data=data[begin : begin + 2**18])
            )

    async def stream_TaskExecStdinWriteStream(self, stream: Any) -> None:
        begin, data = (await stream.recv_message()).start, b""
        while (message := await stream.recv_message()) is not None:
            data += message.data
        self.execs[begin.exec_id].input.set_result(data)
        await stream.send_message(task_command_router_pb2.TaskExecStdinWriteStreamResponse())


def _service(fake: FakeModal, base: type) -> Any:
    """All methods of a service, answered by those of `fake` that have their names."""

    def handler(name: str, known: grpclib.const.Handler) -> grpclib.const.Handler:
        async def answer(stream: Any) -> None:
            fake.asked.append(name)
            if fake.faults[name]:
                raise GRPCError(fake.faults[name].pop(0), "try later")
            if own := getattr(fake, f"stream_{name}", None):
                await own(stream)
                return
            request = await stream.recv_message()
            own = getattr(fake, name, None)
            await stream.send_message(await own(request) if own else known.reply_type())

        return known._replace(func=answer)

    class Service(base):  # type: ignore[misc]
        def __mapping__(self) -> dict[str, grpclib.const.Handler]:
            return {path: handler(path.rpartition("/")[2], known) for path, known in super().__mapping__().items()}

    Service.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]
    return Service()
