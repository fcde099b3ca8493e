"""The hooks into SGLang's scheduler process: what they are, whether they are in place, and what they rest on.

SGLang swallows errors of plugins and hooks, so a stage could serve without WavePP and nobody would know.
`check` therefore verifies every hook after SGLang has applied them, and compares the source of every SGLang
function that WavePP hooks or depends on with the one it was tested with. `python -m sglang_wavepp.hooks`
prints the table for a new SGLang version.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import pkgutil
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from sglang_wavepp.config import CACHE_BACKEND, config_of
from sglang_wavepp.errors import HandshakeError, WavePPError
from sglang_wavepp.tested import TESTED

logger = logging.getLogger(__name__)

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_BATCH = "sglang.srt.managers.schedule_batch.ScheduleBatch"
_REQ = "sglang.srt.managers.schedule_batch.Req"
_CACHE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
_POOLS = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
_GRAPHS = "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner"
_RESULTS = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"

HOOKS: dict[str, str] = {
    f"{_SCHEDULER}.init_ipc_channels": "_remember_instance",
    f"{_SCHEDULER}.get_init_info": "_connect_stages",
    f"{_SCHEDULER}.event_loop_pp": "_wave_loop",
    f"{_SCHEDULER}._add_request_to_queue": "_capture_request",
    f"{_SCHEDULER}.is_fully_idle": "_is_fully_idle",
    f"{_SCHEDULER}.get_internal_state": "_add_statistics",
    f"{_SCHEDULER}.init_req_max_new_tokens": "_clip_to_smallest_pool",
    "sglang.srt.mem_cache.registry.create_unified_radix_cache": "_use_wave_cache",
    f"{_POOLS}._apply_token_constraints": "_own_pool",
    "sglang.srt.utils.common.get_available_gpu_memory": "_own_memory",
    f"{_GRAPHS}.load_batch": "_stage_one_at_a_time",
}
"""Hooked function -> the AROUND hook in this module."""

RELIED_ON: tuple[str, ...] = (
    f"{_SCHEDULER}.handle_generate_request",
    f"{_SCHEDULER}._handle_generate_request",
    f"{_SCHEDULER}.retire_unadmitted_request",
    f"{_SCHEDULER}.run_batch",
    f"{_SCHEDULER}.process_batch_result",
    f"{_SCHEDULER}.on_idle",
    f"{_SCHEDULER}.flush_cache",
    f"{_SCHEDULER}.pause_generation",
    f"{_SCHEDULER}.init_pp_loop_state",
    f"{_SCHEDULER}._pp_launch_batch",
    f"{_SCHEDULER}._pp_prepare_tensor_dict",
    f"{_SCHEDULER}._pp_prep_batch_result",
    f"{_SCHEDULER}._pp_send_dict_to_next_stage",
    f"{_SCHEDULER}._pp_recv_proxy_tensors",
    f"{_SCHEDULER}._pp_commit_comm_work",
    f"{_SCHEDULER}._poll_timeout_aborts",
    f"{_REQ}.init_next_round_input",
    f"{_REQ}._compute_max_prefix_len",
    f"{_REQ}.update_finish_state",
    f"{_REQ}.reset_for_retract",
    f"{_BATCH}.prepare_for_extend",
    f"{_BATCH}.prepare_for_decode",
    f"{_BATCH}.filter_batch",
    f"{_BATCH}.merge_batch",
    f"{_RESULTS}.process_batch_result_prefill",
    f"{_RESULTS}.process_batch_result_decode",
    f"{_CACHE}.checkpoint_into_tree",
    f"{_CACHE}.lock",
    f"{_CACHE}.unlock",
    f"{_CACHE}._reset_full",
    f"{_CACHE}.insert",
    f"{_CACHE}._evict_device_leaf",
    f"{_CACHE}._apply_cache_action",
    f"{_CACHE}._drain_device_frees",
    "sglang.srt.mem_cache.common.checkpoint_kv_cache",
    "sglang.srt.mem_cache.common.release_kv_cache",
    "sglang.srt.mem_cache.allocation.alloc_for_extend",
    "sglang.srt.utils.common.async_h2d",
)
"""SGLang functions that WavePP calls with knowledge of their inside."""

PLANNED_ON_DEVICE = frozenset({"fa3", "fa4", "flashmla", "triton", "trtllm_mha", "trtllm_mla"})
"""Attention backends that stage nothing on the host for a decode graph."""


# --- installing and checking -----------------------------------------------------------------


def install(server_args: Any) -> None:
    """Register the hooks, in a scheduler process of a server with `--wavepp`; SGLang applies them next."""
    from sglang.srt.mem_cache.registry import default_radix_cache_factory, register_radix_cache_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, name in HOOKS.items():
        HookRegistry.register(target, globals()[name], HookType.AROUND)
    # By its name and by default it is the same cache, made with the hook on `create_unified_radix_cache`.
    register_radix_cache_backend(CACHE_BACKEND, default_radix_cache_factory)


def check(allow_untested: bool) -> None:
    """Verify that every hook is in place and SGLang is the tested one. Raises `HandshakeError`."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    missing = [target for target in HOOKS if target not in HookRegistry._patched]
    if missing:
        raise HandshakeError(f"SGLang did not apply the hook on {missing[0]}")
    check_sources(allow_untested)


