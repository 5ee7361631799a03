"""The production engine: vLLM behind our engine protocol, with publications proven on its live parameters.

`core.py` and `cpu_worker.py` hold every use of vLLM's own interfaces. This folder never fills in a sampling parameter
from a model folder and never lets vLLM step while weights change.
"""
