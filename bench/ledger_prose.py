"""What the fields of a case leave out and its sentences say: batch, lengths, GPUs, degrees of parallelism."""

from __future__ import annotations

import re
from typing import Any

from ledger_names import FIELDS, flat
from ledger_numbers import FIGURE, HEDGE, figure, scaled

Part = dict[str, Any]


_NUMBER = rf"{HEDGE}{FIGURE}"
_ROWS = r"(?:responses|samples|rollouts|generations|completions|answers|trajectories)"
_ASKED = r"(?:prompts|questions|problems|queries)"
_LENGTHS = r"(?:\s+lengths?)?\s*(?:is|was|of|:|=)?\s*"
_RESPONSES = r"(?:response|output|completion|generation)s?"
_EACH = r"(?:per|a|an|each|for each|for every|of each)"
_SAID: dict[str, tuple[str, ...]] = {
    "prompts_per_step": (
        rf"{_NUMBER}\s+(?:unique\s+)?{_ASKED}\b",
        rf"{_ASKED}\s*(?:per|a)\s*(?:step|batch)\s*(?:is|of|:|=)?\s*{_NUMBER}",
    ),
    "generations_per_prompt": (
        rf"{_NUMBER}\s+{_ROWS}\s+(?:{_EACH})\s+(?:prompt|question|problem|query)",
        rf"{_ASKED}\s*(?:x|×|\*|times|with)\s*{_NUMBER}",
        rf"groups?(?:\s+size)?\s*(?:of|is|:|=)?\s*{_NUMBER}",
        rf"{_ROWS}\s*(?:per|a)\s*prompt\s*(?:is|of|:|=)?\s*{_NUMBER}",
    ),
    "mean_response_length": (
        rf"(?:mean|average|avg\.?)\s+{_RESPONSES}{_LENGTHS}{_NUMBER}",
        rf"(?:responses|outputs|completions)\s+(?:of|average|are)\s+{_NUMBER}\s*(?:tokens)?\s*"
        r"(?:on average|in the mean)",
    ),
    "mean_prompt_length": (
        rf"(?:mean|average|avg\.?)\s+(?:prompt|input)s?(?:\s+lengths?)?\s*(?:is|was|of|:|=)?\s*{_NUMBER}",
    ),
    "max_response_length": (
        rf"(?:max|maximum|longest allowed)\.?\s+{_RESPONSES}{_LENGTHS}{_NUMBER}",
        rf"(?:responses|outputs|completions)\s+(?:of )?(?:up to|at most)\s+{_NUMBER}",
    ),
    "gbs": (rf"(?:global\s+)?batch(?:\s+size)?\s*(?:of|is|:|=)?\s*{_NUMBER}\s*(?:sequences|samples)?",),
    "sequence_length": (
        rf"(?:sequence|context)\s*lengths?\s*(?:of|is|:|=)?\s*{_NUMBER}",
        rf"sequences of\s+{_NUMBER}",
    ),
    "concurrency": (
        rf"concurrency\s*(?:of|is|:|=)?\s*{_NUMBER}",
        rf"{_NUMBER}\s+(?:concurrent|parallel|simultaneous)\s+(?:requests|streams|users|clients|sequences)",
    ),
    "input_length": (
        rf"(?:ISL|input|prompt)s?(?:\s+lengths?)?\s*(?:of|is|:|=)?\s*{_NUMBER}",
        rf"{_NUMBER}\s+(?:input|prompt)\s+tokens",
    ),
    "output_length": (
        rf"(?:OSL|output)s?(?:\s+lengths?)?\s*(?:of|is|:|=)?\s*{_NUMBER}",
        rf"{_NUMBER}\s+(?:output|generated|new)\s+tokens",
    ),
}  # fmt: skip
"""How people say in a sentence what the fields leave out."""
_FILLED: dict[str, tuple[str, ...]] = {
    "rl_step": (
        "prompts_per_step", "generations_per_prompt", "mean_response_length", "mean_prompt_length",
        "max_response_length",
    ),
    "decode": ("concurrency", "input_length", "output_length"),
    "train_mfu": ("gbs", "sequence_length"),
    "weight_sync": (),
}  # fmt: skip


