"""The parts of `sharded.py`."""
