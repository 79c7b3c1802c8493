"""From the VM to Cloud Storage: uploader, manifest, verification."""
