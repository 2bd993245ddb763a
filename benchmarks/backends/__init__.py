"""What `backends.py` is made of."""
