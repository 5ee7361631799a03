"""One file per kind of state that `states.py` asks for: what limits a run while the system is well. A state never is an
alarm; what it brings about is no finding."""
