"""Takes the place of tunix.rl.rollout.vllm_rollout: samples from the MaxText actor itself, without a cache.

Greedy evaluation, temperature, top-k, top-p, per-token log-probabilities and weight updates behave as Tunix
expects of its vLLM rollout (google-tunix 0.1.7, `base_rollout.BaseRollout`).
"""

# mypy: disable-error-code="import-not-found,misc,untyped-decorator,no-any-return"

from __future__ import annotations

import contextlib
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.generate import tokenizer_adapter
from tunix.generate import utils as generate_utils
from tunix.rl.rollout import base_rollout

_PROMPT_STEP = 32  # prompts are padded to multiples of this, so that few shapes are compiled
_FIRST_SEGMENT, _LONGEST_SEGMENT = 64, 256  # tokens decoded per compiled call, doubling
_COLDEST = 1e-4  # temperature 0 means greedy: divide by this instead


def _sample(logits: Any, key: Any, temperature: Any, top_p: Any, top_k: int) -> tuple[Any, Any]:
    """Draw one token per row of `logits` (rows, vocabulary); return tokens and their log-probabilities."""
    logits = logits.astype(jnp.float32) / jnp.maximum(temperature, _COLDEST)
    if 0 < top_k < logits.shape[-1]:
        least = jax.lax.top_k(logits, top_k)[0][:, -1:]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    descending = jnp.sort(logits, axis=-1)[:, ::-1]
    mass = jnp.cumsum(jax.nn.softmax(descending, -1), -1)
    last = jnp.sum(mass < top_p, -1, keepdims=True).clip(0, logits.shape[-1] - 1)
    least = jnp.take_along_axis(descending, last, -1)
    logits = jnp.where((top_p < 1.0) & (logits < least), -jnp.inf, logits)
    tokens = jax.random.categorical(key, logits).astype(jnp.int32)
    log_probabilities = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, None], -1)[:, 0]
    return tokens, log_probabilities


