"""The original settings as job files: a file a paper."""
