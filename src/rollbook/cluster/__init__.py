"""Owns where the parts of a run live: one process by default, Ray actors on one machine or many. It never decides
what they do: a remote trainer, publisher or engine has the face of the local one.
"""
