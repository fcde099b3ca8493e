"""What WavePP serves: an allow-list over SGLang's configuration, so that an unknown feature is refused, too.

Two looks, both in the launcher:

* `check_given`, before SGLang resolves anything: each field that the operator set to something else than
  its default has to be on the list.
* `check_resolved`, over the outcome: a model, a platform or an environment variable can turn a feature on
  as well. Here a field that is not on the list has to have its default, unless SGLang fills it in for servers
  without the feature, too (`FILLED_IN`). Then come the checks that no single field can answer.

A field that a later SGLang adds is refused until somebody puts it on the list, together with a test.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from sglang_wavepp.config import CACHE_BACKEND, config_of
from sglang_wavepp.errors import ConfigError


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ALLOWED = frozenset(
    _names("""
    model_path model_config_parser revision trust_remote_code decrypted_config_file
    json_model_override_args download_dir load_format model_loader_extra_config custom_weight_loader
    model_checksum context_length dtype quantization quantization_param_path kv_cache_dtype modelopt_quant
    modelopt_checkpoint_restore_path modelopt_checkpoint_save_path modelopt_export_path
    weight_loader_disable_mmap weight_loader_prefetch_checkpoints weight_loader_prefetch_num_threads
    weight_loader_drop_cache_after_load engine_info_bootstrap_port

    tokenizer_path tokenizer_mode tokenizer_backend skip_tokenizer_init detokenizer_worker_num
    enable_dynamic_batch_tokenizer dynamic_batch_tokenizer_batch_size
    dynamic_batch_tokenizer_batch_timeout enable_tokenizer_batch_encode disable_tokenizer_batch_decode

    host port fastapi_root_path enable_http2 http2_max_concurrent_streams
    http2_initial_connection_window_size ssl_keyfile ssl_certfile ssl_ca_certs ssl_keyfile_password
    enable_ssl_refresh api_key admin_api_key served_model_name weight_version chat_template
    hf_chat_template_name completion_template trust_request_chat_template default_chat_template_kwargs
    file_storage_path enable_cache_report enable_response_store return_input_ids return_output_ids
    reasoning_parser tool_call_parser tool_server sampling_defaults preferred_sampling_params
    allow_auto_truncate stream_interval batch_notify_size stream_response_default_include_usage
    incremental_streaming_output skip_server_warmup warmups allowed_media_domains
    media_url_max_file_size_mb

    grammar_backend constrained_json_whitespace_pattern constrained_json_disable_any_whitespace
    constrained_json_max_whitespace_cnt disable_outlines_disk_cache enable_custom_logit_processor

    log_level log_level_http log_requests log_requests_level log_requests_format log_requests_target
    uvicorn_access_log_exclude_prefixes crash_dump_folder show_time_cost enable_request_time_stats_logging
    decode_log_interval gc_warning_threshold_secs enable_metrics enable_mfu_metrics
    enable_metrics_for_all_schedulers load_snapshot_publish_interval
    tokenizer_metrics_custom_labels_header tokenizer_metrics_allowed_custom_labels extra_metric_labels
    bucket_time_to_first_token bucket_inter_token_latency bucket_e2e_request_latency prompt_tokens_buckets
    generation_tokens_buckets export_metrics_to_file export_metrics_to_file_dir

    device base_gpu_id gpu_id_step random_seed watchdog_timeout soft_watchdog_timeout
    custom_sigquit_handler numa_node gc_threshold nccl_port dist_init_addr dist_timeout enable_p2p_check
    nnodes node_rank pp_size pp_max_micro_batch_size

    mem_fraction_static max_running_requests max_queued_requests max_total_tokens chunked_prefill_size
    disable_chunked_prefix_cache
    max_prefill_tokens page_size radix_cache_backend disable_radix_cache disable_overlap_schedule
    prefill_decode_interval prefill_decode_interval_min_bs enable_priority_scheduling
    disable_priority_preemption default_priority_value schedule_low_priority_values_first
    abort_on_priority_when_disabled

    attention_backend prefill_attention_backend decode_attention_backend sampling_backend
    triton_attention_num_kv_splits triton_attention_reduce_in_fp32 triton_attention_split_tile_size
    flashinfer_mla_disable_ragged disable_flashinfer_autotune flashinfer_autotune_skip_ops
    fp8_gemm_runner_backend fp4_gemm_runner_backend bf16_gemm_backend enable_fused_qk_norm_rope
    prefill_kv_cache_dequant_dtype enable_fp32_lm_head enable_tf32_matmul moe_runner_backend
    flashinfer_mxfp4_moe_precision disable_shared_experts_fusion enforce_shared_experts_fusion
    disable_custom_all_reduce pre_warm_nccl enforce_disable_flashinfer_allreduce_fusion
    enable_layerwise_nvtx_marker

    cuda_graph_config cuda_graph_backend_decode cuda_graph_backend_prefill cuda_graph_bs_decode
    cuda_graph_bs_prefill cuda_graph_max_bs_decode cuda_graph_max_bs_prefill
    cuda_graph_max_seq_len_prefill disable_cuda_graph disable_decode_cuda_graph disable_prefill_cuda_graph
    disable_cuda_graph_padding enable_cudagraph_gc enable_profile_cuda_graph debug_cuda_graph

    enable_lora lora_paths max_lora_rank lora_target_modules max_loaded_loras max_loras_per_batch
    lora_eviction_policy lora_backend max_lora_chunk_size lora_strict_loading experts_shared_outer_loras
    lora_use_virtual_experts

    _radix_eviction_policy_explicitly_set _swa_full_tokens_ratio_explicitly_set
    """)
)
"""Fields that may have any value, except for what `VALUES` says."""

VALUES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "device": (
        lambda v: v is None or str(v).split(":")[0] in ("cuda", "cpu"),
        "WavePP runs on cuda and cpu",
    ),
    "load_format": (
        lambda v: v not in ("remote_instance", "flash_rl", "expert_pack"),
        "this way of loading was not tested with WavePP",
    ),
    "chunked_prefill_size": (lambda v: v is None or v > 0, "waves are made of prefill chunks"),
    "radix_cache_backend": (lambda v: v in (None, CACHE_BACKEND), "leases need WavePP's own cache"),
}
"""Fields on the list of which not all values are: whether a value is, and why others are not."""

FILLED_IN = _names("""
    load_balance_method dcp_comm_backend dcp_replicate_q_proj enable_tp_lm_head_all_to_all
    boundary_reduction disable_aiter_allreduce_fusion_* enable_aiter_allreduce_fusion
    enable_flashinfer_allreduce_fusion flashinfer_allreduce_fusion_backend enable_attn_tp_input_scattered
    enable_symm_mem enable_torch_symm_mem moe_dense_tp_size deepep_mode eplb_algorithm
    expert_distribution_recorder_buffer_size grpc_worker_threads hicache_* encoder_transfer_backend mm.*
    mamba_radix_cache_strategy mamba_full_memory_ratio swa_full_tokens_ratio disable_hybrid_swa_memory
    linear_attn_* dsa_*_backend enable_dsa_fused_indexer torch_compile_max_bs spec.*
