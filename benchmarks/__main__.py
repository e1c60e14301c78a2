# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Runs every benchmark: ``make bench``."""

from benchmarks import (
    accuracy,
    hpu_bytes,
    kernels,
    scale_names,
    weight_conversion,
)

if __name__ == "__main__":
    scale_names.main()
    weight_conversion.main()
    hpu_bytes.main()
    kernels.main()
    accuracy.main()
