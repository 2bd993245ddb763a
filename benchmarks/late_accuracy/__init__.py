"""The parts of `late_accuracy.py`."""
