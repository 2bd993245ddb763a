"""The parts of `guard.py`."""
