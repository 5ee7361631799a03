"""Lines in which a worker says what device memory it holds, in the words of AReaL and of slime.

Memory-Usage after train step: memory allocated (GB): 51.20, memory reserved (GB): 60.01, device memory used/total ...
[Rank 0] Memory-Usage after train: {'gpu': '0', 'total_GB': 139.8, ..., 'allocated_GB': 73.45, 'reserved_GB': 83.71}
"""

from __future__ import annotations

import re

_LINES = (
    re.compile(
        r"Memory-Usage\b.*?\ballocated \(GB\): *(?P<allocated>\d+\.?\d*).*?\breserved \(GB\): *(?P<reserved>\d+\.?\d*)"
        r"(?:.*?\bused/total \(GB\): *[\d.]+/(?P<total>\d+\.?\d*))?"
    ),
    re.compile(
        r"Memory-Usage\b.*?(?:\btotal_GB\W+(?P<total>\d+\.?\d*).*?)?\ballocated_GB\W+(?P<allocated>\d+\.?\d*)"
        r".*?\breserved_GB\W+(?P<reserved>\d+\.?\d*)"
    ),
)
_METRICS = {
    "allocated": "perf/max_memory_allocated_gb",
    "reserved": "perf/max_memory_reserved_gb",
    "total": "perf/device_memory_gb",
}


def note_held(line: str, held: dict[str, float]) -> bool:
    """Whether a line says what is held; the largest values since `held` was begun are kept there.

    >>> held = {"perf/max_memory_reserved_gb": 70.0}
    >>> note_held("Memory-Usage after train: {'total_GB': 79.1, 'allocated_GB': 51.2, 'reserved_GB': 60.0}", held)
    True
    >>> held
    {'perf/max_memory_reserved_gb': 70.0, 'perf/max_memory_allocated_gb': 51.2, 'perf/device_memory_gb': 79.1}
    """
    if "Memory-Usage" not in line:
        return False
    found = next((match for pattern in _LINES if (match := pattern.search(line)) is not None), None)
    for part, metric in _METRICS.items():
        if found is not None and found[part] is not None:
            held[metric] = max(held.get(metric, 0.0), float(found[part]))
    return found is not None
