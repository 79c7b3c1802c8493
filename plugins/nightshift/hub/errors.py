"""What an error of huggingface_hub means, and when a call to the Hub is worth repeating."""

from __future__ import annotations

import logging
import random
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING

import httpx2  # huggingface_hub 2.x speaks HTTP through it and lets its transport errors through
from huggingface_hub import errors as hub
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt

from nightshift.errors import AccessDenied, CloudUnavailable, ConfigurationRefused, NightshiftError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tenacity import RetryCallState

log = logging.getLogger(__name__)

TOKENS_URL = "https://huggingface.co/settings/tokens"
#: What a store says of a signed address whose time is over (Amazon S3: "Request has expired"), with status 403.
_EXPIRED = "request has expired"

#: Everything that a call of HfApi raises because of the network, the server's answer, or what it was given:
#: the client says ValueError for a malformed repository id, a card with wrong metadata, a file that LFS refuses.
HUB_ERRORS = (
    hub.HfHubHTTPError,
    hub.LocalTokenNotFoundError,
    hub.LocalEntryNotFoundError,
    httpx2.HTTPError,
    ConnectionError,
    TimeoutError,
    ValueError,
)


def status_of(error: BaseException | None) -> int | None:
    """Return the HTTP status that the Hub answered with, or None when there was no answer."""
    response = _answer(error)
    return None if response is None else response.status_code


def _answer(error: BaseException | None) -> httpx2.Response | None:
    # Downloads wrap the answer in a LocalEntryNotFoundError, which carries it only as its cause.
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, httpx2.Response):
            return response
        error = error.__cause__
    return None


def hub_error(error: Exception, *, doing: str, repo: str = "", endpoint: str = "") -> NightshiftError:
    """Return what an error of huggingface_hub means in our tree.

    :param doing: what was tried, for the message ("reading model x/y").
    :param repo: the repository, when one is concerned.
    :param endpoint: base URL of the Hub, for the address where a licence is accepted.
    """
    if isinstance(error, hub.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    status = status_of(error)
    said = _said(error)
    if isinstance(error, hub.GatedRepoError):  # before its base class RepositoryNotFoundError
        return AccessDenied(
            f"{doing}: the licence of {repo} is not accepted by this token's account ({said})",
            next_step=f"accept it at {endpoint}/{repo} as the account that owns the token; "
            "a fine-grained token also needs read access to public gated repositories",
        )
    if isinstance(error, hub.LocalTokenNotFoundError):
        return AccessDenied(f"{doing}: there is no Hugging Face token", next_step=_token_step())
    if status == 401:  # also for a repository that does not exist, when nobody is logged in
        return AccessDenied(f"{doing}: the Hub does not know this token ({said})", next_step=_token_step())
    if isinstance(error, hub.RepositoryNotFoundError):
        return ConfigurationRefused(
            f"{doing}: {repo} does not exist, or is private and closed to this token",
            next_step="check the repository's name in the recipe, and that the token's account may see it",
        )
    if isinstance(error, hub.RevisionNotFoundError):
        return ConfigurationRefused(
            f"{doing}: {repo} has no such revision ({said})",
            next_step="name a branch, a tag or a full commit hash of the repository in the recipe",
        )
    if status == 403 and _EXPIRED in (said + _text(error)).lower():
        return CloudUnavailable(
            f"{doing}: the address that the Hub gave for it is no longer valid ({said})",
            next_step="nothing: another address is asked for",
        )
    if status == 403:
        return AccessDenied(
            f"{doing}: the Hub refuses ({said})",
            next_step=f"give the token write access to {repo or 'the repository'} at {TOKENS_URL}, "
            "and check the account's storage limit if the answer names it",
        )
    if status == 429 or (status is not None and status >= 500):
        return CloudUnavailable(f"{doing}: the Hub answered {status} ({said})", next_step="try again later")
    if status is None and not isinstance(error, ValueError):
        return CloudUnavailable(f"{doing}: the Hub does not answer ({said})", next_step="try again later")
    return ConfigurationRefused(
        f"{doing}: not possible ({said})",
        next_step="read the answer above; the request is wrong, not the service",
    )


def _text(error: Exception) -> str:
    answer = _answer(error)
    return answer.text if answer is not None and answer.is_closed else ""


def _token_step() -> str:
    return f"make a token at {TOKENS_URL} and store it as the password of the Hugging Face connection"


def _said(error: Exception) -> str:
    text = getattr(error, "server_message", None) or str(error) or type(error).__name__
    return " ".join(text.split())[:300]


@contextmanager
def hub_errors(doing: str, *, repo: str = "", endpoint: str = "") -> Iterator[None]:
    """Raise errors of huggingface_hub as errors of our tree, with the original as their cause."""
    try:
        yield
    except HUB_ERRORS as error:
        raise hub_error(error, doing=doing, repo=repo, endpoint=endpoint) from error
    except RuntimeError as error:
        # So the client wraps what went wrong with the upload of a file in LFS.
        cause = error.__cause__
        if not isinstance(cause, HUB_ERRORS):
            raise
        raise hub_error(cause, doing=doing, repo=repo, endpoint=endpoint) from cause


def retry_after(error: BaseException | None) -> float | None:
    """Return the seconds for which the answer asks to wait (`Retry-After`: seconds or an HTTP date)."""
    response = _answer(error)
    value = response.headers.get("Retry-After") if response is not None else None
    if not value:
        return None
    if value.strip().isdigit():
        return float(value)
    try:
        moment = parsedate_to_datetime(value)
    except ValueError:
        return None
    return max(0.0, (moment - datetime.now(UTC)).total_seconds())


@dataclass(frozen=True)
class RetryPolicy:
    """How patiently a call to the Hub is repeated. All times are seconds.

    :param attempts: how often a call is made in all.
    :param base: first pause without a `Retry-After`; it doubles each time, with up to a quarter of jitter.
    :param longest: longest pause; an answer that asks for a longer one ends the attempts, because
        Airflow's own retry waits without keeping a worker.
    """

    attempts: int = 5
    base: float = 2.0
    longest: float = 90.0

    def retrying(self, *also: type[NightshiftError]) -> Retrying:
        """Return tenacity's loop: it repeats on CloudUnavailable and `also`, and raises the last error.

        AccessDenied and ConfigurationRefused are never repeated: a refusal stays one.
        """
        return Retrying(
            retry=retry_if_exception_type((CloudUnavailable, *also)),
            stop=lambda state: stop_after_attempt(self.attempts)(state) or self._asked(state) > self.longest,
            wait=self._pause,
            before_sleep=_announce,
            reraise=True,
        )

    @staticmethod
    def _asked(state: RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome else None
        return retry_after(error.__cause__ if error else None) or 0.0

    def _pause(self, state: RetryCallState) -> float:
        grown = self.base * 2.0 ** (state.attempt_number - 1) * random.uniform(1.0, 1.25)  # noqa: S311  jitter
        return min(self.longest, self._asked(state) or grown)


def _announce(state: RetryCallState) -> None:
    error = state.outcome.exception() if state.outcome else None
    message = error.message if isinstance(error, NightshiftError) else error
    log.warning("%s; attempt %d follows in %.0f s", message, state.attempt_number + 1, state.upcoming_sleep)


def vm_token_advice(connection: str) -> str:
    """Return what to do about a token for the VM that may do more than read.

    :param connection: id of the connection that holds it.
    """
    return (
        f"make a token of type Read at {TOKENS_URL} and store it as the password of connection {connection}"
    )
