"""docs/localcloud.md names everything that there is."""

import re
from pathlib import Path

from localcloud.compute import service
from localcloud.compute.faults import ORDER

PAGE = (Path(__file__).parent.parent.parent / "docs" / "localcloud.md").read_text()


def test_every_method_is_documented() -> None:
    methods = re.findall(r'"compute\.(\w+\.\w+)": self\.', Path(service.__file__).read_text())
    assert len(methods) > 20
    assert [method for method in methods if f"`{method}`" not in PAGE] == []


def test_every_fault_and_its_fields_are_documented() -> None:
    schema = ORDER.json_schema()
    kinds = {kind: ref.rsplit("/", 1)[-1] for kind, ref in schema["discriminator"]["mapping"].items()}
    for kind, model in kinds.items():
        (row,) = [line for line in PAGE.splitlines() if line.startswith(f"| `{kind}` |")]
        fields = set(schema["$defs"][model]["properties"]) - {"on", "times", "zone", "project"}
        assert [name for name in fields if f"`{name}`" not in row] == [], kind
