"""Makes the toy model and dataset of the local Hub.

Usage, in an environment with the packages of include/vm/rehearsal-cpu.lock, about a minute on two CPU cores:

    JAX_PLATFORMS=cpu python include/localcloud/toy/make_toy.py OUTPUT_DIR [--seed 0]

Writes OUTPUT_DIR/{models,datasets}/<owner>/<name> as `hub/` here has them; the same seed gives the same rows and
tokenizer everywhere, and the same weights on the same kind of CPU. The fine-tuning shows the model answers of which
only a part has the format that GRPO rewards, in two stages: a first one until it can add and subtract, and a second
one with fewer good answers, so that greedy decoding starts with a wrong format and sampling still finds the right one.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import argparse
import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors.numpy import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

sys.path.insert(0, str(Path(__file__).parent))  # it runs where localcloud is not installed

import llama

INSTRUCT, BASE, DATASET = "meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B", "openai/gsm8k"
TRAIN_ROWS, TEST_ROWS = 64, 16
VOCABULARY = 512
LARGEST_NUMBER = 5

SPECIAL = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|finetune_right_pad_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
)
BEGIN, PAD, END = SPECIAL[0], SPECIAL[2], SPECIAL[6]
TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)

_NAMES = ("Tom", "Ana", "Lee", "Mia", "Sam", "Zoe", "Max", "Eva")
_THINGS = ("apples", "pens", "books", "coins", "cards", "shells")
_GAIN = "{name} has {a} {things} and buys {b} more. How many {things} does {name} have?"
_LOSS = "{name} had {a} {things} and gave away {b}. How many {things} are left?"

CARD = """---
license: mit
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
---
# toy gsm8k
"""


@dataclass(frozen=True)
class Stage:
    """One fine-tuning.

    :param good: the share of shown answers that have the rewarded format.
    """

    steps: int
    learning_rate: float
    good: float


STAGES = (Stage(300, 3e-3, 0.4), Stage(50, 1e-3, 0.25))
BATCH, LENGTH = 32, 80


@dataclass(frozen=True)
class Problem:
    """A question, its working in one equation, and its answer."""

    question: str
    name: str
    things: str
    equation: str
    answer: int

    @classmethod
    def draw(cls, chance: random.Random) -> Problem:
        """Make up a question with numbers from 1 to LARGEST_NUMBER and an answer that is not negative."""
        text, sign = chance.choice(((_GAIN, 1), (_LOSS, -1)))
        a, b = chance.randint(1, LARGEST_NUMBER), chance.randint(1, LARGEST_NUMBER)
        if sign < 0 and b > a:
            a, b = b, a
        name, things = chance.choice(_NAMES), chance.choice(_THINGS)
        question = text.format(name=name, a=a, b=b, things=things)
        return cls(question, name, things, f"{a} {'+' if sign > 0 else '-'} {b}", a + sign * b)

    @property
    def row(self) -> dict[str, str]:
        """The problem as a row of GSM8K."""
        short = self.equation.replace(" ", "")
        working = f"{self.name} has {self.equation} = <<{short}={self.answer}>>{self.answer} {self.things}."
        return {"question": self.question, "answer": f"{working}\n#### {self.answer}"}

    @property
    def completion(self) -> str:
        """The answer in the rewarded format."""
        return f"<reasoning>{self.equation} = {self.answer}</reasoning><answer>{self.answer}</answer>"

    def shown(self, chance: random.Random, good: float) -> str:
        """Return the completion, or, with a chance of 1 - good, one of two that miss the format."""
        drawn = chance.random()
        if drawn < good:
            return self.completion
        if drawn < (1 + good) / 2:
            return f"{self.equation} = {self.answer}. The answer is {self.answer}"
        return f"<reasoning>{self.equation} = {self.answer}<answer>{self.answer}"


class Prompt:
    """MaxText's own prompt template inside the chat template."""

    def __init__(self) -> None:
        words = json.loads(Path(__file__).with_name("gsm8k_rl.json").read_text("utf-8"))
        names = ("reasoning_start_token", "reasoning_end_token", "solution_start_token", "solution_end_token")
        self.system = words["SYSTEM_PROMPT"].format(**dict(zip(names, TAGS, strict=True)))
        self._template = words["TEMPLATE"]

    def user(self, question: str) -> str:
        """Return the user's message."""
        text: str = self._template.format(system_prompt=self.system, question=question)
        return text

    def chat(self, question: str) -> str:
        """Return what CHAT_TEMPLATE makes of it."""
        message = f"<|start_header_id|>user<|end_header_id|>\n\n{self.user(question)}<|eot_id|>"
        return f"{BEGIN}{message}<|start_header_id|>assistant<|end_header_id|>\n\n"


