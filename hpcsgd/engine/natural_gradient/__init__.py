"""Natural gradient: `optimizer.py` has the wrapper, `fisher.py` the equations."""

from __future__ import annotations

from hpcsgd.engine.natural_gradient.optimizer import NaturalGradient

__all__ = ["NaturalGradient"]
