"""One stage of a WavePP server: puts the parts together and shakes hands with the other stages."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import secrets
import sys
import threading
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sglang.srt.runtime_context import get_context, get_parallel, get_schedule
from sglang.srt.utils.network import NetworkAddress

from sglang_wavepp import __version__
from sglang_wavepp.admission import Limits
from sglang_wavepp.config import WavePPConfig
from sglang_wavepp.errors import HandshakeError, WavePPError
from sglang_wavepp.exchange import share_over
from sglang_wavepp.hooks import hook_digest
from sglang_wavepp.intake import Intake
from sglang_wavepp.leader import Leader
from sglang_wavepp.loop import LeaderLoop, MemberLoop
from sglang_wavepp.member import Member
from sglang_wavepp.messages import Hello, Message
from sglang_wavepp.mpu import PLANNERS, WaveLimits
from sglang_wavepp.radix.tree import SGLangTree, WaveRadixCache
from sglang_wavepp.record import Header, Recorder
from sglang_wavepp.rounds import LeaderPlane, MemberPlane
from sglang_wavepp.sequencer import Sequencer
from sglang_wavepp.stats import Stats
from sglang_wavepp.transport import IpcLeader, IpcMember, TcpLeader, TcpMember
from sglang_wavepp.watch import end_server, host_id
from sglang_wavepp.wave import MemberWave
from sglang_wavepp.wave_leader import LeaderWave

logger = logging.getLogger(__name__)

_ROUND_BOUND_S = 30.0
_SWITCH_INTERVAL_S = 0.0005
"""How long one thread may keep the GIL from the other.

