"""One file per log format, each turning a file, folder or server into rows of (step, metrics). `table.py` lists
them and finds out which one fits; `assemble.py` makes one `RunSeries` of the rows. Readers never judge."""
