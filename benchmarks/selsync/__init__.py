"""The parts of `selsync.py`."""
