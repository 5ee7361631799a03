"""Producing trajectories: the engine protocol and its engines, the router over replicas, the agent loop, the gateway.

It turns prompts into sampled tokens with logprobs and weight versions. It never decides staleness, never scores and
never trains.
"""