""")
"""Patterns of fields that SGLang sets for servers without the feature, too: refused only if an operator sets
them. The features themselves have fields or checks of their own."""

_SPECULATION = "speculative decoding decides by itself, on every stage, what to allocate"
_TIERS = "KV outside of the device changes the reusable prefix during admission"
_DISAGGREGATION = "prefill-decode disaggregation has loops and queues of its own"
_SESSIONS = "sessions own KV and locks that admission cannot lease"
_ATTENTION_DP = "each step of attention DP is a collective of its own"
_TENSOR = "each stage is one process so far, with one device"
_CONTEXT = "context parallelism changes which tokens a stage holds"
_EXPERTS = "expert parallelism needs several processes in a stage"
_RECURRENT = "recurrent layers reuse snapshots, not prefixes"
_SLIDING = "sliding-window layers reuse less than the common prefix"
_POOLS = "the pool holds more than a plain KV cache"
_MULTIMODAL = "multimodal inputs change the prompt after it has arrived"
_ARRIVAL = "requests are admitted by priority and in the order of arrival"
_PREEMPTION = "only the youngest request gives its room back, and only to one that runs already"
_PLANNED = "stage 0 plans every wave, and does not take this into account"
_TEXT = "waves are made of requests that generate text"
_HIDDEN = "SGLang's pipeline does not carry them back from every stage"
_LORA = "adapters have to be resident on every stage before a request is admitted"
_FRONT = "requests were tested through the HTTP server of the launcher only"
_BATCHES = "it works on the batches and the loop of the stock scheduler"
UNTESTED = "it was not tested with WavePP"

REASONS: Mapping[str, tuple[str, ...]] = {
    _SPECULATION: _names("spec.* decoupled_spec_*"),
    _TIERS: _names(
        "enable_hierarchical_cache hicache_* enable_lmcache lmcache_* enable_flexkv flexkv_* "
        "*_external_linker* enable_linker_mla_dedup"
    ),
    _DISAGGREGATION: _names("disaggregation_* enable_pd* pdmux_* sm_group_num optimistic_* num_reserved_*"),
    _SESSIONS: _names("enable_streaming_session enable_session_radix_cache"),
    _ATTENTION_DP: _names("attn_dp_size enable_dp_* enable_prefill_delayer prefill_delayer_*"),
    "replicas behind one front were not tested; start one server for each": _names(
        "dp_size load_balance_method"
    ),
    _TENSOR: _names("tp_size moe_dense_tp_size enable_layernorm_sp enable_megamoe_for_layernorm_sp"),
    _CONTEXT: _names("attn_cp_size dcp_* *prefill_cp cp_strategy *_kv_cache_sharding *_layer_split *_cp_*"),
    _EXPERTS: _names("ep_* *elastic* *eplb* *expert_backup moe_dp_size *_a2a_* dwdp_size max_ep_size"),
    "--wavepp-run-ahead takes its place": _names("pp_async_batch_depth"),
    _PLANNED: _names(
        "enable_mixed_chunk enable_dynamic_chunking prefill_max_requests "
        "num_continuous_decode_steps min_free_slots_delay scheduler_recv_interval"
    ),
    _ARRIVAL: _names("schedule_policy"),
    _PREEMPTION: _names("priority_scheduling_preemption_threshold retraction_policy"),
    "--wavepp-decode-reserve takes its place": _names("schedule_conservativeness"),
    "a WavePP server sleeps while it is idle, without it": _names("sleep_on_idle"),
    _SLIDING: _names("*swa*"),
    _RECURRENT: _names("exec.mamba.* *mamba*"),
    _POOLS: _names("*hisparse* enable_unified_memory enable_page_major_kv_layout"),
    "eviction was tested in the order of least recent use": _names("radix_eviction_policy*"),
    "it changes what of a request enters the tree": _names("strip_thinking_cache"),
    _TEXT: _names("is_embedding prefill_only_disable_kv_cache enable_mis exec.dllm.*"),
    _HIDDEN: _names(
        "*return_hidden_states* *aux_hidden_state* *_return_routed_experts *_return_indexer_topk"
    ),
    _LORA: _names("lora.*"),
    "it shows the cache of stage 0, not what all stages can reuse": _names("kv_events_config"),
    "it needs --kv-events-config": _names("load_publish_endpoint"),
    _MULTIMODAL: _names("mm.* encoder_* language_* enable_adaptive_dispatch_to_encoder asr_*"),
    "its HTTP workers do not load plugins": _names("tokenizer_worker_num enable_http_worker_reuseport"),
    _FRONT: _names("smg_* grpc_* sidecar*"),
    "schedulers were tested as processes of the launcher only": _names("use_ray"),
    _BATCHES: _names(
        "kv_canary* *forward_pass_metrics* debug_tensor_dump_* msprobe_* enable_*_batch_overlap"
    ),
    "memory would be released under leases": _names("enable_memory_saver enable_weights_cpu_backup"),
    "it aligns chunks in a way that waves do not": _names("*deterministic* rl_on_policy_target"),
}
"""Why fields are refused, as patterns of `field` or `namespace.field`. Without a match it is `UNTESTED`."""

VARIABLES: Mapping[str, str] = {
    "SGLANG_RUST_SERVER": _FRONT,
    "SGLANG_USE_PICKLE_IPC": "requests were tested in SGLang's default encoding between processes only",
    "SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": "it stops a server whose caches differ, which is normal here",
    "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "only the Rust tree is safe to use from a second thread",
    "SGLANG_RADIX_FORCE_MISS": "it hides from admission what the tree holds",
    "SGLANG_ENABLE_PP_SPEC": _SPECULATION,
    "SGLANG_PREFILL_TILE_BUDGET": _PLANNED,
    "SGLANG_PP_COMM_OVERLAP": _BATCHES,
    "SGLANG_ENABLE_COLOCATED_BATCH_GEN": "it holds requests back before they reach admission",
    "SGLANG_TEST_SCRIPTED_RUNTIME": _BATCHES,
}
"""Environment variables that have to have their default, and why."""


def check_given(server_args: Any) -> None:
    """Check what the operator set. Runs before resolution: nothing was read or downloaded yet.

    Raises:
        ConfigError: it is not on the list. One line: the first flag, its reason, the names of the others.
    """
    if server_args.pp_size < 2:
        raise ConfigError("--wavepp needs --pp-size 2 or more: with one stage there is nothing to pipeline")
    config = config_of(server_args)
    pools = config.pools() if config else ()
    if pools and len(pools) != server_args.pp_size:
        raise ConfigError(
            f"--wavepp-pool-tokens has to name the pool of each stage: it names {len(pools)}, and --pp-size "
            f"is {server_args.pp_size}"
        )
    _check_nodes(server_args)
    if str(server_args.model_path).lower() in ("none", "dummy"):
        # SGLang resolves nothing for these, so the second look would never come.
        raise ConfigError(f"WavePP does not support --model-path {server_args.model_path}: it names no model")
    _refuse(
        [(name, value) for name, value in _changed(server_args, server_args) if not _allowed(name, value)]
    )


def _check_nodes(server_args: Any) -> None:
    from sglang.srt.utils.network import NetworkAddress

    nodes = server_args.nnodes
    if nodes == 1:
        return
    if server_args.pp_size % nodes:
        raise ConfigError(
            f"--pp-size {server_args.pp_size} is not a multiple of --nnodes {nodes}: WavePP needs as many "
            "stages on each node"
        )
    if not server_args.dist_init_addr:
        raise ConfigError(
            f"--nnodes {nodes} needs --dist-init-addr HOST:PORT, an address of node 0 that every node can "
            "reach"
        )
    try:
        NetworkAddress.parse(server_args.dist_init_addr)
    except ValueError as error:
        raise ConfigError(f"--dist-init-addr has to be HOST:PORT: {error}") from None


def check_resolved(server_args: Any) -> None:
    """Check what SGLang made of it. Needs a record whose resolution is over, or nearly so.

    Raises:
        ConfigError: something is not supported, whoever turned it on.
    """
    from sglang.srt.arg_groups.overrides import resolving_view

    config = resolving_view(server_args)
    if config.pp_size < 2:
        raise ConfigError("--wavepp needs --pp-size 2 or more, and SGLang turned it off for this model")
    _check_variables()
    _check_model(server_args)
    _refuse(
        [
            (name, value)
            for name, value in _changed(server_args, config)
            if not (_allowed(name, value) or _matches(name, FILLED_IN))
        ],
        ", which SGLang turned on for this model or environment",
    )
    _check_combinations(config)


def flag_of(field: str) -> str:
    """The command line flag of a field of `ServerArgs`."""
    from sglang.srt.arg_groups.arg_utils import Arg
    from sglang.srt.server_args import ServerArgs

    declared = getattr(ServerArgs.__annotations__.get(field), "__metadata__", ())
    named = [arg.cli_name for arg in declared if isinstance(arg, Arg) and arg.cli_name]
    return named[0] if named else "--" + field.lstrip("_").replace("_", "-")


def reason_of(field: str) -> str:
    """Why a field is refused."""
    if field in VALUES:
        return VALUES[field][1]
    return next((reason for reason, patterns in REASONS.items() if _matches(field, patterns)), UNTESTED)


def _matches(field: str, patterns: tuple[str, ...]) -> bool:
    from sglang.srt.server_args import ServerArgs

    full = f"{ServerArgs._NS_BY_FIELD.get(field)}.{field}"
    return any(fnmatchcase(full if "." in pattern else field, pattern) for pattern in patterns)


def _allowed(field: str, value: Any) -> bool:
    return field in ALLOWED and (field not in VALUES or VALUES[field][0](value))


def _changed(server_args: Any, view: Any) -> Iterator[tuple[str, Any]]:
    """Fields whose value is not their default. None and False are one: resolution makes the latter of it."""
    import msgspec

    for field in msgspec.structs.fields(type(server_args)):
        default = field.default
        if default is msgspec.NODEFAULT and field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        value = getattr(view, field.name)
        if (value or default) and value != default:
            yield field.name, value


def _refuse(refused: list[tuple[str, Any]], origin: str = "") -> None:
    if refused:
        (field, value), *rest = refused
        flag = flag_of(field) + (f" {value}" if field in VALUES else "")
        others = f" (nor {', '.join(flag_of(name) for name, _ in rest)})" if rest else ""
        raise ConfigError(f"WavePP does not support {flag} yet{origin}: {reason_of(field)}{others}")


def _check_combinations(config: Any) -> None:
    # FILLED_IN has this one's namespace, most of which models set for a draft that nobody may have asked for.
    if config.speculative_algorithm is not None:
        raise ConfigError(f"WavePP does not support --speculative-algorithm yet: {_SPECULATION}")
    if config.enable_priority_scheduling and not config.disable_priority_preemption:
        raise ConfigError(
            "WavePP does not support --enable-priority-scheduling without --disable-priority-preemption yet: "
            f"{_PREEMPTION}"
        )
    adapters = len(config.lora_paths or ())
    if config.enable_lora and not adapters:
        raise ConfigError(f"WavePP needs --lora-paths for --enable-lora: {_LORA}")
    # One place in a batch is for requests without an adapter.
    if adapters > config.max_loras_per_batch - 1:
        raise ConfigError(
            f"WavePP needs --max-loras-per-batch {adapters + 1} for {adapters} --lora-paths: {_LORA}"
        )


def _check_variables() -> None:
    from sglang.srt.environ import envs

    for name, reason in VARIABLES.items():
        variable = getattr(envs, name)
        if name in os.environ and variable.get() != variable.default:
            raise ConfigError(f"WavePP does not support {name}={os.environ[name]} yet: {reason}")


def _check_model(server_args: Any) -> None:
    from sglang.srt.arg_groups.overrides import model_config_of
    from sglang.srt.mem_cache.kv_cache_builder import uses_ssm_state

    model = model_config_of(server_args)
    names = ", ".join(model.hf_config.architectures)
    for found, kind, reason in (
        (model.is_multimodal or model.is_audio_model, "multimodal models", _MULTIMODAL),
        (not model.is_generation, "embedding and reward models", _TEXT),
        (uses_ssm_state(model), "models with recurrent layers", _RECURRENT),
        ("DeepseekV4" in names, "DeepSeek V4", _POOLS),
        (model.is_hybrid_swa, "models with sliding-window layers", _SLIDING),
    ):
        if found:
            raise ConfigError(f"WavePP does not support {kind} yet (--model-path, {names}): {reason}")
