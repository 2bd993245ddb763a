"""The parts of `simulation_error.py`."""