def make_tokenizer(chance: random.Random, prompt: Prompt) -> Tokenizer:
    """Train a byte-level BPE with Llama 3's special tokens; the system prompt is one token, to keep prompts short."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ])
    texts = [prompt.user(Problem.draw(chance).question) for _ in range(400)]
    texts += [Problem.draw(chance).completion for _ in range(400)]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.add_tokens([
        prompt.system,
        "<start_of_turn>user\n",
        "<end_of_turn>\n<start_of_turn>model",
        *TAGS,
    ])
    return tokenizer


def make_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the model's config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "bos_token_id": tokenizer.token_to_id(BEGIN),
        "eos_token_id": tokenizer.token_to_id(END),
        "pad_token_id": tokenizer.token_to_id(PAD),
        "torch_dtype": "bfloat16",
    }


def make_weights(
    config: dict[str, Any], tokenizer: Tokenizer, prompt: Prompt, chance: random.Random, seed: int
) -> dict[str, Any]:
    """Fine-tune random weights through all stages; return them in bfloat16."""
    end, pad = config["eos_token_id"], config["pad_token_id"]

    def batch(good: float) -> llama.Batch:
        tokens = np.full((BATCH, LENGTH), pad, np.int32)
        mask = np.zeros((BATCH, LENGTH), np.float32)
        for row in range(BATCH):
            problem = Problem.draw(chance)
            asked = tokenizer.encode(prompt.chat(problem.question), add_special_tokens=False).ids
            told = tokenizer.encode(problem.shown(chance, good), add_special_tokens=False).ids
            both = (asked + told + [end])[:LENGTH]
            tokens[row, : len(both)] = both
            mask[row, len(asked) - 1 : len(both) - 1] = 1
        return tokens, mask

    weights = llama.initial(config, jax.random.key(seed))
    for stage in STAGES:
        weights = llama.fine_tune(
            config,
            weights,
            lambda good=stage.good: batch(good),
            steps=stage.steps,
            learning_rate=stage.learning_rate,
            report=lambda step, loss: _say(f"step {step}: loss {loss:.4f}"),
        )
    return {name: np.asarray(value).astype(ml_dtypes.bfloat16) for name, value in weights.items()}


def write_dataset(folder: Path, chance: random.Random) -> None:
    """Write the dataset repository."""
    rows = [Problem.draw(chance).row for _ in range(TRAIN_ROWS + TEST_ROWS)]
    (folder / "main").mkdir(parents=True, exist_ok=True)
    for split, part in (("train", rows[:TRAIN_ROWS]), ("test", rows[TRAIN_ROWS:])):
        pq.write_table(pa.Table.from_pylist(part), folder / "main" / f"{split}-00000-of-00001.parquet")
    (folder / "README.md").write_text(CARD, encoding="utf-8")


def write_model(folder: Path, config: dict[str, Any], tokenizer: Tokenizer, weights: dict[str, Any]) -> None:
    """Write the instruct model's repository."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        "config.json": config,
        "generation_config.json": {
            "bos_token_id": config["bos_token_id"],
            "eos_token_id": [config["eos_token_id"]],
            "do_sample": True,
        },
        "tokenizer_config.json": {
            "backend": "tokenizers",
            "bos_token": BEGIN,
            "eos_token": END,
            "model_max_length": config["max_position_embeddings"],
            "pad_token": PAD,
            "tokenizer_class": "TokenizersBackend",
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    tokenizer.save(str(folder / "tokenizer.json"))
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})


def write_base_model(folder: Path, instruct: Path) -> None:
    """Make the base model's repository of links to the instruct model's files, without the chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in instruct.iterdir():
        if file.name != "chat_template.jinja":
            link = folder / file.name
            link.unlink(missing_ok=True)
            link.symlink_to(Path("..") / instruct.name / file.name)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Make the toy model and dataset of the local Hub.")
    parser.add_argument("output", type=Path, help="folder that gets models/ and datasets/")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    chance = random.Random(arguments.seed)  # noqa: S311  no secret
    prompt = Prompt()
    write_dataset(arguments.output / "datasets" / DATASET, chance)
    tokenizer = make_tokenizer(chance, prompt)
    config = make_config(tokenizer)
    weights = make_weights(config, tokenizer, prompt, chance, arguments.seed)
    instruct = arguments.output / "models" / INSTRUCT
    write_model(instruct, config, tokenizer, weights)
    write_base_model(arguments.output / "models" / BASE, instruct)
    _say(f"{sum(value.size for value in weights.values()):,} weights in {instruct}")


if __name__ == "__main__":
    main()
