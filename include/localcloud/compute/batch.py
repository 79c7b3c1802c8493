"""Google's HTTP batches: several requests in one multipart/mixed message, as gcloud sends for several VMs."""

from __future__ import annotations

import http
import json
import uuid
from dataclasses import dataclass
from email.parser import BytesParser
from email.policy import HTTP
from typing import Any

from localcloud.compute.errors import bad_request


@dataclass(frozen=True)
class Part:
    """One request of a batch."""

    content_id: str
    method: str
    target: str  # path and query
    body: bytes


def parse(content_type: str, payload: bytes) -> list[Part]:
    """Return the requests of a batch. Raises ApiError 400 for what is not one."""
    message = BytesParser(policy=HTTP).parsebytes(
        b"Content-Type: " + content_type.encode() + b"\r\n\r\n" + payload
    )
    if not message.is_multipart():
        raise bad_request("The batch request is not multipart/mixed.")
    parts = []
    for number, part in enumerate(message.iter_parts()):
        raw = part.get_payload(decode=True)
        if not isinstance(raw, bytes):
            raise bad_request(f"Part {number} of the batch request is a batch itself.")
        head, _, body = raw.replace(b"\r\n", b"\n").partition(b"\n\n")
        words = head.split(b"\n", 1)[0].decode("latin-1").split()
        if len(words) < 2:
            raise bad_request(f"Part {number} of the batch request has no request line.")
        parts.append(Part(part.get("Content-ID", f"<{number}>"), words[0], words[1], body.strip()))
    return parts


def render(answers: list[tuple[Part, int, dict[str, Any]]]) -> tuple[str, bytes]:
    """Return content type and body of the answer to a batch."""
    boundary = f"batch_{uuid.uuid4().hex}"
    out = bytearray()
    for part, code, body in answers:
        content = json.dumps(body).encode()
        phrase = http.HTTPStatus(code).phrase
        content_id = part.content_id.removeprefix("<")
        out += (
            f"--{boundary}\r\nContent-Type: application/http\r\nContent-ID: <response-{content_id}\r\n\r\n"
            f"HTTP/1.1 {code} {phrase}\r\nContent-Type: application/json; charset=UTF-8\r\n"
            f"Content-Length: {len(content)}\r\n\r\n"
        ).encode()
        out += content + b"\r\n"
    out += f"--{boundary}--\r\n".encode()
    return f"multipart/mixed; boundary={boundary}", bytes(out)
