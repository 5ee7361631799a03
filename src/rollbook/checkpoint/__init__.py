"""Owns the whole RL state on disk: trainer, prompt stream, buffer, counters. It never decides when to save.

A checkpoint is written aside, digested, and renamed when whole; a reader refuses one whose digests differ.
"""
