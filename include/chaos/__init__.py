"""The fault matrix: every fault at every step where it can strike, with real Airflow processes and the local cloud."""
