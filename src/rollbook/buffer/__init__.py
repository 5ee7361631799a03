"""Owns the life of a group: admitted, then running, finished, failed, trained or evicted, and nothing else.

It decides who may start (the admission budget) and who may be trained (strict staleness). It knows groups and
versions, never engines, tensors on a device or the algorithm.
"""
