"""Every name that Nightshift gives: runs, instances, labels, jobs, folders on the VM and in the bucket."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

LABEL_MANAGED_BY = "managed-by"
LABEL_RUN = "nightshift-run"
LABEL_RECIPE = "nightshift-recipe"
LABEL_INSTALLATION = "nightshift-installation"
LABEL_EXPIRES = "nightshift-expires"
MANAGED_BY = "nightshift"
#: The installation that a Google connection without `installation` in its extra belongs to.
DEFAULT_INSTALLATION = "default"

#: Instance metadata that names the owning run as Airflow knows it: a label cannot hold Airflow's run ids.
METADATA_DAG_ID = "nightshift-dag-id"
METADATA_RUN_ID = "nightshift-run-id"

#: Connections that an installation has to define; their ids are the only thing that the DAGs know of them.
GOOGLE_CONNECTION = "google_cloud_default"
SSH_CONNECTION = "nightshift_ssh"
HUB_CONNECTION = "nightshift_huggingface"
#: Whose token goes to the VM, which may only read; needed where HUB_CONNECTION has a token that may write.
HUB_VM_CONNECTION = "nightshift_huggingface_vm"

MAX_NAME = 63  # Compute Engine: names and label values are RFC 1035 labels of at most 63 characters
_HASH = 6
_STAMP = "%Y%m%d-%H%M"


def slug(text: str) -> str:
    """Return `text` as lower-case letters, digits and single hyphens, starting with a letter."""
    cleaned = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return cleaned if cleaned[:1].isalpha() else f"r-{cleaned}".rstrip("-")


def run_name(recipe: str, moment: datetime, run_id: str) -> str:
    """Return the run's name: readable, valid as an instance name and a label, the same in every try.

    :param recipe: the recipe's name.
    :param moment: the logical date, or the run's `run_after` where there is none.
    :param run_id: Airflow's run id, which tells two manual runs of one minute apart.
    """
    digest = hashlib.sha256(f"{recipe}\0{run_id}".encode()).hexdigest()[:_HASH]
    tail = f"-{moment.strftime(_STAMP)}-{digest}"
    return slug(recipe)[: MAX_NAME - len(tail)].rstrip("-") + tail


def recipe_of(run: str) -> str:
    """Return the recipe that a run name begins with."""
    return run.rsplit("-", 3)[0]


def dag_id(recipe: str) -> str:
    """Return the id of a recipe's DAG."""
    return f"posttrain-{recipe}"


def instance_name(run: str) -> str:
    """Return the name of the run's TPU VM."""
    return run


def labels(recipe: str, run: str, *, installation: str, expires: datetime) -> dict[str, str]:
    """Return the labels by which a run's instances are found.

    :param installation: which Airflow made it; several may share a project.
    :param expires: when the instance may be deleted whatever its run is said to be doing.
    """
    return {
        LABEL_MANAGED_BY: MANAGED_BY,
        LABEL_INSTALLATION: installation,
        LABEL_RECIPE: slug(recipe)[:MAX_NAME].rstrip("-"),
        LABEL_RUN: run,
        LABEL_EXPIRES: str(int(expires.timestamp())),
    }


def expiry(labels: Mapping[str, str]) -> datetime | None:
    """Return when an instance with these labels expires; None when they do not say so in seconds since 1970."""
    text = labels.get(LABEL_EXPIRES, "")
    return datetime.fromtimestamp(int(text), UTC) if re.fullmatch(r"[0-9]{1,11}", text) else None


def job_id(run: str, step: str, incarnation: str) -> str:
    """Return the id of a remote job.

    :param incarnation: the instance's numeric id: a re-created VM of the same name starts with no jobs.
    """
    return f"{run}.{step}.{incarnation}"


def step_of(job_id: str) -> str:
    """Return the step that a remote job belongs to."""
    return job_id.split(".")[-2]


@dataclass(frozen=True)
class VmLayout:
    """Where things lie on the VM.

    Checkpoints are in memory (`/dev/shm`), as in the reference pipeline. Paths that depend on what was
    converted carry it in their name: converting into an existing folder saves nothing and still reports success
    (MaxText 0.2.3).
    """

    model_name: str
    model_revision: str
    maxtext_version: str
    run: str

    @property
    def venv(self) -> str:
        """The MaxText environment, relative to the login user's home."""
        return "maxtext_venv"

    @property
    def python(self) -> str:
        """The environment's interpreter, relative to the home folder."""
        return f"{self.venv}/bin/python3"

    @property
    def root(self) -> str:
        """The model's folder in memory."""
        return f"/dev/shm/{self.model_name}"

    @property
    def mt_format(self) -> str:
        """The base model in MaxText's format."""
        return f"{self.root}/mt-format/{self.model_revision[:12]}-{self.maxtext_version}"

    @property
    def base_checkpoint(self) -> str:
        """What train_rl loads its parameters from."""
        return f"{self.mt_format}/0/items"

    @property
    def post_train(self) -> str:
        """`base_output_directory` of train_rl."""
        return f"{self.root}/post-train"

    @property
    def actor_checkpoints(self) -> str:
        """The folder that holds one folder per saved step."""
        return f"{self.post_train}/{self.run}/checkpoints/actor"

    @property
    def checkpoints_safe(self) -> str:
        """A file that is there once nothing more of the training has to be copied to the bucket."""
        return f"{self.post_train}/{self.run}.copied"

    @property
    def hf_trained(self) -> str:
        """The trained model in the Hugging Face format, ready to be exported."""
        return f"{self.root}/hf-trained/{self.run}"


@dataclass(frozen=True)
class BucketLayout:
    """Where things lie in the bucket."""

    bucket: str
    prefix: str
    run: str

    @property
    def recipe_prefix(self) -> str:
        """The folder of the recipe's runs, without the bucket and without a slash at the end."""
        return f"{self.prefix.strip('/')}/{recipe_of(self.run)}".lstrip("/")

    @property
    def run_prefix(self) -> str:
        """The run's folder."""
        return f"{self.recipe_prefix}/{self.run}"

    @property
    def latest(self) -> str:
        """The object that names the recipe's last run whose model is whole in the bucket."""
        return f"{self.recipe_prefix}/latest.json"

    @property
    def published(self) -> str:
        """The object that says which run of the recipe was published last, and how good it was."""
        return f"{self.recipe_prefix}/published.json"

    @property
    def model_prefix(self) -> str:
        """The exported model's folder."""
        return f"{self.run_prefix}/model"

    @property
    def manifest(self) -> str:
        """The object that lists every exported file with size and checksums."""
        return f"{self.run_prefix}/manifest.json"

    @property
    def record(self) -> str:
        """The object that holds the run's record."""
        return f"{self.run_prefix}/record.json"

    @property
    def checkpoints(self) -> str:
        """The folder of the training's checkpoints and of its log so far, from which a lost VM is made up for."""
        return f"{self.run_prefix}/checkpoints"

    @property
    def vms(self) -> str:
        """The folder with one small document for each VM that the run has had."""
        return f"{self.run_prefix}/vms"

    def vm(self, instance_id: str) -> str:
        """The object that says what is known of one VM of the run."""
        return f"{self.vms}/{instance_id}.json"

    def log(self, step: str, incarnation: str, attempt: int) -> str:
        """The object that holds the full log of one attempt at a step, on one incarnation of the VM."""
        return f"{self.run_prefix}/logs/{step}/{incarnation}-{attempt}.log"

    def uri(self, name: str) -> str:
        """Return `name` as a gs:// address."""
        return f"gs://{self.bucket}/{name}"