With the default of 5 ms the loop waits two to four times as long beside WAVE (p99), 0.05 ms gains no more
(`benchmarks/gil.py`).
"""


class Stage:
    """Everything WavePP has on one stage. Made when SGLang's scheduler is complete, before it reports ready.

    Raises `HandshakeError` if the stages do not agree; nothing was served by then.
    """

    def __init__(self, scheduler: Any, config: WavePPConfig) -> None:
        self.scheduler = scheduler
        self.config = config
        self.rank: int = scheduler.pp_group.rank_in_group
        self.stages: int = scheduler.pp_group.world_size
        self.run_ahead = config.run_ahead or 2 * self.stages
        self.guard = threading.RLock()
        self.stats = Stats(self.stages)
        self.leaving = False
        """A shutdown was applied: peers may go."""
        self.control_idle: bool | None = None
        """While a control decision is applied: stage 0's answer to whether the server was idle."""
        cache = scheduler.tree_cache
        if not isinstance(cache, WaveRadixCache):
            raise HandshakeError(f"stage {self.rank} runs {type(cache).__name__} instead of WavePP's cache")
        if not cache.disable and not type(cache.tree_core).__name__.startswith("Rust"):
            raise HandshakeError(
                f"stage {self.rank} runs the Python tree core, which is not thread safe; WavePP needs the "
                "Rust core (SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND=rust)"
            )
        tree = SGLangTree(cache, scheduler.token_to_kv_pool_allocator, scheduler.req_to_token_pool)
        self.member = Member(tree, lambda: self.wave.guarded(), self._from_member)
        cache.on_reset = self.member.reset
        self._connect()
        sys.setswitchinterval(_SWITCH_INTERVAL_S)

    def serve(self) -> None:
        """Run the wave loop until shutdown. Whatever else stops it ends the server."""
        self.wave.start()
        try:
            self.loop.run()
        except Exception as error:
            # The WAVE thread goes on: others hear from this stage to the last, and do not take it for silent.
            reason = str(error)
            if not isinstance(error, WavePPError):
                # A receive fails when its peer dies, and a moment before that is seen. Of a peer on another
                # host the WAVE thread learns with its next heartbeat, and ends the server meanwhile.
                gone = self.wave.watch.gone(within=2.0)
                if gone is None:
                    logger.exception("Loop of stage %d failed", self.rank)
                reason = (
                    gone or f"its loop failed, {self.loop.progress.doing}: {type(error).__name__}: {error}"
                )
            self.loop.progress.at("ending the server", long=True)
            end_server(self.rank, reason)
        self.wave.stop()

    def recorder(self) -> Recorder | None:
        """Where applied decisions are written. Raises `HandshakeError` if the file cannot be made."""
        if not self.config.decision_log:
            return None
        name = f"wavepp-{self._instance}-stage-{self.rank}.log"
        try:
            return Recorder(
                Path(self.config.decision_log) / name, Header(__version__, self.rank, self.stages)
            )
        except OSError as error:
            raise HandshakeError(f"stage {self.rank} cannot write its decision log: {error}") from None

    def info(self) -> dict[str, Any]:
        """What the launcher sees of this stage."""
        return {"version": __version__, "stages": self.stages, "rank": self.rank}

    def statistics(self) -> dict[str, Any]:
        """Counters since the start, and what this stage holds now."""
        member = self.member.statistics()
        return {
            **self.stats.snapshot(),
            "planning": self.planner.statistics(),
            "running": self.loop.executor.live,
            "waiting": member.offered,
            "kv_tokens": self.pools,
            "hint_index": None if self.hints is None else dataclasses.asdict(self.hints.index.statistics()),
            "held": {
                "leases": member.leases,
                "escrow_tokens": member.escrow_tokens,
                "escrow_rows": member.escrow_rows,
            },
        }

    def is_idle(self) -> bool:
        """SGLang's question whether the scheduler is fully idle, as stage 0 answers it."""
        return not self.loop.executor.live if self.control_idle is None else self.control_idle

    # --- construction ------------------------------------------------------------------------

    def _connect(self) -> None:
        s, config = self.scheduler, self.config
        hello = Hello(self.rank, os.getpid(), host_id(), self._identity(), self._capacity())
        deadline = time.monotonic() + config.handshake_timeout
        address = self._address()
        share = share_over(s.pp_group.cpu_group, deadline)
        plane: LeaderPlane | MemberPlane
        if self.rank == 0:
            leads = TcpLeader(address, share) if address else IpcLeader(config.socket_dir, s.wavepp_instance)
            plane = LeaderPlane(leads, self.stages)
            welcome = plane.gather(hello, deadline, secrets.randbits(64), s.wavepp_instance)
        else:
            follows = (
                TcpMember(share) if address else IpcMember(config.socket_dir, s.wavepp_instance, deadline)
            )
            plane = MemberPlane(follows, self.rank)
            welcome = plane.join(hello, deadline)
        peers = {
            rank: pid if host == hello.host else None
            for rank, (pid, host) in enumerate(zip(welcome.pids, welcome.hosts, strict=True))
            if (rank == 0) != (self.rank == 0)
        }
        self._instance = welcome.instance
        agreed = welcome.capacity
        s.max_req_len = agreed["max_req_len"]
        s.max_running_requests = agreed["running"]
        self._agree_on_batch_size(agreed["batch"])
        self.pool = agreed["kv_tokens"]
        """KV tokens of the smallest stage."""
        self.pools = welcome.pools
        self.longest = self.pool - s.page_size
        s.max_req_input_len = min(agreed["max_req_input_len"], self.longest)
        self.block = math.lcm(config.block_size, s.page_size)
        """Tokens of a block of the prompt hashes."""
        self.hints = None if s.tree_cache.disable else s.tree_cache.keep_hints(self.block, welcome.seed)
        """None if nothing is ever reused."""
        s.load_inquirer = dataclasses.replace(
            s.load_inquirer, max_total_num_tokens=self.pool, max_running_requests=s.max_running_requests
        )
        wake = lambda: self.wave.mail.post(lambda: None)  # noqa: E731
        self.intake = Intake(s, wake)
        self.loop: LeaderLoop | MemberLoop
        self.wave: LeaderWave | MemberWave
        if isinstance(plane, MemberPlane):
            self.loop = MemberLoop(self)
            self.wave = MemberWave(self, plane, peers)
            return
        schedule = get_schedule()
        budget = s.chunked_prefill_size if (s.chunked_prefill_size or 0) > 0 else s.max_prefill_tokens
        limits = WaveLimits(
            stages=self.stages,
            ring=self.run_ahead,
            budget=budget,
            align=s.page_size,
            least=config.wave_floor,
        )
        self.planner = PLANNERS[config.planner](limits)
        leader = Leader(
            Limits(
                stages=self.stages,
                pool=self.pool,
                running=min(agreed["running"], agreed["rows"], self.stages * agreed["batch"]),
                page=s.page_size,
                reserve=config.decode_reserve,
                block=self.block,
                ahead=limits.ahead,
                wave=budget,
                round_bound=_ROUND_BOUND_S,
            ),
            time.monotonic,
        )
        sequencer = Sequencer(
            planner=self.planner,
            run_ahead=self.run_ahead,
            groups=self.stages,
            growth=config.decode_reserve,
            rows=agreed["batch"],
            wave=budget,
            interval=schedule.prefill_decode_interval or 0,
            interval_rows=schedule.prefill_decode_interval_min_bs,
        )
        self.loop = LeaderLoop(self, sequencer)
        self.wave = LeaderWave(self, plane, peers, leader)
        logger.info(
            "WavePP %s: %d stages agreed; %d KV tokens, %d running requests, %d tokens a prefill wave (%s), "
            "%d waves ahead",
            __version__,
            self.stages,
            self.pool,
            agreed["running"],
            budget,
            config.planner,
            self.run_ahead,
        )

    def _address(self) -> str:
        """Where stage 0 listens for stages on other hosts; empty if there are none."""
        parallel = get_parallel()
        if self.config.bind or parallel.nnodes == 1:
            return self.config.bind
        return str(NetworkAddress.parse(parallel.dist_init_addr).host)

    def _agree_on_batch_size(self, size: int) -> None:
        """The requests of one microbatch; SGLang derives them from the pool of the stage."""
        if size != get_parallel().pp_max_micro_batch_size:
            get_context().override("wavepp", pp_max_micro_batch_size=size)

    def _identity(self) -> dict[str, str]:
        s = self.scheduler
        return {
            "sglang-wavepp version": __version__,
            "sglang version": version("sglang"),
            "hook set": hook_digest(),
            "configuration": self.config.digest(),
            "page size": str(s.page_size),
            "block size": str(self.config.block_size),
            "byte order": sys.byteorder,
            "number of stages": str(self.stages),
        }

    def _capacity(self) -> dict[str, int]:
        s = self.scheduler
        return {
            "kv_tokens": int(s.max_total_num_tokens),
            "rows": int(s.req_to_token_pool.size),
            "running": int(s.max_running_requests),
            "batch": int(get_parallel().pp_max_micro_batch_size),
            "max_req_len": int(s.max_req_len),
            "max_req_input_len": int(s.max_req_input_len),
        }

    def _from_member(self, message: Message) -> None:
        if isinstance(self.wave, LeaderWave):
            self.wave.answers.append(message)
        else:
            self.wave.send(message)
