# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
"""The E4M3 number formats of Gaudi2 and Gaudi3, as data.

Both share sign, 4 exponent bits with bias 7 and 3 mantissa bits; they differ in
what the codes from 0x78 on mean. Source: gaudi-pytorch-bridge 1.19 and Intel's
cast models; the tests compare every code with ml_dtypes.
"""

from dataclasses import dataclass
from functools import cached_property

import torch

_BIAS = 7
_MANTISSA_BITS = 3
_SIGN = 0x80
_NAN = 0x7F
_INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Fp8Format:
    """One E4M3 flavour.

    Attributes:
        name: The device that computes with it, as in ``--additional-config``.
        max: Largest finite value; every larger magnitude saturates to it.
        has_infinity: Whether 0x78 decodes to +inf (exponent 15 reserved, as in
            IEEE 754) or to 256.
        nan_keeps_sign: Whether a NaN with the sign bit set encodes to 0xFF.
    """

    name: str
    max: float
    has_infinity: bool
    nan_keeps_sign: bool

    @cached_property
    def table(self) -> torch.Tensor:
        """float32 [256]: the value of each code."""
        values = [self._value(code) for code in range(_SIGN)]
        values += [-value for value in values]
        return torch.tensor(values, dtype=torch.float32, device="cpu")

    @property
    def max_code(self) -> int:
        """The code of ``max``."""
        return 0x77 if self.has_infinity else 0x7E

    def _value(self, code: int) -> float:
        exponent, mantissa = code >> _MANTISSA_BITS, code & 0x7
        if code > self.max_code:
            infinite = self.has_infinity and mantissa == 0
            return float("inf") if infinite else float("nan")
        if exponent == 0:
            return mantissa * 2.0 ** (1 - _BIAS - _MANTISSA_BITS)
        return (8 + mantissa) * 2.0 ** (exponent - _BIAS - _MANTISSA_BITS)

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Casts to FP8 as the device does.

        Rounds to nearest even, keeps denormals and the sign of zero, saturates
        (infinities too), keeps NaN.

        Args:
            values: bfloat16, float16 or float32 of any shape.

        Returns:
            uint8 codes of the same shape.

        Raises:
            TypeError: For any other dtype, which would be rounded twice.
        """
        if values.dtype not in _INPUT_DTYPES:
            raise TypeError(
                f"cannot encode {values.dtype} as FP8 with a single rounding; "
                f"convert to one of {_INPUT_DTYPES} first"
            )
        finite = values.float().clamp(-self.max, self.max)
        codes = finite.to(torch.float8_e4m3fn).view(torch.uint8)
        is_nan = values.isnan()
        if not is_nan.any():
            return codes
        nan = torch.full_like(codes, _NAN)
        if self.nan_keeps_sign:
            nan[values.signbit()] |= _SIGN
        return torch.where(is_nan, nan, codes)

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """Turns uint8 codes of any shape into their float32 values."""
        flat = codes.reshape(-1).to(torch.int32)
        table = self.table.to(codes.device)
        return table.index_select(0, flat).view(codes.shape)

    def cast(self, values: torch.Tensor, quant_scale: torch.Tensor) -> torch.Tensor:
        """Scales and casts as hpu.cast_to_fp8_v2 does: q = encode(x * quant_scale).

        The product is taken in the dtype of ``values``, with the scale cast to
        it first: bf16 x bf16 for a bf16 activation.

        Args:
            values: bfloat16, float16 or float32 activations of any shape.
            quant_scale: The multiplier 1 / dequant_scale, broadcastable.

        Returns:
            uint8 codes with the shape of ``values``.
        """
        return self.encode(values * quant_scale.to(values.dtype))


GAUDI2 = Fp8Format("gaudi2", max=240.0, has_infinity=True, nan_keeps_sign=False)
GAUDI3 = Fp8Format("gaudi3", max=448.0, has_infinity=False, nan_keeps_sign=True)
FORMATS = {fmt.name: fmt for fmt in (GAUDI2, GAUDI3)}
