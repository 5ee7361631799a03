"""One file per rule. A rule is a pure function of the run: a finding with its evidence, or nothing, or what was
missing to judge. Rules never read files and never know each other; `tree.py` orders them."""
