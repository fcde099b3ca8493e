"""The flags through SGLang's own parser, the plugin's entry point, and the `wavepp` command line."""

from __future__ import annotations

import argparse
import dataclasses
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_wavepp.config import WavePPConfig, config_of
from sglang_wavepp.errors import ConfigError, HandshakeError
from sglang_wavepp.launch import cli, flags, plugin
from sglang_wavepp.launch.flags import OPTIONS, engine_args, flag_of

pytestmark = pytest.mark.usefixtures("sglang_with_plugins", "own_log_handlers")

MODEL = ["--model-path", "nowhere", "--pp-size", "2"]
OTHER: dict[str, Any] = {
    "decode_reserve": 64,
    "run_ahead": 3,
    "planner": "static",
    "wave_floor": 256,
    "pool_tokens": "4000,3000",
    "block_size": 32,
    "stall_timeout": 7.5,
    "heartbeat_timeout": 2.0,
    "handshake_timeout": 9.0,
    "allow_untested_sglang": True,
    "decision_log": "/tmp",
    "socket_dir": "/tmp",
    "bind": "127.0.0.2",
}
"""A value for each option that is not its default."""


def parse(*argv: str) -> Any:
    from sglang.srt.server_args import prepare_server_args

    return prepare_server_args([*MODEL, *argv])


def test_there_is_one_option_for_each_field() -> None:
    fields = {f.name for f in dataclasses.fields(WavePPConfig)}
    assert set(OPTIONS) == fields, "a field of WavePPConfig needs an entry in flags.OPTIONS"
    assert set(OTHER) == fields
    default = WavePPConfig()
    assert all(OTHER[name] != getattr(default, name) for name in fields)


def test_the_server_help_has_a_group_with_all_flags() -> None:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    group = parser.format_help().split("\nwavepp:\n")[1]
    for flag in ("--wavepp ", *(flag_of(name) for name in OPTIONS)):
        assert flag in group
    assert "(default: 512)" in group


