"""The parts of `step_overhead.py`."""
