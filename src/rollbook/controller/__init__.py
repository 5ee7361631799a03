"""Where the parts meet: the step loop, the schedules, supervision and preflight. It does no math.

Read `loop.py` first: it is one step from prompts to the proven version that serves the next token. `rollout.py`
keeps the buffer full beside it, `build.py` makes the parts from a config.
"""
