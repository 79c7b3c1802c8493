"""Stand-in for datasets: a split of a repository that has one Parquet file a split, as the local Hub's has."""

from __future__ import annotations

import shutil
from dataclasses import dataclass

import pyarrow.parquet as pq
from huggingface_hub import hf_hub_download


@dataclass(frozen=True)
class Dataset:
    """A split's file."""

    path: str

    def __len__(self) -> int:
        return int(pq.read_metadata(self.path).num_rows)

    def to_parquet(self, path: str) -> None:
        """Write the rows."""
        shutil.copyfile(self.path, path)


def load_dataset(repo: str, *, name: str, split: str, revision: str) -> Dataset:
    """Download one split at one commit."""
    file = f"{name}/{split}-00000-of-00001.parquet"
    return Dataset(hf_hub_download(repo, file, repo_type="dataset", revision=revision))
