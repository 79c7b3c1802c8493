"""The Hugging Face Hub connections: one that publishes, one whose token goes to the VM."""

from __future__ import annotations

import logging

from airflow.sdk import BaseHook
from airflow.sdk.exceptions import AirflowNotFoundException
from huggingface_hub import HfApi

from nightshift.errors import AccessDenied
from nightshift.hub.access import identify, more_than_reads
from nightshift.hub.errors import vm_token_advice
from nightshift.names import HUB_CONNECTION, HUB_VM_CONNECTION

# The Hub's client tells of every request at INFO, and a task's log is for people.
for _client in ("httpx", "httpx2"):
    logging.getLogger(_client).setLevel(logging.WARNING)

PUBLIC_ENDPOINT = "https://huggingface.co"


class HubHook(BaseHook):
    """A connection whose password is the access token; a host, where given, is another Hub's base URL.

    :param hub_conn_id: the connection that the Airflow side uses.
    :param vm_conn_id: the connection whose password is the token for the VM. Where it is not defined, the other
        one's token is taken, which must then be one that may only read: so it is where nothing is published.
    """

    conn_name_attr = "hub_conn_id"
    default_conn_name = HUB_CONNECTION

    def __init__(self, hub_conn_id: str = HUB_CONNECTION, vm_conn_id: str = HUB_VM_CONNECTION) -> None:
        super().__init__()
        self.hub_conn_id = hub_conn_id
        self.vm_conn_id = vm_conn_id

    @property
    def endpoint(self) -> str:
        """Base URL of the Hub, without a slash at the end."""
        return (self.get_connection(self.hub_conn_id).host or PUBLIC_ENDPOINT).rstrip("/")

    def token(self) -> str:
        """Return the access token. Raises AccessDenied when the connection has none."""
        return self._token(self.hub_conn_id)

    def api(self) -> HfApi:
        """Return the Hub client."""
        return HfApi(endpoint=self.endpoint, token=self.token())

    def vm_api(self) -> HfApi:
        """Return a Hub client that sees what the VM will see. Raises AccessDenied when there is no token for it."""
        return HfApi(endpoint=self.endpoint, token=self._vm_token())

    def vm_token(self) -> str:
        """Return the token that the VM gets, which is known to read only.

        The Hub is asked each time: a token that could write must not leave Airflow, whatever became of the
        connection since preflight.

        :raises AccessDenied: the token is wrong, or may do more than read.
        :raises CloudUnavailable: the Hub does not answer, or not now.
        """
        api = self.vm_api()
        if problem := more_than_reads(identify(api)):
            raise AccessDenied(f"No token for the VM: {problem}", next_step=vm_token_advice(self.vm_conn_id))
        return str(api.token)

    def vm_environment(self) -> dict[str, str]:
        """Return what programs on the VM need to use the same Hub (the token is not part of it)."""
        return {} if self.endpoint == PUBLIC_ENDPOINT else {"HF_ENDPOINT": self.endpoint}

    def _vm_token(self) -> str:
        try:
            return self._token(self.vm_conn_id)
        except AirflowNotFoundException:
            return self.token()

    def _token(self, conn_id: str) -> str:
        token = self.get_connection(conn_id).password
        if not token:
            raise AccessDenied(
                f"Connection {conn_id!r} holds no access token",
                next_step=f"put a Hugging Face token into the password of connection {conn_id}",
            )
        return str(token)
