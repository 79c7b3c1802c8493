"""Runs on the TPU VM: download one commit of a model. Arguments: repo, commit, folder."""

import sys

from huggingface_hub import snapshot_download

# The original PyTorch files of Meta's repositories double the download and are read by nothing.
NOT_NEEDED = ["original/*", "*.pth", "*.gguf", "*.onnx", "*.msgpack", "*.h5"]


def main() -> None:
    """Download the snapshot; the token comes from HF_TOKEN."""
    repo, commit, folder = sys.argv[1:]
    snapshot_download(repo, revision=commit, local_dir=folder, ignore_patterns=NOT_NEEDED)
    sys.stdout.write(f"nightshift: {repo} at {commit} is in {folder}\n")


if __name__ == "__main__":
    main()