def check_sources(allow_untested: bool) -> None:
    """Verify that SGLang is the tested one.

    Raises `HandshakeError`; with `allow_untested` a different SGLang is only warned about.
    """
    found = version("sglang")
    tested = TESTED.get(found)
    if tested is None:
        problem = f"SGLang {found} was not tested with this WavePP; tested: {', '.join(sorted(TESTED))}"
    else:
        changed = [t for t in (*HOOKS, *RELIED_ON) if fingerprint(t) != tested.get(t)]
        if not changed:
            return
        problem = f"SGLang {found} differs from the tested one in {', '.join(changed)}"
    if not allow_untested:
        raise HandshakeError(f"{problem} (--wavepp-allow-untested-sglang serves all the same)")
    logger.warning("WavePP: %s; serving all the same", problem)


def fingerprint(target: str) -> str:
    """Hash of the source of an SGLang function, unwrapped from hooks; "missing" if there is none."""
    try:
        function = inspect.unwrap(pkgutil.resolve_name(target))
    except (ImportError, AttributeError):
        return "missing"
    return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:16]


def hook_digest() -> str:
    """Digest of the hook set and of the sources that it rests on, compared between the stages."""
    text = "\n".join(f"{t} {HOOKS.get(t, '')} {fingerprint(t)}" for t in (*HOOKS, *RELIED_ON))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# --- the hooks -------------------------------------------------------------------------------


def _remember_instance(original: Callable[..., Any], scheduler: Any, port_args: Any) -> Any:
    scheduler.wavepp_instance = port_args.instance_id
    return original(scheduler, port_args)


def _connect_stages(original: Callable[..., Any], scheduler: Any) -> dict[str, Any]:
    """SGLang is about to report ready: check, and shake hands with the other stages first."""
    from sglang_wavepp.stage import Stage
    from sglang_wavepp.watch import end_server, spare_main_process

    if scheduler.server_args.custom_sigquit_handler is not None:
        spare_main_process()
    config = config_of(scheduler.server_args)
    assert config is not None
    info: dict[str, Any] = original(scheduler)
    try:
        check(config.allow_untested_sglang)
        scheduler.init_pp_loop_state()
        scheduler.wavepp = Stage(scheduler, config)
    except WavePPError as error:
        end_server(scheduler.pp_group.rank_in_group, str(error))
    info["max_req_input_len"] = scheduler.max_req_input_len
    info["max_total_num_tokens"] = scheduler.wavepp.pool
    info["wavepp"] = scheduler.wavepp.info()
    return info


