"""What the papers have, as constants with their source, and ours beside it: a file a paper."""
