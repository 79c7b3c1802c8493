"""The request bodies that the Hub reads, as huggingface_hub 2.4 and 1.33 send them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Base64Bytes, BaseModel, Field, TypeAdapter, ValidationError

from localcloud.hub import errors
from localcloud.hub.model import Kind  # noqa: TC001  pydantic needs it at run time

if TYPE_CHECKING:
    from starlette.requests import Request

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class RepoOrder(BaseModel):
    """POST /api/repos/create, DELETE /api/repos/delete."""

    name: str
    organization: str | None = None
    type: Kind = "model"
    private: bool = False
    visibility: Literal["public", "private"] | None = None

    @property
    def is_private(self) -> bool:
        """Whether only members may see it: by the newer field or by the older one."""
        return self.private if self.visibility is None else self.visibility == "private"


class SettingsOrder(BaseModel):
    """PUT /api/<kind>s/<id>/settings."""

    private: bool | None = None
    visibility: Literal["public", "private"] | None = None

    @property
    def is_private(self) -> bool | None:
        """The visibility asked for, None when the request is about something else."""
        return self.private if self.visibility is None else self.visibility == "private"


class CardOrder(BaseModel):
    """POST /api/validate-yaml."""

    content: str


class PreuploadFile(BaseModel):
    """A file that a client is going to commit; `sample` is its first 512 bytes at most."""

    path: str
    size: int = Field(ge=0)
    sample: Base64Bytes


class PreuploadOrder(BaseModel):
    """POST /api/<kind>s/<id>/preupload/<revision>."""

    files: list[PreuploadFile]


class BranchOrder(BaseModel):
    """POST /api/<kind>s/<id>/branch/<name>."""

    startingPoint: str | None = None


class TagOrder(BaseModel):
    """POST /api/<kind>s/<id>/tag/<revision>."""

    tag: str = Field(min_length=1)


class LfsObject(BaseModel):
    """A content by its SHA-256."""

    oid: Sha256
    size: int = Field(ge=0)


class LfsBatch(BaseModel):
    """POST <id>.git/info/lfs/objects/batch."""

    operation: Literal["upload"]
    objects: list[LfsObject]
    transfers: list[str] = ["basic"]


class LfsPart(BaseModel):
    """A part of a multipart upload, with the ETag that its PUT was answered with."""

    partNumber: int = Field(ge=1)
    etag: str


class LfsCompletion(BaseModel):
    """POST to a multipart upload's address when all parts are there."""

    oid: Sha256
    parts: list[LfsPart]


class CommitHeader(BaseModel):
    """First line of a commit."""

    summary: str = Field(min_length=1)
    description: str = ""
    parentCommit: str = ""


class CommitFile(BaseModel):
    """A file whose content comes in the commit itself."""

    path: str
    content: str
    encoding: Literal["base64", "utf-8"] = "utf-8"


class CommitLfsFile(BaseModel):
    """A file whose content was uploaded before."""

    path: str
    algo: Literal["sha256"] = "sha256"
    oid: Sha256
    size: int | None = None


class CommitPath(BaseModel):
    """A file or folder to delete."""

    path: str


class _Header(BaseModel):
    key: Literal["header"]
    value: CommitHeader


class _File(BaseModel):
    key: Literal["file"]
    value: CommitFile


class _LfsFile(BaseModel):
    key: Literal["lfsFile"]
    value: CommitLfsFile


class _Deleted(BaseModel):
    key: Literal["deletedFile", "deletedFolder"]
    value: CommitPath


CommitLine = _Header | _File | _LfsFile | _Deleted
_COMMIT_LINE: TypeAdapter[CommitLine] = TypeAdapter(Annotated[CommitLine, Field(discriminator="key")])


def commit_line(line: bytes) -> CommitLine:
    """Parse one line of a commit. Raises HubError 400."""
    try:
        return _COMMIT_LINE.validate_json(line)
    except ValidationError as error:
        raise errors.bad_request(_summary(error)) from error


async def parse[T: BaseModel](request: Request, model: type[T]) -> T:
    """Read the JSON body as `model`. Raises HubError 400."""
    try:
        return model.model_validate_json(await request.body())
    except ValidationError as error:
        raise errors.bad_request(_summary(error)) from error


def _summary(error: ValidationError) -> str:
    first = error.errors(include_input=False, include_url=False)[0]
    return f"{'.'.join(map(str, first['loc'])) or 'body'}: {first['msg']}"
