"""Greedy accuracy of a toy Llama on GSM8K rows, without MaxText, JAX or torch.

Usage: evaluate.py MODEL_DIR DATASET.parquet [--tokenizer DIR] [--json]

An opinion of its own on what a run produced: reads safetensors itself, computes Llama 3.1 in numpy, takes
the chat template and tokenizer of the folder, and extracts answers by its own rule. Needs numpy, tokenizers,
jinja2 and pyarrow. One row at a time and without a cache, so only good for toys.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pyarrow.parquet as pq
from tokenizers import Tokenizer

MAX_NEW_TOKENS = 32  # the toy's right answers have about 15
PROMPT_TEMPLATE = Path(__file__).with_name("gsm8k_rl.json")
TAGS = {
    "reasoning_start_token": "<reasoning>",
    "reasoning_end_token": "</reasoning>",
    "solution_start_token": "<answer>",
    "solution_end_token": "</answer>",
}

type Array = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True)
class Accuracy:
    """How many of the rows were answered with the right number between the answer tags."""

    correct: int
    total: int
    accuracy: float


def read_safetensors(path: Path) -> dict[str, Array]:
    """Return a file's tensors as float32. Raises ValueError for a type other than BF16, F16 and F32.

    Format: 8 bytes little-endian length, a JSON header with type, shape and offsets, the data.
    """
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        raw = data[begin:end]
        match entry["dtype"]:
            case "BF16":  # the upper half of a float32
                values = (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
            case "F16":
                values = np.frombuffer(raw, "<f2").astype(np.float32)
            case "F32":
                values = np.frombuffer(raw, "<f4")
            case other:
                raise ValueError(f"{path}: tensor {name} has type {other}; this reads BF16, F16 and F32")
        tensors[name] = values.reshape(entry["shape"])
    return tensors


class Llama:
    """Llama 3.1 in numpy.

    Raises FileNotFoundError when the folder has no config.json or no safetensors file.
    """

    def __init__(self, folder: Path) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text("utf-8"))
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(f"no *.safetensors in {folder}")
        self._weights: dict[str, Array] = {}
        for file in files:
            self._weights |= read_safetensors(file)

    def _frequencies(self) -> Array:
        """Return the rotary frequencies (head_dim / 2), scaled as `rope_type: llama3` says."""
        head, theta, scaling = self._head_dim, self._rope["rope_theta"], self._rope
        frequency = theta ** (-np.arange(0, head, 2) / head)
        if scaling.get("rope_type") != "llama3":
            return np.asarray(frequency, np.float32)
        old = scaling["original_max_position_embeddings"]
        low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
        turns = old * frequency / (2 * np.pi)  # in the original context
        blend = np.clip((turns - low) / (high - low), 0, 1)
        return np.asarray((1 - blend) * frequency / factor + blend * frequency, np.float32)

    @property
    def _head_dim(self) -> int:
        c = self.config
        return int(c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"])

    @property
    def _rope(self) -> dict[str, Any]:
        """The rotary settings: transformers 5 writes `rope_parameters`, earlier ones two separate keys."""
        if "rope_parameters" in self.config:
            parameters: dict[str, Any] = self.config["rope_parameters"]
            return parameters
        return {"rope_theta": self.config["rope_theta"], **(self.config.get("rope_scaling") or {})}

    def _norm(self, x: Array, name: str) -> Array:
        scale = np.sqrt(np.mean(x * x, -1, keepdims=True) + self.config["rms_norm_eps"])
        return np.asarray(x / scale * self._weights[f"{name}.weight"], np.float32)

    def logits(self, tokens: list[int]) -> Array:
        """Return the logits (vocabulary) of what follows `tokens`."""
        c, w, head = self.config, self._weights, self._head_dim
        heads, kv_heads, length = c["num_attention_heads"], c["num_key_value_heads"], len(tokens)
        angles = np.arange(length)[:, None] * self._frequencies()[None]
        cos, sin = (np.concatenate([f(angles)] * 2, -1)[:, None] for f in (np.cos, np.sin))

        def rotate(x: Array) -> Array:
            turned = np.concatenate([-x[..., head // 2 :], x[..., : head // 2]], -1)
            return np.asarray(x * cos + turned * sin, np.float32)

        mask = np.triu(np.full((length, length), -np.inf, np.float32), 1)
        x = w["model.embed_tokens.weight"][tokens]
        for layer in range(c["num_hidden_layers"]):
            at = f"model.layers.{layer}"
            y = self._norm(x, f"{at}.input_layernorm")
            q, k, v = (
                (y @ w[f"{at}.self_attn.{p}_proj.weight"].T).reshape(length, n, head)
                for p, n in (("q", heads), ("k", kv_heads), ("v", kv_heads))
            )
            q, k = rotate(q), rotate(k)
            k, v = (np.repeat(t, heads // kv_heads, 1) for t in (k, v))
            scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(head) + mask
            scores = np.exp(scores - scores.max(-1, keepdims=True))
            mixed = np.einsum("hqk,khd->qhd", scores / scores.sum(-1, keepdims=True), v)
            x = x + mixed.reshape(length, -1) @ w[f"{at}.self_attn.o_proj.weight"].T
            y = self._norm(x, f"{at}.post_attention_layernorm")
            gate = y @ w[f"{at}.mlp.gate_proj.weight"].T
            up = y @ w[f"{at}.mlp.up_proj.weight"].T
            x = x + (gate / (1 + np.exp(-gate)) * up) @ w[f"{at}.mlp.down_proj.weight"].T
        last = self._norm(x[-1], "model.norm")
        head_name = "model.embed_tokens.weight" if c.get("tie_word_embeddings") else "lm_head.weight"
        return np.asarray(w[head_name] @ last, np.float32)

    def greedy(self, prompt: list[int], ends: set[int]) -> list[int]:
        """Return the likeliest continuation, up to and without an end token."""
        made: list[int] = []
        while len(made) < MAX_NEW_TOKENS:
            token = int(self.logits(prompt + made).argmax())
            if token in ends:
                break
            made.append(token)
        return made


def chat_prompt(folder: Path, question: str) -> str:
    """Return the prompt that train_rl makes of a GSM8K question: MaxText's template inside the chat template.

    Raises FileNotFoundError when the folder has no chat template; a base model's tokenizer has none.
    """
    template = folder / "chat_template.jinja"
    if not template.is_file():
        raise FileNotFoundError(f"{template} is missing; pass --tokenizer with the instruct model's folder")
    settings = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    words = json.loads(PROMPT_TEMPLATE.read_text("utf-8"))
    user = words["TEMPLATE"].format(system_prompt=words["SYSTEM_PROMPT"].format(**TAGS), question=question)
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)  # noqa: S701  a prompt is no HTML
    return environment.from_string(template.read_text("utf-8")).render(
        messages=[{"role": "user", "content": user}],
        bos_token=settings["bos_token"],
        add_generation_prompt=True,
    )


def answered(completion: str) -> float | None:
    """Return the number in the completion's only or last pair of answer tags, if there is one."""
    found = re.findall(r"<answer>\s*(-?[\d,]*\.?\d+)\s*</answer>", completion)
    return float(found[-1].replace(",", "")) if found else None


