"""What the Hub answers when it refuses: status, wording, and the codes that clients choose exceptions by.

huggingface_hub reads the headers `X-Error-Code` and `X-Error-Message`, not the body. What is said about
tokens and gated repositories is worded as by the public Hub, which clients' issue trackers quote.
"""

from __future__ import annotations

from http import HTTPStatus

REPO_NOT_FOUND = "RepoNotFound"
REVISION_NOT_FOUND = "RevisionNotFound"
ENTRY_NOT_FOUND = "EntryNotFound"
GATED_REPO = "GatedRepo"


class HubError(Exception):
    """An answer other than success.

    :param status: HTTP status.
    :param message: for the body and `X-Error-Message`.
    :param code: for `X-Error-Code`; empty where the public Hub sends none.
    :param headers: further response headers.
    :param body: further fields of the JSON body.
    """

    def __init__(
        self,
        status: HTTPStatus,
        message: str,
        code: str = "",
        *,
        headers: dict[str, str] | None = None,
        body: dict[str, object] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.headers = headers or {}
        self.body = body or {}


def invalid_credentials() -> HubError:
    """A token that nobody issued."""
    return HubError(HTTPStatus.UNAUTHORIZED, "Invalid credentials in Authorization header")


def not_logged_in() -> HubError:
    """No token where one is needed."""
    return HubError(HTTPStatus.UNAUTHORIZED, "Invalid username or password.")


def repo_not_found(*, anonymous: bool) -> HubError:
    """No such repository, or none that this caller may know of; anonymous callers are told to log in."""
    if anonymous:
        return HubError(HTTPStatus.UNAUTHORIZED, "Invalid username or password.", REPO_NOT_FOUND)
    return HubError(HTTPStatus.NOT_FOUND, "Repository not found", REPO_NOT_FOUND)


def revision_not_found(revision: str) -> HubError:
    """No branch, tag or commit of that name."""
    return HubError(HTTPStatus.NOT_FOUND, f"Invalid rev id: {revision}", REVISION_NOT_FOUND)


def entry_not_found(commit: str) -> HubError:
    """No such file; the commit is named so that clients can cache the absence."""
    return HubError(
        HTTPStatus.NOT_FOUND, "Entry not found", ENTRY_NOT_FOUND, headers={"X-Repo-Commit": commit}
    )


def gated(kind: str, repo: str, page: str, *, anonymous: bool) -> HubError:
    """A gated repository: 401 without a token, 403 for a user who has not accepted its licence.

    :param kind: model or dataset.
    :param page: the address at which access is asked for.
    """
    if anonymous:
        message = (
            f"Access to {kind} {repo} is restricted. You must have access to it and be authenticated "
            "to access it. Please log in."
        )
        return HubError(HTTPStatus.UNAUTHORIZED, message, GATED_REPO)
    message = (
        f"Access to {kind} {repo} is restricted and you are not in the authorized list. "
        f"Visit {page} to ask for access."
    )
    return HubError(HTTPStatus.FORBIDDEN, message, GATED_REPO)


def forbidden(message: str) -> HubError:
    """A valid token without the right that is needed."""
    return HubError(HTTPStatus.FORBIDDEN, message)


def bad_request(message: str) -> HubError:
    """A request that no Hub would accept."""
    return HubError(HTTPStatus.BAD_REQUEST, message)


def conflict(message: str, **body: object) -> HubError:
    """Something of that name exists already."""
    return HubError(HTTPStatus.CONFLICT, message, body=body)


def stale_parent() -> HubError:
    """The branch has moved on from the parent that the caller named."""
    return HubError(
        HTTPStatus.PRECONDITION_FAILED, "A commit has happened since. Please refresh and try again."
    )
