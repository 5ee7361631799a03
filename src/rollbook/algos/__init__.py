"""Advantages, policy losses, KL and corrections: pure functions on arrays and tensors.

This folder owns the arithmetic between a group's rewards and the scalar that is differentiated. It never
knows where a batch came from, never schedules anything, and never talks to an engine or an optimizer.
"""
