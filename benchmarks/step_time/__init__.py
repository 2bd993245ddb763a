"""The parts of `step_time.py`."""
