"""The native engine: continuous batching on Hugging Face models, on CPU and CUDA.

One step, as data: `scheduler` decides which tokens run (no torch there) ──► `model_runner` runs them through the
Hugging Face model, whose attention reads the paged KV pool in `paged_attention` ──► `sampling` draws one token a
sequence ──► `scheduler` books them. `engine` is the asyncio face of that loop. It never decides staleness and never
moves weights between processes: a publication writes through `live_weights` between two steps.
"""
