"""Nightshift: nightly reinforcement-learning post-training with MaxText on Cloud TPU VMs."""