def test_the_server_help_needs_nothing_set() -> None:
    """In the environment that `make` sets up, and in one with a GPU, the command works as it stands."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("SGLANG_")}
    command = [sys.executable, "-m", "sglang.launch_server", "--help"]
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert "--wavepp-decode-reserve" in ran.stdout


def test_wavepp_alone_means_all_defaults() -> None:
    assert config_of(parse("--wavepp")) == WavePPConfig()


def test_without_wavepp_the_record_is_untouched() -> None:
    record = parse()
    assert not hasattr(record, "_wavepp")
    assert config_of(record) is None


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_reaches_other_processes(name: str) -> None:
    value = [] if OPTIONS[name].parse is None else [str(OTHER[name])]
    record = pickle.loads(pickle.dumps(parse("--wavepp", flag_of(name), *value)))
    assert config_of(record) == dataclasses.replace(WavePPConfig(), **{name: OTHER[name]})
    assert all(type(held) in (bool, int, float, str) for held in record._wavepp.values())


def test_a_yaml_file_may_hold_them_and_the_command_line_wins(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(
        "wavepp: true\nwavepp-decode-reserve: 64\nwavepp-run-ahead: 3\nwavepp-allow-untested-sglang: true\n"
    )
    config = config_of(parse("--config", str(file), "--wavepp-run-ahead", "5"))
    assert config == WavePPConfig(decode_reserve=64, run_ahead=5, allow_untested_sglang=True)


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("decode_reserve", "0", "must be at least 1, not 0"),
        ("decode_reserve", "many", "must be a whole number, not 'many'"),
        ("run_ahead", "-1", "must not be negative, not -1"),
        ("run_ahead", "1.5", "must be a whole number, not '1.5'"),
        ("planner", "best", "must be one of static, mpu, timed, not 'best'"),
        ("wave_floor", "0", "must be at least 1, not 0"),
        ("pool_tokens", "4000,", "must be a whole number, not ''"),
        ("pool_tokens", "4000,0", "must be at least 1, not 0"),
        ("pool_tokens", "most", "must be a whole number, not 'most'"),
        ("block_size", "0", "must be at least 1, not 0"),
        ("stall_timeout", "0", "must be a number of seconds above 0, not 0"),
        ("heartbeat_timeout", "inf", "must be a number of seconds above 0, not inf"),
        ("handshake_timeout", "soon", "must be a number of seconds, not 'soon'"),
        ("socket_dir", "/no/such/dir", "'/no/such/dir' is not a directory that can be written to"),
        ("decision_log", "/no/such/dir", "'/no/such/dir' is not a directory that can be written to"),
        ("bind", "localhost", "must be an IP address, not 'localhost'"),
        ("bind", "0.0.0.0", "must be the address of one interface, not 0.0.0.0"),
    ],
)
def test_a_bad_value_is_one_clear_line(
    name: str, value: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse("--wavepp", f"{flag_of(name)}={value}")
    assert ended.value.code == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line == f"sglang serve: error: argument {flag_of(name)}: {complaint}"


def test_an_option_without_wavepp_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse("--wavepp-run-ahead", "3")
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: --wavepp-run-ahead has no effect without --wavepp\n"


# --- the offline engine ----------------------------------------------------------------------


def test_sglang_does_not_know_our_keywords() -> None:
    """Why `engine_args` is there. If this fails, `sglang.Engine(wavepp=True)` could be supported."""
    from sglang.srt.server_args import ServerArgs

    with pytest.raises(TypeError, match="wavepp"):
        ServerArgs(model_path="nowhere", pp_size=2, wavepp=True)


def test_engine_args_carry_the_options() -> None:
    record = engine_args(model_path="nowhere", pp_size=2, **{f"wavepp_{k}": v for k, v in OTHER.items()})
    assert config_of(pickle.loads(pickle.dumps(record))) == WavePPConfig(**OTHER)
    assert (record.pp_size, record.log_level) == (2, "error")
    assert config_of(engine_args(model_path="nowhere", wavepp=False)) is None


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"wavepp_decode_reserve": 0}, "wavepp_decode_reserve must be at least 1, not 0"),
        ({"wavepp_decode_reserve": "64"}, "wavepp_decode_reserve has the wrong type: '64'"),
        ({"wavepp_run_ahead": True}, "wavepp_run_ahead has the wrong type: True"),
        ({"wavepp_allow_untested_sglang": 1}, "wavepp_allow_untested_sglang must be True or False, not 1"),
        ({"wavepp_planner": "best"}, "wavepp_planner must be one of static, mpu, timed, not 'best'"),
        ({"wavepp_planner": 1}, "wavepp_planner has the wrong type: 1"),
        ({"wavepp_reserve": 1}, "unknown option wavepp_reserve; WavePP has wavepp_decode_reserve, "),
        ({"wavepp": False, "wavepp_run_ahead": 1}, "wavepp_run_ahead has no effect with wavepp=False"),
    ],
)
def test_engine_args_refuse_what_the_flags_refuse(given: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError) as raised:
        engine_args(model_path="nowhere", pp_size=2, **given)
    assert str(raised.value).startswith(complaint)


@pytest.mark.parametrize(("variable", "value"), [("SGLANG_PLUGINS", "other"), ("SGLANG_PLATFORM", "other")])
def test_engine_args_notice_that_sglang_would_not_load_the_plugin(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=variable):
        engine_args(model_path="nowhere", pp_size=2)
    monkeypatch.setenv("SGLANG_PLUGINS", "other, wavepp")
    monkeypatch.setenv("SGLANG_PLATFORM", "")
    engine_args(model_path="nowhere", pp_size=2)


# --- scheduler processes ---------------------------------------------------------------------


def run_as_scheduler(server_args: Any, call: Any) -> Any:
    """Call from a frame that looks like SGLang's `run_scheduler_process`."""
    scope: dict[str, Any] = {"__name__": "sglang.srt.managers.scheduler"}
    exec("def run_scheduler_process(server_args, pp_rank, call):\n    return call()", scope)
    return scope["run_scheduler_process"](server_args, 1, call)


def test_a_scheduler_finds_its_record_in_the_frame() -> None:
    record = object()
    found = run_as_scheduler(record, plugin.scheduler_arguments)
    assert (found["server_args"], found["pp_rank"]) == (record, 1)
    assert plugin.scheduler_arguments() is None


