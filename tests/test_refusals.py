"""What a WavePP server refuses and accepts, through SGLang's own parser and resolution."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_wavepp.config import config_of
from sglang_wavepp.errors import ConfigError, HandshakeError
from sglang_wavepp.hooks import HOOKS, check
from sglang_wavepp.launch import refusals
from sglang_wavepp.launch.flags import engine_args
from sglang_wavepp.launch.models import make_model
from sglang_wavepp.launch.refusals import ALLOWED, FILLED_IN, REASONS, UNTESTED, VALUES, flag_of, reason_of
from sglang_wavepp.tested import TESTED

pytestmark = pytest.mark.usefixtures("sglang_with_plugins", "own_log_handlers")


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_model(tmp_path_factory.mktemp("model") / "llama", layers=2, hidden=32, context=4096))


@pytest.fixture
def start(tiny_model: str) -> Callable[..., Any]:
    """Parse and resolve a command line as the launcher does; returns the record."""

    def run(*argv: str, base: tuple[str, ...] = ("--wavepp", "--pp-size", "2")) -> Any:
        from sglang.srt.server_args import prepare_server_args

        record = prepare_server_args(["--model-path", tiny_model, "--device", "cpu", *base, *argv])
        record.resolve_once()
        record.check_server_args()
        return record

    return run


@pytest.fixture
def refused(start: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The one line with which a command line is refused."""

    def run(*argv: str, **kwargs: Any) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            start(*argv, **kwargs)
        assert ended.value.code == 2
        (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
        return line

    return run


def fields() -> list[Any]:
    import msgspec
    from sglang.srt.server_args import ServerArgs

    return list(msgspec.structs.fields(ServerArgs))


def otherwise(default: Any) -> Any:
    """A value that is not the default, of about its type."""
    if isinstance(default, bool):
        return not default
    if isinstance(default, (int, float)):
        return default + 1
    return "something"


def set_fields(**values: Any) -> Any:
    """An unresolved record with these fields set by its operator."""
    from sglang.srt.server_args import ServerArgs

    return ServerArgs(**{"model_path": "nowhere", "pp_size": 2, **values})


# --- the list --------------------------------------------------------------------------------


def test_every_name_on_the_lists_is_a_field() -> None:
    """A typo would refuse an ordinary flag, or leave a refusal without its reason."""
    names = {field.name for field in fields()}
    assert names >= ALLOWED >= VALUES.keys()
    for pattern in [*FILLED_IN, *(pattern for patterns in REASONS.values() for pattern in patterns)]:
        assert any(refusals._matches(name, (pattern,)) for name in names - ALLOWED), pattern


def test_a_field_that_is_not_on_the_list_is_refused_by_its_flag() -> None:
    checked = 0
    for field in fields():
        if field.name in ALLOWED:
            continue
        with pytest.raises(ConfigError) as raised:
            refusals.check_given(set_fields(**{field.name: otherwise(field.default)}))
        expected = f"WavePP does not support {flag_of(field.name)} yet: {reason_of(field.name)}"
        assert str(raised.value) == expected
        checked += 1
    assert checked > 250


def test_a_field_on_the_list_may_have_any_value() -> None:
    for name in ALLOWED - VALUES.keys() - {"pp_size", "nnodes"}:
        refusals.check_given(set_fields(**{name: "something"}))


def test_a_new_feature_of_sglang_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "ALLOWED", ALLOWED - {"page_size"})
    with pytest.raises(ConfigError, match=f"--page-size yet: {UNTESTED}"):
        refusals.check_given(set_fields(page_size=16))


def test_the_flag_is_the_one_that_sglang_declares() -> None:
    import argparse

    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    known = {option for action in parser._actions for option in action.option_strings}
    without = {f.name for f in fields() if flag_of(f.name) not in known}
    assert flag_of("fp8_gemm_runner_backend") == "--fp8-gemm-backend"
    assert {"stat_loggers", "custom_sigquit_handler"} <= without
    hidden = ("watermark_", "_", "aux_hidden", "uses_", "enable_cp_tp", "grpc_worker", "speculative_boundary")
    assert {n for n in without if not n.startswith(hidden)} == {"stat_loggers", "custom_sigquit_handler"}


