"""The job file: its schema, its overrides, and the functions that it names as methods and parts."""
