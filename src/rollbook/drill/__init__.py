"""Named faults for the real parts of a running job, and the run that says whether the diagnosis finds them. A fault
wraps a part from outside after the run was built; nothing in the parts knows of drills."""
