"""docker-compose.yaml against the official schema, Airflow's own list of options, and its own comments."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import airflow
import jsonschema
import pytest
import yaml
from airflow.sdk import Connection
from localcloud.hub.tokens import READ_TOKEN
from localcloud.settings import DEFAULT_PORT, PROJECT
from nightshift import names

ROOT = Path(__file__).parents[2]
SCHEMA = Path(__file__).parent / "data" / "compose-spec.json"
COMPOSE_FILE = ROOT / "docker-compose.yaml"

#: ${NAME}, ${NAME:-default} and ${NAME:?message}; $$ is a plain dollar sign.
VARIABLE = re.compile(r"\$\$|\$\{(?P<name>\w+)(?::(?P<kind>[-?])(?P<text>[^}]*))?\}")
AIRFLOW_SERVICES = {"api-server", "scheduler", "dag-processor", "triggerer"}
ONE_SHOT = {"init"}


def read_env_file(path: Path) -> dict[str, str]:
    """Return the assignments of a Compose .env file, quotes removed."""
    found = {}
    for line in path.read_text().splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found[name] = value.removeprefix("'").removesuffix("'")
    return found


def interpolate(value: Any, env: dict[str, str]) -> Any:
    """Return `value` with its variables replaced as Compose does it; a required one must not be empty."""

    def replace(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        set_to = env.get(match["name"], "")
        if match["kind"] == "?" and not set_to:
            pytest.fail(f"{match['name']} is required and empty: {match['text']}")
        return set_to or match["text"] or ""

    match value:
        case str():
            return VARIABLE.sub(replace, value)
        case dict():
            return {key: interpolate(item, env) for key, item in value.items()}
        case list():
            return [interpolate(item, env) for item in value]
        case _:
            return value


@pytest.fixture(scope="module")
def raw() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(COMPOSE_FILE.read_text())
    return document


@pytest.fixture(scope="module")
def filled_env() -> dict[str, str]:
    return {name: value or "0" * 64 for name, value in read_env_file(ROOT / ".env.example").items()}


@pytest.fixture(scope="module")
def compose(raw: dict[str, Any], filled_env: dict[str, str]) -> dict[str, Any]:
    document: dict[str, Any] = interpolate(raw, filled_env)
    return document


@pytest.fixture(scope="module")
def services(compose: dict[str, Any]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = compose["services"]
    return found


@pytest.fixture(scope="module")
def validator() -> jsonschema.protocols.Validator:
    schema = json.loads(SCHEMA.read_text())
    cls = jsonschema.validators.validator_for(schema)
    cls.check_schema(schema)
    return cls(schema)


def test_the_file_satisfies_the_compose_specification(
    raw: dict[str, Any], compose: dict[str, Any], validator: jsonschema.protocols.Validator
) -> None:
    assert [e.message for e in validator.iter_errors(raw)] == []
    assert [e.message for e in validator.iter_errors(compose)] == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("services", "scheduler", "helthcheck"), {"test": ["CMD", "true"]}),
        (("services", "scheduler", "depends_on", "postgres", "condition"), "service_ready"),
        (("services", "scheduler", "healthcheck", "retry"), 3),
        (("servces",), {}),
    ],
)
def test_the_schema_refuses_a_misspelt_key_or_value(
    compose: dict[str, Any], validator: jsonschema.protocols.Validator, path: tuple[str, ...], value: object
) -> None:
    broken = json.loads(json.dumps(compose))
    *parents, last = path
    node = broken
    for parent in parents:
        node = node[parent]
    node[last] = value
    assert not validator.is_valid(broken)


def test_the_services_of_an_airflow_3_installation_are_all_there(services: dict[str, dict[str, Any]]) -> None:
    assert set(services) >= AIRFLOW_SERVICES | ONE_SHOT | {"postgres"}
    commands = {name: services[name]["command"] for name in AIRFLOW_SERVICES}
    assert commands == {name: [name] for name in AIRFLOW_SERVICES}
    assert services["scheduler"]["environment"]["AIRFLOW__CORE__EXECUTOR"] == "LocalExecutor"


def test_every_dependency_and_shared_network_names_a_service_that_starts_with_it(
    services: dict[str, dict[str, Any]],
) -> None:
    for name, service in services.items():
        targets = set(service.get("depends_on", {}))
        mode = service.get("network_mode", "")
        if mode.startswith("service:"):
            targets.add(mode.removeprefix("service:"))
        for target in targets:
            assert target in services, f"{name} depends on {target}, which does not exist"
            assert "profiles" not in services[target], (
                f"{name} depends on {target}, which is behind a profile"
            )


def test_a_dependency_waits_for_a_state_that_its_target_can_reach(
    services: dict[str, dict[str, Any]],
) -> None:
    for name, service in services.items():
        for target, how in service.get("depends_on", {}).items():
            if how["condition"] == "service_healthy":
                assert "healthcheck" in services[target], (
                    f"{name} waits for {target}, which has no healthcheck"
                )
            elif how["condition"] == "service_completed_successfully":
                assert services[target]["restart"] == "no", f"{target} never completes: it restarts"


def test_dependencies_have_no_cycle(services: dict[str, dict[str, Any]]) -> None:
    left = {name: set(service.get("depends_on", {})) for name, service in services.items()}
    while left:
        free = {name for name, needs in left.items() if not needs & set(left)}
        assert free, f"these wait for each other: {sorted(left)}"
        left = {name: needs for name, needs in left.items() if name not in free}


def test_named_volumes_are_declared_and_bind_mounts_exist(compose: dict[str, Any]) -> None:
    used = set()
    for service in compose["services"].values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith(("/", ".")):
                assert (ROOT / source).exists(), f"{source} is mounted but does not exist"
            else:
                used.add(source)
    assert used == set(compose["volumes"])


def test_code_is_mounted_read_only_into_every_airflow_service(services: dict[str, dict[str, Any]]) -> None:
    for name in AIRFLOW_SERVICES | ONE_SHOT:
        for folder in ("dags", "plugins", "include"):
            assert f"./{folder}:/opt/airflow/{folder}:ro" in services[name]["volumes"], name


def test_every_image_is_pinned_and_ours_are_never_pulled(services: dict[str, dict[str, Any]]) -> None:
    built = {service["image"] for service in services.values() if "build" in service}
    for name, service in services.items():
        tag = service["image"].rpartition(":")[2]
        assert re.search(r"\d+\.\d+", tag), f"{name}: {service['image']} is not pinned"
        if service["image"] in built:
            assert service["pull_policy"] == ("build" if "build" in service else "never"), name


def test_ports_are_published_on_loopback_only(services: dict[str, dict[str, Any]]) -> None:
    ports = {name: service["ports"] for name, service in services.items() if "ports" in service}
    assert ports == {"network": ["127.0.0.1:8080:8080"]}


def test_every_long_running_service_has_a_healthcheck_and_comes_back(
    services: dict[str, dict[str, Any]],
) -> None:
    for name, service in services.items():
        if name in ONE_SHOT:
            assert service["restart"] == "no"
            continue
        assert service["restart"] == "unless-stopped", name
        test = service["healthcheck"]["test"]
        assert test[0] == "CMD", f"{name}: {test}"
        assert test[1:] != ["true"], f"{name}: a check that cannot fail"


def airflow_options() -> set[tuple[str, str]]:
    """Return (section, option) of Airflow's own configuration description."""
    config = yaml.safe_load((Path(airflow.__path__[0]) / "config_templates" / "config.yml").read_text())
    return {(section, option) for section, body in config.items() for option in body["options"]}


