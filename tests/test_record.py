"""Decision logs on disk, and the command that reads them."""

from __future__ import annotations

import os
import resource
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import eventually

from sglang_wavepp.launch.cli import main
from sglang_wavepp.launch.server import Server
from sglang_wavepp.log import DecisionLog
from sglang_wavepp.messages import Commit, Decode, Drop, Output, Prefill, decode_decision
from sglang_wavepp.record import Header, Recorder, read

HEADER = Header("1.0", 1, 4)
DECISIONS = [Commit(7, 0, 64, 100, 164, 5), Decode(3, 77, 0, [7]), Drop([7], False)]


def _written(path: Path, decisions: list[object]) -> Path:
    log = DecisionLog(1, Recorder(path, HEADER))
    for decision in decisions:
        log.append(decision)  # type: ignore[arg-type]
    return path


def test_what_is_written_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _written(tmp_path / "log", DECISIONS)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    header, entries = read(path)
    assert header == HEADER
    assert [decode_decision(entry) for entry in entries] == DECISIONS
    assert main(["log", "show", str(path), "--first", "1", "--last", "1"]) == 0
    head, line = capsys.readouterr().out.splitlines()
    assert head == "stage 1 of 4, sglang-wavepp 1.0"
    assert line.split()[0] == "1" and line.endswith(str(DECISIONS[1]))


def test_logs_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, part = _written(tmp_path / "a", DECISIONS), _written(tmp_path / "b", DECISIONS[:2])
    other = _written(tmp_path / "c", [*DECISIONS[:2], Drop([8], False)])
    assert main(["log", "diff", str(whole), str(whole)]) == 0
    assert capsys.readouterr().out == "3 equal entries\n"
    assert main(["log", "diff", str(part), str(whole)]) == 0
    assert capsys.readouterr().out == "2 equal entries; one of them goes on for 1 more\n"
    assert main(["log", "diff", str(whole), str(other)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "2 equal entries, then at position 2:",
        f"< {DECISIONS[2]}",
        f"> {Drop([8], False)}",
    ]


def test_a_log_that_was_cut_off_ends_with_its_last_whole_entry(tmp_path: Path) -> None:
    path = _written(tmp_path / "log", DECISIONS)
    data = path.read_bytes()
    for cut in range(1, 6):
        path.write_bytes(data[:-cut])
        assert len(list(read(path)[1])) == 2


@pytest.mark.parametrize(
    "content", [b"", b"something else", b"sglang-wavepp decision log 1\n\x01\x00\x00\x00\xc1"]
)
def test_other_files_are_refused_in_a_line(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "log").write_bytes(content)
    for path in (tmp_path / "log", tmp_path / "none"):
        assert main(["log", "show", str(path)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ") and str(path) in line


def test_a_full_disk_ends_the_record_and_nothing_else(tmp_path: Path) -> None:
    code = f"""
import resource, signal, sys
from pathlib import Path
from sglang_wavepp.log import DecisionLog
from sglang_wavepp.messages import Drop
from sglang_wavepp.record import Header, Recorder
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (200, {resource.RLIM_INFINITY}))
log = DecisionLog(1, Recorder(Path({str(tmp_path / "log")!r}), Header("1.0", 1, 4)))
for seq in range(100):
    log.append(Drop([seq], False))
print(log.position)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "100\n"
    assert done.stderr.count("ends here") == 1
    assert os.path.getsize(tmp_path / "log") <= 200 and 0 < len(list(read(tmp_path / "log")[1])) < 100


def test_a_log_is_never_written_over(tmp_path: Path) -> None:
    _written(tmp_path / "log", [])
    with pytest.raises(FileExistsError):
        Recorder(tmp_path / "log", HEADER)


def test_the_stages_of_a_server_write_the_same(
    wave2: Server, decisions: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for length in (3, 700):
        body = {"input_ids": list(range(300, 300 + length)), "sampling_params": {"max_new_tokens": 5}}
        wave2.post("/generate", body)
    logs = sorted(decisions.iterdir())
    assert len(logs) == 2
    eventually(lambda: logs[0].stat().st_size == logs[1].stat().st_size, "equal length")
    assert main(["log", "diff", *map(str, logs)]) == 0
    assert "goes on" not in capsys.readouterr().out
    assert {Commit, Prefill, Output} <= {type(decode_decision(entry)) for entry in read(logs[1])[1]}
