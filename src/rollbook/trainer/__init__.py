"""Owns the policy under training: packing, forward and backward, the optimizer, the critic and the reference, and the
export of weights as a stream of named tensors. It never schedules: the controller says when.
"""