# --- what is served --------------------------------------------------------------------------


ORDINARY = """
    --host 0.0.0.0 --port 42010 --api-key secret --admin-api-key other --served-model-name name
    --tokenizer-mode auto --trust-remote-code --revision main --dtype float32 --load-format auto
    --context-length 2048 --kv-cache-dtype auto --mem-fraction-static 0.5 --max-running-requests 8
    --max-queued-requests 100 --max-total-tokens 8192 --chunked-prefill-size 512 --max-prefill-tokens 1024
    --page-size 16 --pp-max-micro-batch-size 4 --random-seed 1 --attention-backend torch_native
    --sampling-backend pytorch --grammar-backend xgrammar --constrained-json-disable-any-whitespace
    --tool-call-parser qwen25 --reasoning-parser qwen3 --enable-cache-report --stream-interval 4
    --log-level warning --log-requests --log-requests-level 1 --enable-metrics --decode-log-interval 10
    --watchdog-timeout 60 --soft-watchdog-timeout 30 --dist-timeout 60 --disable-overlap-schedule
    --disable-cuda-graph --cuda-graph-max-bs-decode 8 --base-gpu-id 0
    --enable-custom-logit-processor
    --skip-server-warmup --allow-auto-truncate --max-loras-per-batch 4 --max-lora-rank 16 --weight-version v1
"""


def test_an_ordinary_server_is_accepted(start: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "template.jinja").write_text("{{ messages }}")
    record = start(*ORDINARY.split(), "--chat-template", str(tmp_path / "template.jinja"))
    assert config_of(record) is not None


@pytest.mark.parametrize(
    "argv",
    [
        ["--disable-radix-cache"],
        ["--radix-cache-backend", "wavepp"],
        ["--quantization", "fp8"],
        [
            "--enable-lora",
            "--lora-paths",
            "a=/a",
            "b=/b",
            "--max-lora-rank",
            "8",
            "--lora-target-modules",
            "all",
        ],
        ["--ssl-keyfile", "k", "--ssl-certfile", "c"],
        ["--schedule-policy", "fcfs", "--tp-size", "1", "--enable-p2p-check"],
    ],
    ids=lambda argv: argv[0],
)
def test_options_of_ordinary_servers_are_given_freely(argv: list[str], tiny_model: str) -> None:
    from sglang.srt.server_args import prepare_server_args

    refusals.check_given(
        prepare_server_args(["--model-path", tiny_model, "--wavepp", "--pp-size", "2", *argv])
    )


SERVED: dict[str, tuple[str, str]] = {
    "overlap schedule, which SGLang turns off": ("", "test_oracle.py::test_answers_equal_plain_sglang"),
    "static LoRA adapters": (
        "--lora-paths a=/a b=/b --max-loras-per-batch 3",
        "test_lora.py::test_answers_and_reuse_equal_those_of_merged_weights",
    ),
    "grammars": ("--grammar-backend xgrammar", "test_parity.py::test_same_answer"),
    "retraction": ("--max-total-tokens 10000", "test_oracle.py::test_retraction_keeps_answers"),
    "order of arrival": ("--schedule-policy fcfs", "test_oracle.py::test_answers_equal_plain_sglang"),
    "priorities": (
        "--enable-priority-scheduling --disable-priority-preemption",
        "test_order.py::test_higher_priorities_go_first",
    ),
    "decode waves between prefill waves": (
        "--prefill-decode-interval 2",
        "test_order.py::test_decode_waves_between_prefill_waves",
    ),
    "no radix cache": (
        "--disable-radix-cache",
        "test_no_radix_cache.py::test_answers_equal_plain_sglang",
    ),
    "WavePP's cache by its name": (
        "--radix-cache-backend wavepp",
        "test_oracle.py::test_answers_equal_plain_sglang",
    ),
    "pages": ("--page-size 16", "test_oracle.py::test_answers_equal_plain_sglang"),
    "logprobs": ("", "test_parity.py::test_logprobs"),
    "health answers": ("", "test_parity.py::test_health_generate_answers_idle_and_busy"),
    "flush and pause": ("", "test_parity.py::test_flush_and_pause"),
    "custom logit processors": (
        "--enable-custom-logit-processor",
        "test_parity.py::test_custom_logit_processor",
    ),
    "penalties": ("", "test_parity.py::test_same_answer"),
    "metrics": ("--enable-metrics", "test_oracle.py::test_metrics_of_all_stages"),
}
"""Feature -> flags, and the test that runs it on a real server."""


