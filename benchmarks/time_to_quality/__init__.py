"""The parts of `time_to_quality.py`."""