def filled(config: Part, measured: Part, notes: str, category: str) -> Part:
    """The fields with what only sentences say. A batch in sequences needs no prompts."""
    found = dict(config)
    fields = FIELDS[category]
    for name in _FILLED[category]:
        known = fields[name][0]
        if any(part.get(key) is not None for part in (found, measured) for key in (name, *known)):
            continue
        if name in ("prompts_per_step", "generations_per_prompt") and any(
            key in found for key in fields["samples_per_step"][0]
        ):
            continue
        for pattern in _SAID[name]:
            said = re.search(pattern, notes, re.IGNORECASE)
            if said:
                value = scaled(said[1], said[2])
                found[name] = int(value) if value.is_integer() else value
                break
    _fill_batch(found)
    _fill_gpus(found, notes)
    if category == "weight_sync":
        _fill_sides(found, notes)
    _fill_degrees(found, notes, category)
    if category == "train_mfu":
        _fill_global_batch(found)
    return found


def _fill_batch(config: Part) -> None:
    """ "512 x 16" and "512 prompts x 16 responses" under any name of a batch."""
    for key, value in list(config.items()):
        if "batch" not in flat(key) and flat(key) not in ("prompts_per_step", "workload"):
            continue
        both = re.match(
            rf"\s*(\d[\d,]*)\s*(?:{_ASKED})?\s*(?:x|×|\*)\s*(\d[\d,]*)(?!\s*GPU)", str(value), re.IGNORECASE
        )
        if both and not any(name in config for name in ("generations_per_prompt", "rollout_n", "group_size")):
            config["prompts_per_step"], config["generations_per_prompt"] = (
                int(n.replace(",", "")) for n in both.groups()
            )


_CHIPS = r"(?:NVIDIA |AMD )?(?:DGX )?(?:GH200|GB[23]00|[HABL]\d{2,3}[GS]?|MI\d{3}X?|RTX|A6000|[45]090)"


def _fill_gpus(config: Part, notes: str) -> None:
    """The number of GPUs: of the sides, of nodes, or beside the device's name."""
    if config.get("gpus") is not None:
        return
    sides = [config.get(key) for key in ("train_gpus", "rollout_gpus")]
    if all(isinstance(side, (int, float)) for side in sides) and not re.search("coloc", str(config)):
        config["gpus"] = sum(int(side) for side in sides if side is not None)
        return
    nodes, per_node = (figure(str(config.get(key, ""))) for key in ("nodes", "gpus_per_node"))
    nodes = nodes if nodes is not None else figure(str(config.get("num_nodes", "")))
    device = str(config.get("gpu", ""))
    if nodes is not None and re.fullmatch(
        r"\s*\d+\s*", str(config.get("nodes", config.get("num_nodes", "")))
    ):
        config["gpus"] = int(nodes * (per_node or 8))
        return
    for text in (device, notes):
        of_nodes = re.search(rf"(\d+)\s*(?:x|×)\s*(\d+)\s*(?:x\s*)?{_CHIPS}", text) or re.search(
            r"(\d+)\s*nodes?\s*(?:of|x|×|with)\s*(\d+)", text
        )
        alone = re.search(rf"(\d+)\s*(?:x|×)?\s*{_CHIPS}", text) or re.search(
            rf"{_CHIPS}\w*\s*(?:x|×)\s*(\d+)", text
        )
        said = re.search(r"(?<!per )\b(\d+)\s*GPUs\b", text)
        if of_nodes:
            config["gpus"] = int(of_nodes[1]) * int(of_nodes[2])
        elif alone or said:
            config["gpus"] = int((alone or said)[1])  # type: ignore[index]
        else:
            continue
        return


_TRAINERS = r"(?:train(?:er|ers|ing)?|actors?|policy|learners?|senders?)"
_ENGINES = r"(?:rollouts?|inference|generat(?:ion|ors?)|engines?|samplers?|serving|receivers?|vLLM|SGLang)"


def _fill_sides(config: Part, notes: str) -> None:
    """GPUs of both sides out of a sentence: "16 training GPUs and 32 inference GPUs", "2 trainer nodes, ..."."""
    if any(config.get(key) is not None for key in ("train_gpus", "rollout_gpus")):
        return
    shared = f"{config.get('placement', '')} {config.get('framework', '')} {config.get('mode', '')}".lower()
    if re.search(r"(?<!non-)(?<!not )coloc", shared) and str(config.get("gpus")).isdigit():
        config["train_gpus"] = config["rollout_gpus"] = int(config["gpus"])
        return
    words = ("placement", "topology", "setup", "layout", "gpu_split", "split", "allocation")
    text = " ".join([*(str(value) for key, value in config.items() if flat(key) in words), notes])
    found = []
    for role in (_TRAINERS, _ENGINES):
        side = re.search(
            rf"(\d+)\s*(?:x\s*)?(?:{_CHIPS}\s*)?{role}\s+(nodes|GPUs|ranks|devices)", text, re.IGNORECASE
        ) or re.search(
            rf"(\d+)\s*(nodes|GPUs|ranks|devices)\s*(?:for|as|of the)\s*(?:the\s*)?{role}",
            text,
            re.IGNORECASE,
        )
        if not side:
            return
        per_node = figure(str(config.get("gpus_per_node", ""))) or 8
        found.append(int(side[1]) * (int(per_node) if side[2].lower() == "nodes" else 1))
    config["train_gpus"], config["rollout_gpus"] = found


