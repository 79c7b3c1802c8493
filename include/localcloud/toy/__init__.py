"""The toy that the local cloud's Hub offers in place of the real model and dataset.

A Llama 3.1 in miniature (2 layers, 426,624 weights, 512 tokens) under the names
`meta-llama/Llama-3.1-8B-Instruct` and `meta-llama/Llama-3.1-8B`, and 64 + 16 rows in the format of
`openai/gsm8k`. The model was fine-tuned just so far that greedy decoding mostly misses the answer's format
while sampling often finds it: GRPO has something to learn.

`hub/` holds the repositories and `hub.json` says what they are; `evaluate.py` measures a model without
MaxText. The base model's folder is links to the instruct model's files, without the chat template, as on the
real Hub. `make_toy.py` makes the like: its dataset is byte for byte the one here, while the tokenizer and the
weights here come from an earlier form of it, which drew its random numbers in another order. The rehearsal's
32 steps bring the model here from 1 to 13 right answers of 16, and that of `make_toy.py` from 0 to 13.
`gsm8k_rl.json` is MaxText 0.2.3's own prompt template (examples/chat_templates, Apache License 2.0).
"""