@pytest.mark.parametrize("feature", SERVED)
def test_what_is_served_is_accepted_and_has_a_test(feature: str, start: Callable[..., Any]) -> None:
    from sglang.srt.arg_groups.overrides import resolving_view

    flags, (file, name) = SERVED[feature][0], SERVED[feature][1].split("::")
    record = start(*flags.split())
    assert config_of(record) is not None and resolving_view(record).disable_overlap_schedule
    assert f"def {name}(" in Path(__file__).with_name(file).read_text()


def test_without_wavepp_nothing_is_refused(start: Callable[..., Any]) -> None:
    record = start("--enable-mixed-chunk", "--schedule-policy", "lpm", base=())
    assert record.enable_mixed_chunk


def test_wavepps_cache_alone_is_refused(refused: Callable[..., str]) -> None:
    line = refused("--radix-cache-backend", "wavepp", base=())
    assert line == "error: --radix-cache-backend wavepp needs --wavepp"


def test_the_engine_gets_an_exception(tiny_model: str) -> None:
    record = engine_args(model_path=tiny_model, device="cpu", pp_size=2, enable_mixed_chunk=True)
    with pytest.raises(
        ConfigError, match=r"^WavePP does not support --enable-mixed-chunk yet: stage 0 plans"
    ):
        record.resolve_once()
    engine_args(model_path=tiny_model, device="cpu", pp_size=2, mem_fraction_static=0.5).resolve_once()


# --- what is refused -------------------------------------------------------------------------

MATRIX = """
    # speculative decoding
    --speculative-algorithm EAGLE
    --speculative-algorithm NGRAM
    # LoRA that comes and goes
    --enable-lora-overlap-loading
    --lora-drain-wait-threshold 1.5
    # embeddings and rewards
    --is-embedding
    # attention DP, replicas
    --attn-dp-size 2
    --enable-dp-attention
    --dp-size 2
    --enable-prefill-delayer
    # tiers
    --enable-hierarchical-cache
    --hicache-storage-backend file
    --enable-lmcache
    --enable-flexkv
    --enable-unified-cache-external-linker
    --radix-cache-backend custom
    # disaggregation
    --disaggregation-mode prefill
    --disaggregation-mode decode
    --enable-pd-role-switch
    --enable-pdmux
    --encoder-only
    --language-only
    # sessions
    --enable-streaming-session
    --enable-session-radix-cache
    # scheduling
    --enable-mixed-chunk
    --schedule-policy lpm
    --schedule-policy dfs-weight
    --schedule-policy hrrn
    --schedule-policy shortest-prefill-first
    --schedule-policy random
    --schedule-policy lof
    --retraction-policy priority
    --schedule-conservativeness 0.3
    --enable-dynamic-chunking
    --priority-scheduling-preemption-threshold 5
    --num-continuous-decode-steps 2
    --min-free-slots-delay 4
    --pp-async-batch-depth 1
    --scheduler-recv-interval 2
    --sleep-on-idle
    --enable-two-batch-overlap
    --chunked-prefill-size -1
    # pools and caches
    --enable-hisparse
    --enable-unified-memory
    --enable-page-major-kv-layout
    --max-mamba-cache-size 8
    --swa-full-tokens-ratio 0.5
    --kv-events-config {}
    --load-publish-endpoint auto
    --enable-memory-saver
    --radix-eviction-policy lfu
    --strip-thinking-cache
    --kv-canary log
    # tensor, expert and context parallelism
    --tp-size 2
    --ep-size 2
    --moe-a2a-backend deepep
    --enable-eplb
    --elastic-ep-backend mooncake
    --attn-cp-size 2
    --dcp-size 2
    --enable-prefill-cp
    --enable-kv-cache-sharding
    # other kinds of requests and answers
    --dllm-algorithm LowConfidence
    --enable-multimodal
    --enable-return-hidden-states
    --return-hidden-states-mode last
    --enable-return-routed-experts
    # other fronts and processes
    --use-ray
    --tokenizer-worker-num 2
    --grpc-port 42011
    --smg-grpc-mode
    # what nobody has tested
    --enable-deterministic-inference
    --enable-forward-pass-metrics
    --enable-torch-compile
    --enable-watermark
    --model-impl transformers
    --device npu
    --load-format flash_rl
"""


