"""Every table and figure of five papers: a file a paper, each a command; what they share is beside them."""
