"""The engine that runs a method: the wrapped optimizer, gradient reductions, and each rank's state."""
