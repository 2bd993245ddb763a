"""The job file: its schema, what is typed over it, and the functions it names."""
