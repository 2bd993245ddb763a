"""What every method is written against: P × K ranks, the model as flat vectors, a step, graphs of groups."""
