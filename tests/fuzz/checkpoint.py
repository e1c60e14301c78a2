# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""A shard, a config.json and an index, as `inspect` and a server look at them."""

import struct
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hypothesis import strategies as st

import vllm.fp8_inc.inspection  # noqa: F401 (no example is to wait for the import)
from tests.fuzz.keys import KEYS
from tests.fuzz.nearly_right import ANYTHING, a_file, an_object, maybe
from tests.fuzz.scheme import QUANTIZATION
from vllm.fp8_inc.report import run_command

_DTYPES = [
    "F32",
    "BF16",
    "F16",
    "F64",
    "I64",
    "U8",
    "BOOL",
    "F8_E4M3",
    "F4",
    "C64",
    "Q",
]
_SIZE = {"F64": 8, "I64": 8, "C64": 8, "F32": 4, "BF16": 2, "F16": 2}
_HEADS = [[], [1], [2], [4], [1, 1, 1], [2, 1, 1], [0], [2, 2], [2**62, 8], [-1], [1.5]]


@st.composite
def shards(draw) -> bytes:
    """A shard: offsets that follow each other, unless hypothesis spoils one."""
    header: dict[str, Any] = {}
    offset = 0
    for key in draw(st.lists(KEYS, max_size=5)):
        dtype, shape = draw(st.sampled_from(_DTYPES)), draw(st.sampled_from(_HEADS))
        count = 1
        for size in shape:
            count *= int(size)
        length = min(max(count, 0), 64) * _SIZE.get(dtype, 1)
        offsets: Any = [offset, offset + length]
        offset += length
        header[key] = draw(
            maybe(st.just({"dtype": dtype, "shape": shape, "data_offsets": offsets}))
        )
    if draw(st.booleans()):
        header["__metadata__"] = draw(maybe(st.just({"format": "pt"})))
    text = draw(a_file(st.just(header)))
    lengths = st.one_of(
        st.just(len(text)), st.just(len(text)), st.integers(0, 2**64 - 1)
    )
    data = draw(st.binary(min_size=offset, max_size=offset))
    return struct.pack("<Q", draw(lengths)) + text + data


def _config(quantization: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "quantization_config": quantization,
    }


CONFIG = a_file(
    maybe(
        st.builds(
            lambda config, extra: config | extra,
            maybe(QUANTIZATION).map(_config),
            an_object(dict.fromkeys(_config({}), ANYTHING)),
        )
    )
)


def inspect(data: tuple[bytes, bytes, bytes | None]) -> None:
    """As `inspect` looks at it, and as a server would."""
    shard, config, index = data
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "model.safetensors").write_bytes(shard)
        (folder / "config.json").write_bytes(config)
        if index is not None:
            (folder / "model.safetensors.index.json").write_bytes(index)
        args = SimpleNamespace(
            run="vllm.fp8_inc.inspection:run",
            source=name,
            model=None,
            strict=False,
            capacity=True,
            device=None,
            format="json",
        )
        assert run_command(args) in (0, 1)


INDEX = a_file(
    maybe(
        an_object(
            {
                "weight_map": maybe(
                    st.dictionaries(
                        KEYS, maybe(st.just("model.safetensors")), max_size=3
                    )
                )
            }
        )
    )
)
