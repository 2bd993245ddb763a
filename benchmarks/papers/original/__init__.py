"""The original settings as job files, with one module per paper."""
