"""What a policy is asked and how its answers are judged: prompts, environments, rewards.

This folder owns prompt sources and the resumable stream over them, the `Env` protocol, and the scorers with
their deadlines and failures. It never sees weights, engines or tensors, and works without torch.
"""
