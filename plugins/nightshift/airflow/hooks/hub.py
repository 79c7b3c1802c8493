"""The Hugging Face Hub connection."""

from __future__ import annotations

import logging

from airflow.sdk import BaseHook
from huggingface_hub import HfApi

from nightshift.errors import AccessDenied
from nightshift.names import HUB_CONNECTION

# The Hub's client tells of every request at INFO, and a task's log is for people.
for _client in ("httpx", "httpx2"):
    logging.getLogger(_client).setLevel(logging.WARNING)

PUBLIC_ENDPOINT = "https://huggingface.co"


class HubHook(BaseHook):
    """A connection whose password is the access token; a host, where given, is another Hub's base URL.

    :param hub_conn_id: the connection.
    """

    conn_name_attr = "hub_conn_id"
    default_conn_name = HUB_CONNECTION

    def __init__(self, hub_conn_id: str = HUB_CONNECTION) -> None:
        super().__init__()
        self.hub_conn_id = hub_conn_id

    @property
    def endpoint(self) -> str:
        """Base URL of the Hub, without a slash at the end."""
        return (self.get_connection(self.hub_conn_id).host or PUBLIC_ENDPOINT).rstrip("/")

    def token(self) -> str:
        """Return the access token. Raises AccessDenied when the connection has none."""
        token = self.get_connection(self.hub_conn_id).password
        if not token:
            raise AccessDenied(
                f"Connection {self.hub_conn_id!r} holds no access token",
                next_step=f"put a Hugging Face token into the password of connection {self.hub_conn_id}",
            )
        return str(token)

    def api(self) -> HfApi:
        """Return the Hub client."""
        return HfApi(endpoint=self.endpoint, token=self.token())

    def vm_environment(self) -> dict[str, str]:
        """Return what programs on the VM need to use the same Hub (the token is not part of it)."""
        return {} if self.endpoint == PUBLIC_ENDPOINT else {"HF_ENDPOINT": self.endpoint}
