"""Llama 3.1 in JAX on Hugging Face's weight names, and its supervised fine-tuning; for `make_toy.py`."""

# mypy: disable-error-code="import-not-found,untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

if TYPE_CHECKING:
    from collections.abc import Callable

type Weights = dict[str, Any]
type Batch = tuple[Any, Any]  # tokens (rows, length) and the mask of those whose successor counts


def initial(config: dict[str, Any], key: Any) -> Weights:
    """Return random weights: norms 1, embeddings with deviation 0.02, the rest by fan-in."""
    hidden, inner, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (vocabulary, hidden),
        "lm_head": (vocabulary, hidden),
        "model.norm": (hidden,),
    }
    for layer in range(config["num_hidden_layers"]):
        shapes |= {
            f"model.layers.{layer}.{name}": shape
            for name, shape in (
                ("self_attn.q_proj", (queries, hidden)),
                ("self_attn.k_proj", (keys, hidden)),
                ("self_attn.v_proj", (keys, hidden)),
                ("self_attn.o_proj", (hidden, queries)),
                ("mlp.gate_proj", (inner, hidden)),
                ("mlp.up_proj", (inner, hidden)),
                ("mlp.down_proj", (hidden, inner)),
                ("input_layernorm", (hidden,)),
                ("post_attention_layernorm", (hidden,)),
            )
        }
    weights = {}
    for (name, shape), subkey in zip(shapes.items(), jax.random.split(key, len(shapes)), strict=True):
        deviation = 0.02 if "embed" in name else shape[-1] ** -0.5
        random = jax.random.normal(subkey, shape) * deviation
        weights[f"{name}.weight"] = jnp.ones(shape) if len(shape) == 1 else random
    return weights


def _frequencies(config: dict[str, Any]) -> Any:
    scaling, head = config["rope_scaling"], config["head_dim"]
    frequency = 1.0 / config["rope_theta"] ** (np.arange(0, head, 2) / head)
    turns = scaling["original_max_position_embeddings"] * frequency / (2 * np.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    blend = np.clip((turns - low) / (high - low), 0, 1)
    return ((1 - blend) * frequency / scaling["factor"] + blend * frequency).astype(np.float32)


def forward(config: dict[str, Any], weights: Weights, tokens: Any) -> Any:
    """Return the logits (rows, length, vocabulary) of `tokens` (rows, length)."""
    rows, length = tokens.shape
    head, kv_heads = config["head_dim"], config["num_key_value_heads"]
    heads = config["num_attention_heads"]
    angles = jnp.arange(length)[:, None] * _frequencies(config)[None]
    cos, sin = (jnp.concatenate([f(angles)] * 2, -1)[None, :, None] for f in (jnp.cos, jnp.sin))

    def norm(x: Any, scale: Any) -> Any:
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + config["rms_norm_eps"]) * scale

    def rotate(x: Any) -> Any:
        return x * cos + jnp.concatenate([-x[..., head // 2 :], x[..., : head // 2]], -1) * sin

    mask = jnp.tril(jnp.ones((length, length), bool))
    x = weights["model.embed_tokens.weight"][tokens]
    for layer in range(config["num_hidden_layers"]):
        w = {
            name: weights[f"model.layers.{layer}.{name}.weight"]
            for name in (
                "input_layernorm",
                "post_attention_layernorm",
                *(f"self_attn.{p}_proj" for p in "qkvo"),
                *(f"mlp.{p}_proj" for p in ("gate", "up", "down")),
            )
        }
        y = norm(x, w["input_layernorm"])
        q, k, v = (
            (y @ w[f"self_attn.{p}_proj"].T).reshape(rows, length, n, head)
            for p, n in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        q, k = rotate(q), rotate(k)
        k, v = (jnp.repeat(t, heads // kv_heads, 2) for t in (k, v))
        scores = jnp.where(mask, jnp.einsum("bqhd,bkhd->bhqk", q, k) * head**-0.5, -1e30)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1), v)
        x = x + mixed.reshape(rows, length, -1) @ w["self_attn.o_proj"].T
        y = norm(x, w["post_attention_layernorm"])
        x = x + (jax.nn.silu(y @ w["mlp.gate_proj"].T) * (y @ w["mlp.up_proj"].T)) @ w["mlp.down_proj"].T
    return norm(x, weights["model.norm.weight"]) @ weights["lm_head.weight"].T


def fine_tune(
    config: dict[str, Any],
    weights: Weights,
    batches: Callable[[], Batch],
    *,
    steps: int,
    learning_rate: float,
    report: Callable[[int, float], None],
) -> Weights:
    """Return the weights after `steps` of AdamW with a cosine schedule.

    :param report: called every 50 steps and after the last with the step and its loss.
    """
    optimizer = optax.adamw(optax.cosine_decay_schedule(learning_rate, steps))
    state = optimizer.init(weights)

    def loss(weights: Weights, tokens: Any, mask: Any) -> Any:
        logits = forward(config, weights, tokens)[:, :-1]
        each = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return (each * mask[:, :-1]).sum() / mask.sum()

    @jax.jit
    def step(weights: Weights, state: Any, tokens: Any, mask: Any) -> tuple[Weights, Any, Any]:
        value, gradient = jax.value_and_grad(loss)(weights, tokens, mask)
        updates, state = optimizer.update(gradient, state, weights)
        return optax.apply_updates(weights, updates), state, value

    for number in range(1, steps + 1):
        weights, state, value = step(weights, state, *batches())
        if number % 50 == 0 or number == steps:
            report(number, float(value))
    return weights
