"""The tables and figures of five papers: one command per paper, and the modules that these share."""
