"""Scorers: what a response is worth, under a deadline, in isolation where it needs it.

A scorer that raises, returns something that is not a finite number, or runs out of time gives a failure with its
cause. It never gives a zero.
"""
