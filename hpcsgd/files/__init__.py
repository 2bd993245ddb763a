"""Files that are either whole or absent: replaced at once, or HDF5 with checksums."""
