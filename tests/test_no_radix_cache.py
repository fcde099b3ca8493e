"""`--disable-radix-cache`: nothing is reused, answers stay the same.

What else needs a server of its own is tried on the same one: it runs on an SGLang that was not tested, and
its main process is killed in the end.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import NOTHING, statistics
from test_faults import Faulty, faulty_server, load, refused
from test_oracle import VOCABULARY, generate

from sglang_wavepp.launch.server import Server, ServerError

NEW = 8
PROMPTS = [[VOCABULARY[i * k % len(VOCABULARY)] for i in range(n)] for k, n in ((1, 3), (7, 200), (11, 700))]


CHANGED_SGLANG = """
try:
    from sglang_wavepp.tested import TESTED
    next(iter(TESTED.values()))["sglang.srt.mem_cache.common.release_kv_cache"] = "changed"
except ImportError:
    pass
"""


@pytest.fixture(scope="module")
def faulty(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faulty]:
    flags = ("--disable-radix-cache", "--wavepp-allow-untested-sglang")
    folder = tmp_path_factory.mktemp("no-radix-cache")
    with faulty_server(model, folder, stall=600, flags=flags, more=CHANGED_SGLANG) as faulty:
        yield faulty


@pytest.fixture
def wave(faulty: Faulty) -> Server:
    return faulty.server


@pytest.fixture(scope="module")
def expected(stock: Server) -> list[list[int]]:
    return [generate(stock, prompt, NEW).output for prompt in PROMPTS]


def test_answers_equal_plain_sglang(expected: list[list[int]], wave: Server) -> None:
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda prompt: generate(wave, prompt, NEW), PROMPTS * 4))
    assert [answer.output for answer in answers] == expected * 4
    assert {answer.cached for answer in answers} == {0}
    assert statistics(wave)["held"] == NOTHING


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("input_embeds", {"input_embeds": [[0.0] * 64] * 3}),
        ("positional_embed_overrides", {"input_ids": [400], "positional_embed_overrides": {"0": [0.0] * 64}}),
    ],
)
def test_embeddings_are_refused_by_name(field: str, body: dict[str, object], wave: Server) -> None:
    """Only a server without radix cache lets the first through to the stages, some of which would fail."""
    with pytest.raises(ServerError, match=f"does not support the request field '{field}'") as raised:
        wave.post("/generate", body)
    assert raised.value.status == 400


def test_each_process_warns_of_an_sglang_that_was_not_tested(wave: Server) -> None:
    warnings = [line for line in wave.log_path.read_text().splitlines() if "serving all the same" in line]
    assert len(warnings) == 1 + wave.pp_size
    assert all("differs from the tested one in sglang.srt.mem_cache.common.rel" in line for line in warnings)


def test_a_killed_main_process_leaves_no_stage_behind(faulty: Faulty) -> None:
    """Not even one that waits for activations. The last test of this server."""
    faulty.switch("lose", 0)
    with load(faulty.server, 2) as clients:
        os.kill(faulty.server.pid, signal.SIGKILL)
    refused(clients)
    faulty.ended()
