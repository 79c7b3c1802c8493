"""The toy model and dataset that the local Hub ships, and the evaluator that measures them."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from localcloud.toy import evaluate
from tokenizers import Tokenizer

TOY = Path(evaluate.__file__).parent
HUB = TOY / "hub"
INSTRUCT = HUB / "models" / "meta-llama" / "Llama-3.1-8B-Instruct"
BASE = HUB / "models" / "meta-llama" / "Llama-3.1-8B"
GSM8K = HUB / "datasets" / "openai" / "gsm8k" / "main"
TEST_SPLIT = GSM8K / "test-00000-of-00001.parquet"


def rows(split: str) -> list[dict[str, str]]:
    table: list[dict[str, str]] = pq.read_table(GSM8K / f"{split}-00000-of-00001.parquet").to_pylist()
    return table


def test_the_listing_names_every_folder_there_is() -> None:
    repos = json.loads((HUB / "hub.json").read_text(encoding="utf-8"))["repos"]
    folders = {str(path.relative_to(HUB)) for path in HUB.glob("*/*/*")}
    assert {repo["path"] for repo in repos} == folders
    assert {repo["id"] for repo in repos if repo["gated"]} == {
        "meta-llama/Llama-3.1-8B-Instruct",
        "meta-llama/Llama-3.1-8B",
    }


def test_there_are_as_many_training_rows_as_the_rehearsal_uses() -> None:
    assert (len(rows("train")), len(rows("test"))) == (64, 16)


@pytest.mark.parametrize("split", ["train", "test"])
def test_every_row_has_gsm8ks_format_and_a_right_answer(split: str) -> None:
    for row in rows(split):
        assert set(row) == {"question", "answer"}
        working = re.search(r"<<(\d)([+-])(\d)=(\d+)>>\d+ \w+\.\n#### (\d+)$", row["answer"])
        assert working, row
        a, sign, b, result, final = working.groups()
        assert int(result) == int(final) == int(a) + int(b) * (1 if sign == "+" else -1)


def test_the_weights_are_those_that_the_configuration_describes() -> None:
    config = json.loads((INSTRUCT / "config.json").read_text(encoding="utf-8"))
    weights = evaluate.read_safetensors(INSTRUCT / "model.safetensors")
    assert sum(tensor.size for tensor in weights.values()) == 426_624
    assert len(weights) == 3 + 9 * config["num_hidden_layers"]
    assert weights["model.embed_tokens.weight"].shape == (config["vocab_size"], config["hidden_size"])
    assert all(np.isfinite(tensor).all() for tensor in weights.values())


def test_the_tokenizer_has_llama_3s_special_tokens_where_the_configuration_says() -> None:
    config = json.loads((INSTRUCT / "config.json").read_text(encoding="utf-8"))
    tokenizer = Tokenizer.from_file(str(INSTRUCT / "tokenizer.json"))
    assert tokenizer.token_to_id("<|begin_of_text|>") == config["bos_token_id"]
    assert tokenizer.token_to_id("<|eot_id|>") == config["eos_token_id"]
    assert tokenizer.token_to_id("<|finetune_right_pad_id|>") == config["pad_token_id"]
    for token in ("<|start_header_id|>", "<|end_header_id|>", "<reasoning>", "</answer>"):
        assert tokenizer.encode(token, add_special_tokens=False).ids == [tokenizer.token_to_id(token)]
    assert tokenizer.get_vocab_size() <= config["vocab_size"]


def test_prompts_and_answers_fit_into_the_rehearsals_lengths() -> None:
    tokenizer = Tokenizer.from_file(str(INSTRUCT / "tokenizer.json"))
    for row in rows("train") + rows("test"):
        prompt = evaluate.chat_prompt(INSTRUCT, row["question"])
        assert prompt.startswith(
            "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n<start_of_turn>"
        )
        assert prompt.endswith("<|start_header_id|>assistant<|end_header_id|>\n\n")
        assert len(tokenizer.encode(prompt, add_special_tokens=False).ids) <= 64  # max_prefill_predict_length


def test_the_base_model_has_the_same_files_but_no_chat_template() -> None:
    names = {path.name for path in INSTRUCT.iterdir()}
    assert {path.name for path in BASE.iterdir()} == names - {"chat_template.jinja"}
    for path in BASE.iterdir():
        assert path.is_symlink()
        assert path.read_bytes() == (INSTRUCT / path.name).read_bytes()


def test_the_model_starts_nearly_ignorant_of_the_format() -> None:
    command = [sys.executable, str(TOY / "evaluate.py"), str(INSTRUCT), str(TEST_SPLIT), "--json"]
    done = subprocess.run(command, capture_output=True, check=True, text=True, timeout=120)
    assert json.loads(done.stdout) == {"correct": 1, "total": 16, "accuracy": 1 / 16}


def test_the_numpy_model_knows_the_right_answer_when_led_into_the_format() -> None:
    """A wrong rotation, scaling or mask would not add and subtract."""
    tokenizer = Tokenizer.from_file(str(INSTRUCT / "tokenizer.json"))
    llama = evaluate.Llama(INSTRUCT)
    right = 0
    for row in rows("test"):
        prompt = evaluate.chat_prompt(INSTRUCT, row["question"]) + "<reasoning>"
        ids = llama.greedy(
            tokenizer.encode(prompt, add_special_tokens=False).ids, {llama.config["eos_token_id"]}
        )
        worked = re.match(r"\d [+-] \d = (\d+)", tokenizer.decode(ids))
        right += worked is not None and float(worked[1]) == evaluate.expected(row["answer"])
    assert right >= 12


def test_the_order_of_tokens_changes_what_follows() -> None:
    llama = evaluate.Llama(INSTRUCT)
    assert not np.allclose(llama.logits([439, 5, 6, 7]), llama.logits([439, 6, 5, 7]), atol=1e-3)


@pytest.mark.parametrize(
    ("completion", "number"),
    [
        ("<reasoning>1 + 2 = 3</reasoning><answer>3</answer>", 3),
        ("<answer> 1,234.5 </answer>", 1234.5),
        ("<answer>1</answer> no, <answer>-2</answer>", -2),
        ("The answer is 3", None),
        ("<answer>three</answer>", None),
        ("<answer>3", None),
    ],
)
def test_only_a_number_between_answer_tags_counts(completion: str, number: float | None) -> None:
    assert evaluate.answered(completion) == number


def test_a_folder_without_a_chat_template_is_refused_with_the_way_out() -> None:
    with pytest.raises(FileNotFoundError, match=r"pass --tokenizer with the instruct model's folder"):
        evaluate.evaluate(BASE, TEST_SPLIT)
    assert evaluate.evaluate(BASE, TEST_SPLIT, tokenizer=INSTRUCT).total == 16