def expected(answer: str) -> float:
    """Return the number after GSM8K's `####`. Raises ValueError when there is none."""
    _, mark, number = answer.rpartition("####")
    if not mark:
        raise ValueError(f"answer {answer!r} has no '####'")
    return float(number.replace(",", ""))


def evaluate(model: Path, dataset: Path, tokenizer: Path | None = None) -> Accuracy:
    """Answer every question of `dataset` (a GSM8K parquet file) greedily.

    :param tokenizer: the folder of tokenizer and chat template, where the model's own has no chat template.
    """
    folder = tokenizer or model
    encoder = Tokenizer.from_file(str(folder / "tokenizer.json"))
    llama = Llama(model)
    end = llama.config["eos_token_id"]
    ends = set(end) if isinstance(end, list) else {end}
    rows = pq.read_table(dataset).to_pylist()
    correct = 0
    for row in rows:
        prompt = encoder.encode(chat_prompt(folder, row["question"]), add_special_tokens=False).ids
        completion = encoder.decode(llama.greedy(prompt, ends), skip_special_tokens=True)
        correct += answered(completion) == expected(row["answer"])
    return Accuracy(correct, len(rows), correct / len(rows))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Greedy accuracy of a toy Llama on GSM8K rows.")
    parser.add_argument("model", type=Path, help="a folder with config.json and *.safetensors")
    parser.add_argument("dataset", type=Path, help="a parquet file with `question` and `answer`")
    parser.add_argument("--tokenizer", type=Path, help="a folder with tokenizer and chat template")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    result = evaluate(arguments.model, arguments.dataset, arguments.tokenizer)
    text = json.dumps(asdict(result)) if arguments.json else f"{result.correct}/{result.total} correct"
    sys.stdout.write(f"{text}\n")


if __name__ == "__main__":
    main()
