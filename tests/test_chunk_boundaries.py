# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""What a sequence answers does not depend on where its prompt is cut into chunks."""

import pytest

from tests.checkpoints import BUILDERS
from tests.engines import engine
from tests.test_isolation import clean, close, greedy, spoiled


@pytest.mark.slow
@pytest.mark.parametrize("kind", BUILDERS)
def test_chunk_boundaries_do_not_matter(tmp_path, kind):
    path = spoiled(tmp_path, kind)
    prompts = [clean(length, length) for length in (100, 5, 64, 33)]
    answers = []
    for tokens in (16, 40, 2048):
        with engine(
            path,
            dtype="float32",
            enable_chunked_prefill=True,
            max_num_batched_tokens=tokens,
            max_num_seqs=4,
        ) as llm:
            answers.append(greedy(llm, prompts))
    for other in answers[1:]:
        for found, expected in zip(other, answers[0], strict=True):
            close(found, expected)
