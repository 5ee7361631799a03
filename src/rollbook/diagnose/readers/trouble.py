"""The sentences in which a log reports trouble, and in which stage the trouble came."""

from __future__ import annotations

import re

from rollbook.diagnose.series import Event

OUT_OF_MEMORY = (
    r"(?:CUDA|cuda|NPU|HIP)(?: [Ee]rror:| driver error:)? out of memory|torch\.(?:cuda\.)?OutOfMemoryError"
    r"|CUBLAS_STATUS_ALLOC_FAILED|\b[Cc][Uu]\w* ?[Ee]rror\W{1,3}2 ?\(out of memory|CUDA_ERROR_OUT_OF_MEMORY"
    r"|Failed to CUDA (?:host )?[cm]alloc|[Cc]uda failure(?: \d+)? 'out of memory'"
    r"|\bcu(?:da)?M(?:em|alloc)\w* .{0,20}out of memory|HSA_STATUS_ERROR_OUT_OF_RESOURCES"
)
"""A device that has no memory left, in the words of torch, CUDA, its allocators and NCCL."""
OUT_OF_MEMORY_WORDS = (
    "out of memory", "OutOfMemoryError", "ALLOC_FAILED", "OUT_OF_MEMORY", "to CUDA", "OUT_OF_RESOURCES",
)  # fmt: skip
_GOT_OVER = re.compile(
    r"may not be an issue|(?:will|and|then|to) retry\b|\bretrying\b|falling back|fell back|\bignored\b",
    re.IGNORECASE,
)


_MAY_BE_GOT_OVER = ("out_of_memory", "collective_timeout", "collective_missed")


def is_got_over(line: str) -> bool:
    """Whether a line that reports an error says as well that its program goes on."""
    return _GOT_OVER.search(line) is not None


