"""Owns the run's configuration: one TOML file, one override form, every problem reported at once.

`run_config.py` joins the folders' sections; `loading.py` reads, overrides, checks and writes. It holds no defaults.
"""
