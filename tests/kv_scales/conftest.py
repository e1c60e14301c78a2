# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""A tokenizer for test checkpoints, which have none."""

import pytest

from tests.kv_scales.numbered import Numbered


@pytest.fixture
def numbered(monkeypatch):
    """Test checkpoints have no tokenizer."""
    from vllm import LLM

    start = LLM.__init__
    monkeypatch.setattr(LLM, "get_tokenizer", lambda self: Numbered())

    def without_tokenizer(self, model, **options):
        start(self, model, **{"skip_tokenizer_init": True, **options})

    monkeypatch.setattr(LLM, "__init__", without_tokenizer)
