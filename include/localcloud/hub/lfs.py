"""Large files: git-lfs's batch API, and the uploads that it hands out, whole or in parts.

Batch API: https://github.com/git-lfs/git-lfs/blob/main/docs/api/batch.md. The multipart form is the Hub's:
the upload's `header` maps part numbers to addresses beside `chunk_size`; a POST to `href` joins the parts.
"""

from __future__ import annotations

import hashlib
import shutil
import threading
import uuid
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING

from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from localcloud.hub import bodies, errors
from localcloud.hub.blobs import ContentMismatch
from localcloud.hub.gate import RepoHandlers, base_url, path_parameter

if TYPE_CHECKING:
    from pathlib import Path

    from starlette.requests import Request

    from localcloud.hub.store import HubStore

#: Objects above this many bytes are uploaded in parts of it where the client can.
PART_BYTES = 8 * 2**20
_COPY_BYTES = 1 << 20
_MEDIA_TYPE = "application/vnd.git-lfs+json"


@dataclass(frozen=True)
class _Upload:
    """A permission to send one content; its id stands for the signature of a storage service's address."""

    id: str
    oid: str
    size: int


class LargeFiles(RepoHandlers):
    """Handlers for large-file storage.

    :param store: where contents end up.
    :param folder: for parts of uploads; emptied, as upload permissions do not outlive the process.
    """

    def __init__(self, store: HubStore, folder: Path) -> None:
        super().__init__(store)
        self._folder = folder
        shutil.rmtree(folder, ignore_errors=True)
        self._lock = threading.Lock()
        self._uploads: dict[str, _Upload] = {}

    def routes(self) -> list[Route]:
        """Return the routes."""
        routes = [
            Route("/_lfs/{upload}", self.put_whole, methods=["PUT"]),
            Route("/_lfs/{upload}/{part:int}", self.put_part, methods=["PUT"]),
            Route("/_lfs/{upload}/complete", self.complete, methods=["POST"]),
        ]
        for prefix in ("/datasets/{owner}/{name}", "/{owner}/{name}"):
            routes += [
                Route(f"{prefix}.git/info/lfs/objects/batch", self.batch, methods=["POST"]),
                Route(f"{prefix}.git/info/lfs/objects/verify", self.verify, methods=["POST"]),
            ]
        return routes

    async def batch(self, request: Request) -> Response:
        """Tell for each object where to upload it; nothing for those that are here already."""
        repo, _ = self._gate.writable(request)
        order = await bodies.parse(request, bodies.LfsBatch)
        multipart = "multipart" in order.transfers
        verify = f"{base_url(request)}{repo.page}.git/info/lfs/objects/verify"
        objects: list[dict[str, object]] = []
        for item in order.objects:
            row: dict[str, object] = {"oid": item.oid, "size": item.size}
            if not self._store.blobs.has(item.oid):
                upload = self._permit(item)
                action = _action(f"{base_url(request)}/_lfs/{upload.id}", item.size, multipart=multipart)
                row["actions"] = {"upload": action, "verify": {"href": verify, "header": {}}}
            objects.append(row)
        body = {"transfer": "multipart" if multipart else "basic", "objects": objects}
        return JSONResponse(body, media_type=_MEDIA_TYPE)

    async def verify(self, request: Request) -> Response:
        """Confirm that an object arrived. HubError 404 when it did not, 400 when its size is another."""
        self._gate.writable(request)
        order = await bodies.parse(request, bodies.LfsObject)
        if not self._store.blobs.has(order.oid):
            raise errors.HubError(HTTPStatus.NOT_FOUND, f"Object {order.oid} was not uploaded")
        if self._store.blobs.size(order.oid) != order.size:
            raise errors.bad_request(f"Object {order.oid} is not {order.size} bytes long")
        return JSONResponse({})

    async def put_whole(self, request: Request) -> Response:
        """Receive an object in one piece. HubError 400 when it is not the one that was announced."""
        upload = self._permitted(request)
        writer = await run_in_threadpool(self._store.blobs.writer)
        with writer:
            async for chunk in request.stream():
                await run_in_threadpool(writer.write, chunk)
            try:
                await run_in_threadpool(writer.finish, upload.oid)
            except ContentMismatch as error:
                raise errors.bad_request(str(error)) from error
        self._forget(upload)
        return Response(headers={"ETag": f'"{upload.oid}"'})

    async def put_part(self, request: Request) -> Response:
        """Receive a part, and answer with its ETag."""
        upload = self._permitted(request)
        target = self._part(upload, int(request.path_params["part"]))
        await run_in_threadpool(target.parent.mkdir, parents=True, exist_ok=True)
        partial = target.with_name(f"{target.name}.{uuid.uuid4().hex}")
        digest = hashlib.md5(usedforsecurity=False)
        file = await run_in_threadpool(partial.open, "wb")
        with file:
            async for chunk in request.stream():
                digest.update(chunk)
                await run_in_threadpool(file.write, chunk)
        await run_in_threadpool(partial.replace, target)
        return Response(headers={"ETag": f'"{digest.hexdigest()}"'})

    async def complete(self, request: Request) -> Response:
        """Put the parts together. HubError 400 when one is missing or the whole is not what was announced."""
        upload = self._permitted(request)
        order = await bodies.parse(request, bodies.LfsCompletion)
        await run_in_threadpool(self._assemble, upload, sorted(part.partNumber for part in order.parts))
        self._forget(upload)
        return JSONResponse({"success": True})

    def _assemble(self, upload: _Upload, numbers: list[int]) -> None:
        with self._store.blobs.writer() as writer:
            for number in numbers:
                try:
                    with self._part(upload, number).open("rb") as part:
                        while chunk := part.read(_COPY_BYTES):
                            writer.write(chunk)
                except FileNotFoundError as error:
                    raise errors.bad_request(f"Part {number} of {upload.oid} was not uploaded") from error
            try:
                writer.finish(upload.oid)
            except ContentMismatch as error:
                raise errors.bad_request(str(error)) from error
        shutil.rmtree(self._folder / upload.id)

    def _part(self, upload: _Upload, number: int) -> Path:
        return self._folder / upload.id / str(number)

    def _permit(self, item: bodies.LfsObject) -> _Upload:
        upload = _Upload(uuid.uuid4().hex, item.oid, item.size)
        with self._lock:
            self._uploads[upload.id] = upload
        return upload

    def _permitted(self, request: Request) -> _Upload:
        upload = self._uploads.get(path_parameter(request, "upload"))
        if upload is None:
            raise errors.forbidden("Request has expired")
        return upload

    def _forget(self, upload: _Upload) -> None:
        with self._lock:
            self._uploads.pop(upload.id, None)


def _action(href: str, size: int, *, multipart: bool) -> dict[str, object]:
    if not multipart or size <= PART_BYTES:
        return {"href": href, "header": {}}
    parts = {str(number): f"{href}/{number}" for number in range(1, -(-size // PART_BYTES) + 1)}
    return {"href": f"{href}/complete", "header": {"chunk_size": str(PART_BYTES), **parts}}
