"""Who may do what: the few users of the local Hub and their access tokens, which are no secrets."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from localcloud.hub import errors
from localcloud.settings import HUB_NAMESPACE

Role = Literal["read", "write"]


@dataclass(frozen=True)
class User:
    """A person.

    :param orgs: organisations of which the user is a member with the right to write.
    :param licences_accepted: whether gated repositories let the user in.
    """

    name: str
    fullname: str
    orgs: tuple[str, ...]
    licences_accepted: bool


@dataclass(frozen=True)
class Access:
    """A token's user and what the token allows."""

    user: User
    token_name: str
    role: Role

    def may_write(self, namespace: str) -> bool:
        """Tell whether the user belongs to `namespace` and the token is a write token."""
        return self.role == "write" and self.is_member(namespace)

    def is_member(self, namespace: str) -> bool:
        """Tell whether `namespace` is the user's own or an organisation of theirs."""
        return namespace == self.user.name or namespace in self.user.orgs

    def whoami(self) -> dict[str, object]:
        """Return the body of `GET /api/whoami-v2`."""
        return {
            "type": "user",
            "id": f"user-{self.user.name}",
            "name": self.user.name,
            "fullname": self.user.fullname,
            "isPro": False,
            "canPay": False,
            "orgs": [
                {"type": "org", "id": f"org-{org}", "name": org, "fullname": org, "roleInOrg": "write"}
                for org in self.user.orgs
            ],
            "auth": {
                "type": "access_token",
                "accessToken": {
                    "displayName": self.token_name,
                    "role": self.role,
                    "createdAt": "2026-01-01T00:00:00.000Z",
                },
            },
        }


REHEARSAL = User("rehearsal", "Rehearsal", orgs=(HUB_NAMESPACE,), licences_accepted=True)
NEWCOMER = User("rehearsal-newcomer", "Newcomer", orgs=(HUB_NAMESPACE,), licences_accepted=False)

WRITE_TOKEN = "hf_rehearsal_write"  # noqa: S105  the local Hub's own, known to everybody
READ_TOKEN = "hf_rehearsal_read"  # noqa: S105  likewise
NO_LICENCE_TOKEN = "hf_rehearsal_nolicence"  # noqa: S105  likewise

TOKENS = MappingProxyType({
    WRITE_TOKEN: Access(REHEARSAL, "rehearsal write", "write"),
    READ_TOKEN: Access(REHEARSAL, "rehearsal read", "read"),
    NO_LICENCE_TOKEN: Access(NEWCOMER, "rehearsal without licence", "write"),
})


def authenticate(authorization: str | None) -> Access | None:
    """Return the access that an Authorization header gives, None without one.

    Raises HubError 401 for anything but `Bearer` and a token of the table.
    """
    if not authorization:
        return None
    scheme, _, token = authorization.partition(" ")
    access = TOKENS.get(token.strip())
    if scheme.lower() != "bearer" or access is None:
        raise errors.invalid_credentials()
    return access
