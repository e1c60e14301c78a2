# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""What is fuzzed: each target takes what hypothesis draws, and may raise ValueError.

Inputs are built like real ones and then spoiled, so that most pass the first checks.
"""

import json
import struct
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hypothesis import strategies as st

import vllm.fp8_inc.inspection  # noqa: F401 (no example is to wait for the import)
from vllm.fp8_inc.adjustment import resolve_adjustment
from vllm.fp8_inc.formats import GAUDI2
from vllm.fp8_inc.report import run_command
from vllm.fp8_inc.sources.checkpoint import (
    attention_module_of,
    declared_scheme,
    key_in_layer,
    layer_index,
    layer_of,
    match_scale_key,
    producers_of,
)
from vllm.fp8_inc.sources.inc.read import read_inc_scales
from vllm.fp8_inc.sources.legacy_json import read_legacy_scales
from vllm.fp8_inc.sources.producers import PRODUCERS

_NAMES = sorted({name for row in PRODUCERS for name in row.tensors})
_WORDS = sorted({word for name in _NAMES for word in name.split(".")}) + [
    *("model", "layers", "self_attn", "attn", "mla_attn", "impl", "mtp", "mtp_block"),
    *("language_model", "vision_tower", "encoder", "h", "blocks", "transformer"),
    *("0", "1", "00", "999999", "1000000", "-1", "٣", "weight", "k_proj", ""),
]

# --- JSON that is nearly right
_NUMBERS = st.one_of(
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from([0, 1, -1, 8, 240, 448, 1e-40, 1e30, 1e31, 10**400]),
)
_SCALARS = st.one_of(st.none(), st.booleans(), _NUMBERS, st.text(max_size=20))


def _deep(value: Any, depth: int) -> Any:
    for _ in range(depth):
        value = [value]
    return value


_ANY = st.one_of(
    st.recursive(
        _SCALARS,
        lambda inner: st.one_of(
            st.lists(inner, max_size=4),
            st.dictionaries(st.text(max_size=8), inner, max_size=4),
        ),
        max_leaves=8,
    ),
    st.builds(_deep, _SCALARS, st.integers(1, 700)),
)


def _maybe(usual: st.SearchStrategy) -> st.SearchStrategy:
    """Mostly ``usual``, at times anything."""
    return st.one_of(usual, usual, usual, _ANY)


def _object(optional: dict[str, st.SearchStrategy]) -> st.SearchStrategy:
    """An object with some of these keys, and now and then one of no meaning."""
    known = st.fixed_dictionaries({}, optional=optional)
    extra = st.dictionaries(st.text(max_size=8), _ANY, max_size=1)
    return st.builds(lambda a, b: {**b, **a}, known, extra)


def _spoiled(text: str, cut: float, at: float, byte: int) -> bytes:
    """At times cut short, or with another byte somewhere."""
    data = bytearray(text.encode("utf-8", "surrogatepass"))
    if data and byte < 256:
        data[int(at * (len(data) - 1))] = byte
    return bytes(data[: int(len(data) * cut)])


def _file(content: st.SearchStrategy) -> st.SearchStrategy:
    """Bytes of a JSON; three of four as they should be."""
    cut = st.one_of(st.just(1.0), st.just(1.0), st.just(1.0), st.floats(0, 1))
    byte = st.one_of(st.just(256), st.just(256), st.just(256), st.integers(0, 255))
    return st.builds(_spoiled, content.map(json.dumps), cut, st.floats(0, 1), byte)


# --- The targets
@dataclass(frozen=True)
class Target:
    """Something to fuzz.

    Attributes:
        inputs: What hypothesis draws.
        run: Takes it; may raise ValueError only.
    """

    inputs: st.SearchStrategy
    run: Callable[[Any], None]


_KEYS = st.one_of(
    st.lists(st.sampled_from(_WORDS), max_size=10).map(".".join),
    st.text(max_size=200),
    st.builds(
        "{}.layers.{}.{}.{}".format,
        st.sampled_from(["model", "a.b.vision", "mtp", ".", "x" * 300]),
        st.integers(-1, 10**7),
        st.sampled_from(["self_attn", "attn.impl", "mixer", "self_attn.attn.impl"]),
        st.sampled_from([*_NAMES, "k_proj.weight"]),
    ),
)


def _match(keys: list[str]) -> None:
    for key in keys:
        found = match_scale_key(key)
        layer_of(key)
        attention_module_of(key)
        if found is not None:
            assert found.roles is not None and found.use
            assert match_scale_key(key_in_layer(key, found.layer)) is not None
            assert 0 <= layer_index(found.layer) < 10**6
    producers_of(keys, None)


_SCHEME = {
    "num_bits": _maybe(st.sampled_from([8, 8, 4])),
    "type": _maybe(st.just("float")),
    "strategy": _maybe(st.sampled_from(["tensor", "attn_head"])),
    "dynamic": _maybe(st.just(False)),
    "symmetric": _maybe(st.just(True)),
}
_QUANTIZATION = _object(
    {
        "quant_method": _maybe(st.sampled_from(["compressed-tensors", "fp8", "quark"])),
        "kv_cache_scheme": _maybe(_object(_SCHEME)),
        "kv_cache_quant_algo": _maybe(st.sampled_from(["FP8", "NVFP4"])),
        "quantization": _maybe(
            _object({"kv_cache_quant_algo": _maybe(st.just("FP8"))})
        ),
        "export": _maybe(_object({"kv_cache_group": _ANY})),
        "fp8_dtype_flavor": _maybe(
            st.sampled_from(["float8_e4m3fn", "float8_e4m3fnuz"])
        ),
        "provider": _maybe(st.just("auto-round")),
    }
)


def _declared(config: Any) -> None:
    declared_scheme(config)
    resolve_adjustment(config, GAUDI2, {})


_RANKS = st.sampled_from(["0", "1", "2", "00", "-1", "x"])
_LEGACY = _file(
    _maybe(
        _object(
            {
                "model_type": _maybe(st.just("llama")),
                "kv_cache": _maybe(
                    _object(
                        {
                            "dtype": _maybe(st.just("float8_e4m3fn")),
                            "scaling_factor": _maybe(
                                st.dictionaries(
                                    _RANKS,
                                    _maybe(
                                        st.dictionaries(
                                            _RANKS, _maybe(_NUMBERS), max_size=3
                                        )
                                    ),
                                    max_size=3,
                                )
                            ),
                        }
                    )
                ),
            }
        )
    )
)


def _legacy(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "scales.json"
        path.write_bytes(data)
        found = read_legacy_scales(str(path), "llama", 0, 1, GAUDI2, {}).found
    for roles in found.values():
        assert all(0 < scale.dequant_scale <= 1e30 for scale in roles.values())


def _some(*words: str) -> st.SearchStrategy:
    return st.lists(st.sampled_from(words), max_size=2)


_LISTS = _object(
    {
        "types": _maybe(
            st.lists(st.sampled_from(["Linear", "VLLMKVCache"]), max_size=2)
        ),
        "names": _maybe(st.lists(st.sampled_from(["k_cache", "a(b", "lm_head", ".*"]))),
    }
)
_METHODS = st.sampled_from(
    [
        "maxabs_hw",
        "maxabs_pow2",
        "MAXABS_ARBITRARY",
        "unit_scale",
        "act_maxabs_pcs_pow2",
    ]
)
_SOME_MODULES = [
    f"model.layers.{n}.self_attn.{at}"
    for n in (0, 1)
    for at in (
        *("attn.impl.k_cache", "attn.impl.v_cache", "attn.impl.matmul_qk"),
        *("mla_attn.mla_attn.impl.latent_cache_k", "o_proj"),
        "attn.impl.fused_scaled_dot_product_attention",
    )
]
_QUANT_CONFIG = _file(
    _maybe(
        _object(
            {
                "mode": _maybe(st.sampled_from(["QUANTIZE", "quantize", "MEASURE"])),
                "observer": _maybe(st.sampled_from(["maxabs", "maxabs_per_channel"])),
                "scale_method": _maybe(
                    st.one_of(
                        _METHODS,
                        _object(
                            {
                                "default": _ANY,
                                "layers": _ANY,
                                "nodes": _maybe(
                                    st.dictionaries(
                                        st.sampled_from(_SOME_MODULES), _ANY, max_size=2
                                    )
                                ),
                            }
                        ),
                    )
                ),
                "scale_params": _ANY,
                "device_for_scales": _maybe(st.sampled_from(["GAUDI2", "GAUDI3"])),
                "dynamic_quantization": _maybe(st.booleans()),
                "allowlist": _maybe(_LISTS),
                "blocklist": _maybe(_LISTS),
                "whitelist": _LISTS,
                "ignore_modules_wo_measures": _maybe(st.booleans()),
            }
        )
    )
)
_NODE = _object(
    {
        "inputs": _maybe(
            st.lists(_maybe(st.builds(_deep, _NUMBERS, st.integers(0, 2))))
        ),
        "outputs": _maybe(st.lists(_NUMBERS, max_size=2)),
        "params": _maybe(_object({"weight": _maybe(st.lists(_NUMBERS, max_size=3))})),
    }
)
_NODES = _file(
    _maybe(
        _object(
            {
                "Mode": _maybe(st.sampled_from(["DynamicRange", "Scale"])),
                "Nodes": _maybe(
                    st.dictionaries(
                        st.sampled_from(_SOME_MODULES), _maybe(_NODE), max_size=6
                    )
                ),
            }
        )
    )
)


def _inc(data: tuple[bytes, bytes, bool]) -> None:
    content, nodes, cached = data
    with tempfile.TemporaryDirectory() as folder:
        stats = f"{folder}/inc_output"
        path = Path(folder) / "quant.json"
        named = b'{"dump_stats_path": ' + json.dumps(stats).encode()
        content = content.replace(b"{", named + b", " if b":" in content else named, 1)
        path.write_bytes(content)
        suffix = "_MAXABS_HW" if cached else ""
        Path(f"{stats}_hooks_maxabs{suffix}.json").write_bytes(nodes)
        inc = read_inc_scales(str(path), "gaudi3", 0, 1)
        for n in (0, 1):
            inc.scales_of(f"model.layers.{n}.self_attn.attn", False)


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
def _shards(draw) -> bytes:
    """A shard: offsets that follow each other, unless hypothesis spoils one."""
    header: dict[str, Any] = {}
    offset = 0
    for key in draw(st.lists(_KEYS, max_size=5)):
        dtype, shape = draw(st.sampled_from(_DTYPES)), draw(st.sampled_from(_HEADS))
        count = 1
        for size in shape:
            count *= int(size)
        length = min(max(count, 0), 64) * _SIZE.get(dtype, 1)
        offsets: Any = [offset, offset + length]
        offset += length
        header[key] = draw(
            _maybe(st.just({"dtype": dtype, "shape": shape, "data_offsets": offsets}))
        )
    if draw(st.booleans()):
        header["__metadata__"] = draw(_maybe(st.just({"format": "pt"})))
    text = draw(_file(st.just(header)))
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


_CONFIG = _file(
    _maybe(
        st.builds(
            lambda config, extra: config | extra,
            _maybe(_QUANTIZATION).map(_config),
            _object(dict.fromkeys(_config({}), _ANY)),
        )
    )
)


def _checkpoint(data: tuple[bytes, bytes, bytes | None]) -> None:
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


_INDEX = _file(
    _maybe(
        _object(
            {
                "weight_map": _maybe(
                    st.dictionaries(
                        _KEYS, _maybe(st.just("model.safetensors")), max_size=3
                    )
                )
            }
        )
    )
)

TARGETS = {
    "names": Target(st.lists(_KEYS, max_size=4), _match),
    "scheme": Target(_QUANTIZATION, _declared),
    "legacy": Target(_LEGACY, _legacy),
    "inc": Target(st.tuples(_QUANT_CONFIG, _NODES, st.booleans()), _inc),
    "checkpoint": Target(
        st.tuples(_shards(), _CONFIG, st.one_of(st.none(), _INDEX)), _checkpoint
    ),
}
