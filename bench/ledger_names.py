"""Names of fields that people use for what the adapters of `ledger_cases.py` know by one."""

from __future__ import annotations

import functools
import re


@functools.cache
def flat(key: str) -> str:
    """A name in lower case with underscores: "numGPUs", "Num GPUs" and "num-gpus" are one."""
    key = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", str(key))
    return re.sub(r"[^a-z0-9]+", "_", key.lower()).strip("_")


_COUNT = r"(?:num|n|nr|number_of|total|size_of)_"
_MEAN = r"(?:mean|avg|average)"
_MOST = r"(?:max|maximum|most|limit)"
_OUT = r"(?:response|output|completion|generation|generated|decode|osl|answer|new)"
_IN = r"(?:prompt|input|isl|question)"
_ALL = r"(?:sequence|seq|total|sample)"
_LONG = r"(?:length|lengths|len|tokens|token_length|size)"


def _about(qualifier: str, what: str) -> str:
    """Names of a length: "mean_response_tokens", "response_length_mean", "avg_osl"."""
    return rf"{qualifier}_{what}s?(?:_{_LONG})?|{what}s?(?:_{_LONG})?_{qualifier}|{qualifier}_{_LONG}_{what}"


def _degree_names(letter: str, word: str) -> str:
    sized = r"(?:_parallel|_parallelism|_model_parallel)?(?:_size|_degree)?"
    return rf"{letter}(?:_size|_degree)?|{word}{sized}|{word}_mp"


