"""The parts of `selection.py`."""
