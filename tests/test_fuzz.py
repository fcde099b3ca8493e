"""Whatever arrives on the rounds plane: only errors that are meant, no change from what does not belong."""

from __future__ import annotations

import pickle
import re
import types
import typing
from array import array
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from model_tree import ModelTree, Request

from sglang_wavepp import messages
from sglang_wavepp.admission import Limits
from sglang_wavepp.errors import WavePPError
from sglang_wavepp.leader import Leader
from sglang_wavepp.log import DecisionLog
from sglang_wavepp.member import Member
from sglang_wavepp.messages import Nack, decode_decision, decode_from_leader, decode_from_member, encode
from sglang_wavepp.numbering import Numbering
from sglang_wavepp.record import MAGIC, read

EXAMPLES = 200
PACKAGES = ("sglang_wavepp", "hint_index", "radix", "mpu", "launch")
NUMBERS = st.integers(-2, 40) | st.integers(-(2**63), 2**64 - 1)


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a field's type, as a frame could carry them."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is list:
        return st.lists(values(arguments[0]), max_size=4)
    if origin is tuple and arguments[-1] is Ellipsis:
        return st.lists(values(arguments[0]), max_size=4).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values, arguments))
    if origin is dict:
        return st.dictionaries(*map(values, arguments), max_size=3)
    if origin is types.UnionType:
        return st.one_of(*map(values, arguments))
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        fields = typing.get_type_hints(kind, vars(messages))
        return st.builds(kind, *(values(fields[name]) for name in kind.__struct_fields__))
    simple: dict[Any, st.SearchStrategy[Any]] = {
        int: NUMBERS,
        bool: st.booleans(),
        str: st.text(max_size=8),
        bytes: st.binary(max_size=16),
    }
    return simple[kind]


FROM_MEMBER, FROM_LEADER = values(messages.MEMBER_TO_LEADER), values(messages.LEADER_TO_MEMBER)
DECISIONS = values(messages.DECISIONS)


def damaged(frames: st.SearchStrategy[Any]) -> st.SearchStrategy[bytes]:
    """Garbage, and frames with some bytes changed, cut off or appended."""

    @st.composite
    def frame(draw: st.DrawFn) -> bytes:
        data = bytearray(encode(draw(frames)))
        for _ in range(draw(st.integers(0, 3))):
            data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
        return bytes(data[: draw(st.integers(0, len(data)))]) + draw(st.binary(max_size=4))

    return st.binary(max_size=64) | frame()


@pytest.mark.parametrize(
    ("decode", "frames"),
    [(decode_from_member, FROM_MEMBER), (decode_from_leader, FROM_LEADER), (decode_decision, DECISIONS)],
    ids=["from members", "from the leader", "decisions"],
)
@settings(max_examples=EXAMPLES, deadline=None)
@given(data=st.data())
def test_a_frame_decodes_to_what_was_sent_or_to_a_decode_error(
    decode: Callable[[bytes], Any], frames: st.SearchStrategy[Any], data: st.DataObject
) -> None:
    message = data.draw(frames)
    assert decode(encode(message)) == message
    try:
        decoded = decode(data.draw(damaged(frames)))
    except msgspec.DecodeError:
        return
    assert decode(encode(decoded)) == decoded


@settings(max_examples=EXAMPLES, deadline=None)
@given(damaged(DECISIONS), st.integers(-1, 3))
def test_an_entry_of_the_log_is_the_next_one_or_ends_the_stage(entry: bytes, position: int) -> None:
    log = DecisionLog(1)
    try:
        log.read(position, entry)
    except WavePPError:
        assert (log.position, log.digest) == (0, 0)
    else:
        assert position == 0 and log.position == 1


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.binary(max_size=12) | st.integers(0, 5).map(lambda n: n.to_bytes(8, "big")))
def test_a_stamp_is_the_next_one_or_changes_nothing(stamp: bytes) -> None:
    numbering = Numbering()
    numbering.count = 3
    accepted = True
    try:
        numbering.accept(stamp)
    except (WavePPError, msgspec.DecodeError):
        accepted = False
    assert numbering.count == 3 + accepted
    assert accepted == (stamp == (3).to_bytes(8, "big"))


@pytest.fixture(scope="module")
def codec(sglang_with_plugins: None) -> Any:
    from sglang_wavepp import codec

    return codec


def _request(codec: Any) -> bytes:
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    request = TokenizedGenerateReqInput(
        rid="a",
        input_text="text",
        input_ids=array("q", range(20)),
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=SamplingParams(max_new_tokens=4),
        return_logprob=False,
        logprob_start_len=-1,
        top_logprobs_num=0,
        token_ids_logprob=None,
        stream=False,
    )
    payload = codec.encode_request(request)
    assert codec.decode_request(payload).input_ids == request.input_ids
    return bytes(payload)


@settings(max_examples=EXAMPLES, deadline=None)
@given(data=st.data())
def test_payloads_decode_or_say_that_they_do_not(codec: Any, data: st.DataObject) -> None:
    payload = bytearray(_request(codec))
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    for frame in (bytes(payload), data.draw(st.binary(max_size=64))):
        with suppress(msgspec.DecodeError, ValueError):
            codec.decode_request(frame)
        with suppress(WavePPError):
            codec.decode_outputs(frame)


