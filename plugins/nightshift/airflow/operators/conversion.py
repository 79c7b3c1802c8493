"""The two conversions: from the Hugging Face format to MaxText's and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nightshift.airflow.operators.remote_step import RemoteStepOperator
from nightshift.errors import REPEAT_A_STEP, VerificationFailed
from nightshift.maxtext import logs

if TYPE_CHECKING:
    from nightshift.airflow.jobs import Site
    from nightshift.remote.client import RemoteHost


class ConvertToMaxTextOperator(RemoteStepOperator):
    """Wraps `maxtext.checkpoint_conversion.to_maxtext` for the base model at its resolved commit."""

    step = "convert_to_maxtext"


class ConvertToHuggingFaceOperator(RemoteStepOperator):
    """Wraps `maxtext.checkpoint_conversion.to_huggingface` for the last checkpoint.

    The folder also gets the instruct model's tokenizer, chat template and generation config, and its weights are
    compared with the source model's: one that is not whole, or that the training did not move, fails the step.
    """

    step = "convert_to_huggingface"

    async def figures(self, site: Site, host: RemoteHost, log: str) -> dict[str, Any]:
        """Return {"weights": …}, how far the training moved them. Raises VerificationFailed when nothing says so."""
        weights = logs.weights(log.splitlines())
        if weights is None:
            raise VerificationFailed(
                f"nothing in the log of {self.step} says that its weights were compared with the source model's",
                next_step=REPEAT_A_STEP,
            )
        return {"weights": weights}
