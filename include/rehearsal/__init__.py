"""The rehearsal: Airflow and the local cloud side by side on this machine, and one run of the rehearsal recipe."""
