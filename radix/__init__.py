"""Leases and escrow: how a request's prefix is kept and its room is promised before anything is allocated.

* `ledger`: the escrow ledger of one stage, numbers only;
* `lease`: the lease table of one stage, receipts that are given back exactly once;
* `tree`: the only module that knows SGLang, an adapter over its `UnifiedRadixCache`.

`ledger` and `lease` see the tree and the pools through the `PrefixTree` protocol, so the same code runs
on SGLang's tree and on the model tree of the simulation.
"""
