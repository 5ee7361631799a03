"""Model code that the trainer and the native engine share: loading, tokenizers, the decoder, attention over packed
sequences, and logprobs in chunks. Because both sides run the same code, the logprob gap is at the floor of the
arithmetic. It never decides what is trained or sampled.
"""
