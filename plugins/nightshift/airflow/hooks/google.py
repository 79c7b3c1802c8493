"""Compute Engine and Cloud Storage under the provider's own Google connection."""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow.providers.google.common.hooks.base_google import GoogleBaseHook

from nightshift.errors import ConfigurationRefused
from nightshift.export.storage import Storage, storage_client
from nightshift.names import GOOGLE_CONNECTION
from nightshift.tpu.compute import GoogleCompute

if TYPE_CHECKING:
    from google.auth.credentials import Credentials


class GoogleHook(GoogleBaseHook):
    """Credentials and project of a `google_cloud_platform` connection, for our own thin clients.

    Two extras beside the provider's: `compute_endpoint` and `storage_endpoint` (base URLs) point the clients at
    another server than Google's; with `is_anonymous` no credentials are asked for.

    :param gcp_conn_id: the connection.
    """

    def __init__(self, gcp_conn_id: str = GOOGLE_CONNECTION) -> None:
        super().__init__(gcp_conn_id=gcp_conn_id)

    @property
    def compute_endpoint(self) -> str | None:
        """Base URL of another Compute Engine, from the connection's extra."""
        return self._extra("compute_endpoint")

    @property
    def storage_endpoint(self) -> str | None:
        """Base URL of another Cloud Storage, from the connection's extra."""
        return self._extra("storage_endpoint")

    def project(self) -> str:
        """Return the project that instances are made in.

        Raises ConfigurationRefused when neither the connection nor the credentials name one.
        """
        project = self._credentials()[1]
        if not project:
            raise ConfigurationRefused(
                f"Connection {self.gcp_conn_id!r} names no project and neither do its credentials",
                next_step=f'set "project" in the extra of connection {self.gcp_conn_id}',
            )
        return project

    def compute(self, project: str | None = None) -> GoogleCompute:
        """Return the Compute Engine client, for the connection's project unless another is named."""
        credentials, _ = self._credentials()
        return GoogleCompute(
            project=project or self.project(), credentials=credentials, endpoint=self.compute_endpoint
        )

    def storage(self, bucket: str) -> Storage:
        """Return the Cloud Storage client of one bucket."""
        credentials, project = self._credentials()
        return Storage(storage_client(credentials, project, self.storage_endpoint), bucket)

    def _credentials(self) -> tuple[Credentials, str | None]:
        return self.get_credentials_and_project_id()

    def _extra(self, key: str) -> str | None:
        value = self.extras.get(key)
        return str(value) if value else None
