"""The faults, each a function that wraps a part of a built run; a file for each part."""
