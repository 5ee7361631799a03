"""The one screen of a run as a web page: assembled, served on loopback, or exported as a single file.

It owns what the page shows and how; it reads the run directory alone and never the running process.
"""
