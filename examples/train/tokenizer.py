# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The tokenizer: byte-level BPE of 640 entries in which every digit stands alone.

Single digits matter: with merged numbers the model would have to learn a
separate entry for every number, and a column of an addition would have no name.
"""

import random

from problems import END, make_problem
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 640
PAD = "<pad>"
SAMPLE_PROBLEMS = 30_000

# A conversation is rendered as the shots the model was trained on. Contents are
# trimmed because a generated answer starts with a space that clients send back.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message.role == 'user' -%}"
    "{{ 'Question: ' + message.content | trim + '\\nAnswer:' }}"
    "{%- elif message.role == 'assistant' -%}"
    "{{ ' ' + message.content | trim + '\\n\\n' }}"
    "{%- endif -%}"
    "{%- endfor -%}"
)


def build_tokenizer(max_length: int) -> PreTrainedTokenizerFast:
    """Trains the tokenizer on generated problems; always gives the same one.

    Args:
        max_length: Longest sequence the model takes, in tokens.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    rng = random.Random(0)
    sample = (make_problem(rng) for _ in range(SAMPLE_PROBLEMS))
    bpe.train_from_iterator(
        (p.prompt + p.completion.removesuffix(END) for p in sample),
        trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE,
            special_tokens=[END, PAD],  # ids 0 and 1
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=END,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
