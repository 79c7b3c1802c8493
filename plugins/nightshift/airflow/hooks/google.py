"""Compute Engine and Cloud Storage under the provider's own Google connection."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from airflow.providers.google.common.hooks.base_google import GoogleBaseHook

from nightshift.errors import ConfigurationRefused
from nightshift.export.storage import Storage, storage_client
from nightshift.names import DEFAULT_INSTALLATION, GOOGLE_CONNECTION
from nightshift.tpu.compute import GoogleCompute

if TYPE_CHECKING:
    from google.auth.credentials import Credentials

#: What Compute Engine takes as a label's value, without the letters of other alphabets and at least one long.
_LABEL_VALUE: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")


class GoogleHook(GoogleBaseHook):
    """Credentials and project of a `google_cloud_platform` connection, for our own thin clients.

    Three extras beside the provider's: `compute_endpoint` and `storage_endpoint` (base URLs) point the clients at
    another server than Google's; `installation` names this Airflow where several share a project. With the
    provider's `is_anonymous` no credentials are asked for.

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

    @property
    def installation(self) -> str:
        """Value of the label that tells this installation's instances from those of others in the project.

        Raises ConfigurationRefused when the connection's extra `installation` cannot be a label's value.
        """
        value = self._extra("installation") or DEFAULT_INSTALLATION
        if not _LABEL_VALUE.fullmatch(value):
            raise ConfigurationRefused(
                f"Connection {self.gcp_conn_id!r}: installation {value!r} cannot be the value of a label",
                next_step='write up to 63 lower-case letters, digits, "-" and "_" as "installation" in the extra of '
                f"connection {self.gcp_conn_id}, starting with a letter or digit",
            )
        return value

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
