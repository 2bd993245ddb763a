"""Wire formats: how vectors travel in fewer bits than they have. Means of them are made in float32."""

from collections.abc import Callable, Mapping

from hpcsgd.parts.wires.base import Wire
from hpcsgd.parts.wires.blocks import int2, int4, int8
from hpcsgd.parts.wires.halves import bf16, fp16
from hpcsgd.parts.wires.rounding import ROUNDINGS, Nearest, Stochastic

WIRES: Mapping[str, Callable[..., Wire]] = {
    "bf16": bf16,
    "fp16": fp16,
    "int2": int2,
    "int4": int4,
    "int8": int8,
}
"""As job files call them."""

__all__ = ["ROUNDINGS", "WIRES", "Nearest", "Stochastic", "bf16", "fp16", "int2", "int4", "int8"]
