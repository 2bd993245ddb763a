"""Parts of goodput.py."""
