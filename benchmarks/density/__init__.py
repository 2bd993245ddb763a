"""The parts of `density.py`."""
