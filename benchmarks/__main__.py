# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""Runs every benchmark: ``make bench``."""

from benchmarks import (
    hpu_bytes,
    kernels,
    report,
    request_table,
    scale_names,
    weight_conversion,
)

if __name__ == "__main__":
    scale_names.main()
    weight_conversion.main()
    hpu_bytes.main()
    kernels.main()
    request_table.main()
    report.main()