def degrees(text: str) -> dict[str, int]:
    """Degrees of parallelism of a text: "TP8 PP2", "TP=8, EP=4", "tensor parallel 8"."""
    found = {}
    for letter, word in (
        ("tp", "tensor"),
        ("pp", "pipeline"),
        ("cp", "context"),
        ("ep", "expert"),
        ("vp", "virtual"),
    ):
        match = re.search(rf"\b{letter}\s*[=:]?\s*(\d+)", text, re.IGNORECASE) or re.search(
            rf"{word}[- ](?:model[- ])?parallel(?:ism|[- ]size)?\s*(?:of|=|:|is)?\s*(\d+)",
            text,
            re.IGNORECASE,
        )
        if match:
            found[letter] = int(match[1])
    return found


def _fill_degrees(config: Part, notes: str, category: str) -> None:
    """Layouts in prose or in fields of their own, as the columns that the adapters know."""
    if category in ("train_mfu", "decode"):
        keys = [key for key in config if re.search(r"parallel|layout|sharding|topology|^gpus$", flat(key))]
        said = degrees(
            " ".join([*(str(config[key]) for key in keys), *([notes] if category == "decode" else [])])
        )
        for letter, size in said.items():
            config.setdefault(letter, size)
    if category in ("rl_step", "weight_sync"):
        for role, words in (
            ("train", r"train(?:er|ing)?|actor|policy"),
            ("rollout", r"rollout|gen|generation|inference|engine"),
        ):
            own = {
                letter: value
                for letter in ("tp", "pp", "cp", "ep", "vp")
                for key, value in config.items()
                if re.fullmatch(rf"(?:{words})_{letter}(?:_size)?|{letter}_(?:{words})", flat(key))
                and str(value).isdigit()
            }
            layouts = (value for key, value in config.items() if re.fullmatch(
                rf"(?:{words})_(?:parallel(?:ism)?|layout|sharding|config)", flat(key)))  # fmt: skip
            own = own or next((found for text in layouts if (found := degrees(str(text)))), {})
            if own:
                _write_layout(config, category, role, own)


def _write_layout(config: Part, category: str, role: str, own: dict[str, int]) -> None:
    if category == "weight_sync":
        config.setdefault(
            f"{role}_layout", " ".join(f"{letter.upper()}{size}" for letter, size in own.items())
        )
    elif role == "rollout" and "tp" in own and "generation_TP_PP" not in config:
        config.setdefault("rollout_tp", own["tp"])
    elif role == "train" and len(re.findall(r"\d+|n/a", str(config.get("training_parallel", "")))) < 5:
        columns = [str(own.get(letter, 1)) for letter in ("tp", "cp", "ep", "pp")]
        config["training_parallel"] = f"[{','.join(columns)},{own.get('vp', 'n/a')}]"


def _fill_global_batch(config: Part) -> None:
    """Sequences of an update: out of its tokens, or of micro batches, copies and accumulation."""
    if any(config.get(key) is not None for key in ("gbs", "mini_batch", "sequences_per_step")):
        return
    sequence = config.get("sequence_length", config.get("seq_length"))
    tokens = figure(
        str(config.get("gbs_tokens", config.get("tokens_per_step", config.get("global_batch_tokens", ""))))
    )
    if tokens and sequence:
        config["gbs"] = max(round(tokens / float(sequence)), 1)
        return
    accumulation, micro = (config.get(key) for key in ("gradient_accumulation", "mbs"))
    sizes = [config.get(key, 1) for key in ("tp", "pp", "cp")]
    if accumulation and str(micro).isdigit() and str(config.get("gpus")).isdigit():
        parts = 1
        for size in sizes:
            parts *= int(size) if str(size).isdigit() else 1
        config["gbs"] = int(micro) * int(accumulation) * max(int(config["gpus"]) // parts, 1)
