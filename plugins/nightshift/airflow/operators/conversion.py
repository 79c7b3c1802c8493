"""The two conversions: from the Hugging Face format to MaxText's and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nightshift.airflow.operators.remote_step import RemoteStepOperator, Work
from nightshift.maxtext.commands import conversion_environment
from nightshift.maxtext.scripts import to_huggingface_script, to_maxtext_script

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nightshift.airflow.operators.remote_step import Site


class _ConversionOperator(RemoteStepOperator):
    def _work(self, script: str) -> Work:
        return Work(
            script=script,
            env={**conversion_environment(), **self.hub.vm_environment()},
            secret_env={"HF_TOKEN": self.hub.token()},
        )


class ConvertToMaxTextOperator(_ConversionOperator):
    """Wraps `maxtext.checkpoint_conversion.to_maxtext` for the base model at its resolved commit."""

    step = "convert_to_maxtext"
    timeout_key = "to_maxtext"

    def work(self, site: Site, resolved: Mapping[str, Any]) -> Work:
        """Download and convert, unless the checkpoint is complete already."""
        return self._work(to_maxtext_script(site.night.recipe, site.layout))


class ConvertToHuggingFaceOperator(_ConversionOperator):
    """Wraps `maxtext.checkpoint_conversion.to_huggingface` for the last checkpoint.

    The folder also gets the instruct model's tokenizer, chat template and generation config, and is loaded once.
    """

    step = "convert_to_huggingface"
    timeout_key = "to_huggingface"

    def work(self, site: Site, resolved: Mapping[str, Any]) -> Work:
        """Convert, complete and check, unless the folder is complete already."""
        return self._work(to_huggingface_script(site.night.recipe, site.layout))
