"""The parts of `bytes_at_quality.py`."""
