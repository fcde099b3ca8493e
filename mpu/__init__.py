"""Planning waves: how the prompt tokens of committed requests are cut into microbatches.

* `packing`: which spans make up the next prefill wave for a given budget (first come, first served).
"""
