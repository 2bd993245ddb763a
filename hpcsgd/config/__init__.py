"""The job file: its schema, its overrides, and the lookup of methods and parts that it names."""
