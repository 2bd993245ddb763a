"""The parts of `ensemble.py`."""
