"""Bytes, FLOPs and seconds of an RL step, by arithmetic.

From a `ModelSpec`, a `Cluster`, a `Workload` and `Assumptions` the ledger says what every stage costs, with
the formula and its source beside each number. It never imports torch, never touches a device, and never
chooses: the planner chooses, on the ledger's numbers.
"""
