"""A package with this file, because Jupyter's kernel installs a module of the same name."""
