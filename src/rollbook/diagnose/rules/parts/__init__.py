"""Parts of rules that are one thing each: a way to see a fault that needs a file of its own, or what two rules share.
Each says whose it is; none is asked by the tree."""
