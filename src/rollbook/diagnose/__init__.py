"""Diagnosis of a run from its log alone. It never needs a live run, a GPU or torch, never changes what it reads, and
never judges a signal that was not collected: it says so, and how to collect it. The way of a log to its verdict:

    readers/      a file, folder or server -> rows: `table.py` finds the format and loads, a file per format streams,
                  `names.py`, `words.py`, `renamer.py` turn names into the catalogue's, `status_rows.py` keeps apart
                  what tells of no step, `assemble.py` makes one run
    series.py     that run: a column a metric, a row a step, events (what the log says in words), seams (restarts)
    changes.py    noise and change points; on them `breaks.py` (what lasts) and `spells.py` (what comes and goes)
    view.py       the run as rules ask it: levels, trends, breaks, contrasts at a step; `env_words.py`, `units.py`,
                  `filter_words.py`, `spill_words.py`, `version_words.py`: metrics known by the words of their names
    signs/        what a group of metrics did, worked out once a run: the gap, versions, rewards, seconds, memory
    stops.py      the error that ended the run, and which rule its words belong to
    rules/        a file per verdict: a Finding, NotJudged or nothing; `rules/parts/` has their long or shared parts
    states.py     what of the algorithm limits a well run, a file per kind in `algorithm/`: advice, never an alarm
    tree.py       begin here: asks the rules, drops what a state explains, puts causes before consequences;
                  `cost.py` weighs lost seconds, `four_signals.py` proves "well", `as_logged.py` has the log's names
    report.py     the answer as text, `html_report.py` as a page; `finding.py` is what is said, `wording.py` how it
                  reads; `runbook.py` and `manual.py` are the duty manual of a job
"""