def test_every_airflow_variable_names_an_option_of_this_airflow(services: dict[str, dict[str, Any]]) -> None:
    known = airflow_options()
    assert ("core", "executor") in known
    checked = 0
    for name, service in services.items():
        for variable in service.get("environment", {}):
            if variable.startswith("AIRFLOW__"):
                _, section, option = variable.lower().split("__", 2)
                assert (section, option) in known, (
                    f"{name}: {variable} is no option of Airflow {airflow.__version__}"
                )
                checked += 1
    assert checked > len(AIRFLOW_SERVICES)


def test_every_component_shares_the_secrets_that_sign_and_encrypt(
    services: dict[str, dict[str, Any]],
) -> None:
    for option in (
        "AIRFLOW__CORE__FERNET_KEY",
        "AIRFLOW__API_AUTH__JWT_SECRET",
        "AIRFLOW__API__SECRET_KEY",
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN",
    ):
        assert len({services[name]["environment"][option] for name in AIRFLOW_SERVICES | ONE_SHOT}) == 1, (
            option
        )


def test_the_workers_reach_the_execution_api_through_the_network_that_they_share(
    services: dict[str, dict[str, Any]],
) -> None:
    for name in AIRFLOW_SERVICES:
        assert services[name]["network_mode"] == "service:network"
        assert (
            services[name]["environment"]["AIRFLOW__CORE__EXECUTION_API_SERVER_URL"]
            == "http://127.0.0.1:8080/execution/"
        )


@pytest.mark.parametrize(
    "conn_id", [names.GOOGLE_CONNECTION, names.SSH_CONNECTION, names.HUB_CONNECTION, names.HUB_VM_CONNECTION]
)
def test_connections_go_where_they_are_used_and_nowhere_else(
    services: dict[str, dict[str, Any]], conn_id: str
) -> None:
    variable = f"AIRFLOW_CONN_{conn_id.upper()}"
    holders = {name for name, service in services.items() if variable in service.get("environment", {})}
    assert holders == {"api-server", "scheduler", "triggerer"}


def test_no_secret_is_written_in_the_file(raw: dict[str, Any]) -> None:
    secret = re.compile(r"SECRET|PASSWORD|FERNET|AIRFLOW_CONN_|SQL_ALCHEMY_CONN")
    for name, service in raw["services"].items():
        for variable, value in service.get("environment", {}).items():
            if secret.search(variable):
                assert re.search(r"\$\{\w+:\?", value), (
                    f"{name}: {variable} must come from .env and be required"
                )


