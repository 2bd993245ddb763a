"""The parts of `goodput.py`."""
