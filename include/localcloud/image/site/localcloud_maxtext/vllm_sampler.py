"""The names that MaxText's vLLM rollout imports from Tunix; a Llama never uses them."""

from __future__ import annotations


class VllmConfig:
    """Raises NotImplementedError when used."""

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        raise NotImplementedError("there is no vLLM on the local cloud's VM: only Llama can be rehearsed")


class VllmSampler(VllmConfig):
    """Raises NotImplementedError when used."""
