"""Disturbs the stages of a server whose `PYTHONPATH` is this folder.

A stage reuses less than the others or less than it could, at random, and a foreign thread splits and reorders
its tree. That thread may lock only under the guard: whoever holds a lock without being in the ledger takes
room that was promised.
"""

import os
import random
import threading

try:
    from sglang_wavepp.member import Member
    from sglang_wavepp.radix.lease import LeaseTable
except ImportError:
    Member = None

if Member is not None:
    rng = random.Random(os.getpid())
    find, construct = LeaseTable.find, Member.__init__
    recent = []

    def shorter(table, owner, prefix, limit):
        recent[:] = [*recent[-20:], prefix]
        if rng.random() < 0.3:
            limit = rng.randrange(limit + 1)
        return find(table, owner, prefix, limit)

    def hammer(tree, guard):
        while True:
            threading.Event().wait(0.002)
            if not recent:
                continue
            prefix = rng.choice(recent)
            tree.hint(prefix)
            found = tree.match(prefix, rng.randrange(prefix.max_boundary + 1))
            with guard():
                tree.unlock(tree.lock(prefix, found).lock)

    def disturbed(member, tree, guard, send):
        construct(member, tree, guard, send)
        threading.Thread(target=hammer, args=(tree, guard), daemon=True).start()

    LeaseTable.find, Member.__init__ = shorter, disturbed
