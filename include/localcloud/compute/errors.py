"""What the API answers when it refuses, and what an operation says when it fails.

The wording follows Google's wherever it is known, because clients read it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


class ApiError(Exception):
    """A refused request.

    :param code: HTTP status.
    :param reason: Google's machine-readable reason ("notFound", "invalid", …).
    :param status: the canonical gRPC status, which only some answers carry ("INVALID_ARGUMENT").
    """

    def __init__(self, code: int, reason: str, message: str, *, status: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.status = status

    def body(self) -> dict[str, Any]:
        """Return the JSON answer in the format of Google's REST APIs."""
        error: dict[str, Any] = {
            "code": self.code,
            "message": self.message,
            "errors": [{"message": self.message, "domain": "global", "reason": self.reason}],
        }
        if self.status:
            error["status"] = self.status
        return {"error": error}


def not_found(resource: str) -> ApiError:
    """Return the 404 for a resource path such as `projects/p/zones/z/instances/i`."""
    return ApiError(404, "notFound", f"The resource '{resource}' was not found")


def invalid(field_path: str, value: object, why: str) -> ApiError:
    """Return the 400 for a field whose value Compute Engine does not accept."""
    return ApiError(400, "invalid", f"Invalid value for field '{field_path}': '{value}'. {why}")


def bad_request(message: str) -> ApiError:
    """Return the 400 for a request that does not fit the API's schema."""
    return ApiError(400, "badRequest", message, status="INVALID_ARGUMENT")


def already_exists(resource: str) -> ApiError:
    """Return the 409 for a name that is taken."""
    return ApiError(409, "alreadyExists", f"The resource '{resource}' already exists")


def fingerprint_mismatch(what: str) -> ApiError:
    """Return the 412 for a change that is based on an old state."""
    return ApiError(
        412, "conditionNotMet", f"Supplied fingerprint does not match current {what} fingerprint."
    )


@dataclass(frozen=True)
class OperationFailure:
    """Why an operation ends in an error: the entry of `error.errors` and the HTTP status beside it."""

    code: str
    message: str
    http_status: int
    http_message: str
    details: tuple[dict[str, Any], ...] = field(default=())

    def fields(self) -> dict[str, Any]:
        """Return the fields that the operation resource gains."""
        error: dict[str, Any] = {"code": self.code, "message": self.message}
        if self.details:
            error["errorDetails"] = list(self.details)
        return {
            "error": {"errors": [error]},
            "httpErrorStatusCode": self.http_status,
            "httpErrorMessage": self.http_message,
        }
