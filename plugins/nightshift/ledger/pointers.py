"""The two small documents beside a recipe's runs: which one is whole last, and which one was published last."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError

from nightshift.errors import VerificationFailed
from nightshift.ledger.record import Accuracy  # noqa: TC001  pydantic needs it at run time


class Latest(BaseModel):
    """`latest.json`: the recipe's last run whose model is whole in the bucket.

    :param model: the model's folder, as a gs:// address.
    :param manifest_sha256: of the run's manifest.json.
    """

    model_config = ConfigDict(frozen=True)

    run: str
    model: str
    manifest_sha256: str


class Rival(BaseModel):
    """A published run and how good it was."""

    model_config = ConfigDict(frozen=True)

    run: str
    accuracy: Accuracy


class LastPublished(Rival):
    """`published.json`: the recipe's last published run, and the one before it.

    :param commit: the commit of `repo` that holds it.
    :param before: what a second try of the same run is compared with.
    """

    repo: str
    commit: str
    before: Rival | None = None

    @classmethod
    def from_json(cls, text: str, *, where: str) -> Self:
        """Parse the document. Raises VerificationFailed, naming `where` it lies, when it is not one."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise VerificationFailed(
                f"{where} does not say which run was published last: {error.errors()[0]['msg']}",
                next_step=f"delete it, and the next run is compared with none: gcloud storage rm {where}",
            ) from error

    def rival_of(self, run: str) -> Rival | None:
        """Return the published run that `run` is compared with, which is never itself."""
        return self.before if self.run == run else Rival(run=self.run, accuracy=self.accuracy)
