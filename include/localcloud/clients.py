"""The environment variables that make the real clients talk to a local cloud."""

from __future__ import annotations

from typing import TYPE_CHECKING

from localcloud.settings import PROJECT, ZONE

if TYPE_CHECKING:
    from localcloud.settings import Settings


def environment(settings: Settings) -> dict[str, str]:
    """Return the variables for gcloud, google-cloud-storage, huggingface_hub and the localcloud command."""
    return {
        "LOCALCLOUD_STATE": str(settings.state_dir),
        "LOCALCLOUD_PORT": str(settings.port),
        "CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE": f"{settings.compute_endpoint}/compute/v1/",
        "CLOUDSDK_API_ENDPOINT_OVERRIDES_STORAGE": f"{settings.storage_endpoint}/storage/v1/",
        "CLOUDSDK_AUTH_DISABLE_CREDENTIALS": "true",
        "CLOUDSDK_CORE_PROJECT": PROJECT,
        "CLOUDSDK_COMPUTE_ZONE": ZONE,
        "CLOUDSDK_CORE_DISABLE_PROMPTS": "1",
        "GOOGLE_CLOUD_PROJECT": PROJECT,
        "STORAGE_EMULATOR_HOST": settings.storage_endpoint,
        "HF_ENDPOINT": settings.hub_endpoint,
        # The Hub of the local cloud has no Xet storage, and the client does not fall back by itself.
        "HF_HUB_DISABLE_XET": "1",
    }
