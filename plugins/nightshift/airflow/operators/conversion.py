"""The two conversions: from the Hugging Face format to MaxText's and back."""

from __future__ import annotations

from nightshift.airflow.operators.remote_step import RemoteStepOperator


class ConvertToMaxTextOperator(RemoteStepOperator):
    """Wraps `maxtext.checkpoint_conversion.to_maxtext` for the base model at its resolved commit."""

    step = "convert_to_maxtext"


class ConvertToHuggingFaceOperator(RemoteStepOperator):
    """Wraps `maxtext.checkpoint_conversion.to_huggingface` for the last checkpoint.

    The folder also gets the instruct model's tokenizer, chat template and generation config, and is loaded once.
    """

    step = "convert_to_huggingface"