@pytest.mark.parametrize("row", [row for row in map(str.strip, MATRIX.split("\n")) if row.startswith("--")])
def test_each_row_of_the_matrix_is_refused(row: str, refused: Callable[..., str]) -> None:
    line = refused(*row.split())
    flag = row.split()[0]
    assert line.startswith(f"error: WavePP does not support {flag} ")
    reason = line.split(": ", 2)[2]
    assert reason == UNTESTED or reason in REASONS or any(reason == why for _, why in VALUES.values())


def test_all_refused_flags_are_named_at_once(refused: Callable[..., str]) -> None:
    line = refused("--tp-size", "2", "--enable-mixed-chunk", "--enable-watermark")
    assert all(flag in line for flag in ("--tp-size", "--enable-mixed-chunk", "--enable-watermark"))


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (
            "--nnodes 3 --dist-init-addr localhost:1",
            "--pp-size 2 is not a multiple of --nnodes 3: WavePP needs as many stages on each node",
        ),
        (
            "--nnodes 2",
            "--nnodes 2 needs --dist-init-addr HOST:PORT, an address of node 0 that every node can reach",
        ),
        ("--nnodes 2 --dist-init-addr nowhere", "--dist-init-addr has to be HOST:PORT: "),
    ],
)
def test_nodes_without_an_address_are_refused(
    given: str, complaint: str, refused: Callable[..., str]
) -> None:
    assert refused(*given.split()).startswith(f"error: {complaint}")


def test_one_stage_is_refused(refused: Callable[..., str]) -> None:
    expected = "error: --wavepp needs --pp-size 2 or more: with one stage there is nothing to pipeline"
    assert refused(base=("--wavepp",)) == expected
    assert refused(base=("--wavepp", "--pp-size", "1")) == expected


