"""One server on two nodes: two launchers on this host, which are told that they are on different ones."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from conftest import NOTHING, eventually, start, statistics

from sglang_wavepp.launch import server as server_module
from sglang_wavepp.launch.server import Server, ServerError

HEARTBEAT_S = 6

ANOTHER_HOST = """
try:
    import sglang_wavepp.watch as watch
    watch.host_id = lambda: "another host"
except ImportError:
    pass
"""
"""`sitecustomize` of node 1: no pid means anything there that is of node 0."""


@contextmanager
def _nodes(model: Path, folder: Path) -> Iterator[list[Server]]:
    """Node 0 and node 1, ready; the decision log of both stages goes to `folder`."""
    (folder / "sitecustomize.py").write_text(ANOTHER_HOST)
    address = f"127.0.0.1:{server_module._free_port()}"
    common = ("--nnodes", "2", "--dist-init-addr", address, "--wavepp-decision-log", str(folder))
    common += ("--wavepp-heartbeat-timeout", str(HEARTBEAT_S))
    env: list[dict[str, str]] = [{}, {"PYTHONPATH": str(folder)}]
    nodes = [
        start(
            model,
            folder / f"node-{rank}.log",
            pp_size=2,
            wavepp=True,
            flags=(*common, "--node-rank", str(rank)),
            env={**env[rank], "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0"},
        )
        for rank in range(2)
    ]
    with ExitStack() as stack:
        for node in nodes:
            stack.callback(node.stop)
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(Server.start, nodes))
        yield nodes


def _ask(server: Server, seed: int) -> Any:
    body = {
        "input_ids": [300 + (seed % 2 * 97 + k * k) % 700 for k in range(600)] + [300 + seed],
        "sampling_params": {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True},
    }
    return server.post("/generate", body)["output_ids"]


def _end(server: Server) -> str:
    """Wait for the end of a node, and say how it ended."""
    errors: list[str] = []

    def is_over() -> bool:
        try:
            server.check()
        except ServerError as error:
            errors.append(str(error).splitlines()[0])
        return bool(errors)

    eventually(is_over, "the end of a node")
    return errors[0]


def _reasons(server: Server) -> list[str]:
    lines = server.log_path.read_text(errors="replace").splitlines()
    return [line.partition("WavePP: ")[2] for line in lines if " ends the server: " in line]


def test_two_nodes_serve_as_one_and_end_as_one(model: Path, stock: Server, tmp_path: Path) -> None:
    with _nodes(model, tmp_path) as (first, second):
        assert set(first.scheduler_pids()) == {0} and set(second.scheduler_pids()) == {1}
        assert second.get("/health") == ""
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda seed: _ask(first, seed), range(12)))
        assert answers == [_ask(stock, seed) for seed in range(12)]
        eventually(lambda: statistics(first)["held"] == NOTHING)
        logs = sorted(tmp_path.glob("wavepp-*-stage-*.log"))
        name = logs[0].name.removesuffix("-stage-0.log")
        assert [log.name for log in logs] == [f"{name}-stage-{rank}.log" for rank in range(2)]

        os.kill(second.scheduler_pids()[1], signal.SIGKILL)
        for node in (first, second):
            _end(node)
        (reason,) = _reasons(first)
        assert reason.startswith("stage 0 ends the server: stage 1 cannot be reached on the rounds plane: ")


def test_a_shutdown_of_node_0_ends_both_in_order(model: Path, tmp_path: Path) -> None:
    with _nodes(model, tmp_path) as (first, second):
        assert len(_ask(first, 1)) == 16
        os.kill(first.pid, signal.SIGTERM)
        for node in (first, second):
            assert _end(node).startswith("server ended with exit code 0:")
        assert not _reasons(first) and not _reasons(second)
