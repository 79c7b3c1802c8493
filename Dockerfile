# syntax=docker/dockerfile:1.7
# `airflow` runs every Airflow service. `localcloud` exists for the compose profile `rehearsal` alone.

FROM apache/airflow:3.3.2-python3.12 AS airflow
# An environment of its own: the official image brings some eighty providers at the versions of Airflow's constraints
# file, and installing a lock file over them leaves a mixture that nobody has tested.
USER root
COPY requirements-image.lock /opt/nightshift/requirements-image.lock
RUN python -m venv /opt/nightshift/venv \
    && /opt/nightshift/venv/bin/pip install --no-cache-dir -r /opt/nightshift/requirements-image.lock \
    && /opt/nightshift/venv/bin/pip check \
    # The services may run under any user id of group 0 (AIRFLOW_UID).
    && mkdir -p /opt/airflow/logs \
    && chmod -R g+rwX /opt/airflow
ENV VIRTUAL_ENV=/opt/nightshift/venv \
    PATH=/opt/nightshift/venv/bin:${PATH}
USER airflow

FROM python:3.12.12-slim-bookworm AS localcloud
# A compiler and git: what the rehearsal's MaxText needs to be installed. sftp-server: what `scp` to a VM talks to.
RUN apt-get update \
    && apt-get install -y --no-install-recommends build-essential git openssh-client openssh-sftp-server procps \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/nightshift
COPY requirements-dev.lock ./
RUN pip install --no-cache-dir -r requirements-dev.lock
COPY pyproject.toml ./
COPY plugins ./plugins
COPY include ./include
ENV PYTHONPATH=/opt/nightshift/include:/opt/nightshift/plugins \
    PYTHONUNBUFFERED=1 \
    LOCALCLOUD_STATE=/var/lib/localcloud
ENTRYPOINT ["python", "-m", "localcloud"]
CMD ["up", "--foreground"]
