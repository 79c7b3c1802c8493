"""The only code that imports Airflow: hooks, operators, triggers, links, the DAG factory."""
