"""Diagnosis of a run from its log alone: readers of our run directory and of other frameworks' logs, robust
change points, one rule per fault, and the decision tree data → version → asynchrony → implementation.

It never needs a live run, a GPU or torch, never changes what it reads, and never judges a signal that was
not collected: it says so, and how to collect it.
"""
