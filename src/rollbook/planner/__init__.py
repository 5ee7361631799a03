"""From a workload to a plan: the six-step derivation, the search over topologies and layouts, the
simulator, the explanation, the exporters, and the reconciliation of a finished run with its plan.

It stands on the ledger and on pydantic alone: it never runs a job and never imports torch.
"""