def _own_pool(original: Callable[..., Any], configurator: Any, token_capacity: int) -> int:
    """How many KV tokens this stage gets: instead of the smallest over all stages, what it was given."""
    from sglang.srt.runtime_context import get_parallel, get_schedule, get_server_args

    from sglang_wavepp.watch import end_server

    config = config_of(get_server_args())
    assert config is not None
    if not config.own_pools:
        return int(original(configurator, token_capacity))
    limit = get_schedule().max_total_tokens
    most = token_capacity if limit is None else min(token_capacity, limit)
    if not (pools := config.pools()):
        return most
    rank = get_parallel().pp_rank
    if pools[rank] > most:
        why = "its memory holds" if most == token_capacity else "--max-total-tokens allows"
        end_server(rank, f"--wavepp-pool-tokens wants {pools[rank]} KV tokens for it, but {why} {most}")
    return pools[rank]


def _own_memory(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Free memory: of this stage alone instead of the smallest over all, where pools are sized for each."""
    from sglang.srt.runtime_context import get_server_args

    config = config_of(get_server_args())
    if config is not None and config.own_pools:
        kwargs["distributed"] = False
    return original(*args, **kwargs)


def _clip_to_smallest_pool(original: Callable[..., Any], scheduler: Any, req: Any) -> None:
    """SGLang clips outputs to the local pool, which may be larger than another stage's."""
    original(scheduler, req)
    clipped = scheduler.token_to_kv_pool_allocator.max_new_tokens_for_memory(
        len(req.origin_input_ids),
        req.sampling_params.max_new_tokens,
        token_capacity=scheduler.wavepp.pool,
        sliding_window_size=scheduler.sliding_window_size,
        chunk_size=scheduler.chunked_prefill_size,
    )
    req.sampling_params.max_new_tokens = clipped
    req.sampling_params.min_new_tokens = min(req.sampling_params.min_new_tokens, clipped)


def _wave_loop(original: Callable[..., Any], scheduler: Any) -> None:
    from sglang.srt.utils import DynamicGradMode

    with DynamicGradMode():
        scheduler.wavepp.serve()


def _capture_request(
    original: Callable[..., Any], scheduler: Any, req: Any, is_retracted: bool = False
) -> None:
    """Requests go to admission, not to the stock queue; on stage 0 SGLang's queue limits still apply."""
    stage = scheduler.wavepp
    if stage.rank == 0 and req.to_finish is None:
        limited = scheduler.max_queued_requests is not None
        before = list(scheduler.waiting_queue) if limited else []
        original(scheduler, req, is_retracted)
        queue = scheduler.waiting_queue
        if before:
            left = set(map(id, queue))
            stage.intake.displaced += [waiting for waiting in before if id(waiting) not in left]
        if not queue or queue[-1] is not req:
            return
    stage.intake.capture(req)


def _is_fully_idle(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> bool:
    stage = getattr(scheduler, "wavepp", None)
    return original(scheduler, *args, **kwargs) if stage is None else stage.is_idle()


def _add_statistics(original: Callable[..., Any], scheduler: Any, request: Any) -> Any:
    output = original(scheduler, request)
    output.internal_state["wavepp"] = scheduler.wavepp.statistics()
    output.internal_state["memory_usage"]["token_capacity"] = scheduler.wavepp.pool
    return output


def _use_wave_cache(original: Callable[..., Any], ctx: Any, *, cache_class: Any = None) -> Any:
    from sglang_wavepp.radix.tree import WaveRadixCache

    return original(ctx, cache_class=cache_class or WaveRadixCache)


def _stage_one_at_a_time(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    """Decode graphs share the host memory that backends such as FlashInfer stage their plan in.

    The device reads it when it comes to the wave. Stock SGLang launches no second decode wave before that.
    """
    import torch

    model = runner.model_runner
    if model.decode_attention_backend_str in PLANNED_ON_DEVICE:
        return original(runner, *args, **kwargs)
    if (staged := getattr(runner, "wavepp_staged", None)) is not None:
        staged.synchronize()
    result = original(runner, *args, **kwargs)
    runner.wavepp_staged = torch.get_device_module(model.device).Event()
    runner.wavepp_staged.record()
    return result


if __name__ == "__main__":
    print(f'    "{version("sglang")}": {{')
    for _target in (*HOOKS, *RELIED_ON):
        print(f'        "{_target}": "{fingerprint(_target)}",')
    print("    },")
