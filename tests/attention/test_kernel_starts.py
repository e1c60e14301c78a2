# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Starts of the kernels in processes of their own: the disk, threads, other CPUs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

_START = """
import os, torch
torch.set_num_threads(3)
torch.randn(400, 400) @ torch.randn(400, 400)
from vllm.fp8_inc.attention.kernels import mla, writers
from vllm.fp8_inc.formats import GAUDI3
mla.load()
cache = torch.zeros(40, 16, 32, dtype=torch.uint8)
before = len(os.listdir("/proc/self/task"))
mla.threads_for = lambda operations: torch.get_num_threads()
q, table = torch.ones(1, 4, 16), torch.arange(40, dtype=torch.int32)[None]
lengths = torch.tensor([640], dtype=torch.int32)
out = mla.decode_latents(q, q, cache, table, lengths, 1.0, 1.0, GAUDI3)
after = len(os.listdir("/proc/self/task"))
print(mla.mla_float.kernel.from_disk, writers.latents.from_disk,
      torch.get_num_threads(), after - before, out.abs().sum().item())
"""


def run(program, folder, **environment):
    """The words that a Python program prints; kernels are kept in ``folder``."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"VLLM_CACHE_ROOT": str(folder)} | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.slow
def test_a_second_start_compiles_nothing_and_no_thread_is_added(tmp_path):
    assert run(_START, tmp_path)[:2] == ["False", "False"]
    assert run(_START, tmp_path) == ["True", "True", "3", "0", "0.0"]


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux" or os.uname().machine != "x86_64", reason="x86"
)
def test_a_cpu_with_avx2_only_does_not_abort(tmp_path):
    features = "+avx2,+avx,+fma,+f16c,+sse4.2,+bmi2,+popcnt"
    out = run(_START, tmp_path, NUMBA_CPU_NAME="haswell", NUMBA_CPU_FEATURES=features)
    assert out[4] == "0.0"


@pytest.mark.slow
def test_a_cpu_without_f16c_is_refused(tmp_path):
    with pytest.raises(AssertionError, match="need a CPU with F16C"):
        run(_START, tmp_path, NUMBA_CPU_NAME="nehalem", NUMBA_CPU_FEATURES="+sse4.2")


_AFTER_ANOTHER = """
from vllm.fp8_inc.attention.kernels import mla, mla_bf16, mla_float
mla_bf16.kernel.compile()
mla_float.kernel.compile()
from tests.attention.test_kernels import compare
shape = dict(
    stored="gaudi2", lengths=[70], heads=5, latent=48, rope=48,
    block_size=16, dequant_scale=0.013, largest_logit=35.0, seed=3,
)
mla.HAS_DOT = False
assert compare(shape) < 1e-5
print(mla_float.kernel.from_disk, mla_bf16.kernel.from_disk)
"""


@pytest.mark.slow
def test_code_from_disk_is_not_taken_for_another_kernels(tmp_path):
    """LLVM joins functions of one name, and names number the functions of a process."""
    first = "from vllm.fp8_inc.attention.kernels import mla_float as m"
    run(f"{first}; m.kernel.compile()", tmp_path)
    assert run(_AFTER_ANOTHER, tmp_path) == ["True", "False"]


_SIXTEEN_LANES = """
from vllm.fp8_inc.attention.kernels import vectors
vectors.LANES = 16
from tests.attention.test_kernels import compare
from tests.attention.test_kernels_heads import compare_heads
shapes = ([1, 300, 47], 16, 512), ([5], 3, 48), ([100, 7], 37, 112)
for lengths, heads, latent in shapes:
    for stored in ("gaudi2", "bfloat16"):
        error = compare(dict(
            stored=stored, lengths=lengths, heads=heads, latent=latent, rope=48,
            block_size=16, dequant_scale=0.013, largest_logit=35.0, seed=3,
        ))
        assert error < 1e-5, error
for lengths, queries, size in ([1, 300, 47], 4, 128), ([5], 7, 48), ([100, 7], 1, 80):
    error = compare_heads(dict(
        device="gaudi2", lengths=lengths, kv_heads=2, queries=queries, size=size,
        block=32, window=None, largest_logit=35.0, scales=[0.013, 0.1, 2.0, 3.0],
        per_head=True, seed=3,
    ))
    assert error < 1e-5, error
"""


@pytest.mark.slow
def test_the_vectors_of_avx512_on_any_cpu(tmp_path):
    """LLVM cuts a vector of 16 numbers to what the CPU has."""
    run(_SIXTEEN_LANES, tmp_path)
