"""Trackers that a run may also report to: TensorBoard, Weights & Biases, MLflow, trackio; one file each.

They own the translation to their tracker and nothing else; each is an extra, imported when it is asked for.
"""
