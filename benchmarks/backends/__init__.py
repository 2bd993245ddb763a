"""The parts of `backends.py`."""