Names = tuple[tuple[str, ...], str]
_DEVICE: dict[str, Names] = {
    "model": (("model",), r"(?:policy|actor|base|student)_model|model_name|model_id|llm|checkpoint|policy"),
    "gpu": (
        ("gpu",
        "system"),
        r"gpu_(?:type|model|name|kind|sku)|accelerator(?:_type)?"
        r"|device(?:_type|_name)?|hardware|chip",
    ),
    "gpus": (
        ("gpus",),
        rf"{_COUNT}(?:gpus?|devices|accelerators|cards)|gpus?_(?:total|count|number|num|used)|ngpus|devices|world_size",
    ),
    "framework": (("framework",), r"system_name|library|trainer|software|stack|codebase|rl_framework"),
}  # fmt: skip
_ROLLOUT_TP = (
    r"(?:rollout|gen|generation|generator|vllm|sglang|engine|inference|infer|sampler)_(?:tp|tensor_parallel|"
    r"tensor_model_parallel)(?:_size)?|(?:tp|tensor_parallel)_(?:rollout|generation|engine|inference)"
)
FIELDS: dict[str, dict[str, Names]] = {
    "rl_step": {
        **_DEVICE,
        "prompts_per_step": (
            ("prompts_per_step", "train_batch_size_prompts", "num_prompts"),
            r"prompts(?:_per_(?:batch|rollout|iteration|update))?|(?:batch|num|unique)_prompts(?:_per_step)?|num_prompts_per_step"
            r"|(?:questions|problems|queries)_per_(?:step|batch)|train_batch_size|train_prompt_bsz|rollout_batch_size(?:_prompts)?"
            r"|data_train_batch_size|batch_size_prompts|groups_per_step|num_groups",
        ),
        "generations_per_prompt": (
            ("generations_per_prompt", "rollout_n", "group_size"),
            r"n|(?:num_|n_)?(?:generations|samples|responses|rollouts|completions|answers|trajectories|resp)(?:_per_(?:prompt|question"
            r"|example|problem|group))|num_generations|n_samples|(?:grpo_)?group(?:_size)?|rollouts?_n|responses_per_group|g",
        ),
        "samples_per_step": (
            ("samples_per_step", "sequences_per_step", "rollout_batch_G_GBS"),
            r"(?:trajectories|responses|rollouts|completions|episodes|samples|sequences)_(?:per|a)_(?:step|batch|iteration|update)"
            r"|(?:rollout|generation)_batch_(?:sequences|samples|g)|num_(?:samples|sequences|trajectories)(?:_per_step)?|samples",
        ),
        "train_batch_T_GBS": (
            ("train_batch_T_GBS",),
            r"(?:train_)?global_batch(?:_size)?|gbs|(?:ppo_)?mini_batch_(?:sequences|samples)|sequences_per_update|train_gbs",
        ),
        "mean_response_length": (("mean_response_length", "response_length_mean"), _about(_MEAN, _OUT)),
        "max_response_length": (("max_response_length",), _about(_MOST, _OUT)),
        "mean_prompt_length": (("mean_prompt_length", "prompt_length_mean"), _about(_MEAN, _IN)),
        "max_prompt_length": (("max_prompt_length",), _about(_MOST, _IN)),
        "avg_sequence_length": (
            ("avg_sequence_length", "mean_sequence_tokens", "mean_total_length"),
            _about(_MEAN, _ALL),
        ),
        "max_sequence_length": (("max_sequence_length",), _about(_MOST, rf"(?:{_ALL}|context|model)")),
        "rollout_tp": (("rollout_tp", "generation_TP_PP"), _ROLLOUT_TP),
        "train_backend": (
            ("train_backend",),
            r"train(?:er|ing)?_(?:backend|engine|strategy|framework)|backend|trainer|actor_strategy|train",
        ),
        "engine": (
            ("engine",),
            r"(?:rollout|inference|generation|gen|serving)_(?:engine|backend|framework)|sampler|rollout",
        ),
        "gpu_split": (
            ("gpu_split", "resource_split"),
            r"split|gpu_allocation|resource_allocation|placement|allocation|gpus_split",
        ),
        "mode": (("mode",), r"(?:execution_|training_|rl_)?(?:mode|schedule)|placement_mode|topology"),
        "precision_gen": (
            ("precision_gen",),
            r"(?:gen|generation|rollout|inference)_(?:precision|dtype)|dtype_(?:gen|rollout)",
        ),
        "precision_train": (
            ("precision_train",),
            r"train(?:ing)?_(?:precision|dtype)|dtype_train|precision|dtype",
        ),
        "max_tokens_per_gpu": (
            ("max_tokens_per_gpu", "ppo_max_token_len", "max_tokens_per_micro_batch", "max_token_len"),
            r"(?:ppo_)?max_token_len(?:_per_gpu)?|token_budget|micro_batch_tokens|tokens_per_micro_batch",
        ),
        "micro_batch_per_gpu": (
            ("micro_batch_per_gpu",),
            r"(?:ppo_)?micro_batch(?:_size)?(?:_per_(?:gpu|device|rank))?|mbs|per_device_(?:train_)?batch_size",
        ),
        "enforce_eager": (("enforce_eager", "eager"), r"eager_mode|no_cuda_graphs?"),
        "on_off_policy": (("on_off_policy",), r"off_policy|policy_lag|staleness_mode"),
    },
    "decode": {
        **_DEVICE,
        "engine": (
            ("engine",),
            r"(?:serving|inference)_(?:engine|framework|backend)|framework|server|backend|runtime",
        ),
        "precision": (("precision",), r"(?:weights?_)?(?:dtype|precision|quantization|quant|format)"),
        "kv_cache": (("kv_cache",), r"kv(?:_cache)?_(?:dtype|precision|quantization|format)|kv"),
        "tp": (("tp",), _degree_names("tp", "tensor")),
        "concurrency": (
            ("concurrency", "batch_size"),
            rf"(?:{_MOST}_)?(?:concurrency|concurrent(?:_requests|_users|_streams)?)|{_COUNT}(?:concurrent|streams|users|clients)"
            r"|streams|users|clients|parallel_requests|max_num_concurrent",
        ),
        "batch_size": (
            ("batch_size",
            "concurrency"),
            r"batch|bs|static_batch(?:_size)?|sequences|batch_sequences",
        ),
        "requests": (("requests",), rf"{_COUNT}(?:requests|prompts|samples)"),
        "input_length": (
            ("input_length",),
            rf"(?:{_MEAN}_)?{_IN}s?(?:_{_LONG})?(?:_{_MEAN})?"
            rf"|in_tokens|prefill_length|context_length",
        ),
        "output_length": (
            ("output_length",),
            rf"(?:{_MEAN}_)?{_OUT}s?(?:_{_LONG})?(?:_{_MEAN})?|out_tokens|generation_length",
        ),
        "ep_decode": (("ep_decode",), r"decode_ep(?:_size)?"),
        "batch_per_gpu": (("batch_per_gpu",), r"(?:decode_)?batch(?:_size)?_per_(?:gpu|device|rank|dp)"),
        "kv_length": (
            ("kv_length",),
            r"(?:average_|mean_)?kv_(?:len|tokens|context)|decode_context(?:_length)?",
        ),
    },
    "train_mfu": {
        **_DEVICE,
        "sequence_length": (
            ("sequence_length", "mean_sequence_tokens", "seq_length"),
            rf"(?:{_MEAN}_|{_MOST}_)?(?:seq|sequence|context)(?:_{_LONG})?|seqlen|packed_length|sl",
        ),
        "gbs": (
            ("gbs",
            "mini_batch",
            "sequences_per_step"),
            r"global_batch(?:_size)?(?:_sequences)?|batch_size|gbsz",
        ),
        "mbs": (
            ("mbs",),
            r"(?:local_)?micro_?batch(?:_size)?(?:_per_(?:gpu|device))?"
            r"|per_device_(?:train_)?batch_size|local_batch_size",
        ),
        "tp": (("tp",), _degree_names("tp", "tensor")),
        "pp": (("pp",), _degree_names("pp", "pipeline")),
        "cp": (("cp",), _degree_names("cp", "context") + r"|sp|ulysses(?:_size)?"),
        "ep": (("ep",), _degree_names("ep", "expert")),
        "vp": (("vp",), r"vpp|virtual_(?:pipeline|stages)(?:_size)?|interleave"),
        "precision": (("precision",), r"dtype|compute_(?:dtype|precision)|recipe_precision"),
        "recompute": (
            ("recompute", "activation"),
            r"(?:activation_|gradient_)?(?:checkpointing|recomputation|recompute)(?:_mode)?|ac|remat",
        ),
        "gradient_accumulation": (
            ("gradient_accumulation",),
            r"grad(?:ient)?_accum(?:ulation)?(?:_steps)?|ga",
        ),
    },
    "weight_sync": {
        **_DEVICE,
        "train_gpus": (
            ("train_gpus",),
            r"(?:num_)?(?:train(?:er|ing)?|actor|policy|learner)_(?:gpus|ranks|devices|world_size)|senders|gpus_train(?:er|ing)?",
        ),
        "rollout_gpus": (
            ("rollout_gpus",),
            r"(?:num_)?(?:rollout|inference|gen|generation|engine|sampler|serving|generator)_(?:gpus|ranks|devices|world_size)"
            r"|gpus_(?:rollout|inference|generation)",
        ),
        "train_layout": (
            ("train_layout",),
            r"train(?:er|ing)?_(?:parallel(?:ism)?|sharding|config)|actor_(?:layout|parallel(?:ism)?)",
        ),
        "rollout_layout": (
            ("rollout_layout",),
            r"(?:rollout|inference|engine|generation)_(?:parallel(?:ism)?|config)|engines",
        ),
        "rollout_precision": (
            ("rollout_precision",),
            r"(?:engine|inference|generation|wire|weights?)_(?:precision|dtype)|dtype|precision",
        ),
        "method": (
            ("method",
            "backend"),
            r"transport|transfer(?:_method)?|sync_(?:method|backend)"
            r"|refit_transport|mechanism|path",
        ),
        "network": (("network",), r"interconnect|fabric|nic|link"),
        "changed_fraction": (
            ("changed_fraction",),
            r"changed(?:_frac|_share|_ratio)?|delta_(?:density|fraction)|density",
        ),
        "gpus_per_node": (("gpus_per_node",), r"node_size|gpus_a_node"),
        "rollout": (("rollout",), r"(?:inference_|rollout_|serving_)engine|engine"),
    },
}  # fmt: skip
"""By category: our name of a field -> the names by which the adapters know it, and a pattern of others."""
