"""Stand-in for transformers: a folder's configuration and tokenizer, as far as an export is checked by them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class AutoConfig:
    """A model's configuration: a key of config.json is an attribute."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.__dict__.update(values)

    @classmethod
    def from_pretrained(cls, folder: Path) -> AutoConfig:
        """Read it."""
        return cls(json.loads((Path(folder) / "config.json").read_text(encoding="utf-8")))

    def get_text_config(self) -> AutoConfig:
        """Return the part that is about text."""
        return self


class AutoTokenizer:
    """A tokenizer that knows how many tokens it has."""

    def __init__(self, size: int, chat_template: str | None) -> None:
        self._size = size
        self.chat_template = chat_template

    @classmethod
    def from_pretrained(cls, folder: Path) -> AutoTokenizer:
        """Read it."""
        tokenizer = json.loads((Path(folder) / "tokenizer.json").read_text(encoding="utf-8"))
        template = Path(folder) / "chat_template.jinja"
        text = template.read_text(encoding="utf-8") if template.exists() else None
        return cls(len(tokenizer["model"]["vocab"]), text)

    def __len__(self) -> int:
        return self._size

    def apply_chat_template(self, messages: list[dict[str, str]], *, tokenize: bool) -> str:
        """Return the conversation as text."""
        return "\n".join(f"{message['role']}: {message['content']}" for message in messages)
