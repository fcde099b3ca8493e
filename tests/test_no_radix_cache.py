"""`--disable-radix-cache`: nothing is reused, answers stay the same."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import NOTHING, start, statistics
from test_oracle import VOCABULARY, generate

from sglang_wavepp.launch.server import Server, ServerError

NEW = 8
PROMPTS = [[VOCABULARY[i * k % len(VOCABULARY)] for i in range(n)] for k, n in ((1, 3), (7, 200), (11, 700))]


@pytest.fixture(scope="module")
def wave(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("logs") / "no-radix-cache.log"
    with start(model, log, pp_size=2, wavepp=True, flags=("--disable-radix-cache",)) as server:
        yield server


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
