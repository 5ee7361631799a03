"""What a run says about itself: metric catalogue, spans, run directory, sinks, Prometheus and the page.

It owns the names and reductions of everything measured and the files they go to. It never decides anything
about the run, never reads a device, and imports nothing but `types` and `errors`.
"""
