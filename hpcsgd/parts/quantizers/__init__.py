"""Quantizers: formats in which vectors are sent in fewer bits. Means are computed in float32."""

from collections.abc import Callable, Mapping

from hpcsgd.parts.quantizers.base import Quantizer
from hpcsgd.parts.quantizers.blocks import int2, int4, int8
from hpcsgd.parts.quantizers.halves import bf16, fp16
from hpcsgd.parts.quantizers.rounding import ROUNDINGS, Nearest, Stochastic

QUANTIZERS: Mapping[str, Callable[..., Quantizer]] = {
    "bf16": bf16,
    "fp16": fp16,
    "int2": int2,
    "int4": int4,
    "int8": int8,
}
"""The functions that make quantizers, by their names in job files."""

__all__ = ["QUANTIZERS", "ROUNDINGS", "Nearest", "Stochastic", "bf16", "fp16", "int2", "int4", "int8"]
