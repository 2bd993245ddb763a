"""Which of its two neighbours a number becomes on its way into few bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hpcsgd.arguments import checked
from hpcsgd.errors import UserError
from hpcsgd.parts.quantizers.base import Rounding, noise_for


@checked
@dataclass(frozen=True)
class Nearest:
    """The nearer one, of two the even one. What it loses is kept and sent later.

    Not to be confused with `Stochastic`, which keeps nothing and is right on the mean alone.

    Example:
        >>> hpcsgd.quantizers.int8() == hpcsgd.quantizers.int8(rounding=hpcsgd.quantizers.Nearest())
        True

    Source:
        S. P. Karimireddy et al.: Error Feedback Fixes SignSGD and other Gradient Compression Schemes, ICML
        2019, algorithm 2: what is lost of one vector is added to the next.
    """

    unbiased = False

    def draw(self, dice: int) -> int | None:
        return None


@checked
@dataclass(frozen=True)
class Stochastic:
    """Either one, by a chance that makes the mean right: the farther, the less likely. Nothing is kept.

    The dice are thrown anew for every rank, step and vector, and are the same from run to run and after a
    restart.

    Not to be confused with `Nearest`, the default, with error feedback: less noise, for a vector of room.

    Args:
        seed: of the dice. Default 0.

    Raises:
        UserError: for a `seed` of more than 63 bits, or below 0.

    Example:
        >>> wire = hpcsgd.quantizers.int4(rounding=hpcsgd.quantizers.Stochastic(seed=1))
        >>> method = hpcsgd.hierarchical(sync_every=8, grad_reduce=hpcsgd.Quantized(gradients=wire))
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, method)

    Source:
        D. Alistarh et al.: QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding, NIPS
        2017, section 3.1, with the largest magnitude of a block as its norm.
    """

    seed: int = 0
    unbiased = True

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 1 << 63:
            raise UserError(
                f"seed = {self.seed}: a number from 0 to 2⁶³ − 1 is expected", key="seed", value=self.seed
            )

    def draw(self, dice: int) -> int | None:
        return noise_for(self.seed, dice)


ROUNDINGS: Mapping[str, Callable[..., Rounding]] = {"nearest": Nearest, "stochastic": Stochastic}
"""As job files call them."""
