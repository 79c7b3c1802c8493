"""The comparison of weights on the VM, on the toy model's own files: what moved is told, what is broken is caught."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nightshift.maxtext
import numpy as np
import pytest

from tests.maxtext.model_files import ROUNDED, TELLING, Model, Stored

if TYPE_CHECKING:
    from collections.abc import Iterable

PROGRAM = Path(nightshift.maxtext.__file__).parent / "on_vm" / "compare_weights.py"
SUMMARY = re.compile(r"^nightshift: weights (\{.*\})$", re.MULTILINE)


@pytest.fixture
def source(tmp_path: Path) -> Model:
    return Model.copy(tmp_path / "source")


@pytest.fixture
def export(tmp_path: Path) -> Model:
    """A copy of the toy, to be changed."""
    return Model.copy(tmp_path / "export")


def run(
    source: Model, export: Model, dtype: str = "bfloat16", *more: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(PROGRAM), str(source.path), str(export.path), dtype, *more],
        capture_output=True,
        text=True,
        check=False,
    )


def figures(source: Model, export: Model, dtype: str = "bfloat16") -> dict[str, Any]:
    ran = run(source, export, dtype)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = SUMMARY.findall(ran.stdout)
    assert len(found) == 1, ran.stdout
    summary: dict[str, Any] = json.loads(found[0])
    return summary


def failure(source: Model, export: Model, dtype: str = "bfloat16") -> str:
    ran = run(source, export, dtype)
    assert ran.returncode == 1, ran.stdout
    assert ran.stderr.startswith("nightshift: error["), ran.stderr
    return ran.stderr.removeprefix("nightshift: ").strip()


def values(tensor: Stored) -> np.ndarray:
    return np.frombuffer(tensor.as_float32().data, "<f4").astype(np.float64)


def norm(arrays: Iterable[np.ndarray]) -> float:
    return math.sqrt(sum(float(array @ array) for array in arrays))


def test_what_moved_is_measured_as_double_precision_says(source: Model, export: Model) -> None:
    export.change(TELLING, every=10)
    export.change("model.norm.weight", by=3, every=50)
    old, new = source.tensors(), export.tensors()
    changes = {name: values(new[name]) - values(old[name]) for name in old}
    found = figures(source, export)
    assert found["tensors"] == len(old)
    assert found["tensors_moved"] == 2
    assert found["values"] == sum(change.size for change in changes.values())
    assert found["values_moved"] == sum(np.count_nonzero(change) for change in changes.values())
    expected = norm(changes.values()) / norm(values(tensor) for tensor in old.values())
    assert found["relative_norm"] == pytest.approx(expected, rel=1e-3)
    assert found["max_abs"] == pytest.approx(
        max(np.abs(change).max() for change in changes.values()), rel=1e-3
    )
    assert {entry["name"] for entry in found["most"]} == {TELLING, "model.norm.weight"}
    for entry in found["most"]:
        name = entry["name"]
        assert entry["values_moved"] == np.count_nonzero(changes[name])
        own = norm([changes[name]]) / norm([values(old[name])])
        assert entry["relative_norm"] == pytest.approx(own, rel=1e-3)
        assert entry["max_abs"] == pytest.approx(np.abs(changes[name]).max(), rel=1e-3)


def test_a_report_of_every_tensor_is_written_where_it_is_asked_for(
    source: Model, export: Model, tmp_path: Path
) -> None:
    export.change(TELLING)
    assert run(source, export, "bfloat16", str(tmp_path / "weights.json")).returncode == 0
    report = json.loads((tmp_path / "weights.json").read_text(encoding="utf-8"))
    assert report["each"].keys() == source.tensors().keys()
    assert report["tensors_moved"] == 1
    assert [name for name, tensor in report["each"].items() if tensor["values_moved"]] == [TELLING]


def test_a_single_value_is_enough_to_have_moved(source: Model, export: Model) -> None:
    export.change(TELLING, every=10**9)
    assert figures(source, export)["values_moved"] == 1


def test_a_model_larger_than_one_piece_is_compared_to_its_end(source: Model, export: Model) -> None:
    rows = 1000
    large = Stored("BF16", (rows, 1024), np.full(rows * 1024, 0x3F80, "<u2").tobytes())  # four pieces of ones
    changed = large.bits()
    changed[-1] = 0x4000  # the last value is two
    for model, tensor in ((source, large), (export, large.with_bits(changed))):
        model.write(model.tensors() | {TELLING: tensor})
    found = figures(source, export)
    assert (found["values_moved"], found["max_abs"]) == (1, 1.0)
    assert found["most"][0]["relative_norm"] == pytest.approx(1 / math.sqrt(rows * 1024), rel=1e-3)


def test_an_unmoved_model_fails_with_the_usual_cause(source: Model, export: Model) -> None:
    ran = run(source, export)
    assert ran.returncode == 1
    assert ran.stderr.startswith("nightshift: error[unmoved]: no value of ")
    assert "learning_rate_schedule_steps" in ran.stderr
    assert json.loads(SUMMARY.findall(ran.stdout)[0])["values_moved"] == 0


def test_what_the_conversions_round_does_not_count_as_moved(source: Model, export: Model) -> None:
    tensors = source.tensors()
    # As to_maxtext and to_huggingface do to query projections: by 1/sqrt(head_dim) and back, rounded both times.
    back = values(tensors[ROUNDED]).astype(np.float32)
    for factor in (np.float32(1 / math.sqrt(32)), np.float32(math.sqrt(32))):
        bits = (back * factor).view(np.uint32)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
        back = bits.view(np.float32)
    export.write(tensors | {ROUNDED: tensors[ROUNDED].with_bits(back.view(np.uint32) >> 16)})
    assert export.tensors()[ROUNDED] != tensors[ROUNDED], "the toy's query projections survive the rounding"
    assert failure(source, export).startswith("error[unmoved]: ")


def test_single_precision_is_compared_with_what_the_source_means(source: Model, export: Model) -> None:
    wide = {name: tensor.as_float32() for name, tensor in source.tensors().items()}
    export.write(wide)
    assert failure(source, export, "float32").startswith("error[unmoved]: ")
    moved = np.frombuffer(wide[TELLING].data, "<f4").copy()
    moved[0] = np.nextafter(moved[0], np.float32(2.0))  # less than bfloat16 could tell
    export.write(wide | {TELLING: Stored("F32", wide[TELLING].shape, moved.tobytes())})
    assert figures(source, export, "float32")["values_moved"] == 1


def test_a_wider_source_is_rounded_as_the_export_is(source: Model, export: Model) -> None:
    exact = source.tensors()
    wide = {name: tensor.as_float32() for name, tensor in exact.items()}
    shifted = np.frombuffer(wide[TELLING].data, "<u4") + np.uint32(
        0x7FFF
    )  # just below half a unit: rounds down
    source.write(wide | {TELLING: Stored("F32", wide[TELLING].shape, shifted.tobytes())})
    assert failure(source, export).startswith("error[unmoved]: ")
    export.change(TELLING)
    assert figures(source, export)["tensors_moved"] == 1


@pytest.mark.parametrize(("bits", "what"), [(0x7FC0, "nan"), (0x7F80, "inf"), (0xFF80, "-inf")])
def test_a_value_that_is_no_number_is_caught(source: Model, export: Model, bits: int, what: str) -> None:
    export.change(ROUNDED)
    tensors = export.tensors()
    broken = tensors[TELLING].bits()
    broken[5] = bits
    export.write(tensors | {TELLING: tensors[TELLING].with_bits(broken)})
    assert str(float(values(export.tensors()[TELLING])[5])) == what
    said = failure(source, export)
    assert said.startswith("error[bad_export]: 1 values are NaN or infinite, in 1 of ")
    assert TELLING in said


def test_sharded_models_are_compared_whatever_their_distribution(source: Model, export: Model) -> None:
    export.change(TELLING)
    source.shard(2)
    export.shard(3)
    assert figures(source, export)["tensors_moved"] == 1


def test_a_missing_shard_is_caught(source: Model, export: Model) -> None:
    export.change(TELLING)
    second = export.shard(3)[1]
    (export.path / second).unlink()
    said = failure(source, export)
    assert said.startswith("error[bad_export]: ")
    assert f"{second} is missing, model.safetensors.index.json names it" in said
    assert " tensors are missing: " in said


def test_a_shard_too_many_is_caught(source: Model, export: Model) -> None:
    export.change(TELLING)
    export.shard(2)
    left_over = "model-00003-of-00003.safetensors"
    (export.path / left_over).write_bytes((export.path / "model-00002-of-00002.safetensors").read_bytes())
    said = failure(source, export)
    assert f"{left_over} is not in model.safetensors.index.json" in said
    assert f"is in model-00002-of-00002.safetensors and in {left_over}" in said


def test_a_shard_that_is_cut_off_is_caught(source: Model, export: Model) -> None:
    export.change(TELLING)
    path = export.path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert "its header describes " in failure(source, export)
    path.write_bytes(b"abc")
    assert "3 bytes are no safetensors file" in failure(source, export)


def test_a_wrong_data_type_is_caught(source: Model, export: Model) -> None:
    tensors = export.tensors()
    export.write(tensors | {TELLING: tensors[TELLING].as_float32()})
    assert failure(source, export) == f"error[bad_export]: {TELLING} is F32, not BF16"


def test_a_wrong_shape_is_caught(source: Model, export: Model) -> None:
    tensors = export.tensors()
    rows, columns = tensors[TELLING].shape
    export.write(tensors | {TELLING: Stored("BF16", (columns, rows), tensors[TELLING].data)})
    assert f"{TELLING} has shape [{columns}, {rows}], the source model's has [{rows}, {columns}]" in failure(
        source, export
    )


def test_missing_and_foreign_tensors_are_caught_together(source: Model, export: Model) -> None:
    tensors = export.tensors()
    export.write({name.replace("k_proj", "key"): tensor for name, tensor in tensors.items()})
    said = failure(source, export)
    assert f"2 of {len(tensors)} tensors are missing: {TELLING}, " in said
    assert "2 tensors are not the source model's: model.layers.0.self_attn.key.weight, " in said


def test_a_tied_output_layer_may_be_left_out(source: Model, export: Model) -> None:
    export.change(TELLING)
    tensors = export.tensors()
    del tensors["lm_head.weight"]
    export.write(tensors)
    assert "1 of " in failure(source, export)
    source.configure(tie_word_embeddings=True)
    assert figures(source, export)["tensors"] == len(tensors)


def test_a_text_model_out_of_a_multimodal_one_is_compared_under_both_ways_of_naming(
    source: Model, export: Model
) -> None:
    export.change(TELLING)
    source.configure(vision_config={"hidden_size": 8}, text_config={"tie_word_embeddings": False})
    tensors = source.tensors()
    pixels = Stored("BF16", (2,), b"\0\0\0\0")
    source.write(
        {f"language_model.{name}": tensor for name, tensor in tensors.items()}
        | {"vision_tower.patch.weight": pixels}
    )
    export.write({
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in export.tensors().items()
    })
    assert figures(source, export)["tensors"] == len(tensors)
    export.write({"something.else": pixels})
    assert "no tensor has the name of one of the source model's" in failure(source, export)


def test_a_source_without_safetensors_cannot_be_compared(source: Model, export: Model) -> None:
    (source.path / "model.safetensors").unlink()
    assert "the source model has no safetensors files" in failure(source, export)


def test_files_of_the_source_that_nothing_loads_are_not_looked_at(source: Model, export: Model) -> None:
    export.change(TELLING)
    source.shard(2)
    (source.path / "consolidated.safetensors").write_bytes(b"another format's weights")
    assert figures(source, export)["tensors_moved"] == 1