def test_no_secret_is_an_argument_of_a_command(raw: dict[str, Any]) -> None:
    for name, service in raw["services"].items():
        line = "\n".join(service.get("command", []))
        assert not re.search(r"--password|-p ", line), f"{name} would show a password in the process list"


def test_the_example_env_file_names_every_variable_and_nothing_else(filled_env: dict[str, str]) -> None:
    used = {match["name"] for match in VARIABLE.finditer(COMPOSE_FILE.read_text()) if match["name"]}
    commented = set(re.findall(r"^#(\w+)=", (ROOT / ".env.example").read_text(), re.MULTILINE))
    assert set(filled_env) | commented == used


def connections(text: str) -> dict[str, dict[str, Any]]:
    found = re.findall(r"^#?AIRFLOW_CONN_(\w+)='(.*)'$", text, re.MULTILINE)
    assert found
    return {name.lower(): json.loads(value) for name, value in found}


def test_airflow_reads_the_example_connections() -> None:
    for conn_id, value in read_env_file(ROOT / ".env.example").items():
        if conn_id.startswith("AIRFLOW_CONN_"):
            name = conn_id.removeprefix("AIRFLOW_CONN_").lower()
            connection = Connection.from_json(value, conn_id=name)
            assert connection.conn_type == json.loads(value)["conn_type"]
            if name == names.SSH_CONNECTION:
                assert connection.extra_dejson["private_key"].count("\n") == 3


def test_the_rehearsal_connections_point_at_the_local_cloud() -> None:
    commented = "\n".join(
        line for line in (ROOT / ".env.example").read_text().splitlines() if line.startswith("#AIRFLOW_CONN_")
    )
    found = connections(commented)
    google = found[names.GOOGLE_CONNECTION]["extra"]
    assert google["project"] == PROJECT
    assert google["compute_endpoint"] == f"http://127.0.0.1:{DEFAULT_PORT}"
    assert google["storage_endpoint"] == f"http://127.0.0.1:{DEFAULT_PORT + 1}"
    assert found[names.HUB_CONNECTION]["host"] == f"http://127.0.0.1:{DEFAULT_PORT + 2}"
    assert found[names.HUB_VM_CONNECTION]["password"] == READ_TOKEN


def test_the_local_cloud_runs_in_the_rehearsal_only_and_within_reach_of_airflow(
    services: dict[str, dict[str, Any]],
) -> None:
    behind_profile = {name for name, service in services.items() if "profiles" in service}
    assert behind_profile == {"localcloud"}
    assert services["localcloud"]["profiles"] == ["rehearsal"]
    assert services["localcloud"]["network_mode"] == services["scheduler"]["network_mode"]
    assert services["localcloud"]["cap_add"] == ["SYS_ADMIN"]
    assert not any(service.get("privileged") for service in services.values())


def dockerfile_stages() -> dict[str, list[str]]:
    stages: dict[str, list[str]] = {}
    current: list[str] = []
    for line in (ROOT / "Dockerfile").read_text().splitlines():
        if match := re.fullmatch(r"FROM (\S+) AS (\S+)", line):
            current = stages.setdefault(match[2], [match[1]])
        elif line.startswith("COPY "):
            current += [source for source in line.split()[1:-1] if not source.startswith("--")]
    return stages


def test_every_built_service_names_a_stage_whose_base_is_pinned(services: dict[str, dict[str, Any]]) -> None:
    stages = dockerfile_stages()
    targets = {service["build"]["target"] for service in services.values() if "build" in service}
    assert targets == set(stages)
    for base, *_ in stages.values():
        assert re.search(r":\d+\.\d+\.\d+-", base), base


def test_the_image_is_the_official_one_of_the_locked_airflow() -> None:
    locked = re.search(r"^apache-airflow==(\S+)$", (ROOT / "requirements.lock").read_text(), re.MULTILINE)
    assert locked
    assert dockerfile_stages()["airflow"][0] == f"apache/airflow:{locked[1]}-python3.12"


def test_what_the_dockerfile_copies_exists_and_is_not_ignored() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {source.removeprefix("./") for _, *sources in dockerfile_stages().values() for source in sources}
    assert copied == allowed
    for source in copied:
        assert (ROOT / source).exists(), source


def locked_versions(name: str) -> dict[str, str]:
    return dict(re.findall(r"^([a-z0-9._-]+)==(\S+)$", (ROOT / name).read_text(), re.MULTILINE))


def test_the_image_installs_the_locked_versions_and_only_adds_to_them() -> None:
    product, image = locked_versions("requirements.lock"), locked_versions("requirements-image.lock")
    assert len(product) > 100
    assert {name: image.get(name) for name in product} == product
    assert {"apache-airflow-providers-fab", "psycopg2-binary", "asyncpg"} <= set(image) - set(product)
