"""The parts of `model_error.py`."""