_TROUBLE: tuple[tuple[str, tuple[str, ...], re.Pattern[str]], ...] = tuple(
    (kind, needles, re.compile(pattern))
    for kind, needles, pattern in (
        (
            "host_out_of_memory",
            (
                "memory pressure",
                "OutOfMemoryError",
                "OOM",
                "oom-kill",
                "oom_kill",
                "due to memory",
                "low on memory",
            ),
            r"killed due to (?:the node running low on )?memory|memory pressure|ray\.exceptions\.OutOfMemoryError"
            r"|OOM-?[Kk]illed|oom[-_]kill|running low on memory",
        ),
        (
            "out_of_memory",
            (*OUT_OF_MEMORY_WORDS, "Cannot allocate"),
            rf"{OUT_OF_MEMORY}|OutOfMemoryError|out of memory\. Tried to allocate",
        ),
        (
            "collective_timeout",
            (
                "Watchdog",
                "watchdog",
                "NCCL",
                "collective",
                "Gloo",
                "gloo",
                "HCCL",
                "Timeout",
                "imed out",
                "did not",
                "times out",
                "Barrier",
                "eartbeat",
                "MISMATCH",
                "store->get",
            ),
            r"Watchdog caught collective operation timeout|NCCL (?:operation|error|timeout).{0,80}time[d ]?out"
            r"|watchdog got stuck for|NCCL watchdog hang|\[c10d\] .{0,200}timed out after \d+ ?ms"
            r"|collective operation timeout|ProcessGroupNCCL.{0,120}[Tt]imeout|Connection closed by peer.{0,80}gloo"
            r"|HCCL.{0,60}timeout|Timed out waiting .{0,60}(?:all_?reduce|broadcast|barrier|all_?gather)"
            r"|Timed out waiting \d+ ?ms for (?:recv|send|operation)"
            r"|did not answer to \w+ of version|did not export .{0,60} within"
            r"|failure detected by watchdog|due to (?:a )?collective timeout|[Hh]eartbeat monitor timed out"
            r"|DistStoreError.{0,40}[Tt]imed out|store->get\(.{0,40}timeout|failed to pass monitoredBarrier"
            r"|Notify register times out|mismatch between collectives|Collective .{0,40}type: MISMATCH"
            r"|(?:update_weights\w*|weight[ _](?:sync|update)) .{0,60}(?:timed out after|did not form)",
        ),
        (
            "collective_missed",
            ("join", "enter", "last enqueued", "state", "issing rank"),
            r"last enqueued (?:\w+ )?(?:work|collective)|[Nn]ot all ranks join|\b[Mm]issing ranks?\b"
            r"|\bcollective \d.{0,60}\bstate\W{1,4}(?:started|scheduled)\b"
            r"|(?:\bnot|\bnever) (?:join|enter)(?:ed)?\b.{0,60}"
            r"(?:collective|broadcast|barrier|reduce|gather|process group|\branks?\b)"
            r"|(?:collective|broadcast|barrier|reduce|gather|process group|\branks?\b).{0,60}"
            r"(?:\bnot|\bnever) (?:join|enter)(?:ed)?\b",
        ),
        (
            "stack_in_collective",
            ("distributed_c10d.py", "unshard"),
            r"\b\w+ \(\S*distributed_c10d\.py:\d+\)|distributed_c10d\.py\", line \d+ in \w+"
            r"|\b\w*unshard\w* \(\S*fsdp\S*\.py:\d+\)|fsdp\S*\.py\", line \d+ in \w*unshard",
        ),
        (
            "sandboxes_counted",
            ("andbox", "ontainers"),
            r"\d+ (?:sandboxes|containers) (?:running|alive|live|living|open)\b.{0,40}"
            r"\b\d+ (?:leased|in use|busy|assigned)\b"
            r"|(?:[Ss]andbox|[Cc]ontainers).{0,60}\b(?:running|alive|live|living|open) ?[=:] ?\d+\b.{0,40}"
            r"\b(?:leased|in[ _]use|busy|assigned) ?[=:] ?\d+",
        ),
        (
            "object_store_spill",
            ("pilled", "pilling", "ObjectStoreFull", "object store"),
            r"Spilled \d+|ObjectStoreFullError|[Ss]pilling objects|object store (?:memory )?is full",
        ),
        (
            "resumed",
            (
                "esuming",
                "esumed",
                "Setting global step",
                "Load from checkpoint",
                "ecovered from checkpoint",
                "oaded checkpoint",
                "ontinuing training from",
                "ecover checkpoint",
            ),
            r"[Rr]esum(?:ing|ed) (?:training |run )?from|Setting global step to \d+|Load from checkpoint folder"
            r"|Continuing training from (?:checkpoint|global step|epoch)"
            r"|Recovered from checkpoint|[Ff]ound (?:a )?recover checkpoint|Loaded checkpoint from .*step"
            r"|successfully loaded checkpoint .*at iteration \d+",
        ),
        (
            "sandbox_failure",
            (
                "andbox",
                "env_server",
                "tool call",
                "env step",
                "nvironment step",
                "docker",
                "Docker",
                "OCI runtime",
                "address pool",
                "e2b",
                "Daytona",
                "ApiException",
                "exceeded quota",
                "modal.exception",
                "swerex",
                "from daemon",
                "container creation",
                "ailed to ",
                "ailure to ",
            ),
            r"[Ss]andbox.{0,80}(?:time[d ]*out|unreachable|refused|not healthy|quota|exhausted|lost|died|unavailable)"
            r"|[Ss]andbox (?:API )?(?:call|request|execution) failed"
            r"|(?:Connect(?:ion|or)?(?:Error|Timeout)|[Cc]onnection refused).{0,80}sandbox"
            r"|env_server.{0,60}error|(?:tool call|env(?:ironment)? step) failed"
            r"|docker\.errors\.\w+|Error response from daemon|[Cc]annot connect to the Docker daemon"
            r"|OCI runtime (?:create|exec|error)|IPv4 address pool|address pools have been fully subnetted"
            r"|\be2b\w*\.\S*(?:Exception|Error)|\b(?:Daytona|\w*Sandbox)\w*(?:Error|Exception)\b"
            r"|[Ff]ail(?:ed|ure) to (?:create|start|acquire|get) (?:an? |new )*(?:sandbox|container|pod)\b"
            r"|container creation failed|kubernetes\.\S*ApiException: \((?:403|409|429|5\d\d)\)|exceeded quota: "
            r"|modal\.exception\.\w+|swerex\.exceptions\.\w+",
        ),
        (
            "engine_died",
            (
                "EngineDead",
                "EngineCore",
                "class_name",
                "ngine",
                "nference server",
                "eplica",
                "Scheduler hit",
                "sigquit",
            ),
            r"EngineDeadError|EngineCore\S{0,20} .{0,30}(?:died|encountered an? (?:fatal )?(?:issue|error))"
            r"|class_name: \S*(?:vLLM|VLLM|Vllm|SGLang|Sglang|Engine|Rollout\w*Server|HttpServer)"
            r"|\b(?:[Ee]ngine|[Rr]eplica|[Ii]nference server) (?=\S*\d)\S{1,60} (?:is |was |has )?"
            r"(?:dead|died|crashed|unhealthy|gone\b)"
            r"|[Hh]ealth check .{0,40}(?:failed|timed out) .{0,20}(?:engine|replica|inference server)"
            r"|Scheduler hit an exception|Received sigquit from a child process",
        ),
        (
            "engine_back",
            ("ngine", "eplica", "nference server"),
            r"(?:[Rr]estarted|[Rr]ecovered|[Rr]elaunched|[Rr]e-?registered) .{0,30}(?:engine|replica|inference server)"
            r"|\b(?:[Ee]ngine|[Rr]eplica|[Ii]nference server) (?=\S*\d)\S{1,60} (?:is |was |has )?(?:been )?"
            r"(?:restarted|recovered|relaunched|rejoined|back (?:online|up|in service|after)|healthy again)"
            r"|\b(?:[Ee]ngine|[Rr]eplica|[Ii]nference server) (?=\S*\d)\S{1,60} (?:is|was) back\b",
        ),
    )
)
_NEEDLES = tuple(dict.fromkeys(needle for _, needles, _ in _TROUBLE for needle in needles))
_SYNC_WORDS = re.compile(
    r"update_weights|load_weights|wake_up|wakeup|resume_memory|sync_weights|weight_sync|rollout_mode|update_named_param"
    r"|cumem|checkpoint_engine|all_gather_param|param_sync|sharding_manager|update_params|resume_memory_occupation"
)
_TRAIN_WORDS = re.compile(
    r"update_actor|update_policy|\bbackward\b|compute_log_prob|update_critic|train_step|forward_backward"
)


