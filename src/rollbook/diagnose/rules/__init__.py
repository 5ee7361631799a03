"""One file per rule, named as its verdict. A rule is a pure function of the run: a finding with its evidence, or
nothing, or what was missing to judge. Rules never read files and never know each other: what several ask is in
`signs/`, what is long or shared by two in `parts/`; `tree.py` orders them."""
