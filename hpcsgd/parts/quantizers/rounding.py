"""The kinds of rounding: to the nearer of the two neighbouring values, or to a random one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hpcsgd.arguments import checked
from hpcsgd.errors import UserError
from hpcsgd.parts.quantizers.base import Rounding, noise_for


@checked
@dataclass(frozen=True)
class Nearest:
    """Rounding to the nearest value, in a tie to the even one. The error is kept and sent later.

    Example:
        >>> hpcsgd.quantizers.int8() == hpcsgd.quantizers.int8(rounding=hpcsgd.quantizers.Nearest())
        True

    References:
        S. P. Karimireddy et al.: Error Feedback Fixes SignSGD and other Gradient Compression Schemes, ICML
        2019, algorithm 2: the error of one vector is added to the next.

    See Also:
        `Stochastic`: keeps no error and is exact only on average.
    """

    unbiased = False

    def draw(self, dice: int) -> int | None:
        return None


@checked
@dataclass(frozen=True)
class Stochastic:
    """Stochastic rounding to either neighbour, with probabilities that make the expected value exact.

    Errors are not kept. The noise differs between ranks, steps and vectors. It is the same in repeated runs
    and after a restart.

    Args:
        seed: Seed of the noise. Default 0.

    Raises:
        UserError: If `seed` is negative or has more than 63 bits.

    Example:
        >>> quantizer = hpcsgd.quantizers.int4(rounding=hpcsgd.quantizers.Stochastic(seed=1))
        >>> method = hpcsgd.hierarchical(sync_every=8, grad_reduce=hpcsgd.Quantized(gradients=quantizer))
        >>> optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, method)

    References:
        D. Alistarh et al.: QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding, NIPS
        2017, section 3.1, with the largest magnitude of a block as its norm.

    See Also:
        `Nearest`: has less noise, but keeps a vector for error feedback.
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
"""The kinds of rounding, by their names in job files."""
