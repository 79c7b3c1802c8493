from nightshift import names
from nightshift.export import commands

LAYOUT = names.VmLayout("llama3.1-8b-Instruct", "a" * 40, "0.2.3", "run-1")
BUCKET = names.BucketLayout("bucket", "some/folder", "run-1")


def test_the_upload_names_source_target_and_manifest() -> None:
    assert commands.upload_command(LAYOUT, BUCKET) == (
        "maxtext_venv/bin/python3 -u ~/.nightshift/uploader.py"
        " --source /dev/shm/llama3.1-8b-Instruct/hf-trained/run-1 --bucket bucket"
        " --prefix some/folder/run/run-1/model --manifest some/folder/run/run-1/manifest.json --run run-1"
    )


def test_the_probe_writes_beside_the_model_and_not_into_it() -> None:
    command = commands.probe_command(LAYOUT, BUCKET)
    assert command.endswith("--bucket bucket --prefix some/folder/run/run-1 --probe")
    assert not BUCKET.run_prefix.startswith(BUCKET.model_prefix)


def test_the_file_for_the_vm_is_a_program() -> None:
    assert commands.uploader().startswith(b"#!/usr/bin/env python3\n")