def test_an_sglang_that_was_not_tested_is_refused(
    refused: Callable[..., str], start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is started, and once more in each stage: see test_no_radix_cache.py."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    function = "sglang.srt.mem_cache.common.release_kv_cache"
    monkeypatch.setitem(TESTED[version("sglang")], function, "changed")
    problem = f"SGLang {version('sglang')} differs from the tested one in {function} "
    assert refused() == f"error: {problem}(--wavepp-allow-untested-sglang serves all the same)"
    with monkeypatch.context() as patch, pytest.raises(HandshakeError, match=f"^{re.escape(problem)}"):
        patch.setattr(HookRegistry, "_patched", HOOKS)
        check(allow_untested=False)
    start("--wavepp-allow-untested-sglang")
    monkeypatch.delitem(TESTED, version("sglang"))
    assert "was not tested with this WavePP; tested: " in refused()


def test_a_model_without_configuration_is_refused(refused: Callable[..., str]) -> None:
    """SGLang resolves nothing for it, so nobody would look at what came out."""
    assert "--model-path dummy" in refused("--model-path", "dummy")


def test_preemption_is_refused(refused: Callable[..., str]) -> None:
    assert "without --disable-priority-preemption" in refused("--enable-priority-scheduling")


COMBINATIONS = {
    "--lora-paths a=/a b=/b c=/c --max-loras-per-batch 3": "--max-loras-per-batch 4 for 3 --lora-paths",
    "--enable-lora --max-lora-rank 8 --lora-target-modules all": "--lora-paths for --enable-lora",
}
"""Flags -> what WavePP needs instead."""


@pytest.mark.parametrize("row", COMBINATIONS)
def test_combinations_are_refused(row: str, refused: Callable[..., str]) -> None:
    assert refused(*row.split()).startswith(f"error: WavePP needs {COMBINATIONS[row]}: ")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SGLANG_RUST_SERVER", "1"),
        ("SGLANG_USE_PICKLE_IPC", "0"),
        ("SGLANG_ENABLE_RANK_CONSENSUS_CHECKER", "1"),
        ("SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND", "python"),
        ("SGLANG_RADIX_FORCE_MISS", "true"),
        ("SGLANG_ENABLE_PP_SPEC", "1"),
        ("SGLANG_PREFILL_TILE_BUDGET", "64"),
        ("SGLANG_PP_COMM_OVERLAP", "1"),
        ("SGLANG_ENABLE_COLOCATED_BATCH_GEN", "1"),
        ("SGLANG_TEST_SCRIPTED_RUNTIME", "1"),
    ],
)
def test_environment_variables_are_refused(
    name: str, value: str, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert name in refusals.VARIABLES
    monkeypatch.setenv(name, value)
    assert refused().startswith(f"error: WavePP does not support {name}={value} yet: ")


def test_all_variables_are_known_to_sglang_and_free_at_their_default(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.environ import envs

    for name in refusals.VARIABLES:
        monkeypatch.setenv(name, str(getattr(envs, name).default))
    start()


def test_a_variable_that_sglang_turns_into_a_flag_is_refused(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_GRPC_PORT", "42012")
    assert "--grpc-port yet, which SGLang turned on for this model or environment" in refused()


# --- what resolution turned on ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("speculative_algorithm", "EAGLE"),
        ("enable_hierarchical_cache", True),
        ("enable_lmcache", True),
        ("enable_flexkv", True),
        ("attn_dp_size", 2),
        ("dp_size", 2),
        ("tp_size", 2),
        ("ep_size", 2),
        ("attn_cp_size", 2),
        ("moe_a2a_backend", "deepep"),
        ("is_embedding", True),
        ("enable_mixed_chunk", True),
        ("schedule_policy", "lpm"),
        ("return_hidden_states_mode", "last"),
        ("uses_mamba_radix_cache", True),
        ("enable_page_major_kv_layout", True),
        ("enable_deterministic_inference", True),
        ("radix_eviction_policy", "lfu"),
        ("disaggregation_mode", "prefill"),
        ("smg_grpc_mode", True),
        ("chunked_prefill_size", -1),
        ("device", "xpu"),
        ("pp_size", 1),
    ],
)
def test_a_feature_is_refused_however_it_was_turned_on(
    field: str, value: Any, start: Callable[..., Any]
) -> None:
    from sglang.srt.arg_groups.overrides import declare_resolution

    record = start()
    refusals.check_resolved(record)
    declare_resolution(record, "a model", **{field: value})
    with pytest.raises(ConfigError) as raised:
        refusals.check_resolved(record)
    assert flag_of(field) in str(raised.value)


def test_the_last_look_is_right_before_the_launch(
    start: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    from sglang.srt.arg_groups.overrides import declare_resolution

    record = start()
    declare_resolution(record, "a late step", chunked_prefill_size=-1)
    with pytest.raises(SystemExit):
        record.check_server_args()
    assert "error: WavePP does not support --chunked-prefill-size -1 yet" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model_type", "architecture", "kind"),
    [
        ("qwen3_vl", "Qwen3VLForConditionalGeneration", "multimodal models"),
        ("bert", "BertModel", "embedding and reward models"),
        ("qwen3_next", "Qwen3NextForCausalLM", "models with recurrent layers"),
        ("falcon_h1", "FalconH1ForCausalLM", "models with recurrent layers"),
        ("gpt_oss", "GptOssForCausalLM", "models with sliding-window layers"),
        ("deepseek_v4", "DeepseekV4ForCausalLM", "DeepSeek V4"),
    ],
)
def test_models_that_cannot_reuse_plain_prefixes_are_refused(
    model_type: str, architecture: str, kind: str, tmp_path: Path
) -> None:
    record = resolved_model(tmp_path, model_type, architecture)
    with pytest.raises(ConfigError) as raised:
        record()
    assert str(raised.value).startswith(
        f"WavePP does not support {kind} yet (--model-path, {architecture}): "
    )


@pytest.mark.parametrize(
    ("model_type", "architecture"),
    [
        ("qwen3", "Qwen3ForCausalLM"),
        ("qwen3_moe", "Qwen3MoeForCausalLM"),
        ("deepseek_v3", "DeepseekV3ForCausalLM"),
        ("olmo2", "Olmo2ForCausalLM"),
    ],
)
def test_models_with_full_attention_are_accepted(model_type: str, architecture: str, tmp_path: Path) -> None:
    resolved_model(tmp_path, model_type, architecture)()


def resolved_model(folder: Path, model_type: str, architecture: str) -> Callable[[], None]:
    """Resolution of a server for a model of which there is only a configuration, with default sizes."""
    model_config(model_type, architecture, folder)
    record = engine_args(
        model_path=str(folder), device="cpu", pp_size=2, skip_tokenizer_init=True, mem_fraction_static=0.5
    )
    return record.resolve_once


def model_config(model_type: str, architecture: str, folder: Path) -> None:
    """Write the configuration of a model, with default sizes."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(model_type).to_dict() | {"architectures": [architecture]}
    if model_type == "deepseek_v4":
        config |= {"compress_ratios": [4] * config["num_hidden_layers"]}  # transformers keeps them elsewhere
    (folder / "config.json").write_text(json.dumps(config))


# --- requests --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("session_params", {"id": "s"}, "'session_params'"),
        ("mm_inputs", {"mm_items": []}, "'mm_inputs'"),
        ("token_indices_to_pool", [0], "'token_indices_to_pool'"),
        ("kv_hints", {}, "'kv_hints'"),
        ("input_embeds", [[0.5]], "'input_embeds'"),
        ("positional_embed_overrides", {}, "'positional_embed_overrides'"),
        ("beam_width", 2, "beam search"),
    ],
)
def test_request_fields_that_cannot_be_carried_are_refused_by_name(
    field: str, value: Any, named: str
) -> None:
    """The server makes a 400 of it; see also test_parity.py."""
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    from sglang_wavepp.codec import CannotCarryError, encode_request, strip_unsupported

    request = TokenizedGenerateReqInput(
        input_text=None,
        input_ids=None,
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=SamplingParams(),
        return_logprob=False,
        logprob_start_len=0,
        top_logprobs_num=0,
        token_ids_logprob=None,
        stream=False,
    )
    encode_request(request)
    setattr(request.sampling_params if field == "beam_width" else request, field, value)
    with pytest.raises(CannotCarryError, match=f"^WavePP does not support .*{named} yet$"):
        encode_request(request)
    strip_unsupported(request)
    encode_request(request)


# --- the CPU platform and a real process -----------------------------------------------------


def test_stages_on_the_cpu_platform_get_their_cores(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SGLANG_CPU_OMP_THREADS_BIND", raising=False)
    start("--pp-size", "4")
    assert len(os.environ["SGLANG_CPU_OMP_THREADS_BIND"].split("|")) == 4
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|0")
    start()
    assert os.environ["SGLANG_CPU_OMP_THREADS_BIND"] == "0|0"


COMMANDS: dict[str, tuple[str, dict[str, str], str]] = {
    "one stage": ("--pp-size 1", {}, "--wavepp needs --pp-size 2 or more: with one stage"),
    "a flag": ("--enable-mixed-chunk", {}, "WavePP does not support --enable-mixed-chunk yet: "),
    "a flag that SGLang turned on": (
        "",
        {"SGLANG_GRPC_PORT": "42012"},
        "WavePP does not support --grpc-port yet, which SGLang turned on for this model or environment: ",
    ),
    "a variable": (
        "",
        {"SGLANG_RADIX_FORCE_MISS": "1"},
        "WavePP does not support SGLANG_RADIX_FORCE_MISS=1 yet: ",
    ),
    "a model": (
        "--skip-tokenizer-init --model-path {sliding}",
        {},
        "WavePP does not support models with sliding-window layers yet (--model-path, GptOssForCausalLM): ",
    ),
    "a combination": (
        "--lora-paths a=/a b=/b --max-loras-per-batch 2",
        {},
        "WavePP needs --max-loras-per-batch 3 for 2 --lora-paths: ",
    ),
}
"""Kind of refusal -> flags, environment, and how the line begins."""
ENTRIES = {"sglang serve": "one stage", "sglang.launch_server": "a model"}
"""Entry to SGLang -> the kind of refusal that is tried in a process of its own."""


@pytest.fixture
def command(tiny_model: str, tmp_path: Path) -> Callable[[str], list[str]]:
    """The arguments of a server that is refused for a kind of reason."""

    def argv(kind: str) -> list[str]:
        model_config("gpt_oss", "GptOssForCausalLM", tmp_path)
        common = [
            "--model-path",
            tiny_model,
            "--device",
            "cpu",
            "--port",
            "42013",
            "--mem-fraction-static",
            "0.5",
        ]
        return [*common, "--wavepp", "--pp-size", "2", *COMMANDS[kind][0].format(sliding=tmp_path).split()]

    return argv


def check_refusal(kind: str, code: int, output: str) -> None:
    assert code == 2, output
    assert "Traceback" not in output
    (line,) = [x for x in output.splitlines() if x.lower().startswith("error")]
    assert line.startswith(f"error: {COMMANDS[kind][2]}")


@pytest.mark.parametrize("kind", COMMANDS)
def test_the_launcher_says_it_in_one_line(
    kind: str,
    command: Callable[[str], list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """SGLang's launcher in this process, up to where it would start others."""
    from sglang.launch_server import prepare_server_args, run_server

    started = SimpleNamespace(launch_server=lambda record: pytest.fail("it was started"))
    monkeypatch.setitem(sys.modules, "sglang.srt.entrypoints.http_server", started)
    for name, value in COMMANDS[kind][1].items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        run_server(prepare_server_args(command(kind)))
    check_refusal(kind, int(ended.value.code or 0), "".join(capfd.readouterr()))


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_real_process_says_it_in_one_line(entry: str, command: Callable[[str], list[str]]) -> None:
    how = {
        "sglang serve": ("-c", "from sglang.cli.main import main; main()", "serve"),
        "sglang.launch_server": ("-m", "sglang.launch_server"),
    }[entry]
    done = subprocess.run(
        [sys.executable, *how, *command(ENTRIES[entry])], capture_output=True, text=True, timeout=300
    )
    check_refusal(ENTRIES[entry], done.returncode, done.stdout + done.stderr)
