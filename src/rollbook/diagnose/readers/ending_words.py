"""Words of a log that ends: what a dying process writes and of what cause, how errors are raised, logged and passed on,
and what is said of a training that is over. `endings.py` reads a log by them."""

from __future__ import annotations

import re

from rollbook.diagnose.readers.trouble import OUT_OF_MEMORY, OUT_OF_MEMORY_WORDS

DEATHS: tuple[tuple[str, tuple[str, ...], re.Pattern[str]], ...] = tuple(
    (cause, tuple(needles.split("|")), re.compile(pattern))
    for cause, needles, pattern in (
        # what says most comes first; the last is what others write when a process has gone
        (
            "host_memory",
            "due to|OutOfMemoryError|low on memory|OOM|oom|Out of memory: Kill",
            r"killed due to (?:the node running low on )?memory|ray\.exceptions\.OutOfMemoryError"
            r"|node (?:was |is )?running low on memory|OOM-?[Kk]ill|oom[-_]kill|Out of memory: Kill",
        ),
        (
            "device_memory",
            "|".join(OUT_OF_MEMORY_WORDS),
            OUT_OF_MEMORY,
        ),
        (
            "collective",
            "atchdog|NCCL|Timed out waiting|[c10d]",
            r"Watchdog caught collective operation timeout|NCCL (?:operation|error|timeout).{0,80}time[d ]?out"
            r"|watchdog got stuck|NCCL watchdog hang|\[c10d\] .{0,200}timed out after \d+ ?ms"
            r"|Timed out waiting .{0,60}(?:all_?reduce|broadcast|barrier|all_?gather)",
        ),
        (
            "device",
            "CUDA|device-side assert|STATUS_|Xid|illegal memory|uncorrectable",
            r"CUDA [Ee]rror: |device-side assert|CUDA_ERROR_|CUBLAS_STATUS_|CUDNN_STATUS_|NVRM: Xid"
            r"|illegal memory access|uncorrectable (?:NVLink|ECC) error",
        ),
        (
            "network",
            "nccl|NCCL|watchdog thread|eartbeat monitor|process down",
            r"nccl(?:Remote|System|Internal|UnhandledCuda)Error|NCCL communicator (?:was|encountered)"
            r"|watchdog thread terminated|[Hh]eartbeat monitor timed out|taking the (?:entire )?process down",
        ),
        ("shared_memory", "us error|SIGBUS", r"[Bb]us error|\bSIGBUS\b"),
        (
            "crash",
            "egmentation fault|SIGSEGV|SIGABRT|terminate called|Aborted|Fatal Python",
            r"[Ss]egmentation fault|\bSIGSEGV\b|terminate called|\bSIGABRT\b|^Aborted\b|Fatal Python error",
        ),
        (
            "scheduler",
            "slurmstepd|CANCELLED AT|DUE TO",
            r"slurmstepd: error|CANCELLED AT .{0,40}|DUE TO (?:TIME LIMIT|PREEMPTION)",
        ),
        (
            "killed",
            "illed|SIGKILL|exit|return|SIGTERM",
            r"^Killed\b|\*\*\* SIGTERM received|^Received SIGTERM|(?:^|\s)line \d+:\s+\d+ Killed\b|\bSIGKILL\b"
            r"|[Kk]illed by signal"
            r"|exit ?code\s*[:=]?\s+(?:-\d+|13[4-9])\b|return ?code ?= ?-\d+",
        ),
        (
            "process_gone",
            "Error|The actor |worker died|Worker unexpectedly",
            r"ActorDiedError|ActorUnavailableError|RayActorError|WorkerCrashedError|NodeDiedError|OwnerDiedError"
            r"|The actor (?:died|is dead|is temporarily unavailable)|worker died or was killed"
            r"|Worker unexpectedly exits|ChildFailedError",
        ),
    )
)
FATAL = re.compile(
    r"Error executing job with overrides|RayTaskError\(|(?:^|(?:s/it|it/s)\]\s*)Traceback \(most recent call last\)"
)
_NAME = r"(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception)"
ERROR_LINE = re.compile(rf"^{_NAME}(?:\([^)]*\))?: .+")
BARE_ERROR = re.compile(rf"^(?:{_NAME}|KeyboardInterrupt|Stop(?:Async)?Iteration):?$")
OTHER_ERROR = re.compile(r"^(?:[A-Za-z_]\w*\.)+[A-Z]\w*(?:: .+)?$")
"""What a traceback ends with, where it has no words, or a name that does not say that it is an error."""
FRAME = re.compile(r'^\s*File "(<(?!frozen)[^>]*>)?[^"]*", line \d+')
"""A frame of a traceback; of a program that was given as a text if its file is `<string>` or so."""
OF_A_GROUP = re.compile(r"^\s*(?:[|+]\s+)+")
RANK = re.compile(r"^\[rank\d+\]:\s?")
LOGGED = re.compile(
    rf"^.{{0,80}}\b(?:ERROR|CRITICAL|FATAL)\b.{{0,120}}?[\]:|-]\s+(?=Traceback \(|{_NAME}\b|\S*OutOfMemoryError)"
)
FAILED = re.compile(
    r"\b(?:[Tt]raining|[Rr]un|[Jj]ob|[Ee]xperiment|[Mm]ain|[Pp]rogram|[Ff]atal)\b.{0,30}\b(?:failed|error|crashed|aborted)"
    r"\b(?: with)?(?: error| exception)?\s*:\s*(.*)$"
    r"|^\S+\.py: error: (.+)$|^(?:\S*bash|\S*sh|\S+\.sh|srun|slurmstepd): (?:error: |line \d+: )?"
    r"(.*(?:command not found|No such file or directory|Permission denied|[Uu]nable to .+|[Ii]nvalid .+))$"
)
"""What a program says that catches its own error, and the error behind it or in the line below."""
PASSED_ON = re.compile(
    r"RayTaskError\(|ChildFailedError|CalledProcessError|Process(?:Raised|Exited)Exception|BrokenProcessPool|EngineDeadError"
    r"|[Ee]ngine core initialization failed|[Ss]ee root cause above|SupervisionError|ExceptionGroup|BrokenPipeError"
    r"|ConnectionResetError|EOFError|Connection (?:reset|closed) by peer|KeyboardInterrupt|SystemExit"
)
"""Errors that pass on another one, or follow from it: they stand only where nothing else was said."""
OF_SURROUNDINGS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("disk", re.compile(r"No space left on device|Disk quota exceeded|disk is full", re.IGNORECASE)),
    (
        "library",
        re.compile(
            r"^ModuleNotFoundError|^ImportError|No module named|undefined symbol|requires the .{1,40} library"
            r"|GLIBCXX?_[\d.]+' not found|PackageNotFoundError"
        ),
    ),
    ("port", re.compile(r"[Aa]ddress already in use|EADDRINUSE|[Pp]ort \d+ is (?:already )?in use")),
    (
        "access",
        re.compile(
            r"GatedRepoError|\b40[13] Client Error|Unauthorized|[Pp]ermission denied|[Ii]nvalid (?:API|api) key"
            r"|[Aa]uthentication|[Nn]o API key|[Aa][Pp][Ii][_ ]key not configured|not logged in"
        ),
    ),
    ("file", re.compile(r"^FileNotFoundError|No such file or directory")),
    ("interrupted", re.compile(r"^KeyboardInterrupt")),
)
"""Causes that lie around the job: a key of `stops.CAUSES`, and the words of the error."""
GUESSES = "There are some potential root causes"
"""Ray lists there what may have ended a worker: none of it is known."""
CAUSED = "The above exception was the direct cause of the following exception"
OF_A_SHUTDOWN = re.compile(rf"{PASSED_ON.pattern}|Cancelled|SystemExit|Actor|ProcessGroup|destroy|Timeout")
AT_ITS_END = re.compile(
    r"Final validation metrics|Final checkpoint|Training Progress: 100%|'train_runtime'|Job '\S+' succeeded"
    r"|[Tt]raining (?:is |was |has |run )?(?:finished|completed?|done)\b(?!.{0,40}(?:epoch|error|fail|exit|stage))"
    r"|[Ff]inished training\b(?!.{0,40}(?:epoch|error|stage))"
)
BEGINS_ANEW = re.compile(
    r"[Rr]esum(?:ing|ed) |Setting global step to|Load(?:ed)? (?:from )?checkpoint|local Ray instance"
)
ENDING_BYTES = (
    b"illed", b"egmentation", b"us error", b"SIG", b"xit code", b"xitcode", b"returncode", b"CUDA", b"nccl", b"NCCL",
    b"Xid", b"terminate called", b"Aborted", b"Fatal", b"slurm", b"CANCELLED", b"DUE TO", b"navailable",
    b"process down", b"STATUS_", b"rogress: 100%", b"train_runtime", b"succeeded", b"local Ray", b"ssert", b"illegal",
    b"raining finished", b"raining complete", b"raining done", b"raining is ", b"raining was ", b"raining has ",
    b"raining run ", b"inished training", b"eartbeat", b"unexpectedly", b"[c10d]", b"ailed",
    b"crashed:", b"aborted:", b"nterrupt",
)  # fmt: skip
"""Beside `text.TROUBLE_BYTES`: every line that tells how a log ends holds one of both."""
OF_A_JOB = re.compile(
    r"^(?:\x1b\[[0-9;]*m)*\(\w+ pid=\d+|^\[rank\d+\]:"
    r"|local Ray instance|existing Ray cluster|^Error executing job with overrides: \["
    r"|^\+? ?(?:\S*/)?python3? .*main_ppo"
)
WORD = re.compile(r"""["'(*>-]*[A-Za-z][a-z'-]*[,.;:!?)"']*""")


OF_A_PROGRAM = re.compile(rf"{ERROR_LINE.pattern}|{FATAL.pattern}|\S/\S+:\d+\b|\bpid=\d+")
"""Errors, and places in a source or a process."""
