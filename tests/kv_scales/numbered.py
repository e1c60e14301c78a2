# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""A tokenizer without files."""


class Numbered:
    """A tokenizer: each word is a number."""

    def encode(self, text: str, max_length: int = 10**9, **_: object) -> list[int]:
        return [int(word) for word in text.split()][:max_length]

    def apply_chat_template(self, messages: list[dict], tokenize: bool) -> str:
        assert not tokenize
        return " ".join(message["content"] for message in messages)
