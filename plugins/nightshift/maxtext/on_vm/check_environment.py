"""Runs on the TPU VM: can MaxText be imported, and does it see its chips? Arguments: version, chips."""

import importlib
import importlib.metadata
import os
import sys

MODULES = [
    "maxtext.checkpoint_conversion.to_maxtext",
    "maxtext.trainers.post_train.rl.train_rl",
    "maxtext.checkpoint_conversion.to_huggingface",
]


def fail(code: str, message: str) -> None:
    """End with a message that the Airflow side recognises."""
    sys.exit(f"nightshift: error[{code}]: {message}")


def main() -> None:
    """Check version, imports and devices."""
    wanted, chips = sys.argv[1], int(sys.argv[2])
    version = importlib.metadata.version("maxtext")
    if version != wanted:
        fail("wrong_version", f"MaxText {version} is installed, the recipe asks for {wanted}")
    for module in MODULES:
        importlib.import_module(module)
    jax = importlib.import_module("jax")
    devices = jax.devices()
    platform = devices[0].platform
    sys.stdout.write(
        f"nightshift: MaxText {version}, JAX {jax.__version__}, "
        f"{len(devices)} {platform} device(s): {devices[0]}\n"
    )
    if platform == "tpu" and len(devices) != chips:
        fail("wrong_devices", f"JAX sees {len(devices)} TPU chips, the recipe expects {chips}")
    # Without libtpu JAX falls back to the CPU and says so in a log line only; a rehearsal asks for the CPU.
    if platform != "tpu" and os.environ.get("JAX_PLATFORMS") != "cpu":
        fail("wrong_devices", f"JAX sees no TPU, only {platform}: libtpu is missing or the chips are in use")


if __name__ == "__main__":
    main()
