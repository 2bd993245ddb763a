"""The parts of `strong_scaling.py`."""