def test_a_pickled_object_in_a_payload_is_not_unpickled(codec: Any) -> None:
    """SGLang's own decoder would run it."""
    from sglang.srt.managers import io_struct

    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return (pytest.fail, ("it was unpickled",))

    wrapped = io_struct.msgpack_encode(io_struct.PickleWrapper(pickle.dumps(Trap())))
    with pytest.raises(msgspec.DecodeError):
        codec.decode_request(wrapped)


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.binary(max_size=80), st.booleans())
def test_decision_logs_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, magic: bool
) -> None:
    path = tmp_path_factory.mktemp("log") / "log"
    path.write_bytes(MAGIC * magic + data)
    try:
        _, entries = read(path)
    except WavePPError as error:
        assert str(path) in str(error)
    else:
        assert magic and sum(len(entry) + 4 for entry in entries) <= len(data)


# --- the state machines ------------------------------------------------------------------------


def _state(member: Member, tree: ModelTree) -> Any:
    return (
        member.statistics(),
        member.epoch,
        sorted(member._offered),
        sorted(member._committed),
        member.leases.tokens,
        tree.locked,
    )


def _member(answers: list[Any]) -> tuple[Member, ModelTree]:
    """A stage that knows a few requests: one is leased, one committed, the others are offered."""
    tree = ModelTree(200, 8, 1)
    tree.insert(tuple(range(40)))
    member = Member(tree, nullcontext, answers.append)
    for seq in range(4):
        assert member.arrives(seq)
        member.offered(seq, Request(seq, tuple(range(30 + seq)), 4))
    member.on_message(messages.Hold(0, 1, [messages.HoldItem(0, 20, 40), messages.HoldItem(1, 20, 40)]))
    member.take(1, 20)
    answers.clear()
    return member, tree


@settings(max_examples=EXAMPLES, deadline=None)
@given(FROM_LEADER)
def test_a_member_takes_any_message_or_ends_with_a_reason(message: Any) -> None:
    answers: list[Any] = []
    member, tree = _member(answers)
    before = _state(member, tree)
    try:
        member.on_message(message)
    except WavePPError as error:
        assert str(error)
        return
    if getattr(message, "epoch", 0) != 0:
        assert _state(member, tree) == before
        assert [type(answer) for answer in answers] == [Nack]
    promised = member.ledger.statistics()
    assert tree.free_tokens() + tree.evictable_tokens() >= promised.tokens >= 0
    for answer in answers:
        assert decode_from_member(encode(answer)) == answer


def _leader() -> Leader:
    """A leader with a request in a hold round, one that runs and grows, and one without hints."""
    leader = Leader(
        Limits(
            stages=2, pool=200, running=4, page=1, reserve=4, block=4, ahead=100, wave=100, round_bound=1e9
        ),
        lambda: 0.0,
    )
    for seq in range(3):
        leader.arrive(seq, tuple(range(20)), 5, (1, 2, 3))
    for seq in (0, 1):
        for rank in (0, 1):
            leader.on_message(rank, messages.Hint(0, [messages.HintItem(seq, 4)]))
        leader.step()
    return leader


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1), FROM_MEMBER), max_size=4))
@example([(rank, messages.Held(0, 1, [messages.HeldItem(0, 40, True)])) for rank in (0, 1)])
@example([(rank, messages.Held(0, 1, [messages.HeldItem(7, 4, True)])) for rank in (0, 1)])
@example([(rank, messages.Held(0, 1, [messages.HeldItem(0, -4, True)])) for rank in (0, 1)])
@example([(rank, messages.Grown(0, 1, [messages.GrownItem(True)])) for rank in (0, 1)])
@example([(rank, messages.Hint(0, [messages.HintItem(2, 2**40)])) for rank in (0, 1)])
@example([(rank, messages.Hint(0, [messages.HintItem(2, -1)])) for rank in (0, 1)])
def test_a_leader_takes_any_message_or_ends_with_a_reason(received: list[tuple[int, Any]]) -> None:
    leader = _leader()
    try:
        for rank, message in received:
            leader.on_message(rank, message)
            leader.step()
    except WavePPError as error:
        assert str(error)
        return
    for _, message in leader.outbox:
        assert decode_from_leader(encode(message)) == message
        for item in getattr(message, "items", ()) if isinstance(message, messages.Hold) else ():
            assert 0 <= item.boundary < 20 <= item.until <= 200


def test_nothing_of_ours_pickles() -> None:
    """Neither by name nor through a socket's own helpers."""
    root = Path(__file__).parents[1]
    uses = re.compile(
        r"^\s*(import|from)\s+(pickle|cloudpickle|dill|marshal|shelve)\b|send_pyobj|recv_pyobj"
        r"|broadcast_object_list|scatter_object_list|all_gather_object|gather_object|broadcast_pyobj"
        r"|torch\.(load|save)\b",
        re.MULTILINE,
    )
    sources = [path for folder in PACKAGES for path in (root / folder).rglob("*.py")]
    assert len(sources) > 40
    assert [str(path) for path in sources if uses.search(path.read_text())] == []
