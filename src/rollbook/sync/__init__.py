"""Weight publication: trained weights to every replica, as a transaction that ends in one proven version.

`Publisher` sends buckets over a transport, `ReplicaTransaction` receives and proves them, `digest` is the proof.
This folder knows tensors, names and versions; it never knows the algorithm, the schedule or an engine's insides.
"""
