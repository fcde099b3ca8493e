"""SGLang's own objects as bytes for the rounds plane: requests, control requests and sampled outputs.

SGLang's io structs are msgspec structs; its codec additionally unpickles `PickleWrapper` objects. Here
nothing is ever unpickled: the decoder does not know that type at top level, extension types are limited to
arrays and tensors, and a request whose fields need pickle is refused by name on stage 0.
"""

from __future__ import annotations

import functools
import operator
from array import array
from typing import Any

import msgspec
import torch
from sglang.srt.managers import io_struct
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.utils import msgpack_utils

from sglang_wavepp.errors import ProtocolError

_SAFE_EXTENSIONS = frozenset(
    (
        msgpack_utils._MSGPACK_EXT_ARRAY,
        msgpack_utils._MSGPACK_EXT_TORCH_TENSOR,
        msgpack_utils._MSGPACK_EXT_NP_ARRAY,
    )
)


_UNSUPPORTED_FIELDS = (
    "mm_inputs",
    "session_params",
    "token_indices_to_pool",
    "kv_hints",
    "input_embeds",
    "positional_embed_overrides",
)
"""Fields of a generate request that need more than tokens on every stage.

Embeddings are among them since SGLang's forward pass fails on them if the model is not in bfloat16, in a
batch with prompts of tokens, or on a stage without the embedding layer: one request would end the server.
"""


class CannotCarryError(ValueError):
    """The request has a field that WavePP cannot send to the other stages safely."""


def _ext_hook(code: int, data: memoryview) -> Any:
    if code not in _SAFE_EXTENSIONS:
        raise msgspec.DecodeError(f"extension type {code} is not carried")
    return msgpack_utils.ext_hook(code, data)


_STRUCTS = tuple(t for t in io_struct._struct_types if t is not io_struct.PickleWrapper)
_encoder = msgspec.msgpack.Encoder(enc_hook=msgpack_utils.enc_hook)
_decoder = msgspec.msgpack.Decoder(
    functools.reduce(operator.or_, _STRUCTS),
    dec_hook=msgpack_utils.dec_hook,
    ext_hook=_ext_hook,
)
_outputs_decoder = msgspec.msgpack.Decoder(dict[str, Any], ext_hook=_ext_hook)


def encode_request(request: TokenizedGenerateReqInput) -> bytes:
    """A generate request for the members, without what only stage 0 needs.

    Raises `CannotCarryError` naming the first field that cannot be carried.
    """
    for field in _UNSUPPORTED_FIELDS:
        if getattr(request, field, None) is not None:
            raise CannotCarryError(f"WavePP does not support the request field {field!r} yet")
    if (getattr(request.sampling_params, "beam_width", None) or 1) > 1:
        raise CannotCarryError("WavePP does not support beam search yet")
    return _encode(msgspec.structs.replace(request, time_stats=None), type(request).__name__)


def strip_unsupported(request: TokenizedGenerateReqInput) -> None:
    """Take out what `encode_request` refuses: SGLang then makes the request that carries the refusal."""
    for field in _UNSUPPORTED_FIELDS:
        setattr(request, field, None)
    if request.input_ids is None:  # a prompt of embeddings
        request.input_ids = array("q", [0])
    request.sampling_params.beam_width = None


def encode_control(request: Any) -> bytes:
    """A control request for the members. Raises `CannotCarryError` if it needs pickle."""
    if isinstance(request, io_struct.PickleWrapper):
        raise CannotCarryError("WavePP does not carry pickled control requests")
    return _encode(request, type(request).__name__)


def _encode(request: Any, name: str) -> bytes:
    try:
        return _encoder.encode(request)
    except (TypeError, ValueError) as error:
        raise CannotCarryError(f"WavePP cannot carry this {name}: {error}") from None


def decode_request(payload: bytes | memoryview) -> Any:
    """What `encode_request` or `encode_control` made. Raises `msgspec.DecodeError` on anything else."""
    return _decoder.decode(payload)


def encode_outputs(outputs: dict[str, Any]) -> bytes:
    """SGLang's PP output dictionary (tensors, nested lists, None) without its token ids."""
    return _encoder.encode({k: _to_host(v) for k, v in outputs.items() if k != "next_token_ids"})


def decode_outputs(extra: bytes) -> dict[str, Any]:
    """What `encode_outputs` made. Raises `ProtocolError` on anything else."""
    try:
        return _outputs_decoder.decode(extra) if extra else {}
    except (msgspec.DecodeError, ValueError, TypeError, RuntimeError) as error:
        raise ProtocolError(f"the outputs of the last stage do not decode: {error}") from None


def _to_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, list | tuple):
        return [_to_host(v) for v in value]
    return value
