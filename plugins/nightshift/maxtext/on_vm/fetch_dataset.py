"""Runs on the TPU VM: write splits of one commit of a dataset as Parquet files.

Arguments: repo, subset, commit, folder, and for each split its name and the least number of rows (name=rows).
train_rl can be told a dataset's name but not its revision; it can be told files, and these hold the revision's
rows.
"""

import sys

import datasets  # type: ignore[import-not-found]  # MaxText's environment, on the VM


def main() -> None:
    """Write `<folder>/<split>.parquet`; the token, where one is needed, comes from HF_TOKEN."""
    repo, subset, commit, folder, *splits = sys.argv[1:]
    for item in splits:
        split, _, least = item.partition("=")
        data = datasets.load_dataset(repo, name=subset, split=split, revision=commit)
        sys.stdout.write(f"nightshift: {repo} at {commit} has {len(data)} rows in {split}\n")
        if len(data) < int(least):
            sys.exit(
                f"nightshift: error[too_little_data]: {repo} has {len(data)} rows in split {split}, "
                f"the recipe needs {least}"
            )
        data.to_parquet(f"{folder}/{split}.parquet")


if __name__ == "__main__":
    main()