_ROLLOUT_WORDS = re.compile(r"generate_sequences|execute_model|run_batch|forward_batch_generation")


_STAGES = tuple(
    (stage, tuple(word.removeprefix(r"\b").removesuffix(r"\b") for word in words.pattern.split("|")), words)
    for stage, words in (("sync", _SYNC_WORDS), ("train", _TRAIN_WORDS), ("rollout", _ROLLOUT_WORDS))
)
"""(stage, its words as they are, its words as a pattern)."""
_OF_METRICS = ("timing_s/", "token_ms/", "mfu/", "perf/", "timing/", "time/")
"""Before these words they are metrics' names: every step has `timing_s/update_weights`, and is in no stage for it."""
_OVER = "over"
"""In place of a stage: the one that was under way has ended."""
_IS_OVER = re.compile(
    r"\b(?:done|finished|completed?|ended|succeeded|took|(?:time )?cost|elapsed)\b", re.IGNORECASE
)
_NAME = re.compile(r"[A-Za-z]\w*_\w+")
_ENGINES = ("vllm", "sglang", "engine", "rollout", "inference", "generation")
_HANDED = {"model", "weight", "weights", "param", "params", "parameter", "parameters"}
_HANDS = {"move", "sync", "push", "send", "broadcast", "transfer", "copy", "publish", "load", "update", "put"}


def _stage_of(line: str) -> str:
    """The stage whose words a line holds, other than in the name of a metric; empty for none."""
    for stage, needles, words in _STAGES:
        if any(map(line.__contains__, needles)) and any(
            not line[: found.start()].endswith(_OF_METRICS) for found in words.finditer(line)
        ):
            return _OVER if _IS_OVER.search(line) else stage
    return "sync" if _hands_over(line) else ""


def _hands_over(line: str) -> bool:
    """Whether a line is in a function that hands weights to an engine, by the words of its name.

    >>> _hands_over("trainer.py, line 7, in _move_model_to_vllm"), _hands_over("in load_model, vllm_engine.py")
    (True, False)
    """
    if not any(map(line.__contains__, _ENGINES)):
        return False
    names = (frozenset(name.lower().split("_")) for name in _NAME.findall(line))
    return any(said & _HANDED and said & _HANDS and said.intersection(_ENGINES) for said in names)


MAX_TEXT = 300
"""Characters of a line that an event keeps."""
MAX_WATCHED = 2000
"""Characters of a line that are looked at."""


MAX_CONTEXT = 40
"""Lines whose stages are remembered."""


class TroubleWatcher:
    """Notices the sentences in which a log reports trouble, and in which stage the trouble came."""

    def __init__(self) -> None:
        self._context: list[str] = []
        self.newest_stage = ""
        """What the newest line said of a stage, empty for nothing."""
        self._placeless: Event | None = None
        """The newest event, where no line before it was in a stage: it is in that of the next one that is."""

    def watch(self, line: str, step: int | None) -> Event | None:
        """An event when `line` (already plain) reports trouble; `step` is the newest step logged so far."""
        is_record = line.startswith("step:")
        if len(line) > MAX_WATCHED:
            line = line[-MAX_WATCHED:]  # a record of metrics, perhaps with another process's words at its end
        if is_record or (self._placeless is not None and self._placeless.step != step):
            self._placeless = None
        self.remember("" if is_record else _stage_of(line))
        if not any(map(line.__contains__, _NEEDLES)):
            return None
        for kind, needles, pattern in _TROUBLE:
            if any(map(line.__contains__, needles)) and pattern.search(line):
                is_none = kind in _MAY_BE_GOT_OVER and is_got_over(line)
                return None if is_none else self.event(kind, line, step)
        return None

    def event(self, kind: str, line: str, step: int | None) -> Event:
        """Trouble of a kind that a line reports, in the stage that was spoken of last."""
        stages = [stage for stage in self._context if stage]
        fields = {"stage": stages[-1]} if stages else {}
        most = (
            2 * MAX_TEXT if kind == "out_of_memory" else MAX_TEXT
        )  # what was reserved and not used comes last
        event = Event(kind=kind, step=step, text=line[-MAX_WATCHED:].strip()[:most], fields=fields)
        self._placeless = None if stages else event
        return event

    def remember(self, stage: str) -> None:
        """What a line says of a stage, empty for nothing; nothing is kept while no line of late was in one."""
        self.newest_stage = stage
        if stage == _OVER:
            self._context.clear()
            return
        if stage and self._placeless is not None:
            self._placeless.fields["stage"] = stage
            self._placeless = None
        if not stage and not self._context:
            return
        self._context.append(stage)
        del self._context[:-MAX_CONTEXT]
        if not any(self._context):
            self._context.clear()