@pytest.mark.parametrize("on", [True, False])
def test_only_schedulers_with_wavepp_are_hooked(on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    hooked: list[Any] = []
    fake = SimpleNamespace(install=hooked.append)
    monkeypatch.setitem(sys.modules, "sglang_wavepp.hooks", fake)
    monkeypatch.setattr("sglang_wavepp.hooks", fake, raising=False)
    monkeypatch.setattr(plugin, "_register_launcher", lambda: pytest.fail("a scheduler is not a launcher"))
    record = SimpleNamespace(_wavepp={"wavepp": True}) if on else SimpleNamespace()
    run_as_scheduler(record, plugin.register)
    assert hooked == ([record] if on else [])


def test_a_scheduler_that_cannot_be_hooked_ends_the_server() -> None:
    code = """
import os, signal, sys
from types import ModuleType, SimpleNamespace
told = []
signal.signal(signal.SIGQUIT, lambda number, frame: told.append(number))
hooks = ModuleType("sglang_wavepp.hooks")
def install(server_args):
    raise KeyError("no such\\nhook")
hooks.install = install
sys.modules["sglang_wavepp.hooks"] = hooks
from sglang_wavepp.launch import plugin
def run_scheduler_process(server_args, pp_rank):
    plugin.register()
    print("went on")
run_scheduler_process.__globals__["__name__"] = "sglang.srt.managers.scheduler"
child = os.fork()
if child == 0:
    run_scheduler_process(SimpleNamespace(_wavepp={"wavepp": True}), 0)
    os._exit(0)
status = os.waitpid(child, 0)[1]
print(os.waitstatus_to_exitcode(status), told)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == f"1 [{signal.SIGQUIT!r}]\n".replace(repr(signal.SIGQUIT), str(int(signal.SIGQUIT)))
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: WavePP could not be installed in scheduler process ")
    assert "KeyError: 'no such\\nhook' (<string>:8)" in line


@pytest.mark.parametrize("from_command_line", [True, False])
def test_a_server_whose_scheduler_lacks_wavepp_does_not_start(
    from_command_line: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from sglang.srt import runtime_context

    infos = [{"status": "ready", "wavepp": {}}, {"status": "ready"}]
    record = SimpleNamespace(pp_size=4, nnodes=2, node_rank=1)
    killed: list[int] = []
    processes = [SimpleNamespace(kill=lambda i=i: killed.append(i)) for i in range(2)]
    monkeypatch.setattr(runtime_context, "get_server_args", lambda: record)

    def wait() -> Any:
        return plugin._wait_for_schedulers(lambda readers, processes: infos, [], processes)

    assert wait() is infos, "without --wavepp nobody asks"
    record._wavepp = {"wavepp": True, "from_command_line": from_command_line}
    text = "the server does not start: WavePP was not loaded in the scheduler of stage 3"
    if from_command_line:
        with pytest.raises(SystemExit) as ended:
            wait()
        assert ended.value.code == 1
        assert capsys.readouterr().err == f"error: {text}\n"
    else:
        with pytest.raises(HandshakeError) as raised:
            wait()
        assert str(raised.value) == text
    assert killed == [0, 1]
    infos[1]["wavepp"] = {}
    assert wait() is infos


def test_the_guard_is_on_what_the_engine_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """The late hook has to reach the name that the engine looks up."""
    from sglang.srt.entrypoints import engine

    plugin._hook_engine(None)
    guarded = engine._wait_for_scheduler_ready
    plugin._hook_engine(None)
    assert engine._wait_for_scheduler_ready is guarded
    with pytest.raises(ZeroDivisionError):
        monkeypatch.setattr(flags, "fail", lambda *args, **kwargs: 1 / 0)
        monkeypatch.setattr(plugin, "config_of", lambda record: WavePPConfig())
        record = SimpleNamespace(pp_size=2, nnodes=1, node_rank=0)
        monkeypatch.setattr("sglang.srt.runtime_context.get_server_args", lambda: record)
        reader = SimpleNamespace(poll=lambda timeout: True, recv=lambda: {"status": "ready"})
        engine._wait_for_scheduler_ready([reader], [SimpleNamespace(kill=lambda: None)])


# --- the wavepp command ----------------------------------------------------------------------


def test_help_and_version_import_neither_sglang_nor_torch() -> None:
    code = """
import sys
from sglang_wavepp.launch.cli import main
for argv in ([], ["--help"], ["--version"]):
    try:
        assert main(argv) == 0
    except SystemExit as ended:
        assert ended.code == 0
print(sorted({"sglang", "torch", "numpy"} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert "make-model" in done.stdout and "demo" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


def test_make_model_writes_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "model"
    assert cli.main(["make-model", str(folder), "--layers", "2", "--hidden", "32"]) == 0
    assert capsys.readouterr().out == f"{folder}\n"
    assert (folder / "config.json").is_file()


def test_errors_of_wavepp_are_one_line_and_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert cli.main(["make-model", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")


@pytest.mark.parametrize(
    ("raised", "code"), [(KeyboardInterrupt(), 130), (ModuleNotFoundError(name="sglang"), 2)]
)
def test_interrupts_and_missing_modules(
    raised: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise raised

    monkeypatch.setattr("sglang_wavepp.launch.models.make_model", fail)
    assert cli.main(["make-model", "somewhere"]) == code
    assert capsys.readouterr().err == ("error: the module 'sglang' is not installed\n" if code == 2 else "")