class VllmRollout(base_rollout.BaseRollout):
    """Named as what it replaces."""

    def __init__(
        self, model: Any, tokenizer: Any, cache_config_or_size: Any, mesh: Any, rollout_config: Any
    ) -> None:
        self._tokenizer = tokenizer_adapter.TokenizerAdapter(tokenizer)
        self._config = model.base.config
        self._mesh = model.base.mesh
        self._graph, weights, self._rest = nnx.split(model, nnx.Param, ...)
        self._weights = jax.tree.map(jnp.copy, weights)  # they change by update_params only
        # Tunix takes weights for shared, and never updates them, when model() holds the actor's own arrays.
        self._model = nnx.merge(self._graph, self._weights, self._rest, copy=True)
        self._key = jax.random.key(0)

    @functools.partial(jax.jit, static_argnames=("self", "count", "top_k"))
    def _decode(
        self,
        weights: Any,
        rest: Any,
        tokens: Any,
        lengths: Any,
        done: Any,
        key: Any,
        temperature: Any,
        top_p: Any,
        ends: Any,
        count: int,
        top_k: int,
    ) -> Any:
        """Add up to `count` tokens to each row of `tokens` (rows, width) that is not done."""
        rows, width = tokens.shape
        columns = jnp.arange(width, dtype=jnp.int32)[None]
        positions = jnp.broadcast_to(columns, (rows, width))

        def going_on(state: Any) -> Any:
            return (state[0] < count) & ~jnp.all(state[3])

        def one_token(state: Any) -> Any:
            step, tokens, lengths, done, log_probabilities, key = state
            # A fresh merge, because the model's random counters must belong to this trace.
            model = nnx.merge(self._graph, weights, rest, copy=True)
            logits = model.base(
                decoder_input_tokens=tokens,
                decoder_positions=positions,
                decoder_segment_ids=(columns < lengths[:, None]).astype(jnp.int32),
            )
            last = jnp.take_along_axis(logits, (lengths - 1)[:, None, None], axis=1)[:, 0]
            key, subkey = jax.random.split(key)
            drawn, log_probability = _sample(last, subkey, temperature, top_p, top_k)
            place = (columns == lengths[:, None]) & ~done[:, None]
            tokens = jnp.where(place, drawn[:, None], tokens)
            log_probabilities = log_probabilities.at[:, step].set(jnp.where(done, 0.0, log_probability))
            lengths = jnp.where(done, lengths, lengths + 1)
            done |= jnp.any(drawn[:, None] == ends[None], -1)
            return step + 1, tokens, lengths, done, log_probabilities, key

        start = (0, tokens, lengths, done, jnp.zeros((rows, count), jnp.float32), key)
        return jax.lax.while_loop(going_on, one_token, start)[1:]

    def _encode(self, prompt: str) -> list[int]:
        ids = self._tokenizer.encode(prompt)
        begin = self._tokenizer.bos_id()
        return ids[1:] if ids[:2] == [begin, begin] else ids  # the chat template has written one already

    def generate(self, prompts: list[str], rollout_config: Any, **_: Any) -> Any:
        """Return one completion per prompt as a RolloutOutput."""
        config = rollout_config
        if config.seed is not None:
            self._key = config.seed
        ids = [self._encode(prompt) for prompt in prompts]
        prompt_lengths = np.array([len(row) for row in ids], np.int32)
        longest = int(prompt_lengths.max())
        ends = jnp.asarray(config.eos_tokens or [self.eos_id()], jnp.int32)
        sampling = (
            jnp.float32(config.temperature),
            jnp.float32(1.0 if config.top_p is None else config.top_p),
            ends,
        )
        top_k = max(int(config.top_k or 0), 0)

        tokens: Any = np.full((len(ids), -(-longest // _PROMPT_STEP) * _PROMPT_STEP), self.pad_id(), np.int32)
        for row, prompt_ids in enumerate(ids):
            tokens[row, : len(prompt_ids)] = prompt_ids
        lengths: Any = prompt_lengths.copy()
        done: Any = np.zeros(len(ids), bool)
        pieces, made, segment = [], 0, _FIRST_SEGMENT
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._mesh)
            stack.enter_context(nn.logical_axis_rules(self._config.logical_axis_rules))
            while made < config.max_tokens_to_generate and not np.asarray(done).all():
                count = min(segment, config.max_tokens_to_generate - made)
                tokens = jnp.pad(tokens, ((0, 0), (0, count)), constant_values=self.pad_id())
                tokens, lengths, done, piece, self._key = self._decode(
                    self._weights,
                    self._rest,
                    tokens,
                    jnp.asarray(lengths),
                    jnp.asarray(done),
                    self._key,
                    *sampling,
                    count=count,
                    top_k=top_k,
                )
                pieces.append(np.asarray(piece))
                made, segment = made + count, min(2 * segment, _LONGEST_SEGMENT)

        table, final_lengths = np.asarray(tokens), np.asarray(lengths)
        log_probabilities = np.concatenate(pieces, axis=1)
        completions = [table[r, prompt_lengths[r] : final_lengths[r]] for r in range(len(ids))]
        width = max(config.max_prompt_length or 0, longest)
        return base_rollout.RolloutOutput(
            text=[self._tokenizer.decode([int(t) for t in c], skip_special_tokens=True) for c in completions],
            logits=None,
            tokens=completions,
            left_padded_prompt_tokens=np.stack([
                generate_utils.pad_to_length(np.array(row, np.int32), width, self.pad_id(), left=True)
                for row in ids
            ]),
            logprobs=[log_probabilities[r, : len(c)] for r, c in enumerate(completions)],
        )

    def get_per_token_logps(
        self, prompt_tokens: Any, completion_tokens: Any, completion_mask: Any = None
    ) -> Any:
        """Raises NotImplementedError: Tunix takes them from `generate` or from the actor."""
        raise NotImplementedError("log-probabilities of given completions come from the actor")

    def update_params(self, params: Any, filter_types: Any = None) -> None:
        """Take over the actor's weights."""
        self._weights = jax.tree.map(jnp.copy, nnx.filter_state(params, nnx.Param))
        nnx.update(self._model, self._weights)

    def pad_id(self) -> int:
        """Return the padding token."""
        return self._tokenizer.pad_id()

    def eos_id(self) -> int:
        """Return the token that ends a completion."""
        return self._tokenizer.eos_id()

    def model(self) -> Any:
        """Return a model of the same structure with the current weights."""
        return self._model
