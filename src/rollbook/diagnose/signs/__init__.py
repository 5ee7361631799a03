"""Signs that several rules need, each worked out once a run: what a group of metrics did. A sign never names a fault;
that is what `rules/` are for."""
